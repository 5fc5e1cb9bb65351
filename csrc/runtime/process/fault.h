// Faults on demand, for testing recovery: see Note [Faults].
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace openreg {

// Note [Faults]
// Once armed, an injection skips `after` allocations, kernels or copies on its device, and strikes the next one and the
// `times - 1` after it. It surfaces like a fault on a real accelerator. A failing allocation throws OutOfMemory
// immediately. A failing kernel does not run, and the next call that waits for the device throws (in sync mode, the
// launch itself). A corrupted copy reports nothing. On a lost device, every call that allocates, launches, waits or
// queries whether work is done throws until reset_device(); memory can still be freed.
enum class Fault { kAllocation, kKernel, kCopy, kLost, kKernelLatency, kCopyLatency };

struct Injection {
  Fault fault;
  int device;              // -1: every device
  std::uint64_t after = 0; // how many are skipped
  std::uint64_t times = 1; // how many are struck; 0: all that follow
  std::int64_t nanoseconds = 0; // of latency
};

// Arms a fault and returns a number for disarm(), which returns how often it struck.
int arm(const Injection& injection);
std::uint64_t disarm(int number);

// Sets whether faults skip, and do not count, what this thread launches and allocates: tools use it for their own work.
// Returns the previous setting.
bool spare(bool on);

// Makes a lost device work again. Its memory is unchanged.
void reset_device(int device);
bool lost(int device) noexcept;

// Throws in a child process (see Note [Fork]), and if the device is lost.
void check_usable(int device);

namespace detail {
// These are called only while a fault is armed or a device is lost.
// Throws if the device is lost.
void check_not_lost(int device);
// Counts an event of this kind; returns true if an injection strikes it.
bool strikes(Fault fault, int device);
// Counts an event of this kind; returns the nanoseconds of latency that an injection adds to it, or 0.
std::int64_t latency(Fault fault, int device);
// Counts an allocation; returns true if it must fail. Throws if the device is lost.
bool allocation_fails(int device);
// Counts a kernel; returns true if it makes the device lost.
bool loses_device(int device);
} // namespace detail

} // namespace openreg
