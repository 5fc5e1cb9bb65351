// A stream's queue and its worker. Used only by stream.cpp.
#pragma once

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

#include "runtime/device.h"
#include "runtime/explore/schedule.h"
#include "runtime/memory/isolation.h"
#include "runtime/process/error.h"
#include "runtime/process/interrupts.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/turn.h"

namespace openreg {
namespace {

// Note [Workers]
// A stream gets a thread when work is first queued on it. The thread waits for more work: first it polls for kSpin,
// because waking a sleeping thread costs its waker tens of microseconds; then it sleeps. It ends after kLinger, so ten
// thousand streams leave no threads behind.
constexpr auto kSpin = std::chrono::microseconds(20);
constexpr auto kLinger = std::chrono::seconds(2);

// Note [Full queues]
// As on CUDA, the host can run only a limited distance ahead: when a stream has kMostKernels kernels that have not run,
// launch() waits until half of them have. A replay counts as its nodes, but as kMostOfReplay at most, so that several
// long replays fit. Waits and records of events do not count and do not wait. A full queue always moves on, because
// what is queued depends only on what was queued earlier. Two kinds of launches never wait: those of work, whose own
// stream may be the full one, and those in a schedule, which says itself what runs.
constexpr std::size_t kMostKernels = 1024, kMostOfReplay = 64;

std::atomic<bool> drops{false}; // see detail::dropping()

class Queue;
thread_local const Queue* worked_on = nullptr; // the queue that this thread, a worker, serves

class Queue {
 public:
  explicit Queue(Stream stream) : stream_(stream) {}

  std::uint64_t submitted() const noexcept { return submitted_.load(std::memory_order_acquire); }
  bool idle() const noexcept { return done(submitted()); }
  bool done(std::uint64_t number) const noexcept { return completed_.load(std::memory_order_acquire) >= number; }
  // idle(), but first waits for a signal that is being given.
  bool query() {
    if (idle()) return true;
    std::lock_guard lock(mutex_);
    return idle();
  }

  // `ordered`: a schedule says when it runs. `kernels`: how many it counts as; they may touch device memory, unlike a
  // wait or a sleep. `signal`: others may learn of it when it runs, and must then find it done.
  Ticket push(detail::Task work, const openreg_site& site, bool ordered, std::size_t kernels = 0, bool signal = false) {
    bool wake;
    std::uint64_t number;
    {
      std::lock_guard lock(mutex_);
      start(); // may throw; nothing has changed then
      tasks_.push_back({std::move(work), site, ordered, kernels, signal});
      kernels_.store(kernels_.load(std::memory_order_relaxed) + kernels, std::memory_order_relaxed);
      number = submitted_.load(std::memory_order_relaxed) + 1;
      if (completed_.load(std::memory_order_relaxed) + 1 == number) detail::attention.fetch_add(1);
      submitted_.store(number, std::memory_order_release);
      wake = asleep_;
    }
    if (wake) wake_.notify_one();
    return {stream_, number};
  }

  // Waits while the queue is full: see Note [Full queues].
  void make_room() {
    if (kernels_.load(std::memory_order_relaxed) < kMostKernels) [[likely]]
      return;
    if (worked_on || detail::in_work() || detail::scheduled()) return;
    detail::wait_freely(detail::Interrupt::kThrows, [&](auto most) {
      std::unique_lock lock(mutex_);
      return room_.wait_for(lock, most, [&] { return kernels_.load(std::memory_order_relaxed) <= kMostKernels / 2; });
    });
  }

  void wait(std::uint64_t number, detail::Interrupt interrupt = detail::Interrupt::kThrows) {
    if (done(number)) return;
    detail::refuse_own_stream(stream_);
    if (detail::scheduled()) detail::schedule_wait(nullptr, {[&] { return done(number); }, stream_});
    detail::wait_freely(interrupt, [&](auto most) {
      std::unique_lock lock(mutex_);
      return done_.wait_for(lock, most, [&] { return done(number); });
    });
  }

  // Runs the items up to this one; only in a schedule.
  void run_up_to(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    if (!tasks_.empty()) start();
    granted_ = std::max(granted_, number);
    wake_.notify_one();
    const auto is_done = [&] { return done(number); };
    if (stream_ == detail::collectives_of(stream_.device)) done_.wait_for(lock, detail::kCollective, is_done);
    else done_.wait(lock, is_done);
  }
  // After a schedule: queued work may run.
  void release() {
    std::lock_guard lock(mutex_);
    if (!tasks_.empty()) start();
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
  struct Item {
    detail::Task work;
    openreg_site site;
    bool ordered;
    std::size_t kernels;
    bool signal;
  };

  void start() {
    if (running_) return;
    std::thread([this] { work_loop(); }).detach();
    running_ = true;
  }

  // Whether the worker may run an item: in a schedule, an ordered item only if it was granted.
  bool may_run() const noexcept {
    return !tasks_.empty() && (!tasks_.front().ordered || !detail::scheduled() || stopping_ || !done(granted_));
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
      Item item = std::move(tasks_.front());
      tasks_.pop_front();
      if (!item.signal) lock.unlock();
      try {
        if (item.kernels && detail::dropping()) {
          throw std::runtime_error("openreg error: queued work was dropped, because the process was interrupted");
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
  std::deque<Item> tasks_;
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

Queue& queue_of(Stream stream) {
  if (Queue* known = find_queue(stream)) return *known;
  auto* made = new Queue(stream);
  Queue* expected = nullptr;
  if (slot(stream).compare_exchange_strong(expected, made)) return *made;
  delete made;
  return *expected;
}

} // namespace
} // namespace openreg
