// Where threads stop when the process ends: see Note [Exit].
#pragma once

#include "runtime/stream/task.h"

namespace openreg {

// While threads are kept away, a thread that uses the device, or has waited or worked for it, calls this unless it has
// a turn. Set once, by the bindings.
using StayAway = void (*)();
void set_stay_away(StayAway stay) noexcept;
void keep_threads_away(bool away) noexcept;

namespace detail {

void stay_away();
inline void stay_at_exit() {
  if (attention.load(std::memory_order_relaxed) & kExitBit) [[unlikely]]
    stay_away();
}

} // namespace detail
} // namespace openreg
