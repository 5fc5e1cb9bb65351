// Random number generators of the device.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

#include "runtime/stream/task.h"

namespace at {
struct CPUGeneratorImpl;
}

namespace openreg {

// Returns the generator that a device uses by default.
__attribute__((visibility("default"))) const at::Generator& default_generator(c10::DeviceIndex device);

// Makes a new generator for `device`, with the default seed.
at::Generator new_generator(c10::DeviceIndex device);

// Returns the CPU generator that holds a device generator's state, and from which ATen's CPU kernels draw. Every use
// begins here: see Note [Replayed draws].
__attribute__((visibility("default"))) const at::Generator& inner_generator(const at::Generator& generator);

// Throws unless random operators may draw from the generator while this stream is captured: see Note [Capture].
__attribute__((visibility("default"))) void check_captured_generator(
    const char* name, Stream stream, const c10::GeneratorImpl* generator);

// Lets only the calling thread change the CPU's default generator while this object lives. Then the generator gets its
// own state again: see Note [Lent generators].
class SavedHostGenerator {
 public:
  SavedHostGenerator();
  ~SavedHostGenerator();
  SavedHostGenerator(const SavedHostGenerator&) = delete;
  SavedHostGenerator& operator=(const SavedHostGenerator&) = delete;

 private:
  friend class LendGenerator;
  void note_seed(); // the caller has locked the generator

  at::CPUGeneratorImpl* const host_;
  c10::intrusive_ptr<c10::TensorImpl> saved_;
  uint64_t seed_; // the seed that it has until another thread seeds it
  std::optional<uint64_t> seeded_; // the seed that another thread has given it meanwhile
  std::optional<uint64_t>* outer_seeded_ = nullptr; // seeded_ of the object that this one is nested in
};

// A random operator without a Generator argument draws from the CPU's default generator. While this object lives, that
// generator has the state of the device's generator; afterwards, its own state again. Of several on one thread, each
// inner one continues the numbers of the outer ones. A host thread that draws meanwhile draws from the device's
// numbers.
class LendGenerator {
 public:
  // Takes the generator that a device's generator wraps. Lends nothing if it is undefined.
  explicit LendGenerator(const at::Generator& inner);
  ~LendGenerator();
  LendGenerator(const LendGenerator&) = delete;
  LendGenerator& operator=(const LendGenerator&) = delete;

 private:
  void take_back();
  at::CPUGeneratorImpl* device_ = nullptr;
  LendGenerator* outer_ = nullptr; // the object of this thread that this one is nested in
  std::optional<SavedHostGenerator> host_;
};

} // namespace openreg
