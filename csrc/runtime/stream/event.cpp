#include "runtime/stream/event.h"

#include <utility>

#include "runtime/process/error.h"
#include "runtime/process/fault.h"
#include "runtime/stream/event_point.h"
#include "runtime/stream/profile.h"

namespace openreg {

struct Event::Point : detail::EventPoint {
  explicit Point(Stream stream)
      : EventPoint(stream), captured(detail::any_capture() ? detail::capture_watcher.point(stream) : nullptr) {}
  const std::shared_ptr<const detail::CapturedPoint> captured; // its place in a capture, if it was recorded in one
};

Event::Event(int device, bool timed) : device_(device), timed_(timed) {}

// Another thread may record() again at any time, so a reader keeps the point that it saw.
void Event::record(Stream stream) {
  const HostCall call("openregEventRecord");
  check_usable(stream.device);
  auto point = std::make_shared<Point>(stream);
  std::atomic_store(&point_, point);
  if (!point->captured) detail::queue_record(stream, point);
}

void Event::block(Stream stream) const {
  const HostCall call("openregStreamWaitEvent");
  check_usable(stream.device);
  const auto point = std::atomic_load(&point_);
  if (point && point->captured) return detail::capture_watcher.join(*point->captured, stream);
  if (point && detail::captures(stream))
    detail::capture_watcher.refuse(stream, "a wait for an event",
        "the event was recorded before the capture, or on a stream that is not part of it. Wait for it before the "
        "capture, or let its stream join the capture first, with other.wait_stream(capture_stream).");
  if (point) detail::queue_wait(stream, point);
}

bool Event::recorded() const noexcept {
  return std::atomic_load(&point_) != nullptr;
}

void Event::check_host(const char* what) const {
  const auto point = std::atomic_load(&point_);
  if (point && point->captured) {
    if (detail::captures(point->stream))
      detail::capture_watcher.refuse(point->stream, what, "the event is part of the capture, and has not happened.");
    throw_device_error(error_prefix() + what +
        ": the event was recorded in a capture, and a replay does not record it. Record it after the replay.");
  }
  detail::check_host_call(what);
}

bool Event::query() const {
  check_host("an event's query");
  const auto point = std::atomic_load(&point_);
  if (point && detail::scheduled()) detail::schedule_watcher.query("Event.query", point->stream);
  return !point || point->is_reached();
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
