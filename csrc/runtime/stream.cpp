#include "stream.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "device.h"
#include "error.h"
#include "fault.h"
#include "fork.h"
#include "graph.h"
#include "isolation.h"
#include "profile.h"
#include "turn.h"
#include "usage.h"

namespace openreg {

std::atomic<std::uint32_t> detail::attention{0};

namespace {

thread_local std::array<std::int64_t, kMaxDevices> current_ids{};
std::array<std::array<std::atomic<std::uint32_t>, 2>, kMaxDevices> next{};

// One counter per thread, summed by launch_count(); a shared counter would cost an atomic operation per launch.
struct LaunchCounter {
  LaunchCounter();
  ~LaunchCounter();
  std::uint64_t value = 0;
};
thread_local LaunchCounter launched;

std::mutex counters_mutex;
std::vector<LaunchCounter*>& counters() {
  static auto* all = new std::vector<LaunchCounter*>;
  return *all;
}
std::uint64_t finished = 0; // of threads that have ended

LaunchCounter::LaunchCounter() {
  std::lock_guard lock(counters_mutex);
  counters().push_back(this);
}

LaunchCounter::~LaunchCounter() {
  std::lock_guard lock(counters_mutex);
  finished += value;
  std::erase(counters(), this);
}

// Note [Workers]
// A stream gets a thread when work is first queued on it. The thread waits for more work: first it polls for kSpin,
// because waking a sleeping thread costs its waker tens of microseconds; then it sleeps. It ends after kLinger, so ten
// thousand streams leave no threads behind.
constexpr auto kSpin = std::chrono::microseconds(20);
constexpr auto kLinger = std::chrono::seconds(2);

std::atomic<bool> drops{false}; // see detail::dropping()

class Queue;
thread_local const Queue* worked_on = nullptr; // the queue that this thread, a worker, serves

class Queue {
 public:
  explicit Queue(Stream stream) : stream_(stream) {}

  std::uint64_t submitted() const noexcept { return submitted_.load(std::memory_order_acquire); }
  bool idle() const noexcept { return done(submitted()); }
  bool done(std::uint64_t number) const noexcept { return completed_.load(std::memory_order_acquire) >= number; }

  // `kernel`: the work may touch device memory, other than a wait or a sleep.
  void push(detail::Task work, const openreg_site& site, bool kernel = false) {
    bool wake;
    {
      std::lock_guard lock(mutex_);
      if (!running_) { // may throw; nothing has changed then
        std::thread([this] { work_loop(); }).detach();
        running_ = true;
      }
      tasks_.push_back({std::move(work), site, kernel});
      const auto number = submitted_.load(std::memory_order_relaxed);
      if (completed_.load(std::memory_order_relaxed) == number) detail::attention.fetch_add(1);
      submitted_.store(number + 1, std::memory_order_release);
      wake = asleep_;
    }
    if (wake) wake_.notify_one();
  }

  void wait(std::uint64_t number, detail::Interrupt interrupt = detail::Interrupt::kThrows) {
    if (done(number)) return;
    if (worked_on == this)
      throw std::logic_error("openreg: work on stream " + std::to_string(stream_.id) + " of device " +
          std::to_string(stream_.device) +
          " waits for that stream, and so for itself; wait after launch() has returned, or use another stream in the "
          "work");
    detail::wait_freely(interrupt, [&](auto most) {
      std::unique_lock lock(mutex_);
      return done_.wait_for(lock, most, [&] { return done(number); });
    });
  }

  void stop() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
    done_.wait(lock, [&] { return !running_; });
    stopping_ = false;
  }

 private:
  struct Item {
    detail::Task work;
    openreg_site site;
    bool kernel;
  };

  void work_loop() {
    pthread_setname_np(pthread_self(), "openreg_stream");
    worked_on = this;
    std::unique_lock lock(mutex_);
    for (;;) {
      if (tasks_.empty()) {
        if (stopping_ || !await(lock)) break;
        continue;
      }
      Item item = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        if (item.kernel && detail::dropping()) {
          throw std::runtime_error("openreg error: queued work was dropped, because the process was interrupted");
        } else if (item.kernel) {
          const detail::Turn turn(detail::turn_of(stream_.device, stream_.id));
          const detail::Access access;
          item.work();
        } else item.work();
      } catch (const std::exception& error) {
        detail::keep_error(stream_.device, item.site, error.what());
      } catch (...) {
        detail::keep_error(stream_.device, item.site, "kernel threw an object that is not a std::exception");
      }
      item.work = {}; // before the waiter goes on
      lock.lock();
      const auto number = completed_.load(std::memory_order_relaxed) + 1;
      completed_.store(number, std::memory_order_release);
      if (number == submitted_.load(std::memory_order_relaxed)) detail::attention.fetch_sub(1);
      done_.notify_all();
    }
    running_ = false;
    done_.notify_all();
  }

  // Waits for a task; false if none came within kLinger.
  bool await(std::unique_lock<std::mutex>& lock) {
    const auto number = submitted_.load(std::memory_order_relaxed);
    lock.unlock();
    const auto until = std::chrono::steady_clock::now() + kSpin;
    while (submitted_.load(std::memory_order_acquire) == number && std::chrono::steady_clock::now() < until)
      std::this_thread::yield();
    lock.lock();
    asleep_ = true;
    const bool more = wake_.wait_for(lock, kLinger, [&] { return !tasks_.empty() || stopping_; });
    asleep_ = false;
    return more;
  }

  const Stream stream_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Item> tasks_;
  std::atomic<std::uint64_t> submitted_{0}, completed_{0};
  bool running_ = false, asleep_ = false, stopping_ = false;
};

// Queues by stream, created on first use and never destroyed: a thread may use one after main().
std::array<std::atomic<Queue*>, kMaxDevices * kStreams> queues{};

std::atomic<Queue*>& slot(Stream stream) {
  return queues[static_cast<std::size_t>(stream.device) * kStreams + static_cast<std::size_t>(stream.id)];
}

Queue* find_queue(Stream stream) noexcept {
  return slot(stream).load(std::memory_order_acquire);
}

Queue& queue_of(Stream stream) {
  if (Queue* known = find_queue(stream)) return *known;
  auto* made = new Queue(stream);
  Queue* expected = nullptr;
  if (slot(stream).compare_exchange_strong(expected, made)) return *made;
  delete made;
  return *expected;
}

std::atomic<LaunchMode> current_mode{LaunchMode::kInline};
const bool launch_mode_from_environment = [] {
  const char* text = std::getenv("OPENREG_LAUNCH_MODE");
  if (!text || !*text || !std::strcmp(text, "inline")) return true;
  if (!std::strcmp(text, "async")) set_launch_mode(LaunchMode::kAsync);
  else if (!std::strcmp(text, "sync")) set_launch_mode(LaunchMode::kSync);
  else std::fprintf(stderr, "openreg: OPENREG_LAUNCH_MODE=\"%s\" is not inline, async or sync; using inline\n", text);
  return true;
}();

} // namespace

Stream detail::thread_stream(int device) noexcept {
  return {device, current_ids[static_cast<std::size_t>(device)]};
}

Stream exchange_stream(Stream stream) noexcept {
  return {stream.device, std::exchange(current_ids[static_cast<std::size_t>(stream.device)], stream.id)};
}

Stream new_stream(int device, int priority) noexcept {
  const bool high = priority < 0;
  const auto n = next[static_cast<std::size_t>(device)][high ? 1 : 0]++;
  return {device, 1 + (high ? kPool : 0) + static_cast<std::int64_t>(n % kPool)};
}

int stream_priority(Stream stream) noexcept {
  return stream.id > kPool ? -1 : 0;
}

bool is_stream(Stream stream) noexcept {
  return stream.device >= 0 && stream.device < device_count() && stream.id >= 0 &&
      stream.id < static_cast<std::int64_t>(kStreams);
}

void check_stream(Stream stream) {
  if (!is_stream(stream)) [[unlikely]]
    throw std::invalid_argument("openreg: there is no stream " + std::to_string(stream.id) + " on device " +
        std::to_string(stream.device) + ": this process has " + std::to_string(device_count()) +
        " devices (OPENREG_DEVICE_COUNT), each with streams 0 to " + std::to_string(kStreams - 1));
}

LaunchMode launch_mode() noexcept {
  return current_mode.load(std::memory_order_relaxed);
}

void set_launch_mode(LaunchMode to) noexcept {
  const auto from = current_mode.exchange(to);
  if ((from == LaunchMode::kInline) == (to == LaunchMode::kInline)) return;
  if (to == LaunchMode::kInline) detail::attention.fetch_and(~detail::kModeBit);
  else detail::attention.fetch_or(detail::kModeBit);
}

bool stream_idle(Stream stream) noexcept {
  const Queue* queue = find_queue(stream);
  return !queue || queue->idle();
}

void synchronize_stream(Stream stream) {
  detail::check_host_call("a stream's synchronize", stream);
  detail::finish_stream(stream);
}

void detail::finish_stream(Stream stream) {
  const HostCall call("openregStreamSynchronize");
  check_usable(stream.device);
  detail::wait_for_queued(stream);
  throw_kept_error(stream.device);
}

void synchronize_device(int device) {
  const HostCall call("openregDeviceSynchronize");
  check_usable(device);
  detail::check_host_call("synchronize", device);
  for (std::int64_t id = 0; id < static_cast<std::int64_t>(kStreams); ++id) detail::wait_for_queued({device, id});
  throw_kept_error(device);
}

bool detail::any_queue() noexcept {
  return std::any_of(queues.begin(), queues.end(), [](auto& each) { return each.load(); });
}

void detail::wait_for_queued(Stream stream) {
  if (Queue* queue = find_queue(stream)) queue->wait(queue->submitted());
}

void detail::wait_for_queued(Interrupt interrupt) {
  for (auto& each : queues)
    if (Queue* queue = each.load(std::memory_order_acquire)) queue->wait(queue->submitted(), interrupt);
}

Ticket ticket(Stream stream) noexcept {
  const Queue* queue = find_queue(stream);
  return {stream, queue ? queue->submitted() : 0};
}

bool done(const Ticket& ticket) noexcept {
  const Queue* queue = find_queue(ticket.stream);
  return !queue || queue->done(ticket.number);
}

void sleep_on(Stream stream, std::int64_t cycles) {
  check_usable(stream.device);
  const auto sleep = [cycles, device = stream.device] {
    using std::chrono::nanoseconds, std::chrono::steady_clock;
    const detail::Sleeping busy(device);
    const auto begin = steady_clock::now();
    for (nanoseconds left(cycles); left.count() > 0 && !detail::dropping();
        left = nanoseconds(cycles) - (steady_clock::now() - begin))
      std::this_thread::sleep_for(std::min<nanoseconds>(left, detail::kSlice));
  };
  const Site site("sleep");
  if (detail::captures(stream)) return detail::capture(stream, site, detail::Task(sleep), {});
  detail::queue_wait(stream, detail::profiled(stream, site, sleep), site);
  if (launch_mode() == LaunchMode::kSync) detail::finish_stream(stream);
}

void stop_workers() noexcept {
  if (forked()) return;
  for (auto& each : queues)
    if (Queue* queue = each.load(std::memory_order_acquire)) queue->stop();
}

bool detail::dropping() noexcept {
  return drops.load(std::memory_order_relaxed);
}

void detail::drop_queued() noexcept {
  drops = true;
  stop_workers();
  drops = false;
}

// ---- launching ----

namespace {

enum class Place { kHere, kQueue, kNowhere };

// Handles work that may not simply run here; in sync mode, waits first.
Place place(Stream stream, const openreg_site& site) {
  check_not_forked();
  if ((detail::attention.load() & detail::kFaultBit) && detail::kernel_fails(stream, site)) return Place::kNowhere;
  if (launch_mode() == LaunchMode::kAsync) return Place::kQueue;
  if (launch_mode() == LaunchMode::kSync) detail::finish_stream(stream);
  return stream_idle(stream) ? Place::kHere : Place::kQueue;
}

// Counts a launch; returns what it must take care of.
std::uint32_t begin_launch(Stream stream) {
  check_stream(stream);
  ++launched.value;
  return detail::attention.load(std::memory_order_acquire);
}

bool is_plain(std::uint32_t attention) {
  return (attention & ~detail::kNoWait) == 0;
}

// Runs work on its caller's thread, in its stream's turn, with access to device memory, and logs it in a profile.
void run_here(
    Stream stream, const openreg_site& site, std::uint32_t attention, const openreg_work& work, void* context) {
  const detail::Turn turn(detail::turn_of(stream.device, stream.id));
  const detail::Access access(attention & detail::kIsolationBit);
  const detail::Profiled profiled(attention & detail::kProfileBit, stream, site);
  detail::run_work(work, context);
}

} // namespace

void detail::launch(Stream stream, const openreg_site& site, const openreg_work& work, void* context) {
  const auto attention = begin_launch(stream);
  if ((attention & kCaptureBit) && capture(stream, site, work, context)) [[unlikely]] {
    --launched.value;
    return;
  }
  switch (is_plain(attention) ? Place::kHere : place(stream, site)) {
    case Place::kHere:
      return run_here(stream, site, attention, work, context);
    case Place::kQueue:
      return queue(stream, Task(work, context), site);
    case Place::kNowhere:
      return;
  }
}

void detail::launch_graph(Stream stream, const openreg_site& site, const openreg_work& work, void* context) {
  const auto attention = begin_launch(stream);
  if (!is_plain(attention)) {
    check_not_forked();
    if ((attention & kCaptureBit) && capture(stream, site, work, context)) {
      --launched.value;
      return;
    }
    if (launch_mode() == LaunchMode::kSync) finish_stream(stream);
    if (launch_mode() == LaunchMode::kAsync || !stream_idle(stream)) {
      if (held_turn) ++held_turn->taken;
      return queue_of(stream).push(Task(work, context), site, /*kernel=*/true);
    }
  }
  const Turn turn(turn_of(stream.device, stream.id));
  const Access access(attention & kIsolationBit);
  run_work(work, context);
}

void detail::enqueue(Stream stream, const openreg_site& site, const openreg_work& work, void* context) {
  const auto attention = begin_launch(stream);
  if ((attention & kCaptureBit) && capture(stream, site, work, context)) {
    --launched.value;
    return;
  }
  const auto where = is_plain(attention) ? Place::kQueue : place(stream, site);
  if (where == Place::kNowhere) return;
  if (launch_mode() == LaunchMode::kSync) run_here(stream, site, attention, work, context);
  else queue(stream, Task(work, context), site);
}

void detail::run(Stream stream, const openreg_site& site, const openreg_work& work, void* context) {
  const auto attention = begin_launch(stream);
  if (!is_plain(attention)) [[unlikely]] {
    if (captures(stream))
      refuse_capture(stream,
          site.name           ? site.name
              : site.function ? site.function
                              : "work",
          "the host needs its result now. Move it out of the capture.");
    if (attention & kCaptureBit) capture(stream, site, work, context); // throws if the capture's mode forbids it
    finish_stream(stream);
    // The work still runs, because its caller needs a result; the error says not to use it.
    if (detail::attention.load() & kFaultBit) {
      kernel_fails(stream, site);
      wait_for_queued(stream); // an injected latency
    }
  }
  run_here(stream, site, attention, work, context);
}

void detail::queue(Stream stream, Task task, const openreg_site& site) {
  if (held_turn)
    ++held_turn->taken; // queued work may use memory that the running work has allocated: see Pool::give_back
  if (profiling()) task = profiled(stream, site, std::move(task));
  queue_of(stream).push(std::move(task), site, /*kernel=*/true);
}

void detail::queue_wait(Stream stream, Task task, const openreg_site& site) {
  queue_of(stream).push(std::move(task), site);
}

std::uint64_t launch_count() noexcept {
  std::lock_guard lock(counters_mutex);
  std::uint64_t sum = finished;
  for (const auto* counter : counters()) sum += counter->value;
  return sum;
}

} // namespace openreg
