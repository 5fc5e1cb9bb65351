#include "runtime/process/exit.h"

#include <atomic>

#include "runtime/stream/turn.h"

namespace openreg {
namespace {

std::atomic<StayAway> hook{nullptr};

} // namespace

void set_stay_away(StayAway stay) noexcept {
  hook = stay;
}

void keep_threads_away(bool away) noexcept {
  if (away) detail::attention.fetch_or(detail::kExitBit);
  else detail::attention.fetch_and(~detail::kExitBit);
}

void detail::stay_away() {
  const auto stay = hook.load();
  if (stay && !in_work()) stay();
}

} // namespace openreg
