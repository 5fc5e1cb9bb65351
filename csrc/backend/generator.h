// Random number generators of the device.
#pragma once

#include <ATen/core/Generator.h>

#include "../runtime/work.h"

namespace at {
struct CPUGeneratorImpl;
}

namespace openreg {

// The generator that a device uses by default.
__attribute__((visibility("default"))) const at::Generator& default_generator(c10::DeviceIndex device);

// A new generator for `device`, with the default seed.
at::Generator new_generator(c10::DeviceIndex device);

// The CPU generator that holds a device generator's state. ATen's CPU kernels draw from it. Every use begins here: see
// Note [Replayed draws].
__attribute__((visibility("default"))) const at::Generator& inner_generator(const at::Generator& generator);

// Throws unless random operators may draw from the generator while this stream is captured: see Note [Capture].
__attribute__((visibility("default"))) void check_captured_generator(
    const char* name, Stream stream, const c10::GeneratorImpl* generator);

// A random operator without a Generator argument draws from the CPU's default generator. While this object lives, that
// generator has the state of the device's generator; afterwards, its own state again. A host thread that draws
// meanwhile draws from the device's numbers.
class LendGenerator {
 public:
  LendGenerator(bool on, c10::DeviceIndex device);
  explicit LendGenerator(const at::Generator& inner); // the one that a device's generator wraps; undefined for none
  ~LendGenerator();
  LendGenerator(const LendGenerator&) = delete;
  LendGenerator& operator=(const LendGenerator&) = delete;

 private:
  at::CPUGeneratorImpl *device_ = nullptr, *host_ = nullptr;
  c10::intrusive_ptr<c10::TensorImpl> saved_;
};

} // namespace openreg
