// Work as all parts of the runtime see it: its stream, where it was launched, and what launch() must check first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>

// Of what the libraries of kernels use: Note [Libraries] in setup.py.
#define OPENREG_API __attribute__((visibility("default")))

namespace openreg {

// Of a device: the default stream and, as in CUDA, 32 of either priority, which are reused round robin.
constexpr std::int64_t kPool = 32;
constexpr std::size_t kStreams = 1 + 2 * kPool;

// Stream 0 of a device is its default stream; others come from new_stream().
struct Stream {
  int device;
  std::int64_t id;
  bool operator==(const Stream&) const = default;
};

// A launch, for errors and profiles: where it is, and what its work is called; without a name, as the function that
// launches it. `bytes`: of a copy.
struct Site {
  enum Kind { kKernel, kCopy, kWait };
  Site(std::source_location where) noexcept : where(where) {} // not explicit: for default arguments
  Site(const char* name, Kind kind = kKernel, std::size_t bytes = 0,
      std::source_location where = std::source_location::current()) noexcept
      : where(where), name(name), kind(kind), bytes(bytes) {}
  std::source_location where;
  const char* name = nullptr;
  Kind kind = kKernel;
  std::size_t bytes = 0;
};

namespace detail {

using Task = std::function<void()>;

// Zero while work may run at once: the mode is inline and no stream has queued work. Else the number of
// busy streams, and bits: the mode is not inline; an error waits to be thrown; Note [Fork]; Note [Faults].
// Note [Isolation] and Note [Profile] have one too, which alone are no reason to wait.
inline std::atomic<std::uint32_t> attention{0};
constexpr std::uint32_t kModeBit = 1u << 31, kErrorBit = 1u << 30, kForkBit = 1u << 29, kFaultBit = 1u << 28,
                        kIsolationBit = 1u << 27, kProfileBit = 1u << 26;
constexpr std::uint32_t kNoWait = kIsolationBit | kProfileBit;

} // namespace detail
} // namespace openreg
