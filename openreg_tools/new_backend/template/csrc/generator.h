// The device's random numbers. Rung 6.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace acme {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// Reserves `count` numbers of `generator`, or of the default one. Returns the seed and the offset of the first, from
// which a kernel computes them with Philox.
std::pair<uint64_t, uint64_t> reserve(const std::optional<at::Generator>& generator, c10::DeviceIndex device, uint64_t count);

// Returns a CPU generator, which continues differently after each call, for operators that fall back.
at::Generator for_fallback(const std::optional<at::Generator>& generator, c10::DeviceIndex device);

} // namespace acme
