// A device generator wraps its own CPU generator: the kernels are ATen's CPU kernels, so the random numbers come from a
// Mersenne Twister, and the same seed gives the same numbers as on the CPU.

#include "backend/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/TensorImpl.h>

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backend/device_index.h"
#include "backend/identity/identity.h"
#include "runtime/device.h"
#include "runtime/graph/graph.h"
#include "runtime/process/fork.h"
#include "runtime/process/interrupts.h"
#include "runtime/stream/turn.h"

namespace openreg {
namespace {

// Note [Generators in captures]
// A replay draws new numbers, starting from the generator's state at its launch. The host cannot know that state
// during the capture. So get_state() captures a node that saves the state at each replay, and returns the host's state
// with the number of that node. set_state() with such a number captures a node that restores the saved state. The
// number has 64 bits and starts at a random value, so that no other process has it. Its halves are in the upper halves
// of two entries of the engine's state: entries have 64 bits, of which the engine uses 32. Everywhere else, what
// get_state() returned is an ordinary state.
struct SavedState {
  c10::intrusive_ptr<c10::TensorImpl> value;
};
constexpr size_t kEntries = 24; // before them: seed (8 bytes), left (4), seeded (4), next (8)

void write_number(c10::TensorImpl& state, uint64_t number) {
  auto* entries = static_cast<char*>(state.mutable_data()) + kEntries;
  std::memcpy(entries + 4, &number, 4);
  number >>= 32;
  std::memcpy(entries + 12, &number, 4);
}
uint64_t read_number(const c10::TensorImpl& state) {
  const auto* entries = static_cast<const char*>(state.data()) + kEntries;
  uint32_t low, high;
  std::memcpy(&low, entries + 4, 4);
  std::memcpy(&high, entries + 12, 4);
  return uint64_t{high} << 32 | low;
}

std::mutex saved_states_mutex;
std::unordered_map<uint64_t, std::weak_ptr<SavedState>>& saved_states() {
  static auto* all = new std::unordered_map<uint64_t, std::weak_ptr<SavedState>>;
  return *all;
}

void mark(c10::TensorImpl& state, const std::shared_ptr<SavedState>& saved) {
  std::lock_guard lock(saved_states_mutex);
  static uint64_t last = c10::detail::getNonDeterministicRandom();
  std::erase_if(saved_states(), [](const auto& each) { return each.second.expired(); });
  saved_states()[++last] = saved;
  write_number(state, last);
}

std::shared_ptr<SavedState> find_saved(const c10::TensorImpl& state) {
  std::lock_guard lock(saved_states_mutex);
  const auto known = saved_states().find(read_number(state));
  return known == saved_states().end() ? nullptr : known->second.lock();
}

// Unlocks a mutex that the calling thread has locked, while this object lives. Python's functions lock a generator's
// mutex while they hold Python's lock. A wait gives up Python's lock, and must not take it again while another thread
// has it and waits for the generator's mutex.
class Unlocked {
 public:
  explicit Unlocked(std::mutex& mutex)
      : mutex_(mutex.native_handle()->__data.__owner == syscall(SYS_gettid) ? &mutex : nullptr) {
    if (mutex_) mutex_->unlock();
  }
  ~Unlocked() {
    if (mutex_) mutex_->lock();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::mutex* const mutex_;
};

struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(c10::DeviceIndex device, at::Generator inner,
      std::shared_ptr<ReplayedDraws> draws = std::make_shared<ReplayedDraws>())
      : GeneratorImpl(device_at(device), c10::DispatchKeySet(identity.dense)), inner_(std::move(inner)),
        draws_(std::move(draws)) {}

  // See Note [Replayed draws]. Work does not wait: it may be what comes before the replay.
  const at::Generator& inner() const {
    if (draws_->pending() && !detail::in_work() && !forked()) [[unlikely]] {
      const auto draws = draws_;
      const Unlocked unlocked(const_cast<DeviceGenerator*>(this)->mutex_);
      draws->wait();
    }
    return own_inner();
  }
  const at::Generator& captured() const {
    detail::draw_in_capture(current_stream(device().index()), draws_);
    return inner_;
  }
  // A child created by fork() may have inherited the mutex locked, by a kernel on a thread that it does not have. So it
  // uses a copy, which needs no lock.
  const at::Generator& own_inner() const {
    if (forked() && !of_child_) [[unlikely]] {
      inner_ = inner_.clone();
      of_child_ = true;
    }
    return inner_;
  }

  // Python locks this generator; kernels lock the inner one.
  void set_current_seed(uint64_t seed) override {
    if (capturing(device().index())) [[unlikely]] {
      if (seed == current_seed()) return;
      refuse("Generator.manual_seed",
          "a replay draws from the seed that is set when it is launched. Seed before the replay.");
    }
    at::Generator used = inner();
    std::lock_guard lock(used.mutex());
    used.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    at::Generator used = inner();
    std::lock_guard lock(used.mutex());
    return used.current_seed();
  }
  uint64_t seed() override {
    refuse_in_capture("Generator.seed");
    at::Generator used = inner();
    std::lock_guard lock(used.mutex());
    return used.seed();
  }
  // The offset is the number of 32-bit numbers drawn since seeding. A Mersenne Twister does not keep it, so both
  // functions replay the engine from its seed, at one second per billion numbers.
  void set_offset(uint64_t offset) override {
    refuse_in_capture("Generator.set_offset");
    TORCH_CHECK(offset <= kMostDraws, "openreg: Generator.set_offset() takes at most ", kMostDraws, ", but got ",
        offset, "; use set_state()");
    at::Generator used = inner();
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(used);
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
    refuse_in_capture("Generator.get_offset");
    at::Generator used = inner();
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(used);
    const auto now = [&] {
      std::lock_guard lock(cpu->mutex_);
      return cpu->engine().data();
    }();
    return offset_of(now);
  }
  void set_state(const c10::TensorImpl& state) override {
    at::Generator used = inner();
    const auto before = state_of(used);
    TORCH_CHECK(state.numel() == before->numel(), "openreg: Generator.set_state() expected the ", before->numel(),
        " bytes that get_state() gives, but got ", state.numel());
    if (capturing(device().index())) [[unlikely]]
      return capture_set_state(state, *before);
    std::lock_guard lock(used.mutex());
    used.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = state_of(inner());
    if (capturing(device().index())) [[unlikely]] {
      const Stream stream = checked_stream("Generator.get_state");
      const auto saved = std::make_shared<SavedState>();
      const auto save = [from = captured(), saved] { saved->value = state_of(from); };
      detail::keep_in_capture(stream, saved);
      detail::capture(stream, Site("Generator.get_state"), detail::Task(save), {});
      mark(*state, saved);
    }
    return state;
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    auto* other = dynamic_cast<DeviceGenerator*>(state.get());
    TORCH_CHECK(other, "openreg: graphsafe_set_state() expected a Generator of ", identity.name, ", but got one of ",
        state->device());
    inner_ = other->own_inner();
    of_child_ = other->of_child_;
    draws_ = other->draws_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    auto state = c10::make_intrusive<DeviceGenerator>(device().index(), own_inner(), draws_);
    state->of_child_ = of_child_;
    return state;
  }

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

  static c10::intrusive_ptr<c10::TensorImpl> state_of(const at::Generator& inner) {
    std::lock_guard lock(inner.unsafeGetGeneratorImpl()->mutex_);
    return inner.unsafeGetGeneratorImpl()->get_state();
  }

  [[noreturn]] void refuse(const char* what, const char* why) const {
    detail::refuse_capture(current_stream(device().index()), what, why);
  }
  void refuse_in_capture(const char* what) const {
    if (capturing(device().index())) [[unlikely]]
      refuse(what,
          "a replay draws new numbers, and the host cannot know the state of the generator then. Do it before the "
          "capture, or use get_state() and set_state(), which a replay repeats.");
  }
  // The stream that is captured, if its graph may draw from this generator.
  Stream checked_stream(const char* what) const {
    const Stream stream = current_stream(device().index());
    check_captured_generator(what, stream, this);
    return stream;
  }
  void capture_set_state(const c10::TensorImpl& state, const c10::TensorImpl& now) {
    const Stream stream = checked_stream("Generator.set_state");
    const auto saved = find_saved(state);
    if (!saved || !detail::is_kept_in_capture(stream, saved.get())) {
      const bool same = !std::memcmp(state.data(), now.data(), static_cast<size_t>(now.numel()));
      if (same && !detail::draws_in_capture(stream, draws_.get())) return;
      refuse("Generator.set_state",
          "the state was not taken in this capture, and a replay draws from the seed and state that are set when it is "
          "launched. Set them before the replay, or take the state with get_state() in this capture.");
    }
    const auto restore = [to = captured(), saved] {
      std::lock_guard lock(to.unsafeGetGeneratorImpl()->mutex_);
      if (saved->value) to.unsafeGetGeneratorImpl()->set_state(*saved->value);
    };
    detail::capture(stream, Site("Generator.set_state"), detail::Task(restore), {});
  }

  DeviceGenerator* clone_impl() const override {
    refuse_in_capture("Generator.clone_state");
    return new DeviceGenerator(device().index(), inner().clone());
  }

  mutable at::Generator inner_;
  mutable bool of_child_ = false;
  std::shared_ptr<ReplayedDraws> draws_;
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
  TORCH_CHECK(on_device(generator.device()), "Expected a '", identity.name, "' device type for generator but found '",
      generator.device().type(), "'");
  const auto& ours = *static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  return capturing(generator.device().index()) ? ours.captured() : ours.inner();
}

void check_captured_generator(const char* name, Stream stream, const c10::GeneratorImpl* generator) {
  if (generator == default_generator(static_cast<c10::DeviceIndex>(stream.device)).unsafeGetGeneratorImpl() ||
      detail::has_generator(stream, generator))
    return;
  detail::refuse_capture(stream, name,
      "it draws from a torch.Generator that the graph does not know. Call graph.register_generator_state(generator) of "
      "torch.openreg.Graph before the capture, or use the device's default generator.");
}

// Note [Lent generators]
// One thread at a time changes the state of the CPU's default generator, in calls that may be nested. Its kernel may
// launch work, and then needs turns. So the others give up their turn and Python's lock while they wait, and take the
// mutex only when they have these again. A child created by fork() meanwhile does not have that thread: it gives the
// generator its own state, and frees both mutexes. A thread that seeds the CPU's generator, or the device's,
// meanwhile does not wait. The end of the lending finds a seed that it did not set, and keeps it. It does not notice
// if the same seed is set again.

namespace {

std::mutex lent_mutex;
thread_local int lent = 0; // how many objects of the calling thread lend, nested
thread_local LendGenerator* innermost = nullptr;
std::atomic<const c10::TensorImpl*> lent_state{nullptr}; // the CPU generator's own state

const bool noticed = [] {
  pthread_atfork(nullptr, nullptr, [] {
    if (lent) return;
    if (lent_mutex.try_lock()) return lent_mutex.unlock();
    auto* host = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
    new (&host->mutex_) std::mutex;
    if (const auto* own = lent_state.exchange(nullptr)) host->set_state(*own);
    new (&lent_mutex) std::mutex;
  });
  return true;
}();

} // namespace

SavedHostGenerator::SavedHostGenerator()
    : host_(at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())) {
  const bool outermost = !lent;
  while (outermost && !lent_mutex.try_lock()) {
    const detail::NoTurn given;
    detail::wait_around([](void*) { const std::lock_guard free(lent_mutex); }, nullptr);
  }
  ++lent;
  std::lock_guard lock(host_->mutex_);
  saved_ = host_->get_state();
  seed_ = host_->current_seed();
  if (outermost) lent_state = saved_.get();
}

void SavedHostGenerator::note_seed() {
  if (const uint64_t now = host_->current_seed(); now != seed_) seeded_ = now;
}
SavedHostGenerator::~SavedHostGenerator() {
  {
    std::lock_guard lock(host_->mutex_);
    note_seed();
    host_->set_state(*saved_);
    if (seeded_ && outer_seeded_) *outer_seeded_ = seeded_;
    else if (seeded_) host_->set_current_seed(*seeded_);
  }
  if (--lent) return;
  lent_state = nullptr;
  lent_mutex.unlock();
}

LendGenerator::LendGenerator(const at::Generator& inner) {
  if (!inner.defined()) return;
  device_ = at::check_generator<at::CPUGeneratorImpl>(inner);
  host_.emplace();
  outer_ = std::exchange(innermost, this);
  if (outer_) outer_->take_back();
  std::scoped_lock lock(host_->host_->mutex_, device_->mutex_);
  if (outer_) {
    outer_->host_->note_seed();
    host_->outer_seeded_ = &outer_->host_->seeded_;
  }
  host_->host_->set_state(*device_->get_state());
  host_->seed_ = device_->current_seed();
}

// Gives the device's generator the numbers drawn so far, unless it was seeded meanwhile.
void LendGenerator::take_back() {
  std::scoped_lock lock(host_->host_->mutex_, device_->mutex_);
  if (device_->current_seed() == host_->seed_) device_->set_state(*host_->host_->get_state());
}

LendGenerator::~LendGenerator() {
  if (!host_) return;
  take_back();
  innermost = outer_;
  if (!outer_) return;
  std::lock_guard lock(outer_->device_->mutex_); // the outer one continues with the device's state
  host_->saved_ = outer_->device_->get_state();
  outer_->host_->seed_ = outer_->device_->current_seed();
}

} // namespace openreg
