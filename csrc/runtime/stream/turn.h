// The turns in which several threads run work on one stream, and waits that give up a turn.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "runtime/process/interrupts.h"

namespace openreg {

// Note [Turns]
// Two threads may use one stream, and their work must run one after the other, as on hardware: an in-place update by
// either is never split. So work takes its stream's turn while it runs, on its caller's thread or on a worker. Nested
// work runs in the outer work's turn only, whatever its own stream, and a thread that waits for other work gives up its
// turn meanwhile (wait_freely()). No thread waits for work that needs the turn it holds. A kernel must not take a lock
// that others hold while they launch.

namespace detail {

struct alignas(64) TurnState {
  std::mutex mutex;
  std::atomic<bool> busy{false}; // work has it; for Note [Usage]
  std::uint64_t taken = 0; // increases when it is taken and when its holder queues work: see MemoryPool::give_back()
};
TurnState& turn_of(int device, std::int64_t stream) noexcept;
// The turn that the calling thread has, or null.
extern constinit thread_local TurnState* turn_of_thread;
inline TurnState*& held_turn() noexcept {
  return turn_of_thread;
}
// Returns true if the calling thread is running work.
bool in_work() noexcept;

void wait_for_turn(TurnState& turn) noexcept;
// `held` is held_turn().
inline void take(TurnState& turn, TurnState*& held) noexcept {
  if (!turn.mutex.try_lock()) [[unlikely]]
    wait_for_turn(turn);
  ++turn.taken;
  turn.busy.store(true, std::memory_order_relaxed);
  held = &turn;
}
inline void give(TurnState*& held) noexcept {
  held->busy.store(false, std::memory_order_relaxed);
  std::exchange(held, nullptr)->mutex.unlock();
}

// While it lives, the calling thread has the turn.
class Turn {
 public:
  explicit Turn(TurnState& turn) noexcept : held_(held_turn()), nested_(held_) {
    if (!nested_) [[likely]]
      take(turn, held_);
  }
  ~Turn() {
    if (!nested_) [[likely]]
      give(held_);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  TurnState*& held_;
  const bool nested_;
};

// While it lives, the calling thread has no turn.
class NoTurn {
 public:
  NoTurn() noexcept;
  ~NoTurn();
  NoTurn(const NoTurn&) = delete;
  NoTurn& operator=(const NoTurn&) = delete;

 private:
  TurnState* const given_;
};

// Waits without the calling thread's turn and without Python's lock: see Note [Turns]. `wait(most)` waits for at most
// that long and returns whether the awaited event has happened; it holds no lock.
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
