#include "runtime/process/interrupts.h"

#include <atomic>

#include "runtime/process/exit.h"

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
  auto whole = [=] {
    wait(argument);
    stay_at_exit();
  };
  const auto run = [](void* each) { (*static_cast<decltype(whole)*>(each))(); };
  if (const auto around = around_wait.load()) around(run, &whole);
  else run(&whole);
}

} // namespace openreg
