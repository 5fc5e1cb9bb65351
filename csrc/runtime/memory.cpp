#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"

// Note [Pages, runs and classes]
// A device's address range is cut into 64 KiB pages. An allocation of more than 32 KiB is a run of
// pages; free runs are kept by address (to join neighbours) and taken best fit. A smaller one is a
// block of one of 32 size classes (four to each power of two); a page serves one class. What a page
// holds stands in `pages_`, outside device memory, so that the allocator itself never touches it.
namespace openreg {
namespace {

constexpr std::size_t kPage = 64 * 1024;
constexpr std::size_t kSmall = 32 * 1024;
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

class Pool {
 public:
  void reserve(int device, char* base, std::size_t bytes) {
    device_ = device;
    base_ = base;
    // calloc: a page's entry costs memory only once the page is used.
    pages_ = static_cast<Page*>(std::calloc(bytes / kPage, sizeof(Page)));
    add_free_run(0, bytes / kPage);
  }

  void* allocate(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    // Refused before any rounding can overflow.
    if (bytes > device_memory()) fail(bytes);
    if (bytes <= kSmall) {
      const int index = class_of(bytes);
      const std::size_t size = class_size(index);
      auto& blocks = blocks_[static_cast<std::size_t>(index)];
      if (stats_.allocated + size > device_memory()) fail(bytes);
      if (blocks.empty()) {
        const std::size_t page = take_run(1, bytes);
        pages_[page] = Page{index + 1, 0};
        char* start = base_ + page * kPage;
        for (std::size_t offset = kPage / size * size; offset; offset -= size) blocks.push_back(start + offset - size);
      }
      char* pointer = blocks.back();
      blocks.pop_back();
      ++pages_[page_of(pointer)].count;
      count(size);
      return pointer;
    }
    const std::size_t count_pages = (bytes + kPage - 1) / kPage;
    if (stats_.allocated + count_pages * kPage > device_memory()) fail(bytes);
    const std::size_t page = take_run(count_pages, bytes);
    pages_[page] = Page{kRun, static_cast<std::uint32_t>(count_pages)};
    count(count_pages * kPage);
    return base_ + page * kPage;
  }

  void deallocate(char* pointer) noexcept {
    const std::size_t page = page_of(pointer);
    std::lock_guard lock(mutex_);
    std::size_t size;
    if (pages_[page].kind == kRun) {
      size = pages_[page].count * kPage;
      add_free_run(page, pages_[page].count);
    } else {
      const int index = pages_[page].kind - 1;
      size = class_size(index);
      --pages_[page].count;
      blocks_[static_cast<std::size_t>(index)].push_back(pointer);
    }
    stats_.allocated -= size;
    stats_.total_freed += size;
    ++stats_.frees;
    --stats_.active;
  }

  void empty_cache() noexcept {
    std::lock_guard lock(mutex_);
    reclaim();
    for (const auto& [page, length] : free_)
      if (page < high_water_)
        madvise(base_ + page * kPage, std::min(length, high_water_ - page) * kPage, MADV_DONTNEED);
    if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second >= high_water_)
      high_water_ = std::min(high_water_, free_.rbegin()->first);
    stats_.reserved = high_water_ * kPage;
  }

  MemoryStats stats() noexcept {
    std::lock_guard lock(mutex_);
    return stats_;
  }

  void reset_peak() noexcept {
    std::lock_guard lock(mutex_);
    stats_.peak_allocated = stats_.allocated;
    stats_.peak_reserved = stats_.reserved;
    stats_.peak_active = stats_.active;
  }

  void reset_accumulated() noexcept {
    std::lock_guard lock(mutex_);
    stats_.total_allocated = stats_.total_freed = 0;
    stats_.allocations = stats_.frees = stats_.failures = 0;
  }

 private:
  static constexpr int kRun = 0;
  struct Page {
    int kind;            // 1 + a size class, or kRun for the first page of a run
    std::uint32_t count; // pages in the run, or blocks of the page in use
  };

  std::size_t page_of(const char* pointer) const { return static_cast<std::size_t>(pointer - base_) / kPage; }

  // Gives pages whose blocks are all free back to the runs, for any size class.
  void reclaim() {
    for (auto& blocks : blocks_) {
      std::erase_if(blocks, [&](char* block) {
        const std::size_t page = page_of(block);
        if (pages_[page].count) return false;
        if (pages_[page].kind != kRun) { // the first of its blocks that we meet
          pages_[page].kind = kRun;
          add_free_run(page, 1);
        }
        return true;
      });
    }
  }

  void count(std::size_t size) {
    stats_.allocated += size;
    stats_.total_allocated += size;
    ++stats_.allocations;
    stats_.peak_active = std::max(stats_.peak_active, ++stats_.active);
    stats_.peak_allocated = std::max(stats_.peak_allocated, stats_.allocated);
  }

  [[noreturn]] void fail(std::size_t bytes) {
    ++stats_.failures;
    const std::size_t total = device_memory();
    throw OutOfMemory("openreg out of memory. Tried to allocate " + format_bytes(bytes) + ". Device " +
        std::to_string(device_) + " has a total capacity of " + format_bytes(total) + " of which " +
        format_bytes(total - std::min(total, stats_.allocated)) + " is free; " + format_bytes(stats_.allocated) +
        " is allocated and " + format_bytes(stats_.reserved) +
        " is reserved by openreg. Free some tensors, or raise OPENREG_DEVICE_MEMORY.");
  }

  // The smallest free run of at least `length` pages.
  std::map<std::size_t, std::size_t>::iterator find_run(std::size_t length) {
    auto best = free_.end();
    for (auto run = free_.begin(); run != free_.end(); ++run)
      if (run->second >= length && (best == free_.end() || run->second < best->second)) {
        best = run;
        if (run->second == length) break;
      }
    return best;
  }

  // The first page of `length` free pages, taken.
  std::size_t take_run(std::size_t length, std::size_t bytes) {
    auto best = find_run(length);
    if (best == free_.end()) {
      reclaim();
      best = find_run(length);
    }
    if (best == free_.end()) fail(bytes);
    const std::size_t page = best->first, rest = best->second - length;
    free_.erase(best);
    if (rest) free_.emplace(page + length, rest);
    if (page + length > high_water_) {
      high_water_ = page + length;
      stats_.reserved = high_water_ * kPage;
      stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
    }
    return page;
  }

  void add_free_run(std::size_t page, std::size_t length) {
    auto next = free_.lower_bound(page);
    if (next != free_.end() && next->first == page + length) {
      length += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == page) {
        previous->second += length;
        return;
      }
    }
    free_.emplace(page, length);
  }

  std::mutex mutex_;
  int device_ = 0;
  char* base_ = nullptr;
  std::size_t high_water_ = 0; // pages ever handed out since the last empty_cache()
  Page* pages_ = nullptr;
  std::map<std::size_t, std::size_t> free_; // first page -> pages
  std::array<std::vector<char*>, kClasses> blocks_;
  MemoryStats stats_{};
};

// Every device's range, one after the other, so that an address tells its device by a division.
struct Memory {
  Memory() {
    const auto count = static_cast<std::size_t>(device_count());
    // Twice the capacity: fragmentation must not end what the capacity allows.
    stride = (2 * device_memory() + (1u << 30)) / kPage * kPage;
    if (!count) return;
    void* range =
        mmap(nullptr, stride * count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return; // allocate() says so
    madvise(range, stride * count, MADV_HUGEPAGE);
    base = static_cast<char*>(range);
    size = stride * count;
    pools = new Pool[count]; // lives as long as the process: a tensor may die after main()
    for (std::size_t i = 0; i < count; ++i) pools[i].reserve(static_cast<int>(i), base + i * stride, stride);
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

void* allocate(int device, std::size_t bytes) {
  if (!memory().pools)
    throw OutOfMemory("openreg: cannot reserve address space for " + std::to_string(device_count()) + " devices of " +
        format_bytes(device_memory()) + "; lower OPENREG_DEVICE_MEMORY or OPENREG_DEVICE_COUNT, or raise `ulimit -v`");
  void* pointer = memory().pools[device].allocate(bytes);
  if (poison()) std::memset(pointer, 0xFF, bytes);
  return pointer;
}

void deallocate(void* pointer) noexcept {
  if (!pointer) return;
  auto& m = memory();
  m.pools[static_cast<std::size_t>(static_cast<char*>(pointer) - m.base) / m.stride].deallocate(
      static_cast<char*>(pointer));
}

int device_of(const void* pointer) noexcept {
  auto& m = memory();
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(pointer) - m.base);
  return offset < m.size ? static_cast<int>(offset / m.stride) : -1;
}

void empty_cache(int device) noexcept {
  if (auto* pools = memory().pools) pools[device].empty_cache();
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
