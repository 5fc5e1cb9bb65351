#include "runtime/graph/external_event.h"

#include <stdexcept>
#include <utility>

#include "runtime/graph/graph.h"
#include "runtime/process/error.h"
#include "runtime/process/fault.h"
#include "runtime/process/notices.h"
#include "runtime/stream/event_point.h"
#include "runtime/stream/profile.h"

namespace openreg {

struct ExternalEvent::Point : detail::EventPoint {
  using EventPoint::EventPoint;
  // Waits in the work of a stream.
  void wait_in_work() {
    if (is_reached()) return;
    detail::wait_freely(
        detail::Interrupt::kThrows, [&](auto) { return wait_for(detail::kSlice) || detail::dropping(); });
  }
};

struct ExternalEvent::Latest {
  ~Latest() { notice(NoticeKind::kEventDestroyed, this, {}); }
  std::shared_ptr<Point> get() const { return std::atomic_load(&point); }
  std::shared_ptr<Point> renew(Stream stream) {
    auto made = std::make_shared<Point>(stream);
    std::atomic_store(&point, made);
    return made;
  }
  std::shared_ptr<Point> point;
};

ExternalEvent::ExternalEvent(int device, bool timed) : Event(device, timed), latest_(std::make_shared<Latest>()) {}

const void* ExternalEvent::identity() const noexcept {
  return latest_.get();
}

std::shared_ptr<ExternalEvent::Point> ExternalEvent::latest() const {
  return latest_->get();
}

void ExternalEvent::capture(Stream stream, bool records) const {
  ReplayPoint launch = [latest = latest_, records](Stream replayed_on) -> std::shared_ptr<void> {
    if (!records) return latest->get();
    const auto point = latest->renew(replayed_on);
    return {point.get(), [point](void*) { point->reach(); }}; // at the latest when the replay is over
  };
  const std::size_t number = detail::add_replay_point(stream, std::move(launch));
  const auto work = [records, number] {
    auto* point = static_cast<Point*>(detail::replay_point(number));
    if (!point) return; // it was not recorded
    if (records) point->reach();
    else point->wait_in_work();
  };
  const Site site = records ? Site("record an event") : Site("wait for an event", Site::kWait);
  detail::capture(stream, site, detail::Task(work), {});
}

void ExternalEvent::record(Stream stream) {
  const HostCall call("openregEventRecord");
  check_usable(stream.device);
  if (detail::captures(stream)) return capture(stream, /*records=*/true);
  detail::queue_record(stream, latest_->renew(stream));
}

void ExternalEvent::block(Stream stream) const {
  const HostCall call("openregStreamWaitEvent");
  check_usable(stream.device);
  if (detail::captures(stream)) return capture(stream, /*records=*/false);
  if (const auto point = latest()) detail::queue_wait(stream, point);
}

bool ExternalEvent::query() const {
  detail::check_host_call("an event's query");
  const auto point = latest();
  if (point && detail::scheduled()) detail::schedule_watcher.query("Event.query", point->stream);
  return !point || point->is_reached();
}

void ExternalEvent::synchronize() const {
  const HostCall call("openregEventSynchronize");
  detail::check_host_call("an event's synchronize");
  const auto point = latest();
  if (!point) return;
  check_usable(point->stream.device);
  point->wait();
  throw_kept_error(point->stream.device);
}

Event::Clock::time_point ExternalEvent::time() const {
  detail::check_host_call("an event's elapsed_time");
  const auto point = latest();
  if (!point)
    throw std::logic_error(
        "openreg: elapsed_time() needs events that have been recorded; replay the graphs that record them first");
  check_usable(point->stream.device);
  point->wait();
  return point->time;
}

} // namespace openreg
