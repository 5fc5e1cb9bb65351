// Streams: which is current, their queued work, and the implementation of openreg/launch.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "runtime/process/interrupts.h"
#include "runtime/stream/task.h"

namespace openreg {

// Makes `stream` current on its device for the calling thread and returns the previous one.
Stream exchange_stream(Stream stream) noexcept;
// A stream of the device's pool; as in CUDA, a lower priority number is more urgent.
Stream new_stream(int device, int priority) noexcept;
int stream_priority(Stream stream) noexcept;
// Whether this is the default stream or may come from new_stream().
bool is_stream(Stream stream) noexcept;
// Throws std::invalid_argument if not.
void check_stream(Stream stream);

// Note [Launch mode]
// Work on a stream runs in submission order; the mode says where.
// inline: on the calling thread, immediately, while the stream is idle. If it has queued work (a
//   sleep, a large non_blocking copy, a wait for an event), launch() queues behind it, and run(),
//   whose work uses the caller's stack, first waits for it.
// async: launch() always queues the work for the stream's worker thread, and the host runs ahead. An exception from the
// work is kept, and the next call that waits for the device throws it.
// sync: inline, and nothing is ever left queued: an error appears at its line.
enum class LaunchMode { kInline, kAsync, kSync };
LaunchMode launch_mode() noexcept;
void set_launch_mode(LaunchMode mode) noexcept;

// These wait, then throw the device's first AsyncError since the last such call.
void synchronize_stream(Stream stream);
void synchronize_device(int device);
bool stream_idle(Stream stream) noexcept;
// The same, when the program asks: see Note [Capture] and Note [Schedules].
bool query_stream(Stream stream);

// How much work a stream had been given at some point; done() says whether all of it has run.
struct Ticket {
  Stream stream;
  std::uint64_t number;
};
Ticket ticket(Stream stream) noexcept;
bool done(const Ticket& ticket) noexcept;

// Keeps a stream busy; a cycle is a nanosecond.
void sleep_on(Stream stream, std::int64_t cycles);

// Kernels launched by the calling process so far.
std::uint64_t launch_count() noexcept;
namespace detail {
void hold_launch_counters(bool hold) noexcept; // across a fork()
}

// Waits for all work and ends the worker threads; they start again when needed.
void stop_workers() noexcept;

// The position at which the devices' pools hand out streams again, so that a program gets the same streams in each
// order.
std::vector<std::uint32_t> next_streams();
void set_next_streams(const std::vector<std::uint32_t>& next);

namespace detail {
Stream thread_stream(int device) noexcept;
// The turn of thread_stream(), taken for the host to read what the stream's work has written. Null if the stream has
// work, or if a launch would need attention.
struct TurnState;
TurnState* try_turn(int device) noexcept;
// launch(), enqueue() and run() of openreg/launch.h, which throw on errors.
void launch(Stream stream, const openreg_site& site, const openreg_work& work, void* context);
void enqueue(Stream stream, const openreg_site& site, const openreg_work& work, void* context);
void run(Stream stream, const openreg_site& site, const openreg_work& work, void* context);
// launch() and run() of openreg/launch.h without the checks that calls from other packages get, for kernels that take
// nanoseconds.
template <class Work>
void launch_directly(Stream stream, Work&& work, const Site& site) {
  launch(stream, site, impl::WorkOf<Work>::table, impl::context_of(work));
}
template <class Work>
decltype(auto) run_directly(Stream stream, Work&& work, const Site& site) {
  return impl::with_result(std::forward<Work>(work),
      [&](auto& inner) { run(stream, site, impl::run_only<std::remove_reference_t<decltype(inner)>>, &inner); });
}
// launch() for a graph. A capture records it as one node; profiles and injected faults see the graph's nodes.
void launch_graph(Stream stream, const openreg_site& site, const openreg_work& work, void* context, std::size_t nodes);
// The queueing half of launch(). Waits while the queue is full: see Note [Full queues].
void queue(Stream stream, Task task, const openreg_site& site);
// Queues work that touches no device memory: a wait, a sleep. `after`: what it waits for, if that is known.
struct Awaited;
void queue_wait(Stream stream, Task task, const openreg_site& site);
void queue_wait(Stream stream, Task task, const openreg_site& site, Awaited after);
// Queues the record of an event, which only marks that it was reached. A caller that knows it was reached finds the
// stream's work done up to there.
void queue_signal(Stream stream, Task task, const openreg_site& site);
// Makes the next work on `stream` run after the work that another stream had been given.
void queue_wait(Stream stream, const Ticket& after, const openreg_site& site);

// For Note [Schedules]: queue() for a kernel that leaves the schedule no choice; a collective, which begins and ends
// after the work that `stream` has been given so far; and the functions with which a schedule controls the queues.
// run_up_to() runs an item, and those before it, on its worker and returns when it is done. It stops waiting for a
// collective, which needs other processes, after kCollective.
void queue_part(Stream stream, Task task, const openreg_site& site);
Ticket queue_collective(Stream stream, Task task, const openreg_site& site);
void run_up_to(const Ticket& item);
inline constexpr std::chrono::seconds kCollective{2};
void release_workers() noexcept; // they continue without run_up_to()

// Throws std::logic_error if the calling thread runs the stream's queued work, which would wait for itself. Call it
// before a wait for what the stream has not done yet.
void refuse_own_stream(Stream stream);
// synchronize_stream() for the runtime itself: Note [Capture] does not apply to it.
void finish_stream(Stream stream, const char* name = "wait");
// Waits for the work given to a stream, by a point or so far, or to all streams, without throwing its errors.
void wait_for(const Ticket& ticket);
void wait_for_queued(Stream stream);
void wait_for_queued(Interrupt interrupt);
// Whether any stream has ever had queued work.
bool any_queue() noexcept;
// Ends the workers and drops queued work: a kernel that has begun finishes, each of the others leaves an error that
// says it did not run, and sleeps and waits, which check dropping(), end early.
void drop_queued() noexcept;
bool dropping() noexcept;
} // namespace detail

} // namespace openreg
