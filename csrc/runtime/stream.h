// Streams: which is current, what is queued on one, and what openreg/launch.h does with work.
#pragma once

#include <cstdint>

#include "wait.h"
#include "work.h"

namespace openreg {

// Makes `stream` current on its device for the calling thread and returns the previous one.
Stream exchange_stream(Stream stream) noexcept;
// A stream of the device's pool; a lower priority number is more urgent, as CUDA's.
Stream new_stream(int device, int priority) noexcept;
int stream_priority(Stream stream) noexcept;
// Whether new_stream(), or the default stream, can have given this.
bool is_stream(Stream stream) noexcept;
// Throws std::invalid_argument for another.
void check_stream(Stream stream);

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
Stream thread_stream(int device) noexcept;
// launch(), enqueue() and run() of openreg/launch.h, which throw what goes wrong.
void launch(Stream stream, const openreg_site& site, const openreg_work& work, void* context);
void enqueue(Stream stream, const openreg_site& site, const openreg_work& work, void* context);
void run(Stream stream, const openreg_site& site, const openreg_work& work, void* context);
// launch() for a graph: a capture of it is a node, and what a profile and injected faults see is its nodes.
void launch_graph(Stream stream, const openreg_site& site, const openreg_work& work, void* context);
// What launch() queues, told that it has to.
void queue(Stream stream, Task task, const openreg_site& site);
// Queues what touches no device memory: a wait, a sleep.
void queue_wait(Stream stream, Task task, const openreg_site& site);

// synchronize_stream() for the runtime itself, which Note [Capture] does not concern.
void finish_stream(Stream stream);
// For what a stream has been given, or all of them, throwing none of its errors.
void wait_for_queued(Stream stream);
void wait_for_queued(Interrupt interrupt);
// Whether any stream has ever had queued work.
bool any_queue() noexcept;
// Ends the workers without what is queued: a kernel that has begun ends, the others leave the error that they did not
// run, sleeps and waits, which ask dropping(), are cut short.
void drop_queued() noexcept;
bool dropping() noexcept;
} // namespace detail

} // namespace openreg
