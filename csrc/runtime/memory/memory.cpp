#include "runtime/memory/memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "runtime/device.h"
#include "runtime/memory/pool.h"
#include "runtime/process/attention.h"
#include "runtime/process/fault.h"
#include "runtime/process/fork.h"
#include "runtime/process/isolation.h"
#include "runtime/process/notices.h"
#include "runtime/stream/launch.h"
#include "runtime/stream/turn.h"

namespace openreg {

using detail::memory;
using detail::tell;

namespace {

std::atomic<unsigned long long> pools_made{0};
struct ThreadPools {
  std::array<PoolId, kMaxDevices> by_device{};
  ~ThreadPools() { // a thread may end inside use_pool()
    for (int device = 0; device < kMaxDevices; ++device)
      if (by_device[static_cast<std::size_t>(device)] != PoolId{}) use_pool(device, {});
  }
};
thread_local ThreadPools thread_pools;

// Returns the private pool that an allocation comes from.
PoolId pool_for(Stream stream) {
  if (detail::any_capture())
    if (const PoolId captured = detail::capture_watcher.pool(stream); captured != PoolId{}) return captured;
  return thread_pools.by_device[static_cast<std::size_t>(stream.device)];
}

template <class F>
void with_stats(int device, const F& f) noexcept {
  if (auto* pools = detail::memory().pools) pools[device].with_stats(f);
}

template <class F>
void each_usage(MemoryStats& stats, const F& f) {
  for (auto* kind : {&stats.bytes, &stats.active, &stats.requested, &stats.blocks, &stats.active_blocks,
           &stats.reserved, &stats.segments})
    for (Usage& usage : *kind) f(usage);
}

} // namespace

void* allocate(Stream stream, std::size_t bytes) {
  check_not_forked();
  const auto attention = detail::attention.load();
  const bool fails = (attention & detail::kFaultBit) && detail::allocation_fails(stream.device);
  PoolId pool{};
  if (attention & (detail::kCaptureBit | detail::kPoolBit)) [[unlikely]]
    pool = pool_for(stream);
  if (!memory().pools)
    throw OutOfMemory("openreg: cannot reserve address space for " + std::to_string(device_count()) + " devices of " +
        format_bytes(device_memory()) + "; lower OPENREG_DEVICE_MEMORY or OPENREG_DEVICE_COUNT, or raise `ulimit -v`");
  void* pointer = nullptr;
  try {
    pointer = memory().pools[stream.device].allocate(stream.id, pool, bytes, fails);
  } catch (const OutOfMemory&) {
    tell(MemoryAction::kFailed, nullptr, bytes, stream);
    throw;
  }
  notice(NoticeKind::kAllocated, pointer, stream, bytes);
  tell(MemoryAction::kAllocated, pointer, bytes, stream);
  if (poison()) try {
      const auto fill = [pointer, bytes] { std::memset(pointer, 0xFF, bytes); };
      if (detail::captures(stream)) {
        detail::launch_directly(stream, fill, Site("fill"));
      } else if (detail::held_turn() ||
          (stream_idle(stream) &&
              !detail::scheduled())) { // running work allocates for itself, so filling after it would be too late
        const detail::Access access;
        fill();
      } else detail::queue_part(stream, fill, Site("fill"));
    } catch (...) { // for example in an invalid capture
      deallocate(pointer);
      throw;
    }
  return pointer;
}

void deallocate(void* pointer) noexcept {
  if (!pointer || forked()) return; // another thread of the parent may have held the lock
  notice(NoticeKind::kFreed, pointer, {}); // first, because afterwards another thread may get the block
  auto& m = memory();
  m.pools[static_cast<std::size_t>(static_cast<char*>(pointer) - m.base) / m.stride].deallocate(
      static_cast<char*>(pointer));
}

void record_stream(void* pointer, Stream stream) {
  if (!pointer || device_of(pointer) != stream.device || forked()) return;
  memory().pools[stream.device].record_stream(static_cast<char*>(pointer), stream.id);
  notice(NoticeKind::kStreamRecorded, pointer, stream);
}

void hold_memory(void* pointer) {
  if (const int device = device_of(pointer); device >= 0 && !forked())
    memory().pools[device].hold(static_cast<char*>(pointer));
}
void release_memory(void* pointer) noexcept {
  if (const int device = device_of(pointer); device >= 0 && !forked())
    memory().pools[device].release(static_cast<char*>(pointer));
}

void set_memory_limit(int device, std::size_t bytes) noexcept {
  if (auto* pools = memory().pools) pools[device].set_limit(bytes);
}
std::size_t memory_limit(int device) noexcept {
  auto* pools = memory().pools;
  return pools ? pools[device].limit() : device_memory();
}
std::size_t free_memory(int device) noexcept {
  const std::size_t limit = memory_limit(device);
  return limit - std::min(limit, memory_stats(device).reserved[MemoryStats::kAll].current);
}

void set_memory_watcher(MemoryWatcher watcher) noexcept {
  detail::memory_watcher.store(watcher);
}

int device_of(const void* pointer) noexcept {
  auto& m = memory();
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(pointer) - m.base);
  return offset < m.size ? static_cast<int>(offset / m.stride) : -1;
}

void empty_cache(int device, PoolId pool) noexcept {
  if (auto* pools = memory().pools) pools[device].empty_cache(pool);
}

void settle_memory(int device) noexcept {
  if (auto* pools = memory().pools) pools[device].settle();
}

void set_poison(bool on) noexcept {
  detail::poisoned.store(on, std::memory_order_relaxed);
}
bool poison() noexcept {
  return detail::poisoned.load(std::memory_order_relaxed);
}

// ---- private pools ----

PoolId new_pool(PoolUser user) noexcept {
  const auto number = ++pools_made;
  return user == PoolUser::kGraph ? PoolId{number, 0} : PoolId{0, number};
}

void retain_pool(int device, PoolId pool, PoolUser user) {
  check_not_forked();
  if (auto* pools = detail::memory().pools) pools[device].retain(pool, user);
}

void release_pool(int device, PoolId pool, PoolUser user) noexcept {
  if (forked()) return; // another thread of the parent may have held the lock
  if (auto* pools = detail::memory().pools) pools[device].release(pool, user);
}

int pool_users(int device, PoolId pool) noexcept {
  auto* pools = detail::memory().pools;
  return pools && !forked() ? pools[device].users(pool) : 0;
}

PoolId use_pool(int device, PoolId pool) {
  if (forked()) return {};
  static std::mutex mutex;
  static int uses = 0; // devices of threads
  std::lock_guard lock(mutex);
  const PoolId before = std::exchange(thread_pools.by_device[static_cast<std::size_t>(device)], pool);
  uses += (pool != PoolId{}) - (before != PoolId{});
  if (uses) detail::attention.fetch_or(detail::kPoolBit);
  else detail::attention.fetch_and(~detail::kPoolBit);
  return before;
}

// ---- statistics ----

MemoryStats memory_stats(int device) noexcept {
  MemoryStats copy{};
  with_stats(device, [&](MemoryStats& stats) { copy = stats; });
  return copy;
}

void reset_peak_memory(int device) noexcept {
  with_stats(device, [](MemoryStats& stats) { each_usage(stats, [](Usage& usage) { usage.peak = usage.current; }); });
}

void reset_accumulated_memory(int device) noexcept {
  with_stats(device, [](MemoryStats& stats) {
    each_usage(stats, [](Usage& usage) { usage.in = usage.out = 0; });
    stats.failures = stats.retries = stats.extensions = stats.returns = 0;
  });
}

} // namespace openreg
