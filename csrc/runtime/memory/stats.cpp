#include "runtime/memory/stats.h"

#include "runtime/memory/pool.h"

namespace openreg {
namespace {

template <class F>
void with_stats(int device, const F& f) noexcept {
  if (auto* pools = detail::memory().pools) pools[device].with_stats(f);
}

template <class F>
void each_usage(MemoryStats& stats, const F& f) {
  for (auto* kind : {&stats.bytes, &stats.active, &stats.requested, &stats.blocks, &stats.active_blocks,
           &stats.reserved, &stats.segments})
    for (Usage& usage : *kind) f(usage);
}

} // namespace

MemoryStats memory_stats(int device) noexcept {
  MemoryStats copy{};
  with_stats(device, [&](MemoryStats& stats) { copy = stats; });
  return copy;
}

void reset_peak_memory(int device) noexcept {
  with_stats(device, [](MemoryStats& stats) { each_usage(stats, [](Usage& usage) { usage.peak = usage.current; }); });
}

void reset_accumulated_memory(int device) noexcept {
  with_stats(device, [](MemoryStats& stats) {
    each_usage(stats, [](Usage& usage) { usage.in = usage.out = 0; });
    stats.failures = stats.retries = stats.extensions = stats.returns = 0;
  });
}

} // namespace openreg
