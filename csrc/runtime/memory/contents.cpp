#include "runtime/memory/contents.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "runtime/memory/memory.h"
#include "runtime/memory/pool.h"

namespace openreg {

using detail::kPage;
using detail::Pages;

// Reads a pool with all that it knows.
struct detail::Contents {
  static std::vector<MemorySegment> snapshot(MemoryPool& pool);
  // Returns the owner of an address. `waits`: for the pool's lock.
  static MemoryOwner owner(const void* address, bool waits) noexcept;
};

std::vector<MemorySegment> detail::Contents::snapshot(MemoryPool& pool) {
  std::vector<MemorySegment> out;
  std::lock_guard lock(pool.mutex_);
  const Pages& pages = pool.pages_;
  const PrivatePools& parts = pool.private_;
  Runs unused = pages.free();
  std::map<std::size_t, std::int64_t> owners; // of cached runs, by first page; a run's other pages may lack it
  for (const auto& [owner, runs] : pool.cached_) {
    unused.insert(runs.begin(), runs.end());
    for (const auto& [page, length] : runs) owners[page] = owner;
  }
  for (std::size_t page = 0; page < pages.high_water();) {
    const char* start = pages.start(page);
    if (const auto run = unused.find(page); run != unused.end()) {
      const std::size_t end = page + std::min(run->second, pages.high_water() - page);
      while (page < end) { // returned memory is not a segment
        const std::size_t first = page;
        const bool returned = pages[page].kind == Pages::kReturned;
        while (page < end && (pages[page].kind == Pages::kReturned) == returned) ++page;
        if (returned) continue;
        const char* free_start = pages.start(first);
        const std::size_t size = (page - first) * kPage;
        const auto cached = owners.find(run->first);
        const std::int64_t owner = cached == owners.end() ? pages[first].owner : cached->second;
        out.push_back({free_start, size, parts.stream_of(owner), false,
            cached == owners.end() ? PoolId{} : parts.pool_of(owner), {{free_start, size, MemoryBlock::kFree, size}}});
      }
      continue;
    }
    const Pages::Page& each = pages[page];
    const bool small = each.kind != Pages::kRun;
    MemorySegment segment{
        start, small ? kPage : each.count * kPage, parts.stream_of(each.owner), small, parts.pool_of(each.owner), {}};
    const std::size_t size = Pages::size_of(each);
    for (std::size_t offset = 0; offset + size <= segment.size; offset += size) {
      const char* block = start + offset;
      const auto state = pages.note(block).state;
      segment.blocks.push_back(
          {block, size, state, state == MemoryBlock::kFree ? size : size - pages.note(block).slack});
    }
    page += segment.size / kPage;
    out.push_back(std::move(segment));
  }
  return out;
}

MemoryOwner detail::Contents::owner(const void* address, bool waits) noexcept {
  MemoryOwner owner{device_of(address), false, {}, 0};
  MemoryPool& pool = memory().pools[owner.device];
  std::unique_lock lock(pool.mutex_, std::defer_lock);
  if (waits) lock.lock();
  owner.busy = !waits && !lock.try_lock();
  if (!owner.busy) owner.block = pool.find(static_cast<const char*>(address), owner.stream);
  return owner;
}

std::vector<MemorySegment> memory_snapshot(int device) {
  auto* pools = detail::memory().pools;
  return pools ? detail::Contents::snapshot(pools[device]) : std::vector<MemorySegment>();
}

MemoryOwner find_owner(const void* address) noexcept {
  return detail::Contents::owner(address, /*waits=*/false);
}

MemoryOwner owner_of(const void* address) {
  return detail::Contents::owner(address, /*waits=*/true);
}

} // namespace openreg
