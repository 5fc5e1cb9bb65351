#include "runtime/stream/turn.h"

#include <array>

#include "runtime/device.h"

namespace openreg {
namespace {

std::array<detail::TurnState, kMaxDevices * kStreams> turns;

void wait(void* turn) {
  auto* const held = static_cast<detail::TurnState*>(turn);
  held->mutex.lock();
  detail::held_turn() = held; // from here on, as Note [Exit] asks whether the thread has one
}

} // namespace

constinit thread_local detail::TurnState* detail::turn_of_thread = nullptr;

detail::NoTurn::NoTurn() noexcept : given_(held_turn()) {
  if (given_) give(held_turn());
}
detail::NoTurn::~NoTurn() {
  if (given_) take(*given_, held_turn());
}

bool detail::in_work() noexcept {
  return held_turn() != nullptr;
}

detail::TurnState& detail::turn_of(int device, std::int64_t stream) noexcept {
  return turns[static_cast<std::size_t>(device) * kStreams + static_cast<std::size_t>(stream)];
}

void detail::wait_for_turn(TurnState& turn) noexcept {
  wait_around(&wait, &turn);
}

} // namespace openreg
