#include "memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"
#include "fault.h"
#include "fork.h"
#include "graph.h"
#include "isolation.h"
#include "mutex.h"
#include "observer.h"
#include "schedule.h"
#include "stream.h"
#include "turn.h"

// Note [Pages, runs and classes]
// A device's address range is cut into 64 KiB pages. An allocation of more than 32 KiB is a run of
// pages; free runs are kept by address (to merge neighbors) and chosen by best fit. A smaller one is a block of one of
// 32 size classes (four per power of two); a page serves one class. `pages_` describes the pages, outside device
// memory, so the allocator itself never touches device memory, and `notes_` describes the blocks. `starts_` has a bit
// for each page, set where a run in use or a page of blocks starts: the nearest set bit before an address leads to the
// block that contains the address.
namespace openreg {
namespace {

constexpr std::size_t kPage = kMemoryPage;
constexpr std::size_t kHugePage = 2 << 20; // a huge page of the processor
constexpr std::size_t kSmall = kPage / 2;
constexpr std::size_t kGrain = 64; // addresses and the smallest class are multiples of this
constexpr int kClasses = 32;

// Sizes 64, 128, 192, 256, 320, 384, 448, 512, 640, …: multiples of 64, then four to an octave.
constexpr int class_of(std::size_t bytes) {
  if (bytes <= 512) return bytes == 0 ? 0 : static_cast<int>((bytes - 1) / 64);
  const int octave = std::bit_width(bytes - 1) - 10; // 0 for 513..1024
  const std::size_t step = std::size_t{128} << octave;
  return 8 + 4 * octave + static_cast<int>((bytes - 1 - (std::size_t{512} << octave)) / step);
}
constexpr std::size_t class_size(int index) {
  if (index < 8) return 64 * (static_cast<std::size_t>(index) + 1);
  const int octave = (index - 8) / 4;
  return (std::size_t{512} << octave) + (std::size_t{128} << octave) * static_cast<std::size_t>((index - 8) % 4 + 1);
}
static_assert(class_size(class_of(513)) == 640 && class_size(class_of(1025)) == 1280);
static_assert(class_size(class_of(kSmall)) == kSmall && class_of(kSmall) < kClasses);

std::atomic<bool> poisoned{[] {
  const char* text = std::getenv("OPENREG_POISON");
  return text && *text && std::strcmp(text, "0") != 0;
}()};

std::atomic<MemoryWatcher> memory_watcher{nullptr};

void tell(MemoryAction action, const void* pointer, std::size_t bytes, Stream stream) {
  if (const auto watcher = memory_watcher.load(std::memory_order_relaxed)) [[unlikely]]
    watcher(action, pointer, bytes, stream);
}

// Zeros, which take up memory only when they are first written to; null if no addresses are left.
void* reserve_addresses(std::size_t bytes) {
  void* range = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return range == MAP_FAILED ? nullptr : range;
}

class Pool {
 public:
  // False if the operating system has no addresses left for the tables. Only the used parts of the tables cost memory.
  bool reserve(int device, char* base, std::size_t bytes) {
    device_ = device;
    base_ = base;
    pages_ = static_cast<Page*>(reserve_addresses(bytes / kPage * sizeof(Page)));
    notes_ = static_cast<Note*>(reserve_addresses(bytes / kGrain * sizeof(Note)));
    starts_ = static_cast<std::uint64_t*>(reserve_addresses((bytes / kPage / 64 + 1) * sizeof(std::uint64_t)));
    if (!pages_ || !notes_ || !starts_) return false;
    add_run(free_, 0, bytes / kPage);
    return true;
  }

  void* allocate(std::int64_t stream, PoolId pool, std::size_t bytes, bool fails) {
    const bool captured = detail::captures({device_, stream}) || detail::in_capture(); // before the lock
    std::unique_lock lock(mutex_);
    if (pool != PoolId{}) [[unlikely]]
      stream = owner_of(stream, pool);
    if (fails) fail(bytes, "This was injected: see torch.openreg.faults.");
    // Rejected before any rounding can overflow.
    if (bytes > device_memory()) fail(bytes);
    if (!waiting_.empty()) [[unlikely]]
      free_waiting();
    // Running work comes before its stream's queued work, which may still use the stream's free blocks.
    const bool ahead = bytes && detail::held_turn && !is_private(stream) && !stream_idle({device_, stream});
    if (bytes <= kSmall && !ahead) [[likely]] {
      const int index = class_of(bytes);
      const std::size_t size = class_size(index);
      auto& blocks = blocks_of(stream)[static_cast<std::size_t>(index)];
      if (allocated() + size > limit_) fail(bytes);
      if (blocks.empty()) {
        const std::size_t page = take_run(stream, 1, bytes, size, false, captured, lock);
        occupy(page, {index + 1, 0, stream});
        count_segments(MemoryStats::kSmall, 1, true);
        char* start = base_ + page * kPage;
        for (std::size_t offset = kPage / size * size; offset; offset -= size) blocks.push_back(start + offset - size);
      }
      char* pointer = blocks.back();
      blocks.pop_back();
      ++pages_[page_of(pointer)].count;
      count(MemoryStats::kSmall, pointer, size, bytes);
      if (is_private(stream)) [[unlikely]]
        ++private_of(stream).live;
      return pointer;
    }
    const std::size_t count_pages = (bytes + kPage - 1) / kPage;
    if (allocated() + count_pages * kPage > limit_) fail(bytes);
    const std::size_t page = take_run(stream, count_pages, bytes, count_pages * kPage, ahead, captured, lock);
    occupy(page, {kRun, static_cast<std::uint32_t>(count_pages), stream});
    if (ahead) ahead_.emplace(base_ + page * kPage, std::pair(detail::held_turn, detail::held_turn->taken));
    count(MemoryStats::kLarge, base_ + page * kPage, count_pages * kPage, bytes);
    count_segments(MemoryStats::kLarge, count_pages, true);
    if (is_private(stream)) ++private_of(stream).live;
    return base_ + page * kPage;
  }

  void deallocate(char* pointer) noexcept {
    if (memory_watcher.load(std::memory_order_relaxed)) [[unlikely]] { // before the lock: it may wait for Python
      const auto [size, stream] = [&] {
        std::lock_guard lock(mutex_);
        const Page& page = pages_[page_of(pointer)];
        return std::pair(size_of(page) - note(pointer).slack, stream_of(page.owner));
      }();
      tell(MemoryAction::kFreeRequested, pointer, size, {device_, stream});
    }
    std::lock_guard lock(mutex_);
    const Page& page = pages_[page_of(pointer)];
    const auto pool = page.kind == kRun ? MemoryStats::kLarge : MemoryStats::kSmall;
    const std::size_t size = size_of(page);
    for (const auto each : {pool, MemoryStats::kAll}) {
      stats_.bytes[each].remove(size);
      stats_.requested[each].remove(size - note(pointer).slack);
      stats_.blocks[each].remove(1);
    }
    if (pool == MemoryStats::kLarge) count_segments(pool, page.count, false);
    if (!uses_.empty()) [[unlikely]] {
      if (const auto found = uses_.find(pointer); found != uses_.end()) {
        std::vector<Ticket> tickets;
        for (const std::int64_t stream : found->second) tickets.push_back(ticket({device_, stream}));
        uses_.erase(found);
        note(pointer).state = MemoryBlock::kPending;
        waiting_.push_back({pointer, std::move(tickets)});
        free_waiting();
        return;
      }
    }
    give_back(pointer);
  }

  void record_stream(char* pointer, std::int64_t stream) {
    std::lock_guard lock(mutex_);
    if (stream_of(pages_[page_of(pointer)].owner) == stream) return;
    auto& streams = uses_[pointer];
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  }

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

  std::vector<MemorySegment> snapshot() {
    std::lock_guard lock(mutex_);
    std::map<std::size_t, std::size_t> unused = free_;
    std::map<std::size_t, std::int64_t> owners; // of cached runs, by first page; a run's other pages may lack it
    for (const auto& [owner, runs] : cached_) {
      unused.insert(runs.begin(), runs.end());
      for (const auto& [page, length] : runs) owners[page] = owner;
    }
    std::vector<MemorySegment> out;
    for (std::size_t page = 0; page < high_water_;) {
      const char* start = base_ + page * kPage;
      if (const auto run = unused.find(page); run != unused.end()) {
        const std::size_t end = page + std::min(run->second, high_water_ - page);
        while (page < end) { // returned memory is not a segment
          const std::size_t first = page;
          const bool returned = pages_[page].kind == kReturned;
          while (page < end && (pages_[page].kind == kReturned) == returned) ++page;
          if (returned) continue;
          const char* free_start = base_ + first * kPage;
          const std::size_t size = (page - first) * kPage;
          const auto cached = owners.find(run->first);
          const std::int64_t owner = cached == owners.end() ? pages_[first].owner : cached->second;
          out.push_back({free_start, size, stream_of(owner), false, cached == owners.end() ? PoolId{} : pool_of(owner),
              {{free_start, size, MemoryBlock::kFree, size}}});
        }
        continue;
      }
      const Page& each = pages_[page];
      const bool small = each.kind != kRun;
      MemorySegment segment{
          start, small ? kPage : each.count * kPage, stream_of(each.owner), small, pool_of(each.owner), {}};
      const std::size_t size = size_of(each);
      for (std::size_t offset = 0; offset + size <= segment.size; offset += size) {
        const char* block = start + offset;
        const auto state = note(block).state;
        segment.blocks.push_back({block, size, state, state == MemoryBlock::kFree ? size : size - note(block).slack});
      }
      page += segment.size / kPage;
      out.push_back(std::move(segment));
    }
    return out;
  }

  // Fills in the result of find_owner().
  void find(const char* address, MemoryOwner& owner) noexcept {
    std::unique_lock lock(mutex_, std::try_to_lock);
    owner.busy = !lock;
    if (!owner.busy) find_locked(address, owner);
  }
  void find_waiting(const char* address, MemoryOwner& owner) {
    std::lock_guard lock(mutex_);
    find_locked(address, owner);
  }
  void find_locked(const char* address, MemoryOwner& owner) noexcept {
    const std::size_t target = page_of(address);
    std::size_t word = target / 64;
    std::uint64_t starts = starts_[word] & (~std::uint64_t{0} >> (63 - target % 64)); // up to the address
    while (!starts && word) starts = starts_[--word];
    if (!starts) return;
    const std::size_t page = 64 * word + static_cast<std::size_t>(std::bit_width(starts)) - 1;
    if (page + (pages_[page].kind == kRun ? pages_[page].count : 1) <= target) return; // in an unused run
    const char* start = base_ + page * kPage;
    const std::size_t size = size_of(pages_[page]);
    const char* block = start + static_cast<std::size_t>(address - start) / size * size;
    if (pages_[page].kind != kRun && block + size > start + kPage) return; // past the last block of the page
    owner.block = {block, size, note(block).state, size - note(block).slack};
    owner.stream = stream_of(pages_[page].owner);
  }

  void empty_cache(PoolId pool) noexcept {
    std::lock_guard lock(mutex_);
    free_waiting();
    if (pool == PoolId{}) {
      reclaim();
    } else {
      const auto users = users_.find(pool);
      if (users == users_.end() || users->second.graphs || !all_idle()) return;
      reclaim_pool(pool);
    }
    return_free();
    if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second >= high_water_) {
      const std::size_t end = std::exchange(high_water_, std::min(high_water_, free_.rbegin()->first));
      forget_returned(high_water_, end);
    }
    note_reserved();
  }

  void retain(PoolId pool, PoolUser user) {
    std::lock_guard lock(mutex_);
    Users& users = users_[pool];
    ++(user == PoolUser::kGraph ? users.graphs : users.pools);
  }

  void release(PoolId pool, PoolUser user) noexcept {
    std::lock_guard lock(mutex_);
    const auto found = users_.find(pool);
    if (found == users_.end()) return;
    Users& users = found->second;
    --(user == PoolUser::kGraph ? users.graphs : users.pools);
    if (users.graphs + users.pools) return;
    users_.erase(found);
    if (!all_idle()) return; // reclaim() finds it later
    reclaim_pool(pool);
    forget_private();
  }

  int users(PoolId pool) noexcept {
    std::lock_guard lock(mutex_);
    const auto found = users_.find(pool);
    return found == users_.end() ? 0 : found->second.graphs + found->second.pools;
  }

  MemoryStats stats() noexcept {
    std::lock_guard lock(mutex_);
    return stats_;
  }

  void reset_peak() noexcept {
    std::lock_guard lock(mutex_);
    each_usage([](Usage& usage) { usage.peak = usage.current; });
  }

  void reset_accumulated() noexcept {
    std::lock_guard lock(mutex_);
    each_usage([](Usage& usage) { usage.in = usage.out = 0; });
    stats_.failures = stats_.retries = stats_.extensions = stats_.returns = 0;
  }

 private:
  static constexpr int kRun = 0, kReturned = -1;
  struct Page {
    int kind;            // 1 + a size class, kRun for the first page of a run, or kReturned: free and without memory
    std::uint32_t count; // pages in the run, or blocks of the page in use
    std::int64_t owner;  // the current or last owner: a stream, or a private pool's part for a stream
  };
  using Blocks = std::array<std::vector<char*>, kClasses>;
  using Runs = std::map<std::size_t, std::size_t>; // first page -> pages
  struct Waiting {
    char* pointer;
    std::vector<Ticket> tickets; // of the recorded streams
  };

  struct Note {
    std::uint16_t slack; // bytes added by rounding up; less than a page
    MemoryBlock::State state;
  };

  std::size_t page_of(const char* pointer) const { return static_cast<std::size_t>(pointer - base_) / kPage; }
  static std::size_t size_of(const Page& page) {
    return page.kind == kRun ? page.count * kPage : class_size(page.kind - 1);
  }
  // The note of the block that starts there.
  Note& note(const char* pointer) const { return notes_[static_cast<std::size_t>(pointer - base_) / kGrain]; }

  // A run or a page of blocks comes into use. Call vacate() before its pages become free.
  void occupy(std::size_t page, const Page& what) {
    pages_[page] = what;
    starts_[page / 64] |= std::uint64_t{1} << page % 64;
  }
  void vacate(std::size_t page) { starts_[page / 64] &= ~(std::uint64_t{1} << page % 64); }

  // ---- private pools ----

  // The part of a pool that one stream allocates. Its number, at least kStreams, owns pages and blocks as a stream's
  // number does.
  struct Private {
    PoolId pool;
    std::int64_t stream;
    std::size_t live; // allocations
  };
  struct Users {
    int pools = 0, graphs = 0;
  };

  static bool is_private(std::int64_t owner) { return owner >= static_cast<std::int64_t>(kStreams); }
  Private& private_of(std::int64_t owner) { return private_[static_cast<std::size_t>(owner) - kStreams]; }
  std::int64_t stream_of(std::int64_t owner) { return is_private(owner) ? private_of(owner).stream : owner; }
  PoolId pool_of(std::int64_t owner) { return is_private(owner) ? private_of(owner).pool : PoolId{}; }

  // Whether memory that an owner has freed may go to others. A private pool's memory may be in use on any stream, since
  // a graph can replay on any.
  bool idle(std::int64_t owner) {
    if (!is_private(owner)) return stream_idle({device_, owner});
    return !users_.contains(private_of(owner).pool) && all_idle();
  }
  bool all_idle() {
    for (std::int64_t id = 0; id < static_cast<std::int64_t>(kStreams); ++id)
      if (!stream_idle({device_, id})) return false;
    return true;
  }

  std::int64_t owner_of(std::int64_t stream, PoolId pool) {
    std::size_t free = private_.size();
    for (std::size_t i = 0; i < private_.size(); ++i) {
      if (private_[i].pool == pool && private_[i].stream == stream) return static_cast<std::int64_t>(kStreams + i);
      if (private_[i].pool == PoolId{}) free = i;
    }
    if (free == private_.size()) {
      private_.emplace_back();
      blocks_.emplace_back();
    }
    private_[free] = {pool, stream, 0};
    return static_cast<std::int64_t>(kStreams + free);
  }

  void reclaim_pool(PoolId pool) {
    for (std::size_t i = 0; i < private_.size(); ++i) {
      if (private_[i].pool != pool) continue;
      const auto owner = static_cast<std::int64_t>(kStreams + i);
      if (const auto found = cached_.find(owner); found != cached_.end()) {
        for (const auto& [page, length] : found->second) add_free(page, length);
        cached_.erase(found);
      }
      reclaim_pages(owner);
    }
  }

  // The numbers of pools that are gone together with all of their memory can be reused.
  void forget_private() {
    for (std::size_t i = 0; i < private_.size(); ++i) {
      Private& each = private_[i];
      const auto owner = static_cast<std::int64_t>(kStreams + i);
      if (each.pool == PoolId{} || each.live || users_.contains(each.pool)) continue;
      const auto& blocks = blocks_[kStreams + i];
      const bool empty =
          !blocks || std::all_of(blocks->begin(), blocks->end(), [](const auto& some) { return some.empty(); });
      if (empty && !cached_.contains(owner)) each = {};
    }
  }

  Blocks& blocks_of(std::int64_t stream) {
    auto& blocks = blocks_[static_cast<std::size_t>(stream)];
    if (!blocks) [[unlikely]]
      blocks = std::make_unique<Blocks>();
    return *blocks;
  }

  // Back to the pool: see Note [Stream order].
  void give_back(char* pointer) {
    const std::size_t page = page_of(pointer);
    auto& [kind, count, owner] = pages_[page];
    bool own = false; // belongs to the running work, which has queued nothing since
    if (!ahead_.empty()) [[unlikely]]
      if (const auto made = ahead_.extract(pointer))
        own = detail::held_turn && made.mapped() == std::pair(detail::held_turn, detail::held_turn->taken);
    const std::size_t size = size_of(pages_[page]);
    for (const auto each : {kind == kRun ? MemoryStats::kLarge : MemoryStats::kSmall, MemoryStats::kAll}) {
      stats_.active[each].remove(size);
      stats_.active_blocks[each].remove(1);
    }
    tell(MemoryAction::kFreed, pointer, size - note(pointer).slack, {device_, stream_of(owner)});
    note(pointer).state = MemoryBlock::kFree;
    if (is_private(owner)) [[unlikely]]
      --private_of(owner).live;
    if (kind != kRun) {
      --count;
      blocks_of(owner)[static_cast<std::size_t>(kind - 1)].push_back(pointer);
    } else {
      vacate(page);
      if (own || idle(owner)) [[likely]]
        add_free(page, count);
      else add_run(cached_[owner], page, count);
    }
  }

  void free_waiting() {
    std::erase_if(waiting_, [&](const Waiting& each) {
      if (!std::all_of(each.tickets.begin(), each.tickets.end(), [](const Ticket& t) { return done(t); })) return false;
      give_back(each.pointer);
      return true;
    });
  }

  // Makes the free memory of idle streams available to all: cached runs, and pages whose blocks are all free.
  void reclaim() {
    std::erase_if(cached_, [&](const auto& each) {
      if (!idle(each.first)) return false;
      for (const auto& [page, length] : each.second) add_free(page, length);
      return true;
    });
    for (std::size_t owner = 0; owner < blocks_.size(); ++owner)
      if (blocks_[owner] && idle(static_cast<std::int64_t>(owner))) reclaim_pages(static_cast<std::int64_t>(owner));
    forget_private();
  }

  // Pages whose blocks are all free.
  void reclaim_pages(std::int64_t owner) {
    if (!blocks_[static_cast<std::size_t>(owner)]) return;
    for (auto& blocks : *blocks_[static_cast<std::size_t>(owner)]) {
      std::erase_if(blocks, [&](char* block) {
        const std::size_t page = page_of(block);
        if (pages_[page].count) return false;
        if (pages_[page].kind != kRun) { // this is the first block found on its page
          pages_[page].kind = kRun;
          vacate(page);
          count_segments(MemoryStats::kSmall, 1, false);
          add_free(page, 1);
        }
        return true;
      });
    }
  }

  std::size_t allocated() const { return stats_.bytes[MemoryStats::kAll].current; }

  void count(MemoryStats::Pool pool, const char* pointer, std::size_t size, std::size_t requested) {
    note(pointer) = {static_cast<std::uint16_t>(size - requested), MemoryBlock::kAllocated};
    for (const auto each : {pool, MemoryStats::kAll}) {
      stats_.bytes[each].add(size);
      stats_.active[each].add(size);
      stats_.requested[each].add(requested);
      stats_.blocks[each].add(1);
      stats_.active_blocks[each].add(1);
    }
  }

  // A segment of this many pages comes into use or goes out of use. Everything except small blocks counts as reserved
  // by the large pool, including free memory, which can become either kind.
  void count_segments(MemoryStats::Pool pool, std::size_t pages, bool more) {
    for (const auto each : {pool, MemoryStats::kAll})
      more ? stats_.segments[each].add(1) : stats_.segments[each].remove(1);
    if (pool == MemoryStats::kSmall)
      more ? stats_.reserved[pool].add(pages * kPage) : stats_.reserved[pool].remove(pages * kPage);
    note_reserved();
  }

  void note_reserved() {
    const auto set = [](Usage& usage, std::size_t to) {
      to > usage.current ? usage.add(to - usage.current) : usage.remove(usage.current - to);
    };
    const std::size_t all = (high_water_ - returned_) * kPage;
    set(stats_.reserved[MemoryStats::kAll], all);
    set(stats_.reserved[MemoryStats::kLarge], all - stats_.reserved[MemoryStats::kSmall].current);
  }

  template <class F>
  void each_usage(const F& f) {
    for (auto* kind : {&stats_.bytes, &stats_.active, &stats_.requested, &stats_.blocks, &stats_.active_blocks,
             &stats_.reserved, &stats_.segments})
      for (Usage& usage : *kind) f(usage);
  }

  [[noreturn]] void fail(std::size_t bytes, const char* advice = nullptr) {
    ++stats_.failures;
    const bool limited = limit_ < device_memory();
    if (!advice)
      advice = limited
          ? "Free some tensors, or raise the limit that torch.openreg.set_per_process_memory_fraction() or "
            "an injected fault has set."
          : "Free some tensors, or raise OPENREG_DEVICE_MEMORY.";
    throw OutOfMemory("openreg out of memory. Tried to allocate " + format_bytes(bytes) + ". Device " +
        std::to_string(device_) + " has a total capacity of " + format_bytes(device_memory()) + " of which " +
        (limited ? format_bytes(limit_) + " is allowed and " : "") +
        format_bytes(limit_ - std::min(limit_, allocated())) + " is free; " + format_bytes(allocated()) +
        " is allocated and " + format_bytes(stats_.reserved[MemoryStats::kAll].current) + " is reserved by openreg. " +
        advice);
  }

  // Takes `length` pages from the smallest of `runs` that has enough; returns the first page, or kNone.
  std::size_t take_from(Runs& runs, std::size_t length) {
    auto best = runs.end();
    for (auto run = runs.begin(); run != runs.end(); ++run)
      if (run->second >= length && (best == runs.end() || run->second < best->second)) {
        best = run;
        if (run->second == length) break;
      }
    if (best == runs.end()) return kNone;
    const auto [page, found] = *best;
    runs.erase(best);
    if (found > length) runs.emplace(page + length, found - length);
    return page;
  }

  // Takes `length` free pages for a stream, for `size` bytes of which `bytes` are requested, and returns the first
  // page. `ahead`: for use before the stream's queued work. The caller then calls count_segments().
  std::size_t take_run(std::int64_t stream, std::size_t length, std::size_t bytes, std::size_t size, bool ahead,
      bool captured, std::unique_lock<Mutex>& lock) {
    std::size_t page = kNone;
    const auto take = [&] {
      page = take_from(free_, length);
      if (page == kNone) return;
      taken_ += length;
      if (returned_ && forget_returned(page, page + length)) ++stats_.extensions;
    };
    const auto fits = [&] { return (taken_ + length) * kPage <= limit_; };
    if (!cached_.empty() && !ahead) [[unlikely]]
      if (const auto own = cached_.find(stream); own != cached_.end()) page = take_from(own->second, length);
    if (page == kNone && fits()) take();
    if (page == kNone) {
      free_waiting();
      reclaim();
      // Running work should not wait for other work, so it may exceed the limit while that work holds the rest.
      if (fits() || detail::held_turn) take();
    }
    // If it does not fit and nothing waits, the rest is free blocks on pages shared with others.
    if (page == kNone && !ahead && waiting_.empty() && cached_.empty()) take();
    if (page == kNone && !ahead && !captured) { // wait for memory that queued work still uses
      ++stats_.retries;
      lock.unlock();
      synchronize_device(device_);
      lock.lock();
      free_waiting();
      reclaim();
      if (allocated() + size > limit_) fail(bytes); // another thread was first
      take();
    }
    if (page == kNone)
      fail(bytes,
          ahead ? "Queued work may still use the free memory, and running work cannot wait for it: synchronize before "
                  "you launch it."
                : nullptr);
    if (page + length > high_water_) {
      ++stats_.extensions;
      high_water_ = page + length;
      if (high_water_ * kPage > limit_) return_free(); // the holes do not have to keep their memory
      isolate_used(device_, base_, (high_water_ * kPage + kHugePage - 1) / kHugePage * kHugePage);
    }
    return page;
  }

  // Free memory goes back to the operating system; the addresses stay.
  void return_free() {
    for (const auto& [page, length] : free_) {
      if (page >= high_water_) continue;
      const std::size_t end = std::min(page + length, high_water_), before = returned_;
      for (std::size_t each = page; each < end; ++each)
        if (std::exchange(pages_[each].kind, kReturned) != kReturned) ++returned_;
      if (returned_ == before) continue;
      ++stats_.returns;
      madvise(base_ + page * kPage, (end - page) * kPage, MADV_DONTNEED);
    }
  }

  // Marks pages as in use again, or as beyond the high-water mark; returns whether any of them had been returned.
  bool forget_returned(std::size_t page, std::size_t end) {
    const std::size_t before = returned_;
    for (; page < end; ++page)
      if (pages_[page].kind == kReturned) {
        pages_[page].kind = kRun;
        --returned_;
      }
    return returned_ != before;
  }

  void add_free(std::size_t page, std::size_t length) {
    add_run(free_, page, length);
    taken_ -= length;
  }

  static void add_run(Runs& runs, std::size_t page, std::size_t length) {
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

  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  Mutex mutex_;
  int device_ = 0;
  char* base_ = nullptr;
  std::size_t high_water_ = 0; // pages ever handed out since the last empty_cache()
  Page* pages_ = nullptr;
  Note* notes_ = nullptr;           // one for each kGrain bytes
  std::uint64_t* starts_ = nullptr; // bits
  Runs free_;                                      // for any stream
  std::size_t taken_ = 0;                          // pages that are not in free_
  std::size_t returned_ = 0;                       // pages of free_ that return_free() has given back
  std::map<std::int64_t, Runs> cached_;            // freed while their stream had queued work
  std::vector<std::unique_ptr<Blocks>> blocks_ = std::vector<std::unique_ptr<Blocks>>(kStreams); // of each owner
  std::vector<Private> private_;
  std::map<PoolId, Users> users_; // of private pools
  std::unordered_map<char*, std::vector<std::int64_t>> uses_; // by record_stream()
  // Memory that running work has allocated, and the turn of that work.
  std::unordered_map<char*, std::pair<detail::TurnState*, std::uint64_t>> ahead_;
  std::vector<Waiting> waiting_; // freed, and used by recorded streams
  std::size_t limit_ = device_memory();
  MemoryStats stats_{};
};

struct Memory;
Memory& memory();

// The ranges of all devices, one after the other, so that dividing an address gives the device.
struct Memory {
  Memory() {
    const auto count = static_cast<std::size_t>(device_count());
    // Twice the capacity, so that fragmentation does not reduce the usable capacity.
    stride = (2 * device_memory() + (1u << 30)) / kHugePage * kHugePage;
    if (!count) return;
    void* range = reserve_addresses(stride * count);
    if (!range) return; // allocate() reports it
    madvise(range, stride * count, MADV_HUGEPAGE);
    base = static_cast<char*>(range);
    size = stride * count;
    auto* all = new Pool[count]; // lives as long as the process: a tensor may die after main()
    for (std::size_t i = 0; i < count; ++i)
      if (!all[i].reserve(static_cast<int>(i), base + i * stride, stride)) return;
    isolate(base, size);
    pools = all;
    // A child inherits the pools in their current state, so no other thread may hold one during fork().
    pthread_atfork(
        [] { memory().each(&Pool::lock); }, [] { memory().each(&Pool::unlock); }, [] { memory().each(&Pool::unlock); });
  }
  void each(void (Pool::*method)()) {
    for (int i = 0; i < device_count(); ++i) (pools[i].*method)();
  }
  char* base = nullptr;
  std::size_t size = 0, stride = 1;
  Pool* pools = nullptr;
};

Memory& memory() {
  static Memory* instance = new Memory;
  return *instance;
}

} // namespace

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

// The private pool that an allocation comes from. Called only during a capture, or while a thread uses one.
PoolId pool_for(Stream stream) {
  if (const PoolId captured = detail::capture_pool(stream); captured != PoolId{}) return captured;
  return thread_pools.by_device[static_cast<std::size_t>(stream.device)];
}

} // namespace

PoolId new_pool(PoolUser user) noexcept {
  const auto number = ++pools_made;
  return user == PoolUser::kGraph ? PoolId{number, 0} : PoolId{0, number};
}

void retain_pool(int device, PoolId pool, PoolUser user) {
  check_not_forked();
  if (auto* pools = memory().pools) pools[device].retain(pool, user);
}

void release_pool(int device, PoolId pool, PoolUser user) noexcept {
  if (forked()) return; // another thread of the parent may have held the lock
  if (auto* pools = memory().pools) pools[device].release(pool, user);
}

int pool_users(int device, PoolId pool) noexcept {
  auto* pools = memory().pools;
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
  notice("allocated", pointer, stream, bytes);
  tell(MemoryAction::kAllocated, pointer, bytes, stream);
  if (poison()) try {
      const auto fill = [pointer, bytes] { std::memset(pointer, 0xFF, bytes); };
      if (detail::captures(stream)) {
        detail::launch(stream, Site("fill"), impl::WorkOf<decltype(fill)>::table, impl::context_of(fill));
      } else if (detail::held_turn ||
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
std::vector<MemorySegment> memory_snapshot(int device) {
  auto* pools = memory().pools;
  return pools ? pools[device].snapshot() : std::vector<MemorySegment>();
}

void set_memory_watcher(MemoryWatcher watcher) noexcept {
  memory_watcher.store(watcher);
}

int device_of(const void* pointer) noexcept {
  auto& m = memory();
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(pointer) - m.base);
  return offset < m.size ? static_cast<int>(offset / m.stride) : -1;
}

MemoryOwner find_owner(const void* address) noexcept {
  MemoryOwner owner{device_of(address), false, {}, 0};
  memory().pools[owner.device].find(static_cast<const char*>(address), owner);
  return owner;
}

MemoryOwner owner_of(const void* address) {
  MemoryOwner owner{device_of(address), false, {}, 0};
  memory().pools[owner.device].find_waiting(static_cast<const char*>(address), owner);
  return owner;
}

void empty_cache(int device, PoolId pool) noexcept {
  if (auto* pools = memory().pools) pools[device].empty_cache(pool);
}
MemoryStats memory_stats(int device) noexcept {
  auto* pools = memory().pools;
  return pools ? pools[device].stats() : MemoryStats{};
}
void reset_peak_memory(int device) noexcept {
  if (auto* pools = memory().pools) pools[device].reset_peak();
}
void reset_accumulated_memory(int device) noexcept {
  if (auto* pools = memory().pools) pools[device].reset_accumulated();
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
