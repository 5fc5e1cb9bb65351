// Device memory: one reserved address range per device, pooled so that a small allocation costs tens of nanoseconds and
// a large one finds its pages already mapped; reused in stream order.
#pragma once

#include <cstddef>

#include "runtime/memory/block.h"
#include "runtime/memory/private_pools.h"
#include "runtime/memory/stats.h"

namespace openreg {

// Note [Stream order]
// Memory belongs to the stream that was current when it was allocated. If it is freed while that stream still has
// queued work, only that stream may reuse it immediately, because its next work comes afterwards. The other streams
// must wait until the queued work is done. Work that is already running on that stream must wait too; meanwhile it gets
// its own pages, even for small allocations. The allocator knows about use on another stream only through
// record_stream(): freed memory then waits for that stream too.

// At least `bytes` of memory for use on `stream`, 64-byte aligned; never null. Throws OutOfMemory.
void* allocate(Stream stream, std::size_t bytes);

// Returns memory from allocate() to its pool. Null is allowed.
void deallocate(void* pointer) noexcept;

// Records that the work given to `stream` until the memory is freed uses it. Ignores other addresses.
void record_stream(void* pointer, Stream stream);

// Keeps a block, even if it is freed, until release_memory() is called as often, for work that is on no stream. Ignores
// other addresses.
void hold_memory(void* pointer);
void release_memory(void* pointer) noexcept;

// The limit in bytes on a device's allocations, including memory that queued work still holds. The default is
// device_memory().
void set_memory_limit(int device, std::size_t bytes) noexcept;
std::size_t memory_limit(int device) noexcept;

// Sets who hears of every MemoryAction, or with null nobody.
void set_memory_watcher(MemoryWatcher watcher) noexcept;

// The device whose memory holds this address, or -1.
int device_of(const void* pointer) noexcept;

// Bytes below the limit that are neither in use nor kept for reuse.
std::size_t free_memory(int device) noexcept;

// Returns all empty pages to the operating system, or only the empty pages of a private pool that no graph uses.
void empty_cache(int device, PoolId pool = {}) noexcept;

// For a device without work: fills its free memory with NaN and puts it in the order in which a new process has it, so
// that equal programs get equal memory with equal contents.
void settle_memory(int device) noexcept;

// Fills new memory with 0xFF bytes (NaN, -1) to expose unwritten results. OPENREG_POISON=1.
void set_poison(bool on) noexcept;
bool poison() noexcept;

// ---- private pools ----

// An unused pool number: {0, n} for a MemPool, {n, 0} for a graph.
PoolId new_pool(PoolUser user) noexcept;
void retain_pool(int device, PoolId pool, PoolUser user);
void release_pool(int device, PoolId pool, PoolUser user) noexcept;
// How many users a pool has on a device.
int pool_users(int device, PoolId pool) noexcept;
// Directs the calling thread's allocations on `device` to a pool, or with {0, 0} to none; returns the previous pool.
PoolId use_pool(int device, PoolId pool);

// ---- statistics ----

MemoryStats memory_stats(int device) noexcept;
void reset_peak_memory(int device) noexcept;
void reset_accumulated_memory(int device) noexcept;

} // namespace openreg
