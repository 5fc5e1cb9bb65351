// Device memory: one reserved address range per device, pooled so that a small allocation costs tens of nanoseconds and
// a large one finds its pages already mapped; reused in stream order.
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

// An amount now, its peak since the start or reset_peak_memory(), and the totals added and removed since the start or
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

// A device's memory use: for small blocks, which share pages, for large ones, and for both.
struct MemoryStats {
  enum Pool { kSmall, kLarge, kAll, kPools };
  std::array<Usage, kPools> bytes, blocks; // allocated
  std::array<Usage, kPools> active,
      active_blocks; // allocated memory, and freed memory that queued work may still use: see record_stream()
  std::array<Usage, kPools> requested; // requested bytes, before rounding
  std::array<Usage, kPools> reserved; // bytes obtained from the operating system
  std::array<Usage, kPools> segments; // pages of small blocks, and runs of pages
  std::uint64_t failures = 0;
  std::uint64_t retries = 0; // waits for queued work that held the memory
  std::uint64_t extensions = 0; // times that the operating system provided more memory
  std::uint64_t returns = 0; // pieces returned to the operating system
};

// Thrown when an allocation does not fit on a device; nothing has changed.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Note [Stream order]
// Memory belongs to the stream that was current when it was allocated. If it is freed while that stream still has
// queued work, only that stream may reuse it immediately, because its next work comes afterwards. The other streams
// must wait until the queued work is done. Work that is already running on that stream must wait too; meanwhile it gets
// its own pages, even for small allocations. The allocator knows about use on another stream only through
// record_stream(): freed memory then waits for that stream too.

// An allocation of more than half a page has its own pages.
inline constexpr std::size_t kMemoryPage = 64 * 1024;

// Note [Private pools]
// A private pool holds memory that no other allocation gets: the memory of graphs, whose addresses must stay valid, and
// of torch.openreg.MemPool. Allocations come from it while their stream is captured into a graph of the pool, and
// inside use_pool() on the calling thread. As in CUDA, each stream has its own free blocks in a pool. A pool lives as
// long as it has a user. Afterwards its free memory returns to the general pool; memory that tensors still occupy
// follows when they are freed.
using PoolId = std::pair<unsigned long long, unsigned long long>; // c10::MempoolId_t; {0, 0}: no private pool
// Graphs and MemPools are counted separately: empty_cache() may return only the memory of a pool without graphs.
enum class PoolUser { kPool, kGraph };

// An unused pool number: {0, n} for a MemPool, {n, 0} for a graph.
PoolId new_pool(PoolUser user) noexcept;
void retain_pool(int device, PoolId pool, PoolUser user);
void release_pool(int device, PoolId pool, PoolUser user) noexcept;
// How many users a pool has on a device.
int pool_users(int device, PoolId pool) noexcept;
// Directs the calling thread's allocations on `device` to a pool, or with {0, 0} to none; returns the previous pool.
PoolId use_pool(int device, PoolId pool);

// At least `bytes` of memory for use on `stream`, 64-byte aligned; never null. Throws OutOfMemory.
void* allocate(Stream stream, std::size_t bytes);

// Returns memory from allocate() to its pool. Null is allowed.
void deallocate(void* pointer) noexcept;

// Records that the work given to `stream` until the memory is freed uses it. Ignores other addresses.
void record_stream(void* pointer, Stream stream);

// The limit in bytes on a device's allocations, including memory that queued work still holds. The default is
// device_memory().
void set_memory_limit(int device, std::size_t bytes) noexcept;
std::size_t memory_limit(int device) noexcept;

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

// Allocator events. kFreed follows kFreeRequested once no stream uses the block.
enum class MemoryAction { kAllocated, kFreeRequested, kFreed, kFailed };
// If not null, called for every action, with the requested bytes, on the acting thread. kFreed is reported with the
// pool locked, and an allocating thread may cause it.
using MemoryWatcher = void (*)(MemoryAction, const void*, std::size_t bytes, Stream);
void set_memory_watcher(MemoryWatcher watcher) noexcept;

// The device whose memory holds this address, or -1.
int device_of(const void* pointer) noexcept;

// Bytes below the limit that are neither in use nor kept for reuse.
std::size_t free_memory(int device) noexcept;

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

// Returns all empty pages to the operating system, or only the empty pages of a private pool that no graph uses.
void empty_cache(int device, PoolId pool = {}) noexcept;

MemoryStats memory_stats(int device) noexcept;
void reset_peak_memory(int device) noexcept;
void reset_accumulated_memory(int device) noexcept;

// Fills new memory with 0xFF bytes (NaN, -1) to expose unwritten results. OPENREG_POISON=1.
void set_poison(bool on) noexcept;
bool poison() noexcept;

// "1.50 GiB", as CUDA's messages print sizes.
std::string format_bytes(std::size_t bytes);

} // namespace openreg
