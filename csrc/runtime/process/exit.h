// Where threads stop when the process ends: see Note [Exit].
#pragma once

#include "runtime/process/attention.h"

namespace openreg {

// Called by a thread that uses the device, or has waited or worked for it, while threads are kept away. It must return
// on a thread that runs work: see detail::in_work(). Set once, by the bindings.
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
