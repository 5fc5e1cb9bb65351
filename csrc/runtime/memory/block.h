// A block of device memory, and what can happen to it.
#pragma once

#include <openreg/launch.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace openreg {

// An allocation of more than half a page has its own pages.
inline constexpr std::size_t kMemoryPage = 64 * 1024;

struct MemoryBlock {
  // kPending: freed, but a stream's work may still use it.
  enum State : std::uint8_t { kFree, kAllocated, kPending };
  const void* address;
  std::size_t size;
  State state;
  std::size_t requested; // of `size`; all of it once the block is free
};

// Thrown when an allocation does not fit on a device; nothing has changed.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Allocator events. kFreed follows kFreeRequested once no stream uses the block.
enum class MemoryAction { kAllocated, kFreeRequested, kFreed, kFailed };
// If not null, called for every action, with the requested bytes, on the acting thread. kFreed is reported with the
// pool locked, and an allocating thread may cause it.
using MemoryWatcher = void (*)(MemoryAction, const void*, std::size_t bytes, Stream);
} // namespace openreg
