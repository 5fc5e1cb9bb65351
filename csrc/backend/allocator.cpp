// Device memory as c10 allocators; see Note [Lent memory].

#include "backend/allocator.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "backend/guard.h"
#include "backend/identity/identity.h"
#include "backend/profiler.h"
#include "runtime/device.h"
#include "runtime/graph/graph.h"
#include "runtime/interface.h"
#include "runtime/memory/memory.h"
#include "runtime/memory/stats.h"
#include "runtime/process/fault.h"
#include "runtime/process/isolation.h"
#include "runtime/process/notices.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/turn.h"

// Note [Lent memory]
// A CPU kernel allocates its results with c10's CPU allocator. Ours wraps it: on a thread inside a LendDeviceMemory
// scope, it takes the memory from the device's pool instead, and the result is relabeled as a device tensor afterwards.
// raw_deleter() may get a pointer from either side, so it checks the address.
namespace openreg {
namespace {

void free_device(void* pointer) {
  report_free(pointer);
  deallocate(pointer);
}

// Copy-on-write memory becomes a storage's own, in the order of its device's stream; inside a kernel, immediately.
void copy_memory(void* to, const void* from, size_t bytes) {
  const int device = std::max(device_of(to), device_of(from));
  if (device < 0 || detail::in_work()) std::memcpy(to, from, bytes);
  else if (detail::captures(current_stream(device)))
    launch(current_stream(device), [to, from, bytes] { std::memcpy(to, from, bytes); },
        {"Memcpy DtoD (Device -> Device)", Site::kCopy, bytes});
  else
    run(current_stream(device), [&] { std::memcpy(to, from, bytes); },
        {"Memcpy DtoD (Device -> Device)", Site::kCopy, bytes});
}

// The device allocator, with the statistics that torch.accelerator.memory needs.
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    // Copy-on-write memory is created inside a scope that names its device; see CpuCall::alias_dense.
    const c10::DeviceIndex lent = LendDeviceMemory::lent();
    return allocate_on(lent >= 0 ? lent : checked_index(-1), bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    copy_memory(destination, source, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override {
    for (int device = 0; device < device_count(); ++device) empty_cache(device, pool);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data.get(), checked_stream(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryStats now = memory_stats(checked_index(device));
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto set = [](c10::CachingAllocator::StatArray& to, const std::array<Usage, MemoryStats::kPools>& from) {
      using Type = c10::CachingAllocator::StatType;
      for (const auto& [type, pool] : {std::pair(Type::AGGREGATE, MemoryStats::kAll),
               std::pair(Type::SMALL_POOL, MemoryStats::kSmall), std::pair(Type::LARGE_POOL, MemoryStats::kLarge)}) {
        auto& stat = to[static_cast<size_t>(type)];
        stat.current = static_cast<int64_t>(from[pool].current);
        stat.peak = static_cast<int64_t>(from[pool].peak);
        stat.allocated = static_cast<int64_t>(from[pool].in);
        stat.freed = static_cast<int64_t>(from[pool].out);
      }
    };
    set(stats.allocated_bytes, now.bytes);
    set(stats.active_bytes, now.active);
    set(stats.requested_bytes, now.requested);
    set(stats.reserved_bytes, now.reserved);
    set(stats.allocation, now.blocks);
    set(stats.active, now.active_blocks);
    set(stats.segment, now.segments);
    stats.num_ooms = static_cast<int64_t>(now.failures);
    stats.num_alloc_retries = stats.num_sync_all_streams = static_cast<int64_t>(now.retries);
    stats.num_device_alloc = static_cast<int64_t>(now.extensions);
    stats.num_device_free = static_cast<int64_t>(now.returns);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { reset_accumulated_memory(checked_index(device)); }
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak_memory(checked_index(device)); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    device = checked_index(device);
    check_usable(device);
    return {free_memory(device), device_memory()};
  }
};

DeviceMemory device_memory_allocator;

struct CpuMemory final : c10::Allocator {
  explicit CpuMemory(c10::Allocator* host) : host_(host) { host_raw_deleter = host->raw_deleter(); }
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex device = LendDeviceMemory::lent();
    if (C10_LIKELY(device < 0)) return host_->allocate(bytes);
    c10::DataPtr data = allocate_on(device, bytes);
    data.unsafe_set_device(c10::Device(c10::kCPU));
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return host_raw_deleter ? &free_either : nullptr; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    copy_memory(destination, source, bytes);
  }

 private:
  static void free_either(void* pointer) {
    if (device_of(pointer) >= 0) free_device(pointer);
    else host_raw_deleter(pointer);
  }
  c10::Allocator* host_;
  static inline c10::DeleterFnPtr host_raw_deleter = nullptr;
};

const bool installed = [] {
  set_memory_error([](const std::string& message) { TORCH_CHECK_WITH(OutOfMemoryError, false, message); });
  c10::SetAllocator(identity.type, &device_memory_allocator);
  // Leaked: storages keep a pointer to their allocator until the process ends.
  c10::SetAllocator(c10::kCPU, new CpuMemory(c10::GetAllocator(c10::kCPU)), /*priority=*/255);
  return true;
}();

} // namespace

c10::Allocator* device_allocator() {
  return &device_memory_allocator;
}

void replace_memory(c10::StorageImpl* storage, c10::DataPtr&& data) {
  if (C10_UNLIKELY(storage->has_materializer())) storage->clear_materializer(); // set_data_ptr_noswap() would leave it
  storage->set_data_ptr_noswap(std::move(data));
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  c10::DataPtr grown = allocate_on(storage->device().index(), bytes);
  if (storage->nbytes() && bytes) copy_memory(grown.get(), storage->data(), std::min(bytes, storage->nbytes()));
  notice(NoticeKind::kResized, storage->data(), detail::thread_stream(storage->device().index()));
  replace_memory(storage, std::move(grown));
  storage->set_nbytes(bytes);
}

void expect_memory(const char* op, const at::TensorBase& x) {
  if (!x.defined() || !x.has_storage() || C10_LIKELY(x.storage().data() != nullptr)) return;
  TORCH_CHECK(x.numel() == 0 || x.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::ZeroTensor), op,
      ": a kernel got a tensor of shape ", x.sizes(), " on ", x.device(),
      " without memory: its storage was freed or resized to nothing, or it is a wrapper whose own dispatch was turned "
      "off");
}

void move_to_host(c10::StorageImpl* storage) {
  const void* data = storage->data();
  if (!data || device_of(data) < 0) return;
  LendDeviceMemory none(-1);
  c10::DataPtr copy = c10::GetAllocator(c10::kCPU)->allocate(storage->nbytes());
  const detail::Access access;
  std::memcpy(copy.get(), data, storage->nbytes());
  replace_memory(storage, std::move(copy));
}

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
  const c10::Device label(identity.type, device);
  if (bytes == 0) return {nullptr, label};
  try {
    void* pointer = allocate(detail::thread_stream(device), bytes);
    report_allocation(pointer);
    return {pointer, pointer, &free_device, label};
  } catch (const OutOfMemory& error) {
    report_out_of_memory(device, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

} // namespace openreg
