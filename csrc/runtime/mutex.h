// A lock for critical sections of nanoseconds, at half the cost of std::mutex when uncontended.
#pragma once

#include <atomic>
#include <cstdint>

namespace openreg {

class Mutex {
 public:
  bool try_lock() noexcept {
    std::uint32_t free = 0;
    return state_.compare_exchange_strong(free, 1, std::memory_order_acquire);
  }
  void lock() noexcept {
    if (!try_lock()) [[unlikely]]
      wait();
  }
  void unlock() noexcept {
    if (state_.exchange(0, std::memory_order_release) == 2) [[unlikely]]
      state_.notify_one();
  }
  bool is_locked() const noexcept { return state_.load(std::memory_order_relaxed) != 0; }
  // lock() after a failed try.
  void wait() noexcept {
    while (state_.exchange(2, std::memory_order_acquire)) state_.wait(2);
  }

 private:
  std::atomic<std::uint32_t> state_{0}; // 1: taken; 2: taken, and a thread waits for it
};

} // namespace openreg
