// Streams, events and the one way to run work on a device: launch() and run().
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "isolation.h"
#include "turn.h"

namespace openreg {

// Of a device: the default stream and, as in CUDA, 32 of either priority, which are reused round robin.
constexpr std::int64_t kPool = 32;
constexpr std::size_t kStreams = 1 + 2 * kPool;

// Stream 0 of a device is its default stream; others come from new_stream().
struct Stream {
  int device;
  std::int64_t id;
  bool operator==(const Stream&) const = default;
};

// The calling thread's current stream on a device.
Stream current_stream(int device) noexcept;
// Makes `stream` current on its device for the calling thread and returns the previous one.
Stream exchange_stream(Stream stream) noexcept;
// A stream of the device's pool; a lower priority number is more urgent, as CUDA's.
Stream new_stream(int device, int priority) noexcept;
int stream_priority(Stream stream) noexcept;
// Whether new_stream(), or the default stream, can have given this.
bool is_stream(Stream stream) noexcept;

// Note [Launch mode]
// Work on a stream runs in the stream's order; the mode says where.
// inline: on the calling thread, at once, while the stream is idle. When it has queued work (a
//   sleep, a large non_blocking copy, a wait for an event), launch() queues behind it, and run(),
//   whose work uses the caller's stack, first waits for it.
// async: launch() always queues, for the stream's worker thread, and the host runs ahead. What the
//   work throws is kept, and thrown by the next call that waits for the device.
// sync: inline, and nothing is ever left queued: an error appears at its line.
enum class LaunchMode { kInline, kAsync, kSync };
LaunchMode launch_mode() noexcept;
void set_launch_mode(LaunchMode mode) noexcept;

// A launch, for errors and profiles: where it is, and what its work is called; without a name, as the function that
// launches it. `bytes`: of a copy.
struct Site {
  enum Kind { kKernel, kCopy, kWait };
  Site(std::source_location where) noexcept : where(where) {} // not explicit: for default arguments
  Site(const char* name, Kind kind = kKernel, std::size_t bytes = 0,
      std::source_location where = std::source_location::current()) noexcept
      : where(where), name(name), kind(kind), bytes(bytes) {}
  std::source_location where;
  const char* name = nullptr;
  Kind kind = kKernel;
  std::size_t bytes = 0;
};

// What queued work threw, with where it was launched; in torch, an AcceleratorError.
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// These wait, then throw the first AsyncError of the device since the last time.
void synchronize_stream(Stream stream);
void synchronize_device(int device);
bool stream_idle(Stream stream) noexcept;

// How much of a stream's work had been queued at some time; done() tells whether that has run.
struct Ticket {
  Stream stream;
  std::uint64_t number;
};
Ticket ticket(Stream stream) noexcept;
bool done(const Ticket& ticket) noexcept;

// A point in a stream's order, with the time at which the stream reached it. Copies share the point.
class Event {
 public:
  using Clock = std::chrono::steady_clock;
  Event(int device, bool timed);
  int device() const noexcept { return device_; }
  bool timed() const noexcept { return timed_; }
  void record(Stream stream);
  void block(Stream stream) const; // work launched on `stream` from now on runs behind the point
  bool query() const noexcept;
  void synchronize() const; // throws as synchronize_stream()
  Clock::time_point time() const;

 private:
  struct Point;
  int device_;
  bool timed_;
  std::shared_ptr<Point> point_; // of the latest record()
};

// Keeps a stream busy, a cycle being a nanosecond.
void sleep_on(Stream stream, std::int64_t cycles);

// Kernels launched by the calling process so far.
std::uint64_t launch_count() noexcept;

// Waits for all work and ends the worker threads; they start again when needed.
void stop_workers() noexcept;

// Note [Fork]
// A child made by fork() has none of its parent's threads, so what the parent had queued never runs
// there. As with CUDA, a child whose parent had used a device may not use one: launching and allocating
// throw. What it may do is free what it inherited, and end.
bool forked() noexcept;
void check_not_forked(); // throws std::runtime_error in such a child

namespace detail {
// One counter a thread, added up by launch_count(); a shared one would cost an atomic a launch.
struct LaunchCounter {
  LaunchCounter();
  ~LaunchCounter();
  std::uint64_t value = 0;
};
inline thread_local LaunchCounter launches;

// Zero while work may run at once: the mode is inline and no stream has queued work. Else the number of
// busy streams, and bits: the mode is not inline; an error waits to be thrown; Note [Fork]; Note [Faults].
// Note [Isolation] and Note [Profile] have one too, which alone are no reason to wait.
inline std::atomic<std::uint32_t> attention{0};
constexpr std::uint32_t kModeBit = 1u << 31, kErrorBit = 1u << 30, kForkBit = 1u << 29, kFaultBit = 1u << 28,
                        kIsolationBit = 1u << 27, kProfileBit = 1u << 26;
constexpr std::uint32_t kNoWait = kIsolationBit | kProfileBit;

using Task = std::function<void()>;
enum class Place { kHere, kQueue, kNowhere };
Place place(Stream stream, const Site& site); // waits first where the mode is sync
void queue(Stream stream, Task task, const Site& site);
// Waits for the stream's queued work; throws as synchronize_stream().
void catch_up(Stream stream, const Site& site);
// Keeps an error for the next call that waits for the device, if it is the first.
void keep_error(int device, const std::source_location& where, const char* what);

// While one lives, the profile counts the time as that of work on the stream; see Note [Profile].
struct Running;
Running* begin_work(Stream stream, const Site& site) noexcept;
void end_work(Running* work) noexcept;
class Profiled {
 public:
  Profiled(bool on, Stream stream, const Site& site) noexcept : work_(on ? begin_work(stream, site) : nullptr) {}
  ~Profiled() {
    if (work_) [[unlikely]]
      end_work(work_);
  }
  Profiled(const Profiled&) = delete;
  Profiled& operator=(const Profiled&) = delete;

 private:
  Running* const work_;
};
} // namespace detail

// Runs `work`, which owns what it uses, in the order of `stream`, now or later. Order, access to device
// memory and counting happen here and in run(), and nowhere else; a kernel never does them itself.
template <class Work>
void launch(Stream stream, Work&& work, Site site = std::source_location::current()) {
  ++detail::launches.value;
  const auto attention = detail::attention.load(std::memory_order_acquire);
  const bool plain = (attention & ~detail::kNoWait) == 0;
  switch (plain ? detail::Place::kHere : detail::place(stream, site)) {
    case detail::Place::kHere: {
      const detail::Turn turn(detail::turn_of(stream.device, stream.id));
      const detail::Access access(attention & detail::kIsolationBit);
      const detail::Profiled profiled(attention & detail::kProfileBit, stream, site);
      return static_cast<void>(work());
    }
    case detail::Place::kQueue:
      return detail::queue(stream, std::forward<Work>(work), site);
    case detail::Place::kNowhere:
      return;
  }
}

// launch() for work that takes so long that the host should run ahead also in inline mode.
template <class Work>
void enqueue(Stream stream, Work&& work, Site site = std::source_location::current()) {
  ++detail::launches.value;
  const auto attention = detail::attention.load(std::memory_order_acquire);
  const bool plain = (attention & ~detail::kNoWait) == 0;
  const auto place = plain ? detail::Place::kQueue : detail::place(stream, site);
  if (place == detail::Place::kNowhere) return;
  if (launch_mode() == LaunchMode::kSync) {
    const detail::Turn turn(detail::turn_of(stream.device, stream.id));
    const detail::Access access;
    const detail::Profiled profiled(attention & detail::kProfileBit, stream, site);
    work();
  } else detail::queue(stream, std::forward<Work>(work), site);
}

// Runs `work` in the order of `stream` on the calling thread, before it returns.
template <class Work>
decltype(auto) run(Stream stream, Work&& work, Site site = std::source_location::current()) {
  ++detail::launches.value;
  const auto attention = detail::attention.load(std::memory_order_acquire);
  if (attention & ~detail::kNoWait) [[unlikely]]
    detail::catch_up(stream, site);
  const detail::Turn turn(detail::turn_of(stream.device, stream.id));
  const detail::Access access(attention & detail::kIsolationBit);
  const detail::Profiled profiled(attention & detail::kProfileBit, stream, site);
  return std::forward<Work>(work)();
}

} // namespace openreg
