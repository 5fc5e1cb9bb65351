#include "turn.h"

#include <array>

#include "device.h"
#include "wait.h"
#include "work.h"

namespace openreg {
namespace {

std::array<detail::TurnState, kMaxDevices * kStreams> turns;

void wait(void* turn) {
  auto& state = static_cast<detail::TurnState*>(turn)->state;
  while (state.exchange(2, std::memory_order_acquire)) state.wait(2);
}

} // namespace

detail::TurnState& detail::turn_of(int device, std::int64_t stream) noexcept {
  return turns[static_cast<std::size_t>(device) * kStreams + static_cast<std::size_t>(stream)];
}

void detail::wait_for_turn(TurnState& turn) noexcept {
  wait_around(&wait, &turn);
}

} // namespace openreg
