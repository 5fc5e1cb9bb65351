// How a thread waits for what another thread does.
#pragma once

#include <chrono>
#include <type_traits>

#include "turn.h"

namespace openreg {

// Note [Interrupts]
// Ctrl-C ends a wait, not the work that is waited for. A wait looks for signals every kSlice, and what the program's
// handler raises leaves it as a C++ exception: out of launch() and run() before their work has begun, out of allocate()
// before it has taken memory. The work goes on; a later wait waits for it again and throws its errors. Three waits
// cannot throw, and leave signals to Python until they are over: for the turn, which another thread has for the length
// of one kernel; for the device when memory that processes share is freed; for the streams when a profile ends.

// Called around every wait for another thread, with the wait, which must not keep Python's lock: who has the turn, or
// works off a queue, may want it. Set once, by the bindings.
using AroundWait = void (*)(void (*wait)(void*), void* argument);
void set_around_wait(AroundWait around) noexcept;

// Called by a wait now and then, without Python's lock: lets the program handle its signals, and throws what that
// raises. False on a thread that handles none, and need not ask again. Set once, by the bindings.
using CheckSignals = bool (*)();
void set_check_signals(CheckSignals check) noexcept;

namespace detail {

enum class Interrupt { kThrows, kNever };

// The hook of set_check_signals(); false without one.
bool check_signals();
// The hook of set_around_wait() around the wait, or the wait alone.
void wait_around(void (*wait)(void*), void* argument);

inline constexpr std::chrono::milliseconds kSlice{50};

// Waits without the calling thread's turn and without Python's lock: see Note [Turns]. `wait(most)` waits for that long
// at most and says whether what it waits for has come; it keeps no lock.
template <class Wait>
void wait_freely(Interrupt interrupt, Wait&& wait) {
  const NoTurn no_turn;
  auto whole = [&] {
    std::chrono::nanoseconds most = kSlice;
    while (!wait(most))
      if (interrupt == Interrupt::kNever || !check_signals()) most = std::chrono::hours(1);
  };
  wait_around([](void* argument) { (*static_cast<decltype(whole)*>(argument))(); }, &whole);
}

} // namespace detail
} // namespace openreg
