#include "runtime/stream/watchers.h"

namespace openreg {

constinit detail::CaptureWatcher detail::capture_watcher{};
constinit detail::ScheduleWatcher detail::schedule_watcher{};
constinit std::atomic<bool> detail::schedule_on{false};

} // namespace openreg
