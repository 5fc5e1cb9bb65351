// The device's side of torch's profiler.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace openreg {

namespace detail {
inline std::atomic<int> profiles{0}; // profiles of torch's profiler that run, whatever their activities
void report(void* pointer, bool freed);
} // namespace detail

// Reports new memory to a profile with profile_memory=True. Costs one load while no profiler runs.
inline void report_allocation(void* pointer) {
  if (detail::profiles.load(std::memory_order_relaxed)) [[unlikely]]
    detail::report(pointer, /*freed=*/false);
}
// Reports memory that is about to be freed.
inline void report_free(void* pointer) {
  if (detail::profiles.load(std::memory_order_relaxed)) [[unlikely]]
    detail::report(pointer, /*freed=*/true);
}
// Reports an allocation that failed.
void report_out_of_memory(c10::DeviceIndex device, std::size_t bytes);

// Opens a range on the calling thread, like record_function's. Ranges nest. Returns the range's depth, from 0.
int range_push(const char* name);
// Closes the innermost range of the calling thread, and returns its depth.
int range_pop();

// Starts a range that may overlap others and that another thread may end. Returns its number.
std::uint64_t range_start(const std::string& name);
void range_end(std::uint64_t range);

// Sets whether every operator is also a range on the device, with the name that torch.autograd.profiler.emit_nvtx gives
// it.
void emit_ranges(bool on, bool record_shapes);

} // namespace openreg
