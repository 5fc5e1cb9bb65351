#include "wait.h"

#include <atomic>

namespace openreg {
namespace {

std::atomic<AroundWait> around_wait{nullptr};
std::atomic<CheckSignals> signals{nullptr};

} // namespace

void set_around_wait(AroundWait around) noexcept {
  around_wait = around;
}

void set_check_signals(CheckSignals check) noexcept {
  signals = check;
}

bool detail::check_signals() {
  const auto check = signals.load();
  return check && check();
}

void detail::wait_around(void (*wait)(void*), void* argument) {
  if (const auto around = around_wait.load()) around(wait, argument);
  else wait(argument);
}

} // namespace openreg
