// Device memory: one reserved address range a device, pooled so that a small allocation costs
// tens of nanoseconds and a large one finds its pages already mapped; reused in stream order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "work.h"

namespace openreg {

// An amount now; its peak since start or reset_peak_memory(), and what came and went since start or
// reset_accumulated_memory().
struct Usage {
  std::size_t current = 0, peak = 0, in = 0, out = 0;
  void add(std::size_t amount) noexcept {
    current += amount;
    in += amount;
    if (current > peak) peak = current;
  }
  void remove(std::size_t amount) noexcept {
    current -= amount;
    out += amount;
  }
};

// What a device holds: of small blocks, which share pages, of large ones, and of both.
struct MemoryStats {
  enum Pool { kSmall, kLarge, kAll, kPools };
  std::array<Usage, kPools> bytes, blocks; // allocated
  std::array<Usage, kPools> active,
      active_blocks; // and what was freed while queued work may use it: see record_stream()
  std::array<Usage, kPools> requested;     // bytes that were asked for, before rounding
  std::array<Usage, kPools> reserved;      // bytes that have been taken from the operating system
  std::array<Usage, kPools> segments;      // pages of small blocks, and runs of pages
  std::uint64_t failures = 0;
  std::uint64_t retries = 0;    // waits for queued work, which held the memory
  std::uint64_t extensions = 0; // more memory from the operating system
  std::uint64_t returns = 0;    // pieces of it given back
};

// Thrown when a device cannot hold an allocation; nothing has changed.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Note [Stream order]
// Memory belongs to the stream that was current when it was allocated. When it is freed while that stream
// still has queued work, only that stream may have it again at once, because what it runs next comes
// after; the other streams must wait until the work is done, and so must what runs on that stream already,
// which has pages of its own meanwhile, small allocations too. Use on another stream is known to the
// allocator only by record_stream(): freed memory then waits for that stream too.

// An allocation of more than half a page has pages of its own.
inline constexpr std::size_t kMemoryPage = 64 * 1024;

// Note [Private pools]
// A private pool holds memory that no other allocation gets: that of graphs, whose addresses must stay valid, and of
// torch.openreg.MemPool. Allocations come from it while their stream is captured into a graph of the pool, and inside
// use_pool() on the calling thread. As in CUDA, each stream has its own free blocks in a pool. A pool lives while it
// has a user. Afterwards its free memory goes to everybody; what tensors still occupy follows when they die.
using PoolId = std::pair<unsigned long long, unsigned long long>; // c10::MempoolId_t; {0, 0}: no private pool
// Graphs and MemPools count apart: only the memory of a pool without graphs may be returned by empty_cache().
enum class PoolUser { kPool, kGraph };

// A number that no pool has: {0, n} of a MemPool, {n, 0} of a graph.
PoolId new_pool(PoolUser user) noexcept;
void retain_pool(int device, PoolId pool, PoolUser user);
void release_pool(int device, PoolId pool, PoolUser user) noexcept;
// How many users a pool has on a device.
int pool_users(int device, PoolId pool) noexcept;
// Sends the calling thread's allocations on `device` to a pool, or with {0, 0} to none; returns the previous one.
PoolId use_pool(int device, PoolId pool);

// At least `bytes` of memory for use on `stream`, 64-byte aligned; never null. Throws OutOfMemory.
void* allocate(Stream stream, std::size_t bytes);

// Gives memory from allocate() back to its pool. Null is allowed.
void deallocate(void* pointer) noexcept;

// The work that `stream` has been given until the memory is freed uses it. Ignores other addresses.
void record_stream(void* pointer, Stream stream);

// The most bytes that allocations of a device may occupy, with what queued work still holds; device_memory() unless
// set.
void set_memory_limit(int device, std::size_t bytes) noexcept;
std::size_t memory_limit(int device) noexcept;

// What an address range holds, in the order of addresses.
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

// Allocator events. kFreed follows kFreeRequested once no stream uses the block.
enum class MemoryAction { kAllocated, kFreeRequested, kFreed, kFailed };
// Told of every action while not null, with the bytes asked for, on the thread that acts; kFreed, which an
// allocation's thread may cause, with the pool locked.
using MemoryWatcher = void (*)(MemoryAction, const void*, std::size_t bytes, Stream);
void set_memory_watcher(MemoryWatcher watcher) noexcept;

// The device whose memory holds this address, or -1.
int device_of(const void* pointer) noexcept;

// Bytes of the limit that are neither in use nor kept for reuse.
std::size_t free_memory(int device) noexcept;

// The block of a device's memory that holds an address, of size 0 where none does.
struct MemoryOwner {
  int device;
  bool busy; // another thread is at work in the pool; nothing else is known
  MemoryBlock block;
  std::int64_t stream;
};
// Safe in a signal handler: it waits for no lock and allocates nothing.
MemoryOwner find_owner(const void* address) noexcept;

// The same, waiting for the pool's lock: never in a signal handler.
MemoryOwner owner_of(const void* address);

// Returns all pages that hold nothing to the operating system, or those of a private pool that no graph uses.
void empty_cache(int device, PoolId pool = {}) noexcept;

MemoryStats memory_stats(int device) noexcept;
void reset_peak_memory(int device) noexcept;
void reset_accumulated_memory(int device) noexcept;

// Fill new memory with 0xFF bytes (NaN, -1) so that an unwritten result shows. OPENREG_POISON=1.
void set_poison(bool on) noexcept;
bool poison() noexcept;

// "1.50 GiB", as CUDA's messages print sizes.
std::string format_bytes(std::size_t bytes);

} // namespace openreg
