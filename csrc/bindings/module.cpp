// Python bindings: the C++ that openreg_ops needs and torch does not already offer.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Event.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include <pthread.h>

#include <set>
#include <string>
#include <unordered_map>

#include "aten/autograd_fallback.h"
#include "aten/boxed.h"
#include "aten/fallback.h"
#include "aten/traits/host_scalars.h"
#include "backend/allocator.h"
#include "backend/distributed/process_group.h"
#include "backend/generator.h"
#include "backend/guard.h"
#include "backend/host_allocator.h"
#include "backend/identity/identity.h"
#include "backend/ipc.h"
#include "backend/memory_history.h"
#include "backend/new_tensor.h"
#include "backend/profiler.h"
#include "backend/serialization.h"
#include "backend/sync_debug.h"
#include "bindings/compiled_graphs.h"
#include "bindings/exit.h"
#include "bindings/graph.h"
#include "bindings/schedule.h"
#include "compat.h"
#include "ops/checks.h"
#include "runtime/device.h"
#include "runtime/memory/contents.h"
#include "runtime/memory/isolation.h"
#include "runtime/memory/memory.h"
#include "runtime/process/fault.h"
#include "runtime/process/fork.h"
#include "runtime/process/interrupts.h"
#include "runtime/process/notices.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/utilization.h"

// From torch/csrc/profiler/python/combined_traceback.h, which includes a header that the wheel lacks.
namespace torch {
TORCH_PYTHON_API std::vector<py::object> py_symbolize(std::vector<CapturedTraceback*>& tracebacks);
TORCH_PYTHON_API void installCapturedTracebackPython();
} // namespace torch

// From torch/csrc/jit/python/pybind_utils.h, which takes three seconds to compile.
namespace torch::jit {
TORCH_PYTHON_API c10::IValue toIValue(py::handle object, const c10::TypePtr& type, std::optional<int32_t> size);
} // namespace torch::jit

namespace {

// A thread must not hold Python's lock while another thread's work has the turn, because that work may need the lock.
void wait_without_python(void (*wait)(void*), void* argument) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release others_go_on;
    wait(argument);
  } else wait(argument);
}

unsigned long main_thread = 0; // Python's own, which handles signals

// A handler belongs to the program, not to the waiting operator: its operators use the usual keys, and its CPU tensors
// host memory.
bool check_signals() {
  if (!Py_IsInitialized() || PyThread_get_thread_ident() != main_thread) return false;
  const c10::impl::ForceDispatchKeyGuard usual_keys(c10::default_included_set, c10::default_excluded_set);
  const openreg::LendDeviceMemory host(-1);
  const openreg::AdoptHostMemory none(-1);
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals()) throw py::error_already_set();
  return true;
}

// Each traceback's frames as dictionaries, the innermost first; None for null.
py::list symbolized(const std::vector<openreg::Traceback>& tracebacks) {
  std::vector<torch::CapturedTraceback*> known;
  for (const auto& each : tracebacks)
    if (each) known.push_back(each.get());
  const auto frames = torch::py_symbolize(known);
  py::list out;
  auto next = frames.begin();
  for (const auto& each : tracebacks) out.append(each ? *next++ : py::none());
  return out;
}

// torch.Stream.priority for the device's streams; otherwise only torch.cuda.Stream and similar classes have it.
PyObject* priority_of_stream(PyObject* self, void*) {
  const auto* stream = reinterpret_cast<THPStream*>(self);
  if (static_cast<c10::DeviceType>(stream->device_type) == openreg::identity.type)
    return PyLong_FromLong(openreg::stream_priority({static_cast<int>(stream->device_index), stream->stream_id}));
  PyErr_SetString(PyExc_AttributeError, "'torch.Stream' object has no attribute 'priority'");
  return nullptr;
}
void add_priority() {
  static PyGetSetDef definition = {"priority", &priority_of_stream, nullptr,
      "The priority of a stream of openreg: 0, or -1 for a more urgent one.", nullptr};
  const auto property = py::reinterpret_steal<py::object>(PyDescr_NewGetSet(THPStreamClass, &definition));
  if (!property || PyDict_SetItemString(THPStreamClass->tp_dict, "priority", property.ptr()) < 0)
    throw py::error_already_set();
  PyType_Modified(THPStreamClass);
}

c10::Event& event_of(const py::object& event) {
  TORCH_CHECK_TYPE(THPEvent_Check(event.ptr()), "expected a torch.Event");
  return reinterpret_cast<THPEvent*>(event.ptr())->event;
}

// empty_strided(size, stride, dtype, device index), for code that Inductor generates: tuples of int, unchecked.
// pybind11 would take twice as long as the allocation.
at::DimVector dims(PyObject* tuple) {
  at::DimVector out(static_cast<size_t>(PyTuple_GET_SIZE(tuple)));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(i)));
  return out;
}
PyObject* empty_strided(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const auto size = dims(args[0]), stride = dims(args[1]);
  if (PyErr_Occurred()) return nullptr;
  const auto index = static_cast<c10::DeviceIndex>(PyLong_AsLong(args[3]));
  return THPVariable_Wrap(
      openreg::empty_strided_on(index, size, stride, reinterpret_cast<THPDtype*>(args[2])->scalar_type));
  END_HANDLE_TH_ERRORS
}
PyMethodDef empty_strided_method = {
    "empty_strided", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&empty_strided)), METH_FASTCALL, nullptr};

// The operators' checks, by name: see csrc/ops/checks.h.
std::unordered_map<std::string, openreg::ops::Check>& checks() {
  static auto* all = new std::unordered_map<std::string, openreg::ops::Check>;
  return *all;
}
// "str", "list of Tensor and str".
std::string type_name(const py::handle object) {
  const auto name = [](const py::handle each) {
    return py::type::handle_of(each).attr("__name__").cast<std::string>();
  };
  std::string out = name(object);
  if (!py::isinstance<py::list>(object) && !py::isinstance<py::tuple>(object)) return out;
  std::set<std::string> names;
  for (const auto each : object) names.insert(name(each));
  for (const auto& each : names) out += (each == *names.begin() ? " of " : " and ") + each;
  return out;
}
[[noreturn]] void refuse(const std::string& op, size_t index, const py::handle given) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(("openreg::" + op).c_str(), "");
  const auto& argument = handle.schema().arguments()[index];
  TORCH_CHECK_TYPE(false, op, ": expected ", argument.name(), " of type ", argument.type()->annotation_str(),
      ", but got ", type_name(given));
}
// check(operator's arguments...); it uses the arguments that it checks. None for a list is an empty list.
PyObject* run_check(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  using Named = std::pair<const std::string, openreg::ops::Check>;
  const auto& [op, check] = *static_cast<const Named*>(PyCapsule_GetPointer(self, nullptr));
  TORCH_CHECK(static_cast<size_t>(count) >= check.types.size(), op,
      ": expected all arguments of the operator, but got ", count, " of at least ", check.types.size());
  std::vector<c10::IValue> arguments;
  for (const auto& type : check.types) {
    const py::handle given = args[arguments.size()];
    const bool none = given.is_none() && type->kind() == c10::TypeKind::ListType;
    const auto object = none ? py::tuple() : py::reinterpret_borrow<py::object>(given);
    try {
      arguments.push_back(torch::jit::toIValue(object, type, std::nullopt));
    } catch (const py::cast_error&) {
      refuse(op, arguments.size(), given);
    }
  }
  check.run(arguments);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
PyMethodDef check_method = {
    "check", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&run_check)), METH_FASTCALL, nullptr};

} // namespace

void openreg::ops::add_check(const char* op, Check check) {
  checks().insert_or_assign(op, std::move(check));
}

PYBIND11_MODULE(_C, m) {
  openreg::set_around_wait(&wait_without_python);
  main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  openreg::set_check_signals(&check_signals);
  openreg::bind_graphs(m);
  openreg::bind_compiled_graphs(m);
  openreg::bind_schedules(m);
  openreg::bind_exit(m);
  m.def("register_native_kernels", &openreg::register_native_kernels);
  m.def("device_count", &openreg::device_count);
  m.def("device_memory", &openreg::device_memory);
  m.def("set_host_scalars", &openreg::set_host_scalars);
  m.def("initialize", &openreg::initialize);
  // Torch calls torch.openreg._lazy_init() once per process, and must call it again in a child; see Note [Fork].
  pthread_atfork(nullptr, nullptr, [] { torch::utils::set_requires_device_init(openreg::identity.type, true); });
  m.def("current_device", &openreg::current_device);
  m.def("exchange_device", [](int64_t device) {
    openreg::initialize();
    return openreg::exchange_device(openreg::checked_index(device));
  });
  m.def("checked_index", [](int64_t device) {
    openreg::check_not_forked();
    return static_cast<int>(openreg::checked_index(device));
  });
  m.def("default_generator", [](int64_t device) { return openreg::default_generator(openreg::checked_index(device)); });
  m.def("launch_count", &openreg::launch_count);
  m.def("set_fallback_policy", &openreg::set_fallback_policy);
  openreg::set_fallback_warning([](const std::string& message) {
    py::gil_scoped_acquire gil;
    if (PyErr_WarnEx(PyExc_UserWarning, message.c_str(), 1) < 0) throw py::error_already_set();
  });
  m.def("sync_debug_mode", [] { return static_cast<int>(openreg::sync_debug_mode()); });
  m.def(
      "set_sync_debug_mode", [](int mode) { openreg::set_sync_debug_mode(static_cast<openreg::SyncDebugMode>(mode)); });
  openreg::set_report_sync([](const char* operation) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    py::module_::import("openreg_ops.openreg.sync_debug").attr("_report")(operation);
  });
  m.def("set_missing_reasons", &openreg::set_missing_reasons);
  m.def("fallback_decision", [](const std::string& name, const std::string& overload) {
    const auto decision =
        openreg::fallback_decision(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
    return std::pair(decision.runs, decision.why);
  });
  m.def("fallback_report", [] {
    std::vector<std::tuple<std::string, uint64_t, uint64_t, uint64_t>> rows;
    for (auto& r : openreg::fallback_report()) rows.emplace_back(r.name, r.calls, r.bytes, r.nanoseconds);
    return rows;
  });
  m.def("reset_fallback_report", &openreg::reset_fallback_report);
  m.def("route_operator", &openreg::route_operator);
  m.def("set_autograd_fallback", &openreg::set_autograd_fallback);
  m.def("arm_fault", [](int fault, int device, uint64_t after, uint64_t times, int64_t nanoseconds) {
    return openreg::arm({static_cast<openreg::Fault>(fault), device, after, times, nanoseconds});
  });
  m.def("disarm_fault", &openreg::disarm);
  m.def("spare_faults", &openreg::spare);
  m.def("reset_device", [](int64_t device) { openreg::reset_device(openreg::checked_index(device)); });
  m.def("forked", &openreg::forked);
  m.def("range_push", &openreg::range_push);
  m.def("range_pop", &openreg::range_pop);
  m.def("range_start", &openreg::range_start);
  m.def("range_end", &openreg::range_end);
  m.def("emit_ranges", &openreg::emit_ranges);
  openreg::set_host_thread([] { return PyGILState_GetThisThreadState() != nullptr; });
  m.def("isolation_mode", [] {
    constexpr const char* names[] = {"off", "strict", "keys"};
    return names[static_cast<int>(openreg::isolation())];
  });
  m.def("launch_mode", [] { return static_cast<int>(openreg::launch_mode()); });
  m.def("set_launch_mode", [](int mode) { openreg::set_launch_mode(static_cast<openreg::LaunchMode>(mode)); });
  m.def("sleep", [](int64_t device, int64_t cycles) {
    const int index = openreg::checked_index(device);
    py::gil_scoped_release may_wait;
    openreg::sleep_on(openreg::current_stream(index), cycles);
  });
  m.def("launch_failure", [](int64_t device, const std::string& message) { // for tests of recovery
    const int index = openreg::checked_index(device);
    openreg::launch(openreg::current_stream(index), [message] { throw std::runtime_error(message); });
  });
  m.def("is_stream", [](int device, int64_t id) { return openreg::is_stream({device, id}); });
  m.def("stream_priority", [](int device, int64_t id) { return openreg::stream_priority({device, id}); });
  add_priority();
  m.def("make_interprocess",
      [](const py::object& event) { event_of(event) = c10::Event(openreg::identity.type, openreg::kInterprocess); });
  m.def("make_external",
      [](const py::object& event) { openreg::open_event(event_of(event), openreg::checked_index(-1), ""); });
  m.def("open_event", [](const py::object& event, int64_t device, const py::bytes& handle) {
    openreg::open_event(event_of(event), openreg::checked_index(device), handle);
  });
  m.def("event_handle", [](const py::object& event) { return py::bytes(openreg::event_handle(event_of(event))); });
  m.def("utilization", [](int64_t device) {
    const auto now = openreg::utilization(openreg::checked_index(device));
    return py::make_tuple(now.busy, now.memory);
  });
  m.def("memory_limit", [](int64_t device) { return openreg::memory_limit(openreg::checked_index(device)); });
  m.def("set_memory_limit",
      [](int64_t device, size_t bytes) { openreg::set_memory_limit(openreg::checked_index(device), bytes); });
  m.def("memory_snapshot", [](int64_t device) {
    py::list segments;
    for (const auto& segment : openreg::memory_snapshot(openreg::checked_index(device))) {
      py::list blocks;
      for (const auto& block : segment.blocks)
        blocks.append(py::make_tuple(
            reinterpret_cast<uintptr_t>(block.address), block.size, static_cast<int>(block.state), block.requested));
      segments.append(py::make_tuple(reinterpret_cast<uintptr_t>(segment.address), segment.size, segment.stream,
          segment.small, segment.pool, blocks));
    }
    return segments;
  });
  m.def("record_memory_history", [](bool on, bool events, int context, bool cpp, size_t max_entries) {
    static const bool installed = [] {
      torch::installCapturedTracebackPython();
      return true;
    }();
    static_cast<void>(installed);
    using Options = openreg::HistoryOptions;
    openreg::record_memory_history(
        on ? std::optional(Options{events, static_cast<Options::Context>(context), cpp, max_entries}) : std::nullopt);
  });
  m.def("clear_memory_history", &openreg::clear_memory_history);
  m.def("memory_history_recorded", &openreg::memory_history_recorded);
  m.def("memory_history", [](int64_t device) {
    const auto entries = openreg::memory_history(openreg::checked_index(device));
    std::vector<openreg::Traceback> tracebacks;
    for (const auto& entry : entries) tracebacks.push_back(entry.traceback);
    const py::list frames = symbolized(tracebacks);
    py::list out;
    for (size_t i = 0; i < entries.size(); ++i)
      out.append(py::make_tuple(static_cast<int>(entries[i].action), reinterpret_cast<uintptr_t>(entries[i].address),
          entries[i].size, entries[i].free, entries[i].stream.id, entries[i].time_us, frames[i]));
    return out;
  });
  // The frames that allocated the memory at each address, None if unknown.
  m.def("allocation_tracebacks", [](const std::vector<uintptr_t>& addresses) {
    std::vector<openreg::Traceback> tracebacks;
    for (const auto address : addresses)
      tracebacks.push_back(openreg::allocation_traceback(reinterpret_cast<void*>(address)));
    return symbolized(tracebacks);
  });
  // The first and the last address of a block of pinned memory; see host_allocator.h.
  m.def("pinned_block", [](uintptr_t address) {
    const auto [start, end] = openreg::pinned_block(reinterpret_cast<const void*>(address));
    return py::make_tuple(reinterpret_cast<uintptr_t>(start), reinterpret_cast<uintptr_t>(end));
  });
  // `answers(event, stream)`: see answers_query() in runtime/observer.h.
  m.def(
      "observe",
      [](bool on, py::object answers) {
        static auto& kept = *new py::object; // leaked: Python may have ended
        openreg::set_answers_query(nullptr);
        kept = std::move(answers);
        openreg::observe(on);
        if (kept.is_none()) return;
        openreg::set_answers_query([](const void* event, openreg::Stream stream) {
          const py::gil_scoped_acquire gil;
          return kept(reinterpret_cast<uintptr_t>(event), py::make_tuple(stream.device, stream.id)).cast<bool>();
        });
      },
      py::arg("on"), py::arg("answers") = py::none());
  m.def("take_notices", [] {
    py::list notices;
    for (const auto& each : openreg::take_notices())
      notices.append(py::make_tuple(each.what, each.thread, reinterpret_cast<uintptr_t>(each.object),
          py::make_tuple(each.stream.device, each.stream.id), each.bytes));
    return notices;
  });
  m.def("host_memory_stats", [] {
    const auto stats = at::getHostAllocator(openreg::identity.type)->get_stats();
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
  m.def("reset_peak_host_memory_stats", [] { at::getHostAllocator(openreg::identity.type)->reset_peak_stats(); });
  m.def("reset_accumulated_host_memory_stats",
      [] { at::getHostAllocator(openreg::identity.type)->reset_accumulated_stats(); });
  // An operator's check, a function of its arguments; None if it has none.
  m.def("check_of", [](const std::string& op) -> py::object {
    const auto found = checks().find(op);
    if (found == checks().end()) return py::none();
    const py::capsule self(&*found);
    return py::reinterpret_steal<py::object>(PyCFunction_New(&check_method, self.ptr()));
  });
  m.attr("empty_strided") = py::reinterpret_steal<py::object>(PyCFunction_New(&empty_strided_method, nullptr));
  m.def("tag", &openreg::tag);
  m.def("set_tag", &openreg::set_tag);
  m.def("copy_metadata", &openreg::copy_metadata);
  m.def("share_storage", &openreg::share_storage, py::call_guard<py::gil_scoped_release>());
  m.def("open_storage", &openreg::open_storage, py::call_guard<py::gil_scoped_release>());
  py::class_<openreg::DistributedBackend, c10::intrusive_ptr<openreg::DistributedBackend>, c10d::Backend>(
      m, "DistributedBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>())
#if !OPENREG_TORCH_AT_LEAST(2, 15)
      // split_group() copies these, and Gloo's cannot be copied before 2.15; if None, it uses the backend's own.
      .def_property_readonly("options", [](openreg::DistributedBackend&) { return py::none(); })
#endif
      // new_group() calls it on the processes outside the group, for NCCL, which must know about each split.
      .def("perform_nocolor_split", [](openreg::DistributedBackend&, at::Device) {});
  m.def("set_poison", &openreg::set_poison);
  m.def("poison", &openreg::poison);
}
