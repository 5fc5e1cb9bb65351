// What torch's profiler learns of the device.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace openreg {

namespace detail {
inline std::atomic<int> profiles{0}; // of torch's profiler, whatever their activities
void report(void* pointer, int sign);
} // namespace detail

// For profile_memory=True; each costs one load while nobody profiles.
inline void report_allocation(void* pointer) {
  if (detail::profiles.load(std::memory_order_relaxed)) [[unlikely]]
    detail::report(pointer, 1);
}
inline void report_free(void* pointer) { // while the memory is still allocated
  if (detail::profiles.load(std::memory_order_relaxed)) [[unlikely]]
    detail::report(pointer, -1);
}
void report_out_of_memory(c10::DeviceIndex device, std::size_t bytes);

// Ranges of the calling thread, as record_function makes them; they nest.
// They return the depth of the range, from 0.
int range_push(const char* name);
int range_pop();

// A range of any shape, which another thread may end; returns its number.
std::uint64_t range_start(const std::string& name);
void range_end(std::uint64_t range);

// While on, every operator is a range on the device as well, named as torch.autograd.profiler.emit_nvtx names them.
void emit_ranges(bool on, bool record_shapes);

} // namespace openreg
