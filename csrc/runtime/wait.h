// How a thread waits for what another thread does.
#pragma once

#include <type_traits>

#include "turn.h"

namespace openreg::detail {

// The hook of set_around_wait() around the wait, or the wait alone.
void wait_around(void (*wait)(void*), void* argument);

// Runs `wait` without the calling thread's turn and without Python's lock: see Note [Turns].
template <class Wait>
void wait_freely(Wait&& wait) {
  const NoTurn no_turn;
  wait_around([](void* argument) { (*static_cast<std::remove_reference_t<Wait>*>(argument))(); }, &wait);
}

} // namespace openreg::detail
