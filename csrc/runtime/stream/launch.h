// All entries by which work gets to a stream. They implement openreg/launch.h and throw on errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "runtime/stream/stream.h"
#include "runtime/stream/task.h"
#include "runtime/stream/watchers.h"

namespace openreg {

// Returns how many kernels the calling process has launched.
std::uint64_t launch_count() noexcept;

// Keeps a stream busy; a cycle is a nanosecond.
void sleep_on(Stream stream, std::int64_t cycles);

// Counts a copy that is about to be launched for Note [Faults], and adds its latency. Returns true if one of its bytes
// must flip. `here`: the latency passes before this returns, instead of on the stream.
bool copy_corrupted(Stream stream, bool here = false);

namespace detail { // because openreg::launch() and the like are openreg/launch.h's

// ---- work that the device counts as a kernel ----

// Runs work on the stream: here if the stream is idle and the mode permits it, else on the stream's worker.
void launch(Stream stream, const openreg_site& site, const openreg_work& work, void* context);
// Queues work even if it could run here. In sync mode it runs here.
void enqueue(Stream stream, const openreg_site& site, const openreg_work& work, void* context);
// Runs work here, after the stream's queued work, for a caller that needs its result.
void run(Stream stream, const openreg_site& site, const openreg_work& work, void* context);
// Launches a replay. A capture records it as one node; profiles and injected faults see the graph's nodes instead.
void launch_graph(Stream stream, const openreg_site& site, const openreg_work& work, void* context, std::size_t nodes);

// Launches a callable without the checks that calls from other packages get, for kernels that take nanoseconds.
template <class Work>
void launch_directly(Stream stream, Work&& work, const Site& site) {
  launch(stream, site, impl::WorkOf<Work>::table, impl::context_of(work));
}
// Runs a callable and returns its result, without the checks that calls from other packages get.
template <class Work>
decltype(auto) run_directly(Stream stream, Work&& work, const Site& site) {
  return impl::with_result(std::forward<Work>(work),
      [&](auto& inner) { run(stream, site, impl::run_only<std::remove_reference_t<decltype(inner)>>, &inner); });
}

// Runs `read` here, in the turn of the device's current stream, if the stream is idle and nothing needs attention.
// Otherwise returns false; use run() then. It is not counted as a kernel: it only reads what the stream's work wrote.
bool read_if_idle(int device, void (*read)(void*), void* context);
template <class Read>
bool read_if_idle(int device, Read&& read) {
  return read_if_idle(device, [](void* self) { (*static_cast<std::remove_reference_t<Read>*>(self))(); }, &read);
}

// ---- queueing ----

// Queues a kernel. Waits while the queue is full: see Note [Full queues].
void queue(Stream stream, Task task, const openreg_site& site);
// Queues a kernel that leaves a schedule no choice.
void queue_part(Stream stream, Task task, const openreg_site& site);
// Queues work that touches no device memory: a wait, a sleep. `after`: what it waits for, if that is known.
void queue_wait(Stream stream, Task task, const openreg_site& site, Awaited after = {});
// Makes the next work on `stream` run after the work that another stream had been given.
void queue_wait(Stream stream, const Ticket& after, const openreg_site& site);
// Queues the record of an event, which only marks that it was reached. A caller that knows it was reached finds the
// stream's work done up to there.
void queue_signal(Stream stream, Task task, const openreg_site& site);
// Queues a collective, which begins and ends after the work that `stream` has been given so far. Only in a schedule.
Ticket queue_collective(Stream stream, Task task, const openreg_site& site);

// Counts a kernel for Note [Faults], and adds its latency. Returns true if it must not run: its error is kept, or
// thrown in sync mode. Throws if the device is lost. `here`: the latency passes before this returns, instead of on the
// stream.
bool kernel_fails(Stream stream, const openreg_site& site, bool here = false);

} // namespace detail
} // namespace openreg
