#include "runtime/mutex.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace openreg {
namespace {

constexpr int kTries = 16;
constexpr auto kRecheck = std::chrono::microseconds(50);

void pause_briefly() noexcept {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

// Runs a fence on every thread of the process; returns whether it could.
bool fence_all_threads() noexcept {
  static const bool registered = !syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
  return registered && !syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
}

} // namespace

void Mutex::wait() noexcept {
  for (int i = 0; i < kTries; ++i, pause_briefly())
    if (!is_locked() && try_lock()) return;
  waiting_.fetch_add(1);
  const bool woken = fence_all_threads();
  while (!try_lock())
    if (woken) syscall(SYS_futex, &taken_, FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0);
    else std::this_thread::sleep_for(kRecheck);
  waiting_.fetch_sub(1);
}

void Mutex::wake() noexcept {
  syscall(SYS_futex, &taken_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

} // namespace openreg
