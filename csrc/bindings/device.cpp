// Python bindings of devices, streams, events, faults, profiles, and what the tools observe.
#include <c10/core/Event.h>
#include <torch/csrc/Event.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "backend/allocator.h"
#include "backend/generator.h"
#include "backend/guard.h"
#include "backend/identity/identity.h"
#include "backend/profiler.h"
#include "backend/sync_debug.h"
#include "bindings/names.h"
#include "runtime/device.h"
#include "runtime/process/fault.h"
#include "runtime/process/fork.h"
#include "runtime/process/notices.h"
#include "runtime/stream/launch.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/utilization.h"

namespace openreg {
namespace {

constexpr Named<LaunchMode> kLaunchModes[] = {
    {LaunchMode::kInline, "inline"}, {LaunchMode::kAsync, "async"}, {LaunchMode::kSync, "sync"}};
constexpr Named<SyncDebugMode> kSyncDebugModes[] = {
    {SyncDebugMode::kDefault, "default"}, {SyncDebugMode::kWarn, "warn"}, {SyncDebugMode::kError, "error"}};
constexpr Named<Fault> kFaults[] = {{Fault::kAllocation, "allocation"}, {Fault::kKernel, "kernel"},
    {Fault::kCopy, "copy"}, {Fault::kLost, "lost"}, {Fault::kKernelLatency, "kernel_latency"},
    {Fault::kCopyLatency, "copy_latency"}};
constexpr Named<NoticeKind> kNotices[] = {{NoticeKind::kAllocated, "allocated"}, {NoticeKind::kFreed, "freed"},
    {NoticeKind::kResized, "resized"}, {NoticeKind::kStreamRecorded, "stream_recorded"},
    {NoticeKind::kHostFreed, "host_freed"}, {NoticeKind::kEventRecorded, "event_recorded"},
    {NoticeKind::kEventWaitedFor, "event_waited_for"}, {NoticeKind::kRecordCaptured, "record_captured"},
    {NoticeKind::kWaitCaptured, "wait_captured"}, {NoticeKind::kEventSynchronized, "event_synchronized"},
    {NoticeKind::kEventDestroyed, "event_destroyed"}, {NoticeKind::kStreamSynchronized, "stream_synchronized"},
    {NoticeKind::kDeviceSynchronized, "device_synchronized"}, {NoticeKind::kCollectiveStarted, "collective_started"},
    {NoticeKind::kCollectiveWaitedFor, "collective_waited_for"},
    {NoticeKind::kCollectiveDestroyed, "collective_destroyed"}};

py::dict identity_as_names() {
  const auto key = [](c10::DispatchKey named) { return std::string(c10::toString(named)); };
  using namespace py::literals;
  return py::dict("name"_a = identity.name, "module"_a = identity.module, "type"_a = static_cast<int>(identity.type),
      "dense"_a = key(identity.dense), "sparse"_a = key(identity.sparse), "sparse_csr"_a = key(identity.sparse_csr),
      "quantized"_a = key(identity.quantized), "nested"_a = key(identity.nested), "autograd"_a = key(identity.autograd),
      "autocast"_a = key(identity.autocast));
}

// torch.Stream.priority for the device's streams; otherwise only torch.cuda.Stream and similar classes have it.
PyObject* priority_of_stream(PyObject* self, void*) {
  const auto* stream = reinterpret_cast<THPStream*>(self);
  if (static_cast<c10::DeviceType>(stream->device_type) == identity.type)
    return PyLong_FromLong(stream_priority({static_cast<int>(stream->device_index), stream->stream_id}));
  PyErr_SetString(PyExc_AttributeError, "'torch.Stream' object has no attribute 'priority'");
  return nullptr;
}
// torch.cuda.Stream.cuda_stream
PyObject* handle_of_stream(PyObject* self, void*) {
  return PyObject_GetAttrString(self, "native_handle");
}
PyObject* address_of_event(PyObject* self, void*) {
  return PyLong_FromVoidPtr(reinterpret_cast<THPEvent*>(self)->event.eventId());
}

void add_property(PyTypeObject* type, PyGetSetDef& definition) {
  const auto property = py::reinterpret_steal<py::object>(PyDescr_NewGetSet(type, &definition));
  if (!property || PyDict_SetItemString(type->tp_dict, definition.name, property.ptr()) < 0)
    throw py::error_already_set();
  PyType_Modified(type);
}

void add_properties() {
  static PyGetSetDef priority = {"priority", &priority_of_stream, nullptr,
      "The priority of a stream of the device: 0, or -1 for a more urgent one.", nullptr};
  static PyGetSetDef stream = {"cuda_stream", &handle_of_stream, nullptr, "The stream's native_handle.", nullptr};
  static PyGetSetDef event = {
      "cuda_event", &address_of_event, nullptr, "The address of the event, 0 before it is first recorded.", nullptr};
  add_property(THPStreamClass, priority);
  if (!is_cuda()) return;
  add_property(THPStreamClass, stream);
  add_property(THPEventClass, event);
}

c10::Event& event_of(const py::object& event) {
  TORCH_CHECK_TYPE(THPEvent_Check(event.ptr()), "expected a torch.Event");
  return reinterpret_cast<THPEvent*>(event.ptr())->event;
}

void bind_streams(py::module_& m) {
  m.def("launch_count", &launch_count);
  m.def("launch_mode", [] { return name_of(launch_mode(), kLaunchModes); });
  m.def("set_launch_mode", [](const std::string& mode) { set_launch_mode(value_of(mode, kLaunchModes)); });
  m.def("sleep", [](int64_t device, int64_t cycles) {
    const int index = checked_index(device);
    py::gil_scoped_release may_wait;
    sleep_on(current_stream(index), cycles);
  });
  m.def("launch_failure", [](int64_t device, const std::string& message) { // for tests of recovery
    launch(current_stream(checked_index(device)), [message] { throw std::runtime_error(message); });
  });
  m.def("is_stream", [](int device, int64_t id) { return is_stream({device, id}); });
  add_properties();
  m.def(
      "make_interprocess", [](const py::object& event) { event_of(event) = c10::Event(identity.type, kInterprocess); });
  m.def("make_external", [](const py::object& event) { open_event(event_of(event), checked_index(-1), ""); });
  m.def("open_event", [](const py::object& event, int64_t device, const py::bytes& handle) {
    open_event(event_of(event), checked_index(device), handle);
  });
  m.def("event_handle", [](const py::object& event) { return py::bytes(event_handle(event_of(event))); });
}

void bind_faults(py::module_& m) {
  m.def("arm_fault", [](const std::string& fault, int device, uint64_t after, uint64_t times, int64_t nanoseconds) {
    return arm({value_of(fault, kFaults), device, after, times, nanoseconds});
  });
  m.def("disarm_fault", &disarm);
  m.def("spare_faults", &spare);
  m.def("reset_device", [](int64_t device) { reset_device(checked_index(device)); });
}

void bind_tools(py::module_& m) {
  m.def("sync_debug_mode", [] { return name_of(sync_debug_mode(), kSyncDebugModes); });
  m.def("set_sync_debug_mode", [](const std::string& mode) { set_sync_debug_mode(value_of(mode, kSyncDebugModes)); });
  set_report_sync([](const char* operation) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    py::module_::import("openreg_ops.device.sync_debug").attr("_report")(operation);
  });
  m.def("range_push", &range_push);
  m.def("range_pop", &range_pop);
  m.def("range_start", &range_start);
  m.def("range_end", &range_end);
  m.def("emit_ranges", &emit_ranges);
  m.def("utilization", [](int64_t device) {
    const auto now = utilization(checked_index(device));
    return py::make_tuple(now.busy, now.memory);
  });
  // `answers(event, stream)`: see answers_query() in runtime/process/notices.h.
  m.def(
      "observe",
      [](bool on, py::object answers) {
        static auto& kept = *new py::object; // leaked: Python may have ended
        set_answers_query(nullptr);
        kept = std::move(answers);
        observe(on);
        if (kept.is_none()) return;
        set_answers_query([](const void* event, Stream stream) {
          const py::gil_scoped_acquire gil;
          return kept(reinterpret_cast<uintptr_t>(event), py::make_tuple(stream.device, stream.id)).cast<bool>();
        });
      },
      py::arg("on"), py::arg("answers") = py::none());
  m.def("take_notices", [] {
    py::list notices;
    for (const auto& notice : take_notices())
      notices.append(
          py::make_tuple(name_of(notice.kind, kNotices), notice.thread, reinterpret_cast<uintptr_t>(notice.object),
              py::make_tuple(notice.stream.device, notice.stream.id), notice.bytes));
    return notices;
  });
}

} // namespace

void bind_device(py::module_& m) {
  m.def("identity", &identity_as_names);
  m.def("device_count", &device_count);
  m.def("initialize", &initialize);
  m.def("initialized", &initialized);
  m.def("forked", &forked);
  m.def("current_device", &current_device);
  m.def("exchange_device", [](int64_t device) {
    initialize();
    return exchange_device(checked_index(device));
  });
  m.def("checked_index", [](int64_t device) {
    check_not_forked();
    return static_cast<int>(checked_index(device));
  });
  m.def("default_generator", [](int64_t device) { return default_generator(checked_index(device)); });
  bind_streams(m);
  bind_faults(m);
  bind_tools(m);
}

} // namespace openreg
