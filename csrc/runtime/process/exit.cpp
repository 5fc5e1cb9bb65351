#include "runtime/process/exit.h"

#include <atomic>

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
  if (const auto stay = hook.load()) stay();
}

} // namespace openreg
