// Python bindings of device memory: limits, pools, snapshots and history; pinned and shared memory.
#include <ATen/core/CachingHostAllocator.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "backend/allocator.h"
#include "backend/host_allocator.h"
#include "backend/identity/identity.h"
#include "backend/ipc.h"
#include "backend/memory_history.h"
#include "bindings/names.h"
#include "runtime/device.h"
#include "runtime/memory/contents.h"
#include "runtime/memory/memory.h"
#include "runtime/process/fork.h"
#include "runtime/process/isolation.h"
#include "runtime/stream/stream.h"

// From torch/csrc/profiler/python/combined_traceback.h, which includes a header that the wheel lacks.
namespace torch {
TORCH_PYTHON_API std::vector<py::object> py_symbolize(std::vector<CapturedTraceback*>& tracebacks);
TORCH_PYTHON_API void installCapturedTracebackPython();
} // namespace torch

namespace openreg {
namespace {

constexpr Named<Isolation> kIsolations[] = {
    {Isolation::kOff, "off"}, {Isolation::kStrict, "strict"}, {Isolation::kKeys, "keys"}};
constexpr Named<MemoryBlock::State> kBlockStates[] = {{MemoryBlock::kFree, "inactive"},
    {MemoryBlock::kAllocated, "active_allocated"}, {MemoryBlock::kPending, "active_pending_free"}};
constexpr Named<MemoryAction> kMemoryActions[] = {{MemoryAction::kAllocated, "alloc"},
    {MemoryAction::kFreeRequested, "free_requested"}, {MemoryAction::kFreed, "free_completed"},
    {MemoryAction::kFailed, "oom"}};
constexpr Named<HistoryOptions::Context> kContexts[] = {{HistoryOptions::kNone, "none"},
    {HistoryOptions::kState, "state"}, {HistoryOptions::kAlloc, "alloc"}, {HistoryOptions::kAll, "all"}};

// A private memory pool that a program holds: torch.openreg.MemPool.
struct MemPool {
  explicit MemPool(int64_t index) : device(checked_index(index)), id(new_pool(PoolUser::kPool)) {
    initialize();
    retain_pool(device, id, PoolUser::kPool);
  }
  ~MemPool() { release_pool(device, id, PoolUser::kPool); }
  MemPool(const MemPool&) = delete;
  MemPool& operator=(const MemPool&) = delete;

  const int device;
  const PoolId id;
};

// Each traceback's frames as dictionaries, the innermost first; None for null.
py::list symbolized(const std::vector<Traceback>& tracebacks) {
  std::vector<torch::CapturedTraceback*> known;
  for (const auto& each : tracebacks)
    if (each) known.push_back(each.get());
  const auto frames = torch::py_symbolize(known);
  py::list out;
  auto next = frames.begin();
  for (const auto& each : tracebacks) out.append(each ? *next++ : py::none());
  return out;
}

py::list snapshot(int device) {
  using namespace py::literals;
  py::list segments;
  for (const auto& segment : memory_snapshot(device)) {
    py::list blocks;
    for (const auto& block : segment.blocks)
      blocks.append(py::dict("address"_a = reinterpret_cast<uintptr_t>(block.address), "size"_a = block.size,
          "requested_size"_a = block.requested, "state"_a = name_of(block.state, kBlockStates)));
    segments.append(py::make_tuple(reinterpret_cast<uintptr_t>(segment.address), segment.size, segment.stream,
        segment.small, segment.pool, blocks));
  }
  return segments;
}

void bind_pools(py::module_& m) {
  m.def("graph_pool_handle", [] { return new_pool(PoolUser::kPool); }); // as CUDA numbers them
  py::class_<MemPool>(m, "MemPool")
      .def(py::init<int64_t>())
      .def_readonly("id", &MemPool::id)
      .def_readonly("device", &MemPool::device)
      .def("use_count", [](const MemPool& self) { return pool_users(self.device, self.id); });
  m.def("retain_pool", [](int device, PoolId pool) { retain_pool(device, pool, PoolUser::kPool); });
  m.def("release_pool", [](int device, PoolId pool) { release_pool(device, pool, PoolUser::kPool); });
  m.def("use_pool", [](int64_t device, PoolId pool) { return use_pool(checked_index(device), pool); });
  m.def("empty_pool", [](int64_t device, PoolId pool) { empty_cache(checked_index(device), pool); });
  m.def("caching_allocator_alloc", [](size_t bytes, int64_t device, int64_t stream) {
    initialize();
    const int index = checked_index(device);
    TORCH_CHECK(
        is_stream({index, stream}), "caching_allocator_alloc: there is no stream ", stream, " on ", device_at(index));
    try {
      return reinterpret_cast<uintptr_t>(allocate({index, stream}, bytes));
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  });
  m.def("caching_allocator_delete", [](uintptr_t address) {
    auto* memory = reinterpret_cast<void*>(address);
    const auto allocated = [memory] {
      if (device_of(memory) < 0) return false;
      const auto block = owner_of(memory).block;
      return block.address == memory && block.state == MemoryBlock::kAllocated;
    };
    TORCH_CHECK(!memory || allocated(),
        "caching_allocator_delete: expected an address from caching_allocator_alloc that has not been freed, but "
        "got ",
        address);
    deallocate(memory);
  });
}

void bind_history(py::module_& m) {
  m.def("record_memory_history", [](bool on, bool events, const std::string& context, bool cpp, size_t max_entries) {
    static const bool installed = [] {
      torch::installCapturedTracebackPython();
      return true;
    }();
    static_cast<void>(installed);
    record_memory_history(
        on ? std::optional(HistoryOptions{events, value_of(context, kContexts), cpp, max_entries}) : std::nullopt);
  });
  m.def("clear_memory_history", &clear_memory_history);
  m.def("memory_history", [](int64_t device) {
    const auto entries = memory_history(checked_index(device));
    std::vector<Traceback> tracebacks;
    for (const auto& entry : entries) tracebacks.push_back(entry.traceback);
    const py::list frames = symbolized(tracebacks);
    py::list out;
    for (size_t i = 0; i < entries.size(); ++i)
      out.append(
          py::make_tuple(name_of(entries[i].action, kMemoryActions), reinterpret_cast<uintptr_t>(entries[i].address),
              entries[i].size, entries[i].free, entries[i].stream.id, entries[i].time_us, frames[i]));
    return out;
  });
  // The frames that allocated the memory at each address, None if unknown.
  m.def("allocation_tracebacks", [](const std::vector<uintptr_t>& addresses) {
    std::vector<Traceback> tracebacks;
    for (const auto address : addresses) tracebacks.push_back(allocation_traceback(reinterpret_cast<void*>(address)));
    return symbolized(tracebacks);
  });
  // The first and the last address of a block of pinned memory; see host_allocator.h.
  m.def("pinned_block", [](uintptr_t address) {
    const auto [start, end] = pinned_block(reinterpret_cast<const void*>(address));
    return py::make_tuple(reinterpret_cast<uintptr_t>(start), reinterpret_cast<uintptr_t>(end));
  });
}

void bind_host_memory(py::module_& m) {
  m.def("host_memory_stats", [] {
    const auto stats = at::getHostAllocator(identity.type)->get_stats();
    py::dict out;
    const auto amount = [&](const char* name, const auto& stat) {
      using namespace py::literals;
      out[name] = py::dict(
          "current"_a = stat.current, "peak"_a = stat.peak, "allocated"_a = stat.allocated, "freed"_a = stat.freed);
    };
    const auto time = [&](const char* name, const auto& stat) {
      using namespace py::literals;
      out[name] = py::dict("total"_a = stat.total, "max"_a = stat.max, "min"_a = stat.min, "count"_a = stat.count,
          "avg"_a = stat.count ? stat.total / stat.count : 0);
    };
    amount("active_requests", stats.active_requests);
    amount("active_bytes", stats.active_bytes);
    amount("allocations", stats.allocations);
    amount("allocated_bytes", stats.allocated_bytes);
    time("host_alloc_time", stats.host_alloc_time);
    time("host_free_time", stats.host_free_time);
    out["num_host_alloc"] = stats.num_host_alloc;
    out["num_host_free"] = stats.num_host_free;
    return out;
  });
  m.def("reset_peak_host_memory_stats", [] { at::getHostAllocator(identity.type)->reset_peak_stats(); });
  m.def("reset_accumulated_host_memory_stats", [] { at::getHostAllocator(identity.type)->reset_accumulated_stats(); });
}

} // namespace

void bind_memory(py::module_& m) {
  m.def("device_memory", &device_memory);
  m.def("memory_limit", [](int64_t device) { return memory_limit(checked_index(device)); });
  m.def("set_memory_limit", [](int64_t device, size_t bytes) { set_memory_limit(checked_index(device), bytes); });
  m.def("memory_snapshot", [](int64_t device) { return snapshot(checked_index(device)); });
  m.def("set_poison", &set_poison);
  m.def("poison", &poison);
  m.def("isolation_mode", [] { return name_of(isolation(), kIsolations); });
  set_host_thread([] { return PyGILState_GetThisThreadState() != nullptr; });
  m.def("resize_storage",
      [](const c10::Storage& storage, size_t bytes) { resize_storage(storage.unsafeGetStorageImpl(), bytes); });
  m.def("share_storage", &share_storage, py::call_guard<py::gil_scoped_release>());
  m.def("open_storage", &open_storage, py::call_guard<py::gil_scoped_release>());
  bind_pools(m);
  bind_history(m);
  bind_host_memory(m);
}

} // namespace openreg
