#include "runtime/memory/memory.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "runtime/device.h"
#include "runtime/explore/schedule.h"
#include "runtime/graph/graph.h"
#include "runtime/memory/isolation.h"
#include "runtime/memory/pool.h"
#include "runtime/memory/stats.h"
#include "runtime/process/fault.h"
#include "runtime/process/fork.h"
#include "runtime/process/notices.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/turn.h"

namespace openreg {

using detail::memory;
using detail::tell;

namespace {

std::atomic<bool> poisoned{[] {
  const char* text = std::getenv("OPENREG_POISON");
  return text && *text && std::strcmp(text, "0") != 0;
}()};

} // namespace

void* allocate(Stream stream, std::size_t bytes) {
  check_not_forked();
  const auto attention = detail::attention.load();
  const bool fails = (attention & detail::kFaultBit) && detail::allocation_fails(stream.device);
  PoolId pool{};
  if (attention & (detail::kCaptureBit | detail::kPoolBit)) [[unlikely]]
    pool = detail::pool_for(stream);
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
  notice("allocated", pointer, stream, bytes);
  tell(MemoryAction::kAllocated, pointer, bytes, stream);
  if (poison()) try {
      const auto fill = [pointer, bytes] { std::memset(pointer, 0xFF, bytes); };
      if (detail::captures(stream)) {
        detail::launch(stream, Site("fill"), impl::WorkOf<decltype(fill)>::table, impl::context_of(fill));
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
  notice("freed", pointer, {}); // first, because afterwards another thread may get the block
  auto& m = memory();
  m.pools[static_cast<std::size_t>(static_cast<char*>(pointer) - m.base) / m.stride].deallocate(
      static_cast<char*>(pointer));
}

void record_stream(void* pointer, Stream stream) {
  if (!pointer || device_of(pointer) != stream.device || forked()) return;
  memory().pools[stream.device].record_stream(static_cast<char*>(pointer), stream.id);
  notice("stream_recorded", pointer, stream);
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
  poisoned.store(on, std::memory_order_relaxed);
}
bool poison() noexcept {
  return poisoned.load(std::memory_order_relaxed);
}

std::string format_bytes(std::size_t bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.2f %s" : "%.0f %s", value, kUnits[unit]);
  return text;
}

} // namespace openreg
