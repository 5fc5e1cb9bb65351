// What a device's memory holds: its segments and blocks, and the one that contains an address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/memory/private_pools.h"

namespace openreg {

// An allocation of more than half a page has its own pages.
inline constexpr std::size_t kMemoryPage = 64 * 1024;

// The contents of an address range, in address order.
struct MemoryBlock {
  // kPending: freed, but a stream's work may still use it.
  enum State : std::uint8_t { kFree, kAllocated, kPending };
  const void* address;
  std::size_t size;
  State state;
  std::size_t requested; // of `size`; all of it once the block is free
};
struct MemorySegment {
  const void* address;
  std::size_t size;
  std::int64_t stream;
  bool small; // a page of blocks of one size
  PoolId pool;
  std::vector<MemoryBlock> blocks;
};
std::vector<MemorySegment> memory_snapshot(int device);

// The block of a device's memory that contains an address; its size is 0 if there is none.
struct MemoryOwner {
  int device;
  bool busy; // another thread is using the pool; nothing else is known
  MemoryBlock block;
  std::int64_t stream;
};
// Safe in a signal handler: it takes no lock and allocates nothing.
MemoryOwner find_owner(const void* address) noexcept;

// The same, but waits for the pool's lock: never call it in a signal handler.
MemoryOwner owner_of(const void* address);

} // namespace openreg
