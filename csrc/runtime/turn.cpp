#include "turn.h"

#include <array>

#include "device.h"
#include "stream.h"
#include "wait.h"

namespace openreg {
namespace {

std::array<detail::TurnState, kMaxDevices * kStreams> turns;
std::atomic<AroundWait> around_wait{nullptr};
std::atomic<CheckSignals> signals{nullptr};

void wait(void* turn) {
  auto& state = static_cast<detail::TurnState*>(turn)->state;
  while (state.exchange(2, std::memory_order_acquire)) state.wait(2);
}

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

detail::TurnState& detail::turn_of(int device, std::int64_t stream) noexcept {
  return turns[static_cast<std::size_t>(device) * kStreams + static_cast<std::size_t>(stream)];
}

void detail::wait_around(void (*wait)(void*), void* argument) {
  if (const auto around = around_wait.load()) around(wait, argument);
  else wait(argument);
}

void detail::wait_for_turn(TurnState& turn) noexcept {
  wait_around(&wait, &turn);
}

} // namespace openreg
