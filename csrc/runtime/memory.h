// Device memory: one reserved address range a device, pooled so that a small allocation costs
// tens of nanoseconds and a large one finds its pages already mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace openreg {

// What a device holds, in bytes; the peaks since start or reset_peak_memory().
struct MemoryStats {
  std::size_t allocated, peak_allocated;
  std::size_t reserved, peak_reserved;
  std::size_t total_allocated, total_freed;
  std::uint64_t allocations, frees, failures;
  std::uint64_t active, peak_active; // allocations that live
};

// Thrown when a device cannot hold an allocation; nothing has changed.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// At least `bytes` of memory on `device`, 64-byte aligned; never null. Throws OutOfMemory.
void* allocate(int device, std::size_t bytes);

// Gives memory from allocate() back to its pool. Null is allowed.
void deallocate(void* pointer) noexcept;

// The device whose memory holds this address, or -1.
int device_of(const void* pointer) noexcept;

// Returns all pages that hold nothing to the operating system.
void empty_cache(int device) noexcept;

MemoryStats memory_stats(int device) noexcept;
void reset_peak_memory(int device) noexcept;
void reset_accumulated_memory(int device) noexcept;

// Fill new memory with 0xFF bytes (NaN, -1) so that an unwritten result shows. OPENREG_POISON=1.
void set_poison(bool on) noexcept;
bool poison() noexcept;

// "1.50 GiB", as CUDA's messages print sizes.
std::string format_bytes(std::size_t bytes);

} // namespace openreg
