// How many simulated devices there are, how large they are, and which is current.
//
// The runtime's folders, from below. Each includes only those before it, and no two modules (a header with its .cpp)
// include each other, directly or indirectly: tests/project/test_includes.py.
// process/: what the whole process shares: errors, signals, fork() and exit, faults, isolation, the log of notices.
// stream/: streams, their queues, launching, events, profiles. What watches them from above: stream/watchers.h.
// memory/: device memory, reused in the order of streams.
// graph/: captures of streams, and their replay.
// explore/: schedules, which decide what runs next.
// interface.cpp: all of it, for programs in C.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace openreg {

inline constexpr int kMaxDevices = 64;

// Streams per device: the default stream and, as in CUDA, 32 of either priority, reused round robin.
inline constexpr std::int64_t kPool = 32;
inline constexpr std::size_t kStreams = 1 + 2 * kPool;

// "openreg", or "cuda" if OPENREG_DEVICE asks for that name.
const char* device_name() noexcept;
// "openreg:1"
std::string device_name(int device);
// The beginning of errors: "openreg", or "CUDA".
const char* vendor_name() noexcept;

// The number of devices: OPENREG_DEVICE_COUNT, 2 unless set, 0 to kMaxDevices.
int device_count() noexcept;

// Bytes of memory per device: OPENREG_DEVICE_MEMORY ("8GiB", "512MiB" or bytes), by default the machine's physical
// memory.
std::size_t device_memory() noexcept;

// The calling thread's current device.
int current_device() noexcept;

// Makes `device` current for the calling thread and returns the previous one. Does not check it.
int exchange_device(int device) noexcept;

} // namespace openreg
