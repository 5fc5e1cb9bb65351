// Device memory: one reserved address range per device, pooled so that a small allocation costs tens of nanoseconds and
// a large one finds its pages already mapped; reused in stream order.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "runtime/memory/private_pools.h"
#include "runtime/stream/task.h"

namespace openreg {

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

// Returns all empty pages to the operating system, or only the empty pages of a private pool that no graph uses.
void empty_cache(int device, PoolId pool = {}) noexcept;

// For a device without work: fills its free memory with NaN and puts it in the order in which a new process has it, so
// that equal programs get equal memory with equal contents.
void settle_memory(int device) noexcept;

// Fills new memory with 0xFF bytes (NaN, -1) to expose unwritten results. OPENREG_POISON=1.
void set_poison(bool on) noexcept;
bool poison() noexcept;

// "1.50 GiB", as CUDA's messages print sizes.
std::string format_bytes(std::size_t bytes);

} // namespace openreg
