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

std::vector<MemorySegment> memory_snapshot(int device) {
  std::vector<MemorySegment> out;
  auto* pools = detail::memory().pools;
  if (!pools) return out;
  auto& pool = pools[device];
  std::lock_guard lock(pool.mutex_);
  const Pages& pages = pool.pages_;
  const detail::PrivatePools& parts = pool.private_;
  detail::Runs unused = pages.free();
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

MemoryOwner find_owner(const void* address) noexcept {
  MemoryOwner owner{device_of(address), false, {}, 0};
  auto& pool = detail::memory().pools[owner.device];
  std::unique_lock lock(pool.mutex_, std::try_to_lock);
  owner.busy = !lock;
  if (!owner.busy) pool.find(static_cast<const char*>(address), owner);
  return owner;
}

MemoryOwner owner_of(const void* address) {
  MemoryOwner owner{device_of(address), false, {}, 0};
  auto& pool = detail::memory().pools[owner.device];
  std::lock_guard lock(pool.mutex_);
  pool.find(static_cast<const char*>(address), owner);
  return owner;
}

} // namespace openreg
