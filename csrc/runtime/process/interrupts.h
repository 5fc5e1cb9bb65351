// What a thread that waits for another one does about signals and Python's lock.
#pragma once

#include <chrono>

namespace openreg {

// Note [Interrupts]
// Ctrl-C ends a wait, not the work that it waits for. A wait checks for signals every kSlice. If the program's handler
// raises, the wait throws a C++ exception: from launch() and run() before their work has begun, from allocate() before
// it has taken memory. The work continues; a later wait waits for it again and throws its errors. Three waits cannot
// throw, and defer signals until they are done: the wait for the turn, which another thread has for the length of one
// kernel; for the device, when memory shared by processes is freed; and for the streams, when a profile ends.

// Called around every wait for another thread, with the wait. The wait must not hold Python's lock, because the holder
// of the turn, or a queue's worker, may need it. Set once, by the bindings.
using AroundWait = void (*)(void (*wait)(void*), void* argument);
void set_around_wait(AroundWait around) noexcept;

// Called periodically by a wait, without Python's lock: lets the program handle its signals, and throws what its
// handlers raise. Returns false on a thread that handles no signals; it does not have to call again. Set once, by the
// bindings.
using CheckSignals = bool (*)();
void set_check_signals(CheckSignals check) noexcept;

namespace detail {

enum class Interrupt { kThrows, kNever };

// Calls the hook from set_check_signals(); returns false without one.
bool check_signals();
// Calls the hook from set_around_wait() around the wait, or the wait alone.
void wait_around(void (*wait)(void*), void* argument);

inline constexpr std::chrono::milliseconds kSlice{50}; // between two looks for signals

} // namespace detail
} // namespace openreg
