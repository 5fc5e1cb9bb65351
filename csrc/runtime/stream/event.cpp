#include "runtime/stream/event.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "runtime/explore/schedule.h"
#include "runtime/graph/graph.h"
#include "runtime/process/error.h"
#include "runtime/process/fault.h"
#include "runtime/process/interrupts.h"
#include "runtime/process/profile.h"
#include "runtime/stream/stream.h"

namespace openreg {

struct Event::Point {
  explicit Point(Stream stream) : stream(stream), captured(detail::capture_point(stream)) {}
  const Stream stream;
  const std::shared_ptr<const detail::CapturedPoint> captured; // its place in a capture, if it was recorded in one
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> reached{false};
  Clock::time_point time;

  void reach() {
    std::lock_guard lock(mutex);
    time = Clock::now();
    reached.store(true, std::memory_order_release);
    changed.notify_all();
  }
  bool wait_for(std::chrono::nanoseconds most) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, most, [&] { return reached.load(std::memory_order_acquire); });
  }
  void wait() {
    const auto is_reached = [this] { return reached.load(std::memory_order_acquire); };
    if (!is_reached()) detail::refuse_own_stream(stream);
    if (detail::scheduled()) detail::schedule_wait("Event.synchronize", {is_reached, stream});
    if (is_reached()) return;
    detail::wait_freely(detail::Interrupt::kThrows, [&](auto most) { return wait_for(most); });
  }
  // On a worker, which holds no turn and handles no signals.
  void wait_unless_dropping() {
    while (!wait_for(detail::kSlice) && !detail::dropping()) {
    }
  }
};

Event::Event(int device, bool timed) : device_(device), timed_(timed) {}

// Another thread may record() again at any time, so a reader keeps the point that it saw.
void Event::record(Stream stream) {
  const HostCall call("openregEventRecord");
  check_usable(stream.device);
  auto point = std::make_shared<Point>(stream);
  std::atomic_store(&point_, point);
  if (point->captured) return;
  if (stream_idle(stream)) point->reach();
  else detail::queue_signal(stream, [point] { point->reach(); }, Site("record an event"));
}

void Event::block(Stream stream) const {
  const HostCall call("openregStreamWaitEvent");
  check_usable(stream.device);
  const auto point = std::atomic_load(&point_);
  if (point && point->captured) return detail::join_capture(*point->captured, stream);
  if (point && detail::captures(stream))
    detail::refuse_capture(stream, "a wait for an event",
        "the event was recorded before the capture, or on a stream that is not part of it. Wait for it before the "
        "capture, or let its stream join the capture first, with other.wait_stream(capture_stream).");
  if (!point || point->reached.load(std::memory_order_acquire) || point->stream == stream) return;
  const Site site("wait for an event", Site::kWait);
  auto wait = detail::profiled(stream, site, [point] { point->wait_unless_dropping(); });
  if (!detail::scheduled()) return detail::queue_wait(stream, std::move(wait), site);
  detail::queue_wait(stream, std::move(wait), site,
      {[point] { return point->reached.load(std::memory_order_acquire); }, point->stream});
}

bool Event::recorded() const noexcept {
  return std::atomic_load(&point_) != nullptr;
}

void Event::check_host(const char* what) const {
  const auto point = std::atomic_load(&point_);
  if (point && point->captured) {
    if (detail::captures(point->stream))
      detail::refuse_capture(point->stream, what, "the event is part of the capture, and has not happened.");
    throw_device_error(std::string("openreg error: ") + what +
        ": the event was recorded in a capture, and a replay does not record it. Record it after the replay.");
  }
  detail::check_host_call(what);
}

bool Event::query() const {
  check_host("an event's query");
  const auto point = std::atomic_load(&point_);
  if (point && detail::scheduled()) detail::schedule_query("Event.query", point->stream);
  return !point || point->reached.load(std::memory_order_acquire);
}

void Event::synchronize() const {
  const HostCall call("openregEventSynchronize");
  check_host("an event's synchronize");
  const auto point = std::atomic_load(&point_);
  if (!point) return;
  check_usable(point->stream.device);
  point->wait();
  throw_kept_error(point->stream.device);
}

Event::Clock::time_point Event::time() const {
  check_host("an event's elapsed_time");
  const auto point = std::atomic_load(&point_);
  if (!point) return {};
  check_usable(point->stream.device);
  point->wait();
  return point->time;
}

} // namespace openreg
