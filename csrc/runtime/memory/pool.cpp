#include "runtime/memory/pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "runtime/process/isolation.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/watchers.h"

namespace openreg::detail {

std::atomic<bool> poisoned{[] {
  const char* text = std::getenv("OPENREG_POISON");
  return text && *text && std::strcmp(text, "0") != 0;
}()};

void* MemoryPool::allocate(std::int64_t stream, PoolId pool, std::size_t bytes, bool fails) {
  const bool captured =
      any_capture() && (captures({device_, stream}) || capture_watcher.in_capture()); // before the lock
  std::unique_lock lock(mutex_);
  if (pool != PoolId{}) [[unlikely]] {
    stream = private_.owner_of(stream, pool);
    blocks_.resize(static_cast<std::size_t>(private_.end()));
  }
  if (fails) fail(bytes, "This was injected: see torch.openreg.faults.");
  // Rejected before any rounding can overflow.
  if (bytes > device_memory()) fail(bytes);
  if (!waiting_.empty()) [[unlikely]]
    free_waiting();
  const bool is_private = PrivatePools::is_private(stream);
  // Running work comes before its stream's queued work, which may still use the stream's free blocks.
  const bool ahead = bytes && held_turn() && !is_private && !stream_idle({device_, stream});
  if (bytes <= kSmall && !ahead) [[likely]] {
    const int index = class_of(bytes);
    const std::size_t size = class_size(index);
    auto& blocks = blocks_of(stream)[static_cast<std::size_t>(index)];
    if (allocated() + size > limit_) fail(bytes);
    if (blocks.empty()) {
      const std::size_t page = take_pages(stream, 1, bytes, size, false, captured, lock);
      pages_.occupy(page, {index + 1, 0, stream});
      count_segments(MemoryStats::kSmall, 1, true);
      char* start = pages_.start(page);
      for (std::size_t offset = kPage / size * size; offset; offset -= size) blocks.push_back(start + offset - size);
    }
    char* pointer = blocks.back();
    blocks.pop_back();
    ++pages_[pages_.page_of(pointer)].count;
    count(MemoryStats::kSmall, pointer, size, bytes);
    if (is_private) [[unlikely]]
      ++private_.part(stream).live;
    return pointer;
  }
  const std::size_t length = (bytes + kPage - 1) / kPage;
  if (allocated() + length * kPage > limit_) fail(bytes);
  const std::size_t page = take_pages(stream, length, bytes, length * kPage, ahead, captured, lock);
  char* pointer = pages_.start(page);
  pages_.occupy(page, {Pages::kRun, static_cast<std::uint32_t>(length), stream});
  if (ahead) ahead_.emplace(pointer, std::pair(held_turn(), held_turn()->taken));
  count(MemoryStats::kLarge, pointer, length * kPage, bytes);
  count_segments(MemoryStats::kLarge, length, true);
  if (is_private) ++private_.part(stream).live;
  return pointer;
}

void MemoryPool::deallocate(char* pointer) noexcept {
  if (memory_watcher.load(std::memory_order_relaxed)) [[unlikely]] { // before the lock: it may wait for Python
    const auto [size, stream] = [&] {
      std::lock_guard lock(mutex_);
      const auto& page = pages_[pages_.page_of(pointer)];
      return std::pair(Pages::size_of(page) - pages_.note(pointer).slack, private_.stream_of(page.owner));
    }();
    tell(MemoryAction::kFreeRequested, pointer, size, {device_, stream});
  }
  std::lock_guard lock(mutex_);
  const auto& page = pages_[pages_.page_of(pointer)];
  const auto pool = page.kind == Pages::kRun ? MemoryStats::kLarge : MemoryStats::kSmall;
  const std::size_t size = Pages::size_of(page);
  stats_.freed(pool, size, size - pages_.note(pointer).slack);
  if (pool == MemoryStats::kLarge) count_segments(pool, page.count, false);
  if (!uses_.empty() || !holds_.empty()) [[unlikely]] {
    const auto used = uses_.extract(pointer);
    if (used || holds_.contains(pointer)) {
      std::vector<Ticket> tickets;
      if (used)
        for (const std::int64_t stream : used.mapped()) tickets.push_back(ticket({device_, stream}));
      pages_.note(pointer).state = MemoryBlock::kPending;
      waiting_.push_back({pointer, std::move(tickets)});
      free_waiting();
      return;
    }
  }
  give_back(pointer);
}

void MemoryPool::record_stream(char* pointer, std::int64_t stream) {
  std::lock_guard lock(mutex_);
  if (private_.stream_of(pages_[pages_.page_of(pointer)].owner) == stream) return;
  auto& streams = uses_[pointer];
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

void MemoryPool::hold(char* pointer) {
  std::lock_guard lock(mutex_);
  ++holds_[pointer];
}

void MemoryPool::release(char* pointer) noexcept {
  std::lock_guard lock(mutex_);
  const auto held = holds_.find(pointer);
  if (--held->second) return;
  holds_.erase(held);
  free_waiting();
}

void MemoryPool::empty_cache(PoolId pool) noexcept {
  std::lock_guard lock(mutex_);
  free_waiting();
  if (pool == PoolId{}) reclaim();
  else if (private_.used(pool) && !private_.users(pool).graphs && all_idle()) reclaim_pool(pool);
  else return;
  stats_.returns += pages_.return_free();
  pages_.lower();
  note_reserved();
}

void MemoryPool::settle() noexcept {
  empty_cache({});
  std::lock_guard lock(mutex_);
  for (const auto& [owner, runs] : cached_)
    for (const auto& [page, length] : runs) fill(pages_.start(page), length * kPage);
  for (const auto& of_owner : blocks_) {
    if (!of_owner) continue;
    for (auto& blocks : *of_owner) {
      std::sort(blocks.begin(), blocks.end(), std::greater<>()); // the lowest address is used first
      for (char* block : blocks) fill(block, Pages::size_of(pages_[pages_.page_of(block)]));
    }
  }
}

void MemoryPool::fill(char* start, std::size_t bytes) noexcept {
  const Access access;
  std::memset(start, 0xFF, bytes);
}

void MemoryPool::release(PoolId pool, PoolUser user) noexcept {
  std::lock_guard lock(mutex_);
  if (!private_.release(pool, user) || !all_idle()) return; // reclaim() finds it later
  reclaim_pool(pool);
  forget_private();
}

bool MemoryPool::idle(std::int64_t owner) {
  if (!PrivatePools::is_private(owner)) return stream_idle({device_, owner});
  return !private_.used(private_.pool_of(owner)) && all_idle();
}

bool MemoryPool::all_idle() {
  for (std::int64_t id = 0; id < static_cast<std::int64_t>(kStreams); ++id)
    if (!stream_idle({device_, id})) return false;
  return true;
}

void MemoryPool::give_back(char* pointer) {
  const std::size_t page = pages_.page_of(pointer);
  auto& [kind, count, owner] = pages_[page];
  bool own = false; // belongs to the running work, which has queued nothing since
  if (!ahead_.empty()) [[unlikely]]
    if (const auto made = ahead_.extract(pointer))
      own = held_turn() && made.mapped() == std::pair(held_turn(), held_turn()->taken);
  const std::size_t size = Pages::size_of(pages_[page]);
  stats_.unused(kind == Pages::kRun ? MemoryStats::kLarge : MemoryStats::kSmall, size);
  tell(MemoryAction::kFreed, pointer, size - pages_.note(pointer).slack, {device_, private_.stream_of(owner)});
  pages_.note(pointer).state = MemoryBlock::kFree;
  if (PrivatePools::is_private(owner)) [[unlikely]]
    --private_.part(owner).live;
  if (kind != Pages::kRun) {
    --count;
    blocks_of(owner)[static_cast<std::size_t>(kind - 1)].push_back(pointer);
  } else {
    pages_.vacate(page);
    if (own || idle(owner)) [[likely]]
      pages_.add_free(page, count);
    else add_run(cached_[owner], page, count);
  }
}

void MemoryPool::free_waiting() {
  std::erase_if(waiting_, [&](const Waiting& each) {
    if (holds_.contains(each.pointer)) return false;
    if (!std::all_of(each.tickets.begin(), each.tickets.end(), [](const Ticket& t) { return done(t); })) return false;
    give_back(each.pointer);
    return true;
  });
}

void MemoryPool::reclaim() {
  std::erase_if(cached_, [&](const auto& each) {
    if (!idle(each.first)) return false;
    for (const auto& [page, length] : each.second) pages_.add_free(page, length);
    return true;
  });
  for (std::size_t owner = 0; owner < blocks_.size(); ++owner)
    if (blocks_[owner] && idle(static_cast<std::int64_t>(owner))) reclaim_pages(static_cast<std::int64_t>(owner));
  forget_private();
}

void MemoryPool::reclaim_pages(std::int64_t owner) {
  if (!blocks_[static_cast<std::size_t>(owner)]) return;
  for (auto& blocks : *blocks_[static_cast<std::size_t>(owner)]) {
    std::erase_if(blocks, [&](char* block) {
      const std::size_t page = pages_.page_of(block);
      if (pages_[page].count) return false;
      if (pages_[page].kind != Pages::kRun) { // this is the first block found on its page
        pages_[page].kind = Pages::kRun;
        pages_.vacate(page);
        count_segments(MemoryStats::kSmall, 1, false);
        pages_.add_free(page, 1);
      }
      return true;
    });
  }
}

void MemoryPool::reclaim_pool(PoolId pool) {
  for (auto owner = static_cast<std::int64_t>(kStreams); owner < private_.end(); ++owner) {
    if (private_.pool_of(owner) != pool) continue;
    if (const auto found = cached_.find(owner); found != cached_.end()) {
      for (const auto& [page, length] : found->second) pages_.add_free(page, length);
      cached_.erase(found);
    }
    reclaim_pages(owner);
  }
}

void MemoryPool::forget_private() {
  for (auto owner = static_cast<std::int64_t>(kStreams); owner < private_.end(); ++owner) {
    auto& part = private_.part(owner);
    if (part.pool == PoolId{} || part.live || private_.used(part.pool)) continue;
    const auto& blocks = blocks_[static_cast<std::size_t>(owner)];
    const bool empty =
        !blocks || std::all_of(blocks->begin(), blocks->end(), [](const auto& some) { return some.empty(); });
    if (empty && !cached_.contains(owner)) part = {};
  }
}

void MemoryPool::count_segments(MemoryStats::Pool pool, std::size_t pages, bool more) {
  for (const auto each : {pool, MemoryStats::kAll})
    more ? stats_.segments[each].add(1) : stats_.segments[each].remove(1);
  if (pool == MemoryStats::kSmall)
    more ? stats_.reserved[pool].add(pages * kPage) : stats_.reserved[pool].remove(pages * kPage);
  note_reserved();
}

void MemoryPool::note_reserved() {
  const std::size_t all = pages_.reserved() * kPage;
  stats_.reserved[MemoryStats::kAll].set(all);
  stats_.reserved[MemoryStats::kLarge].set(all - stats_.reserved[MemoryStats::kSmall].current);
}

void MemoryPool::fail(std::size_t bytes, const char* advice) {
  ++stats_.failures;
  const bool limited = limit_ < device_memory();
  if (!advice)
    advice = limited ? "Free some tensors, or raise the limit that torch.openreg.set_per_process_memory_fraction() or "
                       "an injected fault has set."
                     : "Free some tensors, or raise OPENREG_DEVICE_MEMORY.";
  const bool named_gpu = device_name() == std::string_view("cuda"); // programs read the number from the message
  throw OutOfMemory(vendor_name() + std::string(" out of memory. Tried to allocate ") + format_bytes(bytes) +
      (named_gpu ? ". GPU " : ". Device ") + std::to_string(device_) + " has a total capacity of " +
      format_bytes(device_memory()) + " of which " + (limited ? format_bytes(limit_) + " is allowed and " : "") +
      format_bytes(limit_ - std::min(limit_, allocated())) + " is free; " + format_bytes(allocated()) +
      " is allocated and " + format_bytes(stats_.reserved[MemoryStats::kAll].current) + " is reserved by " +
      device_name() + ". " + advice);
}

std::size_t MemoryPool::take_pages(std::int64_t stream, std::size_t length, std::size_t bytes, std::size_t size,
    bool ahead, bool captured, std::unique_lock<std::mutex>& lock) {
  std::size_t page = kNoPage;
  bool taken = false; // from the pages that no work uses
  const auto take = [&] {
    page = pages_.take(length);
    taken = page != kNoPage;
    if (taken && pages_.forget_returned(page, page + length)) ++stats_.extensions;
  };
  const auto fits = [&] { return (pages_.taken() + length) * kPage <= limit_; };
  if (!cached_.empty() && !ahead) [[unlikely]]
    if (const auto own = cached_.find(stream); own != cached_.end()) page = take_run(own->second, length);
  if (page == kNoPage && fits()) take();
  if (page == kNoPage) {
    free_waiting();
    reclaim();
    // Running work should not wait for other work, so it may exceed the limit while that work holds the rest.
    if (fits() || held_turn()) take();
  }
  // If it does not fit and nothing waits, the rest is free blocks on pages shared with others.
  if (page == kNoPage && !ahead && waiting_.empty() && cached_.empty()) take();
  if (page == kNoPage && !ahead && !captured) { // wait for memory that queued work still uses
    ++stats_.retries;
    lock.unlock();
    synchronize_device(device_);
    lock.lock();
    free_waiting();
    reclaim();
    if (allocated() + size > limit_) fail(bytes); // another thread was first
    take();
  }
  if (page == kNoPage)
    fail(bytes,
        ahead ? "Queued work may still use the free memory, and running work cannot wait for it: synchronize before "
                "you launch it."
              : nullptr);
  if (pages_.raise(page + length)) {
    ++stats_.extensions;
    if (pages_.high_water() * kPage > limit_) stats_.returns += pages_.return_free(); // holes, which are not needed
  }
  // What the fill of allocate() is too late for finds the same in each run of an order.
  if (taken && scheduled() && poisoned.load(std::memory_order_relaxed)) fill(pages_.start(page), length * kPage);
  return page;
}

Memory::Memory() {
  const auto count = static_cast<std::size_t>(device_count());
  // Twice the capacity, so that fragmentation does not reduce the usable capacity.
  stride = (2 * device_memory() + (1u << 30)) / kHugePage * kHugePage;
  if (!count) return;
  void* range = reserve_addresses(stride * count);
  if (!range) return; // allocate() reports it
  madvise(range, stride * count, MADV_HUGEPAGE);
  base = static_cast<char*>(range);
  size = stride * count;
  auto* all = new MemoryPool[count]; // lives as long as the process: a tensor may die after main()
  for (std::size_t i = 0; i < count; ++i)
    if (!all[i].reserve(static_cast<int>(i), base + i * stride, stride)) return;
  isolate(base, size);
  pools = all;
  // A child inherits the pools in their current state, so no other thread may hold one during fork().
  pthread_atfork([] { memory().each(&MemoryPool::lock); }, [] { memory().each(&MemoryPool::unlock); },
      [] { memory().each(&MemoryPool::unlock); });
}

} // namespace openreg::detail
