// The device's generator: a seed, and how many numbers have been drawn since. Rung 6.
//
// Document: "Facilitating New Backend Integration by PrivateUse1", section "Register generator for the new backend".
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "common.h"

namespace acme {
namespace {

struct AcmeGenerator final : c10::GeneratorImpl {
  explicit AcmeGenerator(c10::DeviceIndex device)
      : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  // The state is a CPU tensor of bytes.
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "acme: expected the 16 bytes that get_state() returns, but got ", state.numel());
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }

  AcmeGenerator* clone_impl() const override {
    auto* copy = new AcmeGenerator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

} // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int i = 0; i < acme_device_count(); ++i) {
      generators->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
      generators->back().seed();
    }
    return generators;
  }();
  return all->at(static_cast<size_t>(checked_index(device)));
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<AcmeGenerator>(checked_index(device));
}

std::pair<uint64_t, uint64_t> reserve(const MaybeGenerator& given, c10::DeviceIndex device, uint64_t count) {
  at::Generator generator = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(generator.device().type() == kDevice, "Expected a 'acme' device type for generator but found '",
      generator.device().type(), "'");
  std::lock_guard lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + (count + 3) / 4 * 4); // Philox computes four at a time
  return {generator.current_seed(), offset};
}

at::Generator for_fallback(const MaybeGenerator& generator, c10::DeviceIndex device) {
  const auto [seed, offset] = reserve(generator, device, 4);
  uint64_t mixed = seed + (offset / 4 + 1) * 0x9E3779B97F4A7C15; // SplitMix64
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
  return at::make_generator<at::CPUGeneratorImpl>(mixed ^ mixed >> 31);
}

} // namespace acme
