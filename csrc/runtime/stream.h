// Streams and the one way to run work on a device: launch() and run().
#pragma once

#include <cstdint>
#include <source_location>
#include <utility>

#include "isolation.h"
#include "profile.h"
#include "turn.h"
#include "wait.h"
#include "work.h"

namespace openreg {

// The calling thread's current stream on a device.
OPENREG_API Stream current_stream(int device) noexcept;
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

// Keeps a stream busy, a cycle being a nanosecond.
void sleep_on(Stream stream, std::int64_t cycles);

// Kernels launched by the calling process so far.
std::uint64_t launch_count() noexcept;

// Waits for all work and ends the worker threads; they start again when needed.
void stop_workers() noexcept;

namespace detail {
// Counts a launch; what it must attend to.
OPENREG_API std::uint32_t begin_launch() noexcept;

enum class Place { kHere, kQueue, kNowhere };
OPENREG_API Place place(Stream stream, const Site& site); // waits first where the mode is sync
OPENREG_API void queue(Stream stream, Task task, const Site& site);
// Waits for the stream's queued work; throws as synchronize_stream().
OPENREG_API void catch_up(Stream stream, const Site& site);
// Queues what touches no device memory: a wait, a sleep.
void queue_wait(Stream stream, Task task, const Site& site);

// For what a stream has been given, or all of them, throwing none of its errors.
void wait_for_queued(Stream stream);
void wait_for_queued(Interrupt interrupt);
// Whether any stream has ever had queued work.
bool any_queue() noexcept;
// Ends the workers without what is queued: a kernel that has begun ends, the others leave the error that they did not
// run, sleeps and waits, which ask dropping(), are cut short.
void drop_queued() noexcept;
bool dropping() noexcept;

// Around work while it runs on its caller's thread: its stream's turn, access to device memory, and the profile.
class OPENREG_API Scope {
 public:
  Scope(Stream stream, const Site& site, std::uint32_t attention) noexcept;
  ~Scope();

 private:
  const Turn turn_;
  const Access access_;
  const Profiled profiled_;
};
} // namespace detail

// Runs `work`, which owns what it uses, in the order of `stream`, now or later. Order, access to device
// memory and counting happen here and in run(), and nowhere else; a kernel never does them itself.
template <class Work>
void launch(Stream stream, Work&& work, Site site = std::source_location::current()) {
  const auto attention = detail::begin_launch();
  const bool plain = (attention & ~detail::kNoWait) == 0;
  switch (plain ? detail::Place::kHere : detail::place(stream, site)) {
    case detail::Place::kHere: {
      const detail::Scope scope(stream, site, attention);
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
  const auto attention = detail::begin_launch();
  const bool plain = (attention & ~detail::kNoWait) == 0;
  const auto place = plain ? detail::Place::kQueue : detail::place(stream, site);
  if (place == detail::Place::kNowhere) return;
  if (launch_mode() == LaunchMode::kSync) {
    const detail::Scope scope(stream, site, attention);
    work();
  } else detail::queue(stream, std::forward<Work>(work), site);
}

// Runs `work` in the order of `stream` on the calling thread, before it returns.
template <class Work>
decltype(auto) run(Stream stream, Work&& work, Site site = std::source_location::current()) {
  const auto attention = detail::begin_launch();
  if (attention & ~detail::kNoWait) [[unlikely]]
    detail::catch_up(stream, site);
  const detail::Scope scope(stream, site, attention);
  return std::forward<Work>(work)();
}

} // namespace openreg
