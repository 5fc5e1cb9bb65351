// Random number generators of the device.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

#include "runtime/stream/task.h"

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

// While it lives, only the calling thread changes the CPU's default generator, which then gets its own state again: see
// Note [Lent generators].
class SavedHostGenerator {
 public:
  SavedHostGenerator();
  ~SavedHostGenerator();
  SavedHostGenerator(const SavedHostGenerator&) = delete;
  SavedHostGenerator& operator=(const SavedHostGenerator&) = delete;

 private:
  friend class LendGenerator;
  void note_seed(); // with the generator's mutex

  at::CPUGeneratorImpl* const host_;
  c10::intrusive_ptr<c10::TensorImpl> saved_;
  uint64_t seed_; // the seed that it has until another thread seeds it
  std::optional<uint64_t> seeded_; // the seed that it was given meanwhile
  std::optional<uint64_t>* outer_seeded_ = nullptr; // of the lend that contains this one
};

// A random operator without a Generator argument draws from the CPU's default generator. While this object lives, that
// generator has the state of the device's generator; afterwards, its own state again. Of several on one thread, each
// inner one continues the numbers of the outer ones. A host thread that draws meanwhile draws from the device's
// numbers.
class LendGenerator {
 public:
  explicit LendGenerator(const at::Generator& inner); // the one that a device's generator wraps; undefined for none
  ~LendGenerator();
  LendGenerator(const LendGenerator&) = delete;
  LendGenerator& operator=(const LendGenerator&) = delete;

 private:
  void take_back(); // the numbers drawn so far count for the device's generator, unless it was seeded meanwhile
  at::CPUGeneratorImpl* device_ = nullptr;
  LendGenerator* outer_ = nullptr; // of the calling thread
  std::optional<SavedHostGenerator> host_;
};

} // namespace openreg
