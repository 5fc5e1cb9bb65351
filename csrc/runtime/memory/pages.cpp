#include "runtime/memory/pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "runtime/process/isolation.h"

namespace openreg::detail {

void* reserve_addresses(std::size_t bytes) noexcept {
  void* range = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return range == MAP_FAILED ? nullptr : range;
}

void add_run(Runs& runs, std::size_t page, std::size_t length) {
  auto next = runs.lower_bound(page);
  if (next != runs.end() && next->first == page + length) {
    length += next->second;
    next = runs.erase(next);
  }
  if (next != runs.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == page) {
      previous->second += length;
      return;
    }
  }
  runs.emplace(page, length);
}

std::size_t take_run(Runs& runs, std::size_t length) {
  auto best = runs.end();
  for (auto run = runs.begin(); run != runs.end(); ++run)
    if (run->second >= length && (best == runs.end() || run->second < best->second)) {
      best = run;
      if (run->second == length) break;
    }
  if (best == runs.end()) return kNoPage;
  const auto [page, found] = *best;
  runs.erase(best);
  if (found > length) runs.emplace(page + length, found - length);
  return page;
}

bool Pages::reserve(int device, char* base, std::size_t bytes) {
  device_ = device;
  base_ = base;
  pages_ = static_cast<Page*>(reserve_addresses(bytes / kPage * sizeof(Page)));
  notes_ = static_cast<Note*>(reserve_addresses(bytes / kGrain * sizeof(Note)));
  starts_ = static_cast<std::uint64_t*>(reserve_addresses((bytes / kPage / 64 + 1) * sizeof(std::uint64_t)));
  if (!pages_ || !notes_ || !starts_) return false;
  add_run(free_, 0, bytes / kPage);
  return true;
}

MemoryBlock Pages::find(const char* address, std::int64_t& owner) const noexcept {
  const std::size_t target = page_of(address);
  std::size_t word = target / 64;
  std::uint64_t starts = starts_[word] & (~std::uint64_t{0} >> (63 - target % 64)); // up to the address
  while (!starts && word) starts = starts_[--word];
  if (!starts) return {};
  const std::size_t first = 64 * word + static_cast<std::size_t>(std::bit_width(starts)) - 1;
  const Page& page = pages_[first];
  if (first + (page.kind == kRun ? page.count : 1) <= target) return {}; // in an unused run
  const std::size_t size = size_of(page);
  const char* block = start(first) + static_cast<std::size_t>(address - start(first)) / size * size;
  if (page.kind != kRun && block + size > start(first + 1)) return {}; // past the last block of the page
  owner = page.owner;
  return {block, size, note(block).state, size - note(block).slack};
}

std::size_t Pages::take(std::size_t length) {
  const std::size_t page = take_run(free_, length);
  if (page != kNoPage) taken_ += length;
  return page;
}

void Pages::add_free(std::size_t page, std::size_t length) {
  add_run(free_, page, length);
  taken_ -= length;
}

bool Pages::forget_returned(std::size_t page, std::size_t end) noexcept {
  if (!returned_) return false;
  const std::size_t before = returned_;
  for (; page < end; ++page)
    if (pages_[page].kind == kReturned) {
      pages_[page].kind = kRun;
      --returned_;
    }
  return returned_ != before;
}

bool Pages::raise(std::size_t end) noexcept {
  if (end <= high_water_) return false;
  high_water_ = end;
  isolate_used(device_, base_, (end * kPage + kHugePage - 1) / kHugePage * kHugePage);
  return true;
}

void Pages::lower() noexcept {
  if (free_.empty() || free_.rbegin()->first + free_.rbegin()->second < high_water_) return;
  const std::size_t end = std::exchange(high_water_, std::min(high_water_, free_.rbegin()->first));
  forget_returned(high_water_, end);
}

std::size_t Pages::return_free() noexcept {
  std::size_t pieces = 0;
  for (const auto& [page, length] : free_) {
    if (page >= high_water_) continue;
    const std::size_t end = std::min(page + length, high_water_), before = returned_;
    for (std::size_t each = page; each < end; ++each)
      if (std::exchange(pages_[each].kind, kReturned) != kReturned) ++returned_;
    if (returned_ == before) continue;
    ++pieces;
    madvise(start(page), (end - page) * kPage, MADV_DONTNEED);
  }
  return pieces;
}

} // namespace openreg::detail
