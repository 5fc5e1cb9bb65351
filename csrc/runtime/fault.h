// Faults on demand, for people who test recovery: see Note [Faults].
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "work.h"

namespace openreg {

// Note [Faults]
// An injection waits for the `after`-th allocation, kernel or copy on its device that comes from then
// on, and strikes that one and the `times - 1` after it. It surfaces as the fault of a real
// accelerator does: an allocation that fails throws OutOfMemory there and then; a kernel that fails
// does not run, and the next call that waits for the device throws (in sync mode the launch itself); a
// corrupted copy says nothing; a lost device makes every call that allocates, launches, waits or asks whether work is
// done throw until reset_device(); memory can be freed.
enum class Fault { kAllocation, kKernel, kCopy, kLost, kKernelLatency, kCopyLatency };

struct Injection {
  Fault fault;
  int device;              // -1: every device
  std::uint64_t after = 0; // how many are spared
  std::uint64_t times = 1; // how many are struck; 0: all that follow
  std::int64_t nanoseconds = 0; // of latency
};

// Arms a fault; the number is for disarm(), which returns how often it struck.
int arm(const Injection& injection);
std::uint64_t disarm(int number);

// Whether faults spare what this thread launches and allocates, and do not count it, as a tool asks for work of its
// own; returns what held before.
bool spare(bool on);

// Makes a lost device work again. What its memory held is as it was.
void reset_device(int device);
bool lost(int device) noexcept;

// Throws in a child of Note [Fork], and where the device is lost.
void check_usable(int device);

namespace detail {
// These are called only while a fault is armed or a device is lost.
bool allocation_fails(int device);
// Whether the kernel is to be skipped, its error kept; throws where the device is lost. `here`: a latency passes before
// it returns, in place of on the stream.
bool kernel_fails(Stream stream, const openreg_site& site, bool here = false);
void check_not_lost(int device);
} // namespace detail

// For a copy that is about to be launched on `stream`: adds its latency; true if one of its bytes must flip. `here`: as
// above.
bool copy_corrupted(Stream stream, bool here = false);

} // namespace openreg
