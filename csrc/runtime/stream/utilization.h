// How busy a device is, by NVML's definition: the busy share of the samples of its streams in the last second.
#pragma once

#include <array>
#include <atomic>

#include "runtime/device.h"

namespace openreg {

// Note [Usage]
// Running work counts nothing itself. A thread samples the streams every millisecond: whether work has a stream's turn,
// or sleep_on() keeps it busy. The thread starts with the first call of utilization(), and ends after a while without
// calls.
struct Utilization {
  int busy;   // percent of the samples in which the device ran work
  int memory; // percent in which it ran work that may touch memory, which a sleep does not
};

// Over the last second, or since the first call if that was later. The first call waits for a sixth of a second.
Utilization utilization(int device);

namespace detail {
inline std::array<std::atomic<int>, kMaxDevices> sleeping{};

// While it lives, a stream of the device counts as busy without work.
class Sleeping {
 public:
  explicit Sleeping(int device) noexcept : count_(sleeping[static_cast<std::size_t>(device)]) { ++count_; }
  ~Sleeping() { --count_; }
  Sleeping(const Sleeping&) = delete;
  Sleeping& operator=(const Sleeping&) = delete;

 private:
  std::atomic<int>& count_;
};
} // namespace detail

} // namespace openreg
