#include "event.h"

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "error.h"
#include "fault.h"
#include "profile.h"
#include "stream.h"
#include "wait.h"

namespace openreg {

struct Event::Point {
  explicit Point(Stream stream) : stream(stream) {}
  const Stream stream;
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
    if (reached.load(std::memory_order_acquire)) return;
    detail::wait_freely(detail::Interrupt::kThrows, [&](auto most) { return wait_for(most); });
  }
  // On a worker, which has no turn and no signals.
  void wait_unless_dropping() {
    while (!wait_for(detail::kSlice) && !detail::dropping()) {
    }
  }
};

Event::Event(int device, bool timed) : device_(device), timed_(timed) {}

// Another thread may record() again at any time, so that a reader keeps the point that it saw.
void Event::record(Stream stream) {
  const HostCall call("openregEventRecord");
  check_usable(stream.device);
  auto point = std::make_shared<Point>(stream);
  std::atomic_store(&point_, point);
  if (stream_idle(stream)) point->reach();
  else detail::queue_wait(stream, [point] { point->reach(); }, Site("record an event"));
}

void Event::block(Stream stream) const {
  const HostCall call("openregStreamWaitEvent");
  check_usable(stream.device);
  const auto point = std::atomic_load(&point_);
  if (!point || point->reached.load(std::memory_order_acquire) || point->stream == stream) return;
  const Site site("wait for an event", Site::kWait);
  detail::queue_wait(stream, detail::profiled(stream, site, [point] { point->wait_unless_dropping(); }), site);
}

bool Event::recorded() const noexcept {
  return std::atomic_load(&point_) != nullptr;
}

bool Event::query() const noexcept {
  const auto point = std::atomic_load(&point_);
  return !point || point->reached.load(std::memory_order_acquire);
}

void Event::synchronize() const {
  const HostCall call("openregEventSynchronize");
  const auto point = std::atomic_load(&point_);
  if (!point) return;
  check_usable(point->stream.device);
  point->wait();
  throw_kept_error(point->stream.device);
}

Event::Clock::time_point Event::time() const {
  const auto point = std::atomic_load(&point_);
  if (!point) return {};
  check_usable(point->stream.device);
  point->wait();
  return point->time;
}

} // namespace openreg
