// A device's allocator: who may get which memory, in the order of streams.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/device.h"
#include "runtime/memory/block.h"
#include "runtime/memory/pages.h"
#include "runtime/memory/private_pools.h"
#include "runtime/memory/stats.h"
#include "runtime/stream/task.h"
#include "runtime/stream/turn.h"

namespace openreg {

namespace detail {

inline std::atomic<MemoryWatcher> memory_watcher __attribute__((visibility("hidden"))){nullptr};

inline void tell(MemoryAction action, const void* pointer, std::size_t bytes, Stream stream) {
  if (const auto watcher = memory_watcher.load(std::memory_order_relaxed)) [[unlikely]]
    watcher(action, pointer, bytes, stream);
}

extern std::atomic<bool> poisoned; // see set_poison()

struct Contents;

class MemoryPool {
 public:
  bool reserve(int device, char* base, std::size_t bytes) {
    device_ = device;
    return pages_.reserve(device, base, bytes);
  }

  void* allocate(std::int64_t stream, PoolId pool, std::size_t bytes, bool fails);
  void deallocate(char* pointer) noexcept;
  void record_stream(char* pointer, std::int64_t stream);
  void hold(char* pointer);
  void release(char* pointer) noexcept;
  void empty_cache(PoolId pool) noexcept;
  void settle() noexcept; // as settle_memory()

  void set_limit(std::size_t bytes) noexcept {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
  }
  std::size_t limit() noexcept {
    std::lock_guard lock(mutex_);
    return limit_;
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  void retain(PoolId pool, PoolUser user) {
    std::lock_guard lock(mutex_);
    private_.retain(pool, user);
  }
  void release(PoolId pool, PoolUser user) noexcept;
  int users(PoolId pool) noexcept {
    std::lock_guard lock(mutex_);
    const auto users = private_.users(pool);
    return users.graphs + users.pools;
  }

  template <class F>
  void with_stats(const F& f) noexcept {
    std::lock_guard lock(mutex_);
    f(stats_);
  }

 private:
  friend struct Contents; // which contents.cpp reads it with

  using Blocks = std::array<std::vector<char*>, kClasses>;
  struct Waiting {
    char* pointer;
    std::vector<Ticket> tickets; // of the recorded streams
  };

  // Returns the block in use that contains an address, and its stream; its size is 0 if there is none.
  MemoryBlock find(const char* address, std::int64_t& stream) noexcept {
    std::int64_t owner = 0;
    const MemoryBlock found = pages_.find(address, owner);
    stream = private_.stream_of(owner);
    return found;
  }

  // Returns true if memory that an owner has freed may go to others. A private pool's memory may be in use on any
  // stream, since a graph can replay on any.
  bool idle(std::int64_t owner);
  bool all_idle();

  Blocks& blocks_of(std::int64_t owner) {
    auto& blocks = blocks_[static_cast<std::size_t>(owner)];
    if (!blocks) [[unlikely]]
      blocks = std::make_unique<Blocks>();
    return *blocks;
  }

  // Back to the pool: see Note [Stream order].
  void give_back(char* pointer);
  void free_waiting();

  // Makes the free memory of idle streams available to all: cached runs, and pages whose blocks are all free.
  void reclaim();
  void reclaim_pages(std::int64_t owner); // whose blocks are all free
  void reclaim_pool(PoolId pool);
  // The numbers of pools that are gone together with all of their memory can be reused.
  void forget_private();

  std::size_t allocated() const { return stats_.bytes[MemoryStats::kAll].current; }
  void count(MemoryStats::Pool pool, const char* pointer, std::size_t size, std::size_t requested) {
    pages_.note(pointer) = {static_cast<std::uint16_t>(size - requested), MemoryBlock::kAllocated};
    stats_.allocated(pool, size, requested);
  }
  // A segment of this many pages comes into use or goes out of use. Everything except small blocks counts as reserved
  // by the large pool, including free memory, which can become either kind.
  void count_segments(MemoryStats::Pool pool, std::size_t pages, bool more);
  void note_reserved();
  void fill(char* start, std::size_t bytes) noexcept; // with NaN, although it is free
  [[noreturn]] void fail(std::size_t bytes, const char* advice = nullptr);

  // Takes `length` free pages for a stream, for `size` bytes of which `bytes` are requested, and returns the first
  // page. `ahead`: for use before the stream's queued work. The caller then calls count_segments().
  std::size_t take_pages(std::int64_t stream, std::size_t length, std::size_t bytes, std::size_t size, bool ahead,
      bool captured, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  int device_ = 0;
  Pages pages_;
  PrivatePools private_;
  std::map<std::int64_t, Runs> cached_; // freed while their stream had queued work
  std::vector<std::unique_ptr<Blocks>> blocks_ = std::vector<std::unique_ptr<Blocks>>(kStreams); // of each owner
  std::unordered_map<char*, std::vector<std::int64_t>> uses_; // by record_stream()
  // Memory that running work has allocated, and the turn of that work.
  std::unordered_map<char*, std::pair<TurnState*, std::uint64_t>> ahead_;
  std::unordered_map<char*, std::size_t> holds_; // how often each is held
  std::vector<Waiting> waiting_;                 // freed, and held or used by recorded streams
  std::size_t limit_ = device_memory();
  MemoryStats stats_{};
};

// The ranges of all devices, one after the other, so that dividing an address gives the device.
struct Memory {
  Memory();
  void each(void (MemoryPool::*method)()) {
    for (int i = 0; i < device_count(); ++i) (pools[i].*method)();
  }
  char* base = nullptr;
  std::size_t size = 0, stride = 1;
  MemoryPool* pools = nullptr;
};

__attribute__((visibility("hidden"))) inline Memory& memory() {
  static Memory* instance = new Memory;
  return *instance;
}

} // namespace detail
} // namespace openreg
