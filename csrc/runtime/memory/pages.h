// The pages of a device's address range: what each is used for, and which are free.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>

#include "runtime/memory/block.h"

namespace openreg::detail {

// Note [Pages, runs and classes]
// A device's address range is cut into 64 KiB pages. An allocation of more than 32 KiB is a run of
// pages; free runs are kept by address (to merge neighbors) and chosen by best fit. A smaller one is a block of one of
// 32 size classes (four per power of two); a page serves one class. `pages_` describes the pages, outside device
// memory, so the allocator itself never touches device memory, and `notes_` describes the blocks. `starts_` has a bit
// for each page, set where a run in use or a page of blocks starts: the nearest set bit before an address leads to the
// block that contains the address.
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

// Zeros, which take up memory only when they are first written to; null if no addresses are left.
void* reserve_addresses(std::size_t bytes) noexcept;

constexpr std::size_t kNoPage = static_cast<std::size_t>(-1);

using Runs = std::map<std::size_t, std::size_t>; // first page -> pages
void add_run(Runs& runs, std::size_t page, std::size_t length);
// Takes `length` pages from the smallest run that has enough; returns the first page, or kNoPage.
std::size_t take_run(Runs& runs, std::size_t length);

class Pages {
 public:
  static constexpr int kRun = 0, kReturned = -1;
  struct Page {
    int kind;            // 1 + a size class, kRun for the first page of a run, or kReturned: free and without memory
    std::uint32_t count; // pages in the run, or blocks of the page in use
    std::int64_t owner;  // the current or last owner: a stream, or a private pool's part for a stream
  };
  struct Note {
    std::uint16_t slack; // bytes added by rounding up; less than a page
    MemoryBlock::State state;
  };

  // False if the operating system has no addresses left for the tables. Only the used parts of the tables cost memory.
  bool reserve(int device, char* base, std::size_t bytes);

  Page& operator[](std::size_t page) const { return pages_[page]; }
  char* start(std::size_t page) const { return base_ + page * kPage; }
  std::size_t page_of(const char* pointer) const { return static_cast<std::size_t>(pointer - base_) / kPage; }
  // Returns the size of a run, or of each block of a page.
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

  // The block in use that contains an address, and the owner of its page; its size is 0 if there is none. Takes no lock
  // and allocates nothing.
  MemoryBlock find(const char* address, std::int64_t& owner) const noexcept;

  // Takes `length` free pages; returns the first, or kNoPage.
  std::size_t take(std::size_t length);
  void add_free(std::size_t page, std::size_t length);
  // Marks pages as in use again, or as beyond the high-water mark; returns whether any of them had been returned.
  bool forget_returned(std::size_t page, std::size_t end) noexcept;
  // Raises the high-water mark to this page; returns false if it is not below.
  bool raise(std::size_t end) noexcept;
  // Lowers it to the last page in use. Call return_free() first.
  void lower() noexcept;
  // Free memory goes back to the operating system; the addresses stay. Returns the number of pieces.
  std::size_t return_free() noexcept;

  const Runs& free() const { return free_; } // for any stream
  std::size_t taken() const { return taken_; } // pages that are not free
  std::size_t high_water() const { return high_water_; } // pages ever handed out since the last lower()
  std::size_t reserved() const { return high_water_ - returned_; } // pages that have memory

 private:
  int device_ = 0;
  char* base_ = nullptr;
  Page* pages_ = nullptr;
  Note* notes_ = nullptr;           // one for each kGrain bytes
  std::uint64_t* starts_ = nullptr; // bits
  Runs free_;
  std::size_t taken_ = 0, high_water_ = 0;
  std::size_t returned_ = 0; // pages of free_ that return_free() has given back
};

} // namespace openreg::detail
