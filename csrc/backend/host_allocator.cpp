// Pinned host memory: page-aligned, and known by address so that is_pinned() is right.
#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "host_allocator.h"

namespace openreg {
namespace {

constexpr size_t kPage = 4096;
std::mutex mutex;
// Start of each pinned allocation and its size. Leaked, since tensors may outlive main().
std::map<const char*, size_t>& pinned() {
  static auto* all = new std::map<const char*, size_t>;
  return *all;
}

void free_pinned(void* pointer) {
  if (!pointer) return;
  {
    std::lock_guard lock(mutex);
    pinned().erase(static_cast<const char*>(pointer));
  }
  std::free(pointer);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* pointer = nullptr;
    const int error = posix_memalign(&pointer, kPage, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, error == 0, "openreg: cannot allocate ", bytes,
        " bytes of pinned host memory; use less, or do without pin_memory");
    std::lock_guard lock(mutex);
    pinned().emplace(static_cast<const char*>(pointer), bytes);
    return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
  // Copies have finished when the call returns, so there is nothing to wait for before reuse.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory pinned_memory;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &pinned_memory)

} // namespace

bool is_pinned(const void* pointer) {
  std::lock_guard lock(mutex);
  auto after = pinned().upper_bound(static_cast<const char*>(pointer));
  if (after == pinned().begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return static_cast<const char*>(pointer) < start + bytes;
}

} // namespace openreg
