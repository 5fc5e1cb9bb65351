// How many simulated devices there are, how large they are, and which is current.
#pragma once

#include <cstddef>

namespace openreg {

inline constexpr int kMaxDevices = 64;

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
