// How much memory of a device is in use, and how much has been allocated and freed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace openreg {

// An amount now, its peak since the start or reset_peak_memory(), and the totals added and removed since the start or
// reset_accumulated_memory().
struct Usage {
  std::size_t current = 0, peak = 0, in = 0, out = 0;
  void add(std::size_t amount) noexcept {
    current += amount;
    in += amount;
    if (current > peak) peak = current;
  }
  void remove(std::size_t amount) noexcept {
    current -= amount;
    out += amount;
  }
  void set(std::size_t to) noexcept { to > current ? add(to - current) : remove(current - to); }
};

// A device's memory use: for small blocks, which share pages, for large ones, and for both.
struct MemoryStats {
  enum Pool { kSmall, kLarge, kAll, kPools };
  std::array<Usage, kPools> bytes, blocks; // allocated
  std::array<Usage, kPools> active,
      active_blocks; // allocated memory, and freed memory that queued work may still use: see record_stream()
  std::array<Usage, kPools> requested; // requested bytes, before rounding
  std::array<Usage, kPools> reserved; // bytes obtained from the operating system
  std::array<Usage, kPools> segments; // pages of small blocks, and runs of pages
  std::uint64_t failures = 0;
  std::uint64_t retries = 0; // waits for queued work that held the memory
  std::uint64_t extensions = 0; // times that the operating system provided more memory
  std::uint64_t returns = 0; // pieces returned to the operating system

  // A block of `size` bytes is allocated, freed, and no longer used by queued work.
  void allocated(Pool pool, std::size_t size, std::size_t wanted) noexcept {
    for (const auto each : {pool, kAll}) {
      bytes[each].add(size);
      active[each].add(size);
      requested[each].add(wanted);
      blocks[each].add(1);
      active_blocks[each].add(1);
    }
  }
  void freed(Pool pool, std::size_t size, std::size_t wanted) noexcept {
    for (const auto each : {pool, kAll}) {
      bytes[each].remove(size);
      requested[each].remove(wanted);
      blocks[each].remove(1);
    }
  }
  void unused(Pool pool, std::size_t size) noexcept {
    for (const auto each : {pool, kAll}) {
      active[each].remove(size);
      active_blocks[each].remove(1);
    }
  }
};

// Prints a size as CUDA's messages do: "1.50 GiB".
std::string format_bytes(std::size_t bytes);

} // namespace openreg
