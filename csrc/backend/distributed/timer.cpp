// How long the parts of DistributedDataParallel's steps take on the device, for its log.
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <map>

#include "backend/device_index.h"
#include "backend/identity/identity.h"
#include "runtime/stream/event.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

class DeviceTimer final : public c10d::Timer {
 public:
  explicit DeviceTimer(c10::Device device) : device_(checked_index(device)) {}

  void record(Event event) override {
    c10d::Timer::record(event); // the host's time
    openreg::Event point(device_, /*timed=*/true);
    point.record(current_stream(device_));
    points_.insert_or_assign(event, std::move(point));
  }

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto first = points_.find(start), last = points_.find(end);
    if (first == points_.end() || last == points_.end()) return std::nullopt;
    const auto nanoseconds = [](const openreg::Event& event) {
      event.synchronize();
      return std::chrono::duration_cast<std::chrono::nanoseconds>(event.time().time_since_epoch()).count();
    };
    const int64_t difference = nanoseconds(last->second) - nanoseconds(first->second);
    return difference < 0 ? std::nullopt : std::optional(difference);
  }

 private:
  int device_;
  std::map<Event, openreg::Event> points_;
};

const bool registered = [] {
  c10d::TimerRegistry()->Register(identity.type,
      [](c10::Device device) -> std::unique_ptr<c10d::Timer> { return std::make_unique<DeviceTimer>(device); });
  return true;
}();

} // namespace
} // namespace openreg
