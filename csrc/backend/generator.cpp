// A device generator wraps its own CPU generator: the kernels are ATen's CPU kernels, so the random numbers come from a
// Mersenne Twister, and the same seed gives the same numbers as on the CPU.
#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/TensorImpl.h>

#include <mutex>
#include <vector>

#include "../runtime/device.h"
#include "../runtime/graph.h"
#include "allocator.h"

namespace openreg {
namespace {

// A replay draws new numbers, starting at the generator's state at that time.
void refuse_in_capture(int device, const char* what) {
  if (capturing(device)) [[unlikely]]
    detail::refuse_capture(current_stream(device), what,
        "a replay draws new numbers, and the host can neither know nor set the state of the generator then. Do it "
        "before "
        "the capture; torch.utils.checkpoint takes preserve_rng_state=False.");
}

struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(c10::DeviceIndex device, at::Generator inner)
      : GeneratorImpl(c10::Device(c10::kPrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}

  // Python locks this generator; kernels lock the inner one.
  void set_current_seed(uint64_t seed) override {
    refuse_in_capture(device().index(), "Generator.manual_seed");
    std::lock_guard lock(engine_mutex());
    inner.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    refuse_in_capture(device().index(), "Generator.initial_seed");
    std::lock_guard lock(engine_mutex());
    return inner.current_seed();
  }
  uint64_t seed() override {
    refuse_in_capture(device().index(), "Generator.seed");
    std::lock_guard lock(engine_mutex());
    return inner.seed();
  }
  // The offset is the number of 32-bit numbers drawn since seeding. A Mersenne Twister does not keep it, so both
  // functions replay the engine from its seed, at one second per billion numbers.
  void set_offset(uint64_t offset) override {
    refuse_in_capture(device().index(), "Generator.set_offset");
    TORCH_CHECK(offset <= kMostDraws, "openreg: Generator.set_offset() takes at most ", kMostDraws, ", but got ",
        offset, "; use set_state()");
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(inner);
    std::lock_guard lock(cpu->mutex_);
    at::mt19937 engine(cpu->current_seed());
    while (offset--) engine();
    const auto now = cpu->engine().data(), to = engine.data();
    if (to.next_ == now.next_ && to.state_ == now.state_) return; // which keeps half of a pair of normal numbers
    cpu->set_engine(engine);
    cpu->set_next_float_normal_sample(std::nullopt);
    cpu->set_next_double_normal_sample(std::nullopt);
  }
  uint64_t get_offset() const override {
    refuse_in_capture(device().index(), "Generator.get_offset");
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(inner);
    const auto now = [&] {
      std::lock_guard lock(cpu->mutex_);
      return cpu->engine().data();
    }();
    return offset_of(now);
  }
  void set_state(const c10::TensorImpl& state) override {
    refuse_in_capture(device().index(), "Generator.set_state");
    std::lock_guard lock(engine_mutex());
    try {
      inner.unsafeGetGeneratorImpl()->set_state(state);
    } catch (const c10::Error&) { // which speaks of the CPU's generator
      const auto bytes = inner.unsafeGetGeneratorImpl()->get_state()->numel();
      TORCH_CHECK(state.numel() == bytes, "openreg: Generator.set_state() expected the ", bytes,
          " bytes that get_state() gives, but got ", state.numel());
      throw;
    }
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    refuse_in_capture(device().index(), "Generator.get_state");
    std::lock_guard lock(engine_mutex());
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    auto* other = dynamic_cast<DeviceGenerator*>(state.get());
    TORCH_CHECK(
        other, "openreg: graphsafe_set_state() expected an openreg Generator, but got one of ", state->device());
    inner = other->inner;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<DeviceGenerator>(device().index(), inner);
  }

  at::Generator inner;

 private:
  static constexpr uint64_t kMostDraws = uint64_t{1} << 33;

  static uint64_t offset_of(const at::mt19937_data_pod& now) {
    if (!now.next_) return 0;
    at::mt19937 engine(now.seed_);
    for (uint64_t drawn = 0; drawn <= kMostDraws; drawn += at::MERSENNE_STATE_N) {
      engine(); // the first number of a block generates its whole state
      if (engine.data().state_ == now.state_) return drawn + now.next_;
      for (int i = 1; i < at::MERSENNE_STATE_N; ++i) engine();
    }
    TORCH_CHECK(false, "openreg: Generator.get_offset() found no offset up to ", kMostDraws,
        " at which the seed gives the generator's state; use get_state()");
  }

  std::mutex& engine_mutex() const { return inner.unsafeGetGeneratorImpl()->mutex_; }

  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), inner.clone()); }
};

} // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); ++i) {
      generators->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
      generators->back().seed(); // like CUDA's and the CPU's: different numbers in each process until seeded
    }
    return generators;
  }();
  return (*all)[static_cast<size_t>(checked_index(device))];
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(checked_index(device), at::detail::createCPUGenerator());
}

const at::Generator& inner_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().is_privateuseone(), "Expected a 'openreg' device type for generator but found '",
      generator.device().type(), "'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

void check_captured_generator(const char* name, Stream stream, const at::Generator& generator) {
  if (generator.unsafeGetGeneratorImpl() ==
          default_generator(static_cast<c10::DeviceIndex>(stream.device)).unsafeGetGeneratorImpl() ||
      detail::has_generator(stream, generator.unsafeGetGeneratorImpl()))
    return;
  detail::refuse_capture(stream, name,
      "it draws from a torch.Generator that the graph does not know. Call graph.register_generator_state(generator) of "
      "torch.openreg.Graph before the capture, or use the device's default generator.");
}

LendGenerator::LendGenerator(bool on, c10::DeviceIndex device)
    : LendGenerator(on ? inner_generator(default_generator(device)) : at::Generator()) {}

LendGenerator::LendGenerator(const at::Generator& inner) {
  if (!inner.defined()) return;
  device_ = at::check_generator<at::CPUGeneratorImpl>(inner);
  host_ = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
  std::scoped_lock lock(host_->mutex_, device_->mutex_);
  saved_ = host_->get_state();
  host_->set_state(*device_->get_state());
}

LendGenerator::~LendGenerator() {
  if (!host_) return;
  std::scoped_lock lock(host_->mutex_, device_->mutex_);
  device_->set_state(*host_->get_state());
  host_->set_state(*saved_);
}

} // namespace openreg
