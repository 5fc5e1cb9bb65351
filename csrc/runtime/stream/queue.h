// The queues of streams and their workers: for launch.cpp, for what waits for queued work, and for schedules.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "runtime/device.h"
#include "runtime/process/interrupts.h"
#include "runtime/stream/task.h"

namespace openreg {

// Returns a ticket for all work that the stream has been given so far.
Ticket ticket(Stream stream) noexcept;
// Returns true if the work of the ticket has run. Never waits.
bool done(const Ticket& ticket) noexcept;

// Waits for all work and ends the worker threads; they start again when needed.
void stop_workers() noexcept;

namespace detail {

// Note [Full queues]
// As on CUDA, the host can run only a limited distance ahead: when a stream has kMostKernels kernels that have not run,
// launch() waits until half of them have. A replay counts as its nodes, but as kMostOfReplay at most, so that several
// long replays fit. Waits and records of events do not count and do not wait. A full queue always moves on, because
// what is queued depends only on what was queued earlier. Two kinds of launches never wait: those of work, whose own
// stream may be the full one, and those in a schedule, which says itself what runs.
inline constexpr std::size_t kMostKernels = 1024, kMostOfReplay = 64;

struct QueuedItem {
  Task work;
  openreg_site site;
  std::size_t kernels = 0; // as how many it counts; they may touch device memory, unlike a wait or a sleep
  bool signal = false;     // others may learn of it when it runs, and must then find it done
  bool ordered = false;    // a schedule says when it runs
};

// Queues an item for the stream's worker.
Ticket push(Stream stream, QueuedItem item);
// Waits while the stream's queue is full: see Note [Full queues].
void make_room(Stream stream);

// Returns true if the stream has no queued work. Never waits.
bool queue_idle(Stream stream) noexcept;
// Returns queue_idle(), but first waits for a signal that is being given.
bool query_queue(Stream stream);
// Returns true if any stream has ever had queued work.
bool any_queue() noexcept;

// Waits for the work of the ticket, without throwing its errors.
void wait_for(const Ticket& ticket, Interrupt interrupt = Interrupt::kThrows);
// Waits for the work that the stream has been given so far, without throwing its errors.
void wait_for_queued(Stream stream);
// Waits for the work that all streams have been given so far, without throwing its errors.
void wait_for_queued(Interrupt interrupt);
// Throws std::logic_error if the calling thread runs the stream's queued work, which would wait for itself. Call it
// before a wait for what the stream has not done yet.
void refuse_own_stream(Stream stream);

// Ends the workers and drops queued work: a kernel that has begun finishes, each of the others leaves an error that
// says it did not run, and sleeps and waits, which check dropping(), end early.
void drop_queued() noexcept;
// Returns true while drop_queued() ends the workers.
bool dropping() noexcept;

// ---- for schedules ----

// Returns the queue for a device's collectives, which is not a stream of the program.
inline Stream collectives_of(int device) noexcept {
  return {device, static_cast<std::int64_t>(kStreams)};
}
// Runs an item, and those before it, on its worker and returns when it is done. Stops waiting for a collective, which
// needs other processes, after kCollective.
void run_up_to(const Ticket& item);
inline constexpr std::chrono::seconds kCollective{2};
// Lets the workers continue without run_up_to().
void release_workers() noexcept;

} // namespace detail
} // namespace openreg
