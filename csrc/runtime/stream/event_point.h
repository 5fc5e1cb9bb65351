// A point in a stream's order that its work reaches. Used only by event.cpp and graph/external_event.cpp.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "runtime/stream/launch.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/turn.h"

namespace openreg::detail {

struct EventPoint {
  explicit EventPoint(Stream stream) : stream(stream) {}
  const Stream stream; // whose work reaches it
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> reached{false};
  std::chrono::steady_clock::time_point time;

  bool is_reached() const { return reached.load(std::memory_order_acquire); }
  // Marks the point as reached now, unless it was reached before.
  void reach() {
    std::lock_guard lock(mutex);
    if (is_reached()) return;
    time = std::chrono::steady_clock::now();
    reached.store(true, std::memory_order_release);
    changed.notify_all();
  }
  // Waits for at most that long; returns is_reached().
  bool wait_for(std::chrono::nanoseconds most) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, most, [&] { return is_reached(); });
  }
  // Lets the host wait.
  void wait() {
    if (!is_reached()) refuse_own_stream(stream);
    if (scheduled()) schedule_watcher.wait("Event.synchronize", {[this] { return is_reached(); }, stream});
    if (is_reached()) return;
    wait_freely(Interrupt::kThrows, [&](auto most) { return wait_for(most); });
  }
};

// Makes the next work on a stream run after the point.
inline void queue_wait(Stream stream, const std::shared_ptr<EventPoint>& point) {
  if (point->is_reached() || point->stream == stream) return;
  const auto wait = [point] { // on a worker, which holds no turn and handles no signals
    while (!point->wait_for(kSlice) && !dropping()) {
    }
  };
  queue_wait(
      stream, wait, Site("wait for an event", Site::kWait), {[point] { return point->is_reached(); }, point->stream});
}

// Lets the stream reach the point after the work that it has been given so far.
inline void queue_record(Stream stream, const std::shared_ptr<EventPoint>& point) {
  if (stream_idle(stream)) point->reach();
  else queue_signal(stream, [point] { point->reach(); }, Site("record an event"));
}

} // namespace openreg::detail
