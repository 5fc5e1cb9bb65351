// Work, for all parts of the runtime: its stream, its launch site, and what launch() must check first.
#pragma once

#include <openreg/launch.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace openreg {

// Streams per device: the default stream and, as in CUDA, 32 of either priority, reused round robin.
constexpr std::int64_t kPool = 32;
constexpr std::size_t kStreams = 1 + 2 * kPool;

namespace detail {

// Whether the work, and not the runtime, has thrown the exception that the calling thread handles: the same type says
// something else then. The C interface resets it before each call.
inline thread_local bool work_threw = false;

// Calls a function of the program's work.
template <class Call>
auto call_work(Call&& call) {
  try {
    return call();
  } catch (...) {
    work_threw = true;
    throw;
  }
}

inline void run_work(const openreg_work& work, void* context) {
  call_work([&] {
    if (const char* wrong = work.run(context)) [[unlikely]]
      throw std::runtime_error(wrong);
  });
}

// Work with its own context, which can be queued.
class Task {
 public:
  Task() = default;
  // A copy of the work, for a caller that continues.
  Task(const openreg_work& work, void* context)
      : work_(work), context_(work.keep ? call_work([&] { return work.keep(context); }) : context) {}
  template <class Work, class = std::enable_if_t<!std::is_same_v<std::decay_t<Work>, Task>>>
  Task(Work&& work) : work_(impl::WorkOf<Work>::table), context_(impl::WorkOf<Work>::keep(impl::context_of(work))) {}
  Task(Task&& other) noexcept : work_(std::exchange(other.work_, {})), context_(other.context_) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(work_, other.work_);
    std::swap(context_, other.context_);
    return *this;
  }
  ~Task() {
    if (work_.drop) work_.drop(context_);
  }
  void operator()() { run_work(work_, context_); }

 private:
  openreg_work work_{};
  void* context_ = nullptr;
};

// Zero while work may run immediately: the mode is inline and no stream has queued work. Otherwise the number of busy
// streams, plus bits: the mode is not inline; an error is pending; Note [Fork]; Note [Faults]; Note [Exit], while
// threads are kept away; Note [Capture], while any stream of the process is captured. Note [Isolation], Note [Profile]
// and Note [Private pools] also have a bit each, which alone is no reason to wait: see kNoWait.
extern std::atomic<std::uint32_t> attention;
constexpr std::uint32_t kModeBit = 1u << 31, kErrorBit = 1u << 30, kForkBit = 1u << 29, kFaultBit = 1u << 28,
                        kIsolationBit = 1u << 27, kProfileBit = 1u << 26, kCaptureBit = 1u << 25, kPoolBit = 1u << 24,
                        kExitBit = 1u << 23;
constexpr std::uint32_t kNoWait = kIsolationBit | kProfileBit | kPoolBit;

} // namespace detail
} // namespace openreg
