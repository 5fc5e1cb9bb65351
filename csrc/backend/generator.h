// Random number generators of the device.
#pragma once

#include <ATen/core/Generator.h>

namespace openreg {

// The generator that a device uses where none is given.
const at::Generator& default_generator(c10::DeviceIndex device);

// A new generator for `device`, with the default seed.
at::Generator new_generator(c10::DeviceIndex device);

// The CPU generator that holds a device generator's state. ATen's CPU kernels draw from it.
const at::Generator& inner_generator(const at::Generator& generator);

} // namespace openreg
