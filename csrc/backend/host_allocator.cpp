// Pinned host memory: page-aligned, cached by size, recorded by address for is_pinned(), and reused only after the
// copies that use it have run.
#include "backend/host_allocator.h"

#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "backend/guard.h"
#include "backend/identity/identity.h"
#include "runtime/memory/memory.h"
#include "runtime/process/fork.h"
#include "runtime/process/notices.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

constexpr size_t kPage = 4096;

struct Block {
  size_t bytes; // a power of two, at least kPage
  bool used;
  std::vector<Ticket> uses; // queued work that reads or writes it
  int kept = 0; // how often keep_pinned() keeps it
};

struct Pool {
  std::mutex mutex;
  std::map<const char*, Block> blocks;      // by their first address
  std::multimap<size_t, const char*> free;  // by their size
  std::vector<const char*> waiting; // freed, but in use by queued work
  at::HostStats stats;

  // Returns the block that holds this address, or blocks.end().
  std::map<const char*, Block>::iterator find(const void* pointer) {
    auto after = blocks.upper_bound(static_cast<const char*>(pointer));
    if (after == blocks.begin()) return blocks.end();
    const auto found = std::prev(after);
    return found->second.used && static_cast<const char*>(pointer) < found->first + found->second.bytes ? found
                                                                                                        : blocks.end();
  }

  void collect() {
    std::erase_if(waiting, [&](const char* start) {
      Block& block = blocks.at(start);
      if (block.kept || !std::all_of(block.uses.begin(), block.uses.end(), [](const Ticket& use) { return done(use); }))
        return false;
      block.uses.clear();
      free.emplace(block.bytes, start);
      stats.active_requests.decrease(1);
      stats.active_bytes.decrease(block.bytes);
      return true;
    });
  }
};

// Leaked, since tensors may outlive main().
Pool& pool() {
  static auto* instance = new Pool;
  return *instance;
}

int64_t microseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin).count();
}

void free_pinned(void* pointer) {
  if (!pointer || forked()) return; // another thread of the parent may have held the lock
  auto& [mutex, blocks, free, waiting, stats] = pool();
  std::lock_guard lock(mutex);
  Block& block = blocks.at(static_cast<const char*>(pointer));
  notice(NoticeKind::kHostFreed, pointer, {}, block.bytes); // under the lock, so before another thread gets the block
  block.used = false;
  waiting.push_back(static_cast<const char*>(pointer));
  pool().collect();
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    initialize(); // before the lock, which another thread of the parent may have held
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < size_t{1} << 62, "openreg: cannot allocate ", bytes,
        " bytes of pinned host memory; use less, or do without pin_memory");
    const size_t size = std::max(kPage, std::bit_ceil(bytes));
    auto& [mutex, blocks, free, waiting, stats] = pool();
    std::lock_guard lock(mutex);
    pool().collect();
    void* pointer = nullptr;
    if (const auto cached = free.find(size); cached != free.end()) {
      pointer = const_cast<char*>(cached->second);
      free.erase(cached);
    } else {
      const auto begin = std::chrono::steady_clock::now();
      const int error = posix_memalign(&pointer, kPage, size);
      TORCH_CHECK_WITH(OutOfMemoryError, error == 0, "openreg: cannot allocate ", bytes,
          " bytes of pinned host memory; use less, or do without pin_memory");
      stats.host_alloc_time.increase(microseconds_since(begin));
      stats.allocations.increase(1);
      stats.allocated_bytes.increase(size);
    }
    stats.active_requests.increase(1);
    stats.active_bytes.increase(size);
    blocks[static_cast<const char*>(pointer)] = {size, true, {}, 0};
    if (poison()) std::memset(pointer, 0xFF, size);
    return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    record_pinned_use(pointer, checked_stream(stream));
    return true;
  }
  void empty_cache() override {
    auto& [mutex, blocks, free, waiting, stats] = pool();
    std::lock_guard lock(mutex);
    pool().collect();
    for (const auto& [bytes, start] : free) {
      const auto begin = std::chrono::steady_clock::now();
      blocks.erase(start);
      std::free(const_cast<char*>(start));
      stats.host_free_time.increase(microseconds_since(begin));
      stats.allocations.decrease(1);
      stats.allocated_bytes.decrease(bytes);
    }
    free.clear();
  }
  at::HostStats get_stats() override {
    std::lock_guard lock(pool().mutex);
    at::HostStats stats = pool().stats;
    stats.num_host_alloc = stats.allocations.allocated;
    stats.num_host_free = stats.allocations.freed;
    return stats;
  }
  void reset_accumulated_stats() override {
    std::lock_guard lock(pool().mutex);
    auto& s = pool().stats;
    for (auto* each : {&s.active_requests, &s.active_bytes, &s.allocations, &s.allocated_bytes})
      each->reset_accumulated();
    s.host_alloc_time.reset_accumulated();
    s.host_free_time.reset_accumulated();
  }
  void reset_peak_stats() override {
    std::lock_guard lock(pool().mutex);
    auto& s = pool().stats;
    for (auto* each : {&s.active_requests, &s.active_bytes, &s.allocations, &s.allocated_bytes}) each->reset_peak();
    s.host_alloc_time.reset_peak();
    s.host_free_time.reset_peak();
  }
};

PinnedMemory pinned_memory;
const bool registered = (at::setHostAllocator(identity.type, &pinned_memory), true);

} // namespace

bool is_pinned(const void* pointer) {
  std::lock_guard lock(pool().mutex);
  return pool().find(pointer) != pool().blocks.end();
}

std::pair<const char*, const char*> pinned_block(const void* pointer) {
  std::lock_guard lock(pool().mutex);
  const auto found = pool().find(pointer);
  if (found == pool().blocks.end()) return {static_cast<const char*>(pointer), static_cast<const char*>(pointer)};
  return {found->first, found->first + found->second.bytes};
}

std::shared_ptr<void> keep_pinned(const void* pointer) {
  std::lock_guard lock(pool().mutex);
  const auto found = pool().find(pointer);
  if (found == pool().blocks.end()) return nullptr;
  Block& block = found->second; // the map erases no block that is kept
  ++block.kept;
  return {&block, [](void* kept) {
            if (forked()) return; // another thread of the parent may have held the lock
            std::lock_guard unkeep(pool().mutex);
            --static_cast<Block*>(kept)->kept;
            pool().collect();
          }};
}

void record_pinned_use(const void* pointer, Stream stream) {
  std::lock_guard lock(pool().mutex);
  const auto found = pool().find(pointer);
  if (found == pool().blocks.end()) return;
  auto& uses = found->second.uses; // the latest of each stream
  std::erase_if(uses, [&](const Ticket& use) { return use.stream == stream || done(use); });
  uses.push_back(ticket(stream));
}

} // namespace openreg
