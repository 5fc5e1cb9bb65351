// What several threads run on one stream takes turns.
#pragma once

#include <atomic>
#include <cstdint>

namespace openreg {

// Note [Turns]
// Two threads may use one stream, and what they run on it must run one after the other, as on hardware: an update in
// place by either is whole. So work takes its stream's turn while it runs, on its caller's thread or on a worker. Work
// inside work runs in the turn of the outer one alone, on whatever stream it is, and a thread that waits for other work
// gives its turn up meanwhile (wait.h): none ever waits for what needs the turn that it has. A kernel must not take a
// lock that others hold while they launch.

namespace detail {

struct alignas(64) TurnState {
  std::atomic<std::uint32_t> state{0}; // 1: taken; 2: and a thread waits for it
  std::uint64_t taken = 0;             // how often, by whoever has it; see also detail::queue()
};
TurnState& turn_of(int device, std::int64_t stream) noexcept;
inline thread_local TurnState* held_turn = nullptr;

void wait_for_turn(TurnState& turn) noexcept;
inline void take(TurnState& turn) noexcept {
  std::uint32_t free = 0;
  if (!turn.state.compare_exchange_strong(free, 1, std::memory_order_acquire)) [[unlikely]]
    wait_for_turn(turn);
  ++turn.taken;
  held_turn = &turn;
}
inline void give(TurnState& turn) noexcept {
  held_turn = nullptr;
  if (turn.state.exchange(0, std::memory_order_release) == 2) [[unlikely]]
    turn.state.notify_one();
}

// While one lives, the calling thread has the turn.
class Turn {
 public:
  explicit Turn(TurnState& turn) noexcept : taken_(held_turn ? nullptr : &turn) {
    if (taken_) [[likely]]
      take(turn);
  }
  ~Turn() {
    if (taken_) [[likely]]
      give(*taken_);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  TurnState* const taken_;
};

// While one lives, the calling thread has no turn.
class NoTurn {
 public:
  NoTurn() noexcept : given_(held_turn) {
    if (given_) give(*given_);
  }
  ~NoTurn() {
    if (given_) take(*given_);
  }
  NoTurn(const NoTurn&) = delete;
  NoTurn& operator=(const NoTurn&) = delete;

 private:
  TurnState* const given_;
};

} // namespace detail
} // namespace openreg
