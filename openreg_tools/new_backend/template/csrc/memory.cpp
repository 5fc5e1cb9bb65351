// Device memory and pinned host memory: the allocators, with their statistics and history. Rungs 2, 3 and 9.
//
// Documents: none of the four describes allocators. c10/core/CachingDeviceAllocator.h and
// ATen/core/CachingHostAllocator.h in PyTorch's headers do.
#include <ATen/core/CachingHostAllocator.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "common.h"

namespace acme {
namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingDeviceAllocator::TraceEntry;

// ---- the history ----

std::mutex history_mutex;
std::atomic<bool> recording{false};
auto& entries = *new std::vector<TraceEntry>; // leaked, as the pool below: storages may be freed after main()

void keep(TraceEntry::Action action, void* address, size_t size, c10::Stream stream) {
  if (!recording) return;
  auto frames = action == TraceEntry::ALLOC ? torch::CapturedTraceback::gather(/*python=*/true, false, false) : nullptr;
  const std::lock_guard lock(history_mutex);
  entries.emplace_back(action, stream.device_index(), reinterpret_cast<size_t>(address), size,
      reinterpret_cast<void*>(stream.id()), c10::MempoolId_t{0, 0}, c10::getApproximateTime(), std::move(frames));
}

// ---- device memory ----

struct Block {
  void* address;
  size_t size;
  c10::Stream stream;              // that it was allocated on
  std::vector<c10::Stream> users;  // other streams, from record_stream()
  std::vector<acme_event*> events; // once freed: where the work of these streams stood
};

// Freed blocks are kept for the next allocation of their size on their stream. Work on that stream which still uses a
// freed block runs before the work that uses it next, so neither side waits.
struct Pool final : c10::DeviceAllocator {
  std::mutex mutex;
  std::unordered_map<void*, Block> used;
  std::map<std::tuple<c10::DeviceIndex, c10::StreamId, size_t>, std::vector<Block>> cached;
  std::vector<Block> pending; // freed, but other streams may still use them
  std::vector<DeviceStats> stats{static_cast<size_t>(acme_device_count())};

  // Adds `sign` blocks to the statistics: of all blocks, and of the small or large ones.
  static void add(StatArray& sizes, StatArray& blocks, const Block& block, int sign) {
    const auto kind = block.size < (size_t{1} << 20) ? StatType::SMALL_POOL : StatType::LARGE_POOL;
    for (const auto type : {StatType::AGGREGATE, kind})
      for (auto [stat, amount] : {std::pair(&sizes, block.size), std::pair(&blocks, size_t{1})}) {
        auto& one = (*stat)[static_cast<size_t>(type)];
        sign < 0 ? one.decrease(amount) : one.increase(amount);
      }
  }
  DeviceStats& stats_of(const Block& block) { return stats[static_cast<size_t>(block.stream.device_index())]; }
  void count(const Block& block, int sign) {
    DeviceStats& of = stats_of(block);
    add(of.allocated_bytes, of.allocation, block, sign);
    add(of.active_bytes, of.active, block, sign);
    c10::reportMemoryUsageToProfiler(block.address, sign * static_cast<int64_t>(block.size),
        static_cast<size_t>(of.allocated_bytes[0].current), static_cast<size_t>(of.reserved_bytes[0].current),
        block.stream.device());
  }

  void* allocate(size_t bytes, c10::Stream stream) {
    std::unique_lock lock(mutex);
    collect();
    const size_t unit = bytes < (size_t{1} << 20) ? 512 : size_t{2} << 20;
    Block block{nullptr, (bytes + unit - 1) / unit * unit, stream, {}, {}};
    DeviceStats& of = stats_of(block);
    auto& free = cached[{stream.device_index(), stream.id(), block.size}];
    if (!free.empty()) {
      block.address = free.back().address;
      free.pop_back();
    } else {
      acme_error error = acme_malloc(stream.device_index(), block.size, &block.address);
      if (error == ACME_OUT_OF_MEMORY) {
        ++of.num_alloc_retries;
        release_cached();
        error = acme_malloc(stream.device_index(), block.size, &block.address);
      }
      if (error == ACME_OUT_OF_MEMORY) {
        ++of.num_ooms;
        keep(TraceEntry::OOM, nullptr, bytes, stream);
      }
      check(error, c10::str("cannot allocate ", bytes, " bytes on ", stream.device()).c_str());
      add(of.reserved_bytes, of.segment, block, 1);
    }
    count(block, 1);
    used.emplace(block.address, block);
    lock.unlock(); // the history may take Python's lock
    keep(TraceEntry::ALLOC, block.address, bytes, stream);
    return block.address;
  }

  void free(void* address) {
    std::unique_lock lock(mutex);
    auto node = used.extract(address);
    if (!node) return;
    Block& block = node.mapped();
    count(block, -1);
    for (const auto& user : block.users)
      if (acme_event* event = nullptr; !acme_event_create(&event) && !acme_event_record(event, native(user)))
        block.events.push_back(event);
    pending.push_back(block);
    lock.unlock();
    keep(TraceEntry::FREE_COMPLETED, address, block.size, block.stream);
  }

  // Moves the blocks that no other stream uses any more to the cache.
  void collect() {
    std::erase_if(pending, [&](Block& block) {
      if (!std::all_of(block.events.begin(), block.events.end(), acme_event_query)) return false;
      for (acme_event* event : block.events) acme_event_destroy(event);
      cached[{block.stream.device_index(), block.stream.id(), block.size}].push_back(block);
      return true;
    });
  }

  void release_cached() {
    for (const Block& block : pending)
      for (acme_event* event : block.events) acme_event_synchronize(event);
    collect();
    for (auto& [key, blocks] : cached)
      for (const Block& block : std::exchange(blocks, {})) {
        synchronize(block.stream);
        check(acme_free(block.address), "empty_cache");
        add(stats_of(block).reserved_bytes, stats_of(block).segment, block, -1);
      }
  }

  // ---- c10::DeviceAllocator ----

  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override {
    check(acme_copy(to, from, bytes, native_stream(current_device())), "copy_data");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    const std::lock_guard lock(mutex);
    release_cached();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const std::lock_guard lock(mutex);
    const auto found = used.find(data.get());
    if (found == used.end() || found->second.stream == stream) return;
    auto& users = found->second.users;
    if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex);
    return stats.at(static_cast<size_t>(checked_index(device)));
  }
  template <class Reset>
  void for_each_stat(c10::DeviceIndex device, Reset reset) {
    const std::lock_guard lock(mutex);
    DeviceStats& of = stats.at(static_cast<size_t>(checked_index(device)));
    for (StatArray* array :
        {&of.allocation, &of.allocated_bytes, &of.active, &of.active_bytes, &of.segment, &of.reserved_bytes})
      for (auto& stat : *array) reset(stat);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::pair<size_t, size_t> info;
    check(acme_memory_info(checked_index(device), &info.first, &info.second), "get_memory_info");
    return info;
  }
};

Pool& pool() {
  static Pool* instance = new Pool;
  return *instance;
}
void free_memory(void* address) {
  pool().free(address);
}
c10::DeleterFnPtr Pool::raw_deleter() const {
  return &free_memory;
}
const bool registered = (c10::SetAllocator(kDevice, &pool()), true);

// ---- pinned memory: PyTorch's caching allocator, with the runtime's memory and events ----

struct PinnedPool final : at::CachingHostAllocatorImpl<c10::Stream, acme_event*> {
  void allocate_host_memory(size_t size, void** pointer) override {
    check(acme_host_malloc(size, pointer), "pin_memory");
  }
  void free_block(at::HostBlock<c10::Stream>* block) override { acme_host_free(block->ptr_); }
  void record_stream(std::optional<std::vector<acme_event*>>& events, c10::Stream stream) override {
    if (!events) events.emplace();
    check(acme_event_create(&events->emplace_back()), "pin_memory");
    check(acme_event_record(events->back(), native(stream)), "pin_memory");
  }
  bool query_event(acme_event*& event) override {
    const bool reached = acme_event_query(event);
    if (reached) acme_event_destroy(event); // PyTorch drops it now
    return reached;
  }
  c10::Stream get_current_stream() const override { return current_stream(current_device()); }
  bool stream_is_capturing(c10::Stream) const override { return false; }
};
DECLARE_HOST_ALLOCATOR(PinnedAllocator, PinnedPool, free_pinned, pinned_allocator)
const bool pinned_registered = (at::setHostAllocator(kDevice, &pinned_allocator), true);

} // namespace

c10::DeviceAllocator* device_allocator() {
  return &pool();
}

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
  void* address = bytes ? pool().allocate(bytes, current_stream(checked_index(device))) : nullptr;
  return {address, address, &free_memory, device_at(device)};
}

void record_history(bool on) {
  const std::lock_guard lock(history_mutex);
  recording = on;
  entries.clear();
}

std::vector<TraceEntry> history() {
  const std::lock_guard lock(history_mutex);
  return entries;
}

} // namespace acme
