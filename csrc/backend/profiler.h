// The device's side of torch's profiler.
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

// For profile_memory=True; each costs one load while no profiler runs.
inline void report_allocation(void* pointer) {
  if (detail::profiles.load(std::memory_order_relaxed)) [[unlikely]]
    detail::report(pointer, 1);
}
inline void report_free(void* pointer) { // while the memory is still allocated
  if (detail::profiles.load(std::memory_order_relaxed)) [[unlikely]]
    detail::report(pointer, -1);
}
void report_out_of_memory(c10::DeviceIndex device, std::size_t bytes);

// Ranges on the calling thread, like record_function's; they nest.
// They return the depth of the range, from 0.
int range_push(const char* name);
int range_pop();

// A range that may overlap others and that another thread may end; returns its number.
std::uint64_t range_start(const std::string& name);
void range_end(std::uint64_t range);

// While on, every operator is also a range on the device, with the name that torch.autograd.profiler.emit_nvtx gives
// it.
void emit_ranges(bool on, bool record_shapes);

} // namespace openreg
