#include "runtime/stream/queue.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "runtime/process/attention.h"
#include "runtime/process/error.h"
#include "runtime/process/fork.h"
#include "runtime/process/isolation.h"
#include "runtime/stream/turn.h"
#include "runtime/stream/watchers.h"

namespace openreg {

using detail::kMostKernels;
using detail::QueuedItem;

namespace {

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
  bool query() {
    if (idle()) return true;
    std::lock_guard lock(mutex_);
    return idle();
  }

  Ticket push(QueuedItem item) {
    bool wake;
    std::uint64_t number;
    {
      std::lock_guard lock(mutex_);
      start(); // may throw; nothing has changed then
      kernels_.store(kernels_.load(std::memory_order_relaxed) + item.kernels, std::memory_order_relaxed);
      items_.push_back(std::move(item));
      number = submitted_.load(std::memory_order_relaxed) + 1;
      if (completed_.load(std::memory_order_relaxed) + 1 == number) detail::attention.fetch_add(1);
      submitted_.store(number, std::memory_order_release);
      wake = asleep_;
    }
    if (wake) wake_.notify_one();
    return {stream_, number};
  }

  void make_room() {
    if (kernels_.load(std::memory_order_relaxed) < kMostKernels) [[likely]]
      return;
    if (worked_on || detail::in_work() || detail::scheduled()) return;
    detail::wait_freely(detail::Interrupt::kThrows, [&](auto most) {
      std::unique_lock lock(mutex_);
      return room_.wait_for(lock, most, [&] { return kernels_.load(std::memory_order_relaxed) <= kMostKernels / 2; });
    });
  }

  void wait(std::uint64_t number, detail::Interrupt interrupt) {
    if (done(number)) return;
    detail::refuse_own_stream(stream_);
    if (detail::scheduled()) detail::schedule_watcher.wait(nullptr, {[&] { return done(number); }, stream_});
    detail::wait_freely(interrupt, [&](auto most) {
      std::unique_lock lock(mutex_);
      return done_.wait_for(lock, most, [&] { return done(number); });
    });
  }

  void run_up_to(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    if (!items_.empty()) start();
    granted_ = std::max(granted_, number);
    wake_.notify_one();
    const auto is_done = [&] { return done(number); };
    if (stream_ == detail::collectives_of(stream_.device)) done_.wait_for(lock, detail::kCollective, is_done);
    else done_.wait(lock, is_done);
  }
  void release() {
    std::lock_guard lock(mutex_);
    if (!items_.empty()) start();
    wake_.notify_one();
  }

  void stop() {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
    done_.wait(lock, [&] { return !running_; });
    stopping_ = false;
  }

 private:
  void start() {
    if (running_) return;
    std::thread([this] { work_loop(); }).detach();
    running_ = true;
  }

  // Returns true if the worker may run an item. In a schedule, it may run an ordered item only if it was granted.
  bool may_run() const noexcept {
    return !items_.empty() && (!items_.front().ordered || !detail::scheduled() || stopping_ || !done(granted_));
  }

  void work_loop() {
    pthread_setname_np(pthread_self(), "openreg_stream");
    worked_on = this;
    std::unique_lock lock(mutex_);
    for (;;) {
      if (!may_run()) {
        if (stopping_ || !await(lock)) break;
        continue;
      }
      QueuedItem item = std::move(items_.front());
      items_.pop_front();
      if (!item.signal) lock.unlock();
      try {
        if (item.kernels && detail::dropping()) {
          throw std::runtime_error(error_prefix() + "queued work was dropped, because the process was interrupted");
        } else if (item.kernels) {
          const detail::Turn turn(detail::turn_of(stream_.device, stream_.id));
          const detail::Access access;
          item.work();
        } else item.work();
      } catch (const std::exception& error) {
        detail::keep_error(stream_.device, item.site, error.what());
      } catch (...) {
        detail::keep_error(stream_.device, item.site, "kernel threw an object that is not a std::exception");
      }
      item.work = {}; // before the waiter continues
      if (!item.signal) lock.lock();
      const auto before = kernels_.load(std::memory_order_relaxed), left = before - item.kernels;
      kernels_.store(left, std::memory_order_relaxed);
      if (left <= kMostKernels / 2 && before > kMostKernels / 2) room_.notify_all();
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
    const bool more = wake_.wait_for(lock, kLinger, [&] { return may_run() || stopping_; });
    asleep_ = false;
    return more;
  }

  const Stream stream_;
  std::mutex mutex_;
  std::condition_variable wake_, done_, room_;
  std::deque<QueuedItem> items_;
  std::atomic<std::uint64_t> submitted_{0}, completed_{0};
  std::atomic<std::size_t> kernels_{0}; // that have not run
  bool running_ = false, asleep_ = false, stopping_ = false;
  std::uint64_t granted_ = 0; // up to which item a schedule has let them run
};

// Queues by stream, created on first use and never destroyed, because a thread may use one after main().
constexpr std::size_t kQueues = kStreams + 1; // per device: see detail::collectives_of()
std::array<std::atomic<Queue*>, kMaxDevices * kQueues> queues{};

std::atomic<Queue*>& slot(Stream stream) {
  return queues[static_cast<std::size_t>(stream.device) * kQueues + static_cast<std::size_t>(stream.id)];
}

Queue* find_queue(Stream stream) noexcept {
  return slot(stream).load(std::memory_order_acquire);
}

template <class Visit>
void for_each_queue(const Visit& visit) {
  for (auto& each : queues)
    if (Queue* queue = each.load(std::memory_order_acquire)) visit(*queue);
}

Queue& queue_of(Stream stream) {
  if (Queue* known = find_queue(stream)) return *known;
  auto* made = new Queue(stream);
  Queue* expected = nullptr;
  if (slot(stream).compare_exchange_strong(expected, made)) return *made;
  delete made;
  return *expected;
}

} // namespace

Ticket ticket(Stream stream) noexcept {
  const Queue* queue = find_queue(stream);
  return {stream, queue ? queue->submitted() : 0};
}

bool done(const Ticket& ticket) noexcept {
  const Queue* queue = find_queue(ticket.stream);
  return !queue || queue->done(ticket.number);
}

void stop_workers() noexcept {
  if (forked()) return;
  if (detail::scheduled()) detail::schedule_watcher.abandon();
  for_each_queue([](Queue& queue) { queue.stop(); });
}

Ticket detail::push(Stream stream, QueuedItem item) {
  return queue_of(stream).push(std::move(item));
}

void detail::make_room(Stream stream) {
  if (Queue* queue = find_queue(stream)) queue->make_room();
}

bool detail::queue_idle(Stream stream) noexcept {
  const Queue* queue = find_queue(stream);
  return !queue || queue->idle();
}

bool detail::query_queue(Stream stream) {
  Queue* queue = find_queue(stream);
  return !queue || queue->query();
}

bool detail::any_queue() noexcept {
  return std::any_of(queues.begin(), queues.end(), [](auto& each) { return each.load(); });
}

void detail::wait_for(const Ticket& ticket, Interrupt interrupt) {
  if (Queue* queue = find_queue(ticket.stream)) queue->wait(ticket.number, interrupt);
}

void detail::wait_for_queued(Stream stream) {
  wait_for(ticket(stream));
}

void detail::wait_for_queued(Interrupt interrupt) {
  for_each_queue([&](Queue& queue) { queue.wait(queue.submitted(), interrupt); });
}

void detail::refuse_own_stream(Stream stream) {
  if (!worked_on || worked_on != find_queue(stream)) return;
  throw std::logic_error("openreg: work on stream " + std::to_string(stream.id) + " of device " +
      std::to_string(stream.device) +
      " waits for that stream, and so for itself; wait after launch() has returned, or use another stream in the work");
}

void detail::drop_queued() noexcept {
  drops = true;
  stop_workers();
  drops = false;
}

bool detail::dropping() noexcept {
  return drops.load(std::memory_order_relaxed);
}

void detail::run_up_to(const Ticket& item) {
  queue_of(item.stream).run_up_to(item.number);
}

void detail::release_workers() noexcept {
  for_each_queue([](Queue& queue) { queue.release(); });
}

} // namespace openreg
