// What watches streams from above: captures of graphs (graph/) and schedules (explore/). Each registers its functions
// when the library is loaded. Streams, events and memory call them, and so include nothing that is above them. Code
// above graph/ and explore/ calls graph.h and schedule.h instead.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "runtime/process/attention.h"
#include "runtime/stream/task.h"

namespace openreg {

inline constexpr int kAnyDevice = -1;

namespace detail {

// ---- captures: see Note [Capture] ----

// An event's place in a capture.
struct CapturedPoint;

// Called only while attention has kCaptureBit.
struct CaptureWatcher {
  // Returns true if the calling thread's work on the stream is captured.
  bool (*captures)(Stream) noexcept;
  // Returns true if the calling thread captures any stream.
  bool (*in_capture)() noexcept;
  // Returns the private pool of the stream's capture, or {0, 0}.
  std::pair<unsigned long long, unsigned long long> (*pool)(Stream) noexcept;
  // Captures the work, or returns false if it should run. Throws if it must do neither.
  bool (*launch)(Stream, const openreg_site&, const openreg_work&, void* context);
  // Adds a node to the capture of the stream.
  void (*add)(Stream, const openreg_site&, Task);
  // Throws that a capture does not permit `what`, and invalidates the capture.
  void (*refuse)(Stream, const std::string& what, const std::string& why);
  // Throws if a capture forbids the host to wait for a stream or query it. An id below 0 means all streams of the
  // device; the device kAnyDevice means something that is on no stream.
  void (*check_host_call)(const char* what, Stream);
  // Returns the point that the stream's capture has reached, or null if the stream is not captured.
  std::shared_ptr<const CapturedPoint> (*point)(Stream);
  // Makes a stream wait for a point, and so join its capture.
  void (*join)(const CapturedPoint&, Stream);
};
extern CaptureWatcher capture_watcher;

inline bool any_capture() noexcept {
  return attention.load(std::memory_order_relaxed) & kCaptureBit;
}
// Returns true if work that is launched on the stream now is captured.
inline bool captures(Stream stream) noexcept {
  return any_capture() && capture_watcher.captures(stream);
}
// Throws if a capture forbids the call: see CaptureWatcher.
inline void check_host_call(const char* what, Stream stream = {kAnyDevice, -1}) {
  if (any_capture()) [[unlikely]]
    capture_watcher.check_host_call(what, stream);
}

// ---- schedules: see Note [Schedules] ----

// A condition that never becomes false again, and the stream whose work makes it true.
using Until = std::function<bool()>;
struct Awaited {
  Until done;
  Stream stream{}; // an id below 0: all streams of the device, or of all devices for kAnyDevice
};

// Called only while scheduled().
struct ScheduleWatcher {
  // Queues an item on a stream by calling `push`, so that several threads' items are in the same order in the queue and
  // in the schedule. The argument of `push` says if the schedule takes the item: it may have ended. `kernel`: the
  // schedule chooses when the item runs, and it is a step. `after`: it cannot run before.
  void (*item)(Stream, const openreg_site&, bool kernel, Awaited after, const std::function<Ticket(bool)>& push);
  // Lets other things happen until the condition is true. Without a name, the wait is part of another step.
  void (*wait)(const char* name, const Awaited& until);
  // Notes that the host asks once if it would have to wait.
  void (*query)(const char* name, Stream);
  // Ends the schedule without running anything: queued work runs on the threads of its streams.
  void (*abandon)() noexcept;
};
extern ScheduleWatcher schedule_watcher;

extern std::atomic<bool> schedule_on;
// Returns true while a schedule is active.
inline bool scheduled() noexcept {
  return schedule_on.load(std::memory_order_relaxed);
}

} // namespace detail
} // namespace openreg
