// What a device's memory holds: its segments and blocks, and the one that contains an address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/memory/block.h"
#include "runtime/memory/private_pools.h"

namespace openreg {

// A range of a device's memory with the blocks in it, in address order.
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

// Waits for the pool's lock, so the answer is always complete. Never call it in a signal handler.
MemoryOwner owner_of(const void* address);

} // namespace openreg
