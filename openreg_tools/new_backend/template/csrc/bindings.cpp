// What torch_acme's Python code calls: the module torch_acme._C. Every rung.
//
// Document: "Extending dispatcher for a new backend in C++", section "Build an extension".
#include <torch/csrc/utils/pybind.h>

#include "common.h"
#include "distributed.h"
#include "fallback.h"
#include "generator.h"
#include "history.h"
#include "serialization.h"

namespace torch { // from combined_traceback.h, whose Python part the wheel lacks
TORCH_PYTHON_API std::vector<py::object> py_symbolize(std::vector<CapturedTraceback*>& tracebacks);
TORCH_PYTHON_API void installCapturedTracebackPython();
} // namespace torch

namespace acme {
namespace {

py::list history_with_frames() {
  py::list out;
  for (const HistoryEntry& entry : history()) {
    py::object frames = py::list();
    if (entry.frames) {
      std::vector<torch::CapturedTraceback*> tracebacks{entry.frames.get()};
      frames = torch::py_symbolize(tracebacks).front();
    }
    out.append(py::make_tuple(entry.action, reinterpret_cast<uintptr_t>(entry.address), entry.size,
        static_cast<int>(entry.stream.device_index()), entry.stream.id(), entry.time_us, frames));
  }
  return out;
}

} // namespace

PYBIND11_MODULE(_C, m) {
  torch::installCapturedTracebackPython();
  m.def("device_count", &device_count);
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("exchange_device", [](int64_t index) { return static_cast<int>(exchange_device(checked_index(index))); });
  m.def("default_generator", [](int64_t index) { return default_generator(checked_index(index)); });
  m.def("fallback_counts", &fallback_counts);
  m.def("set_fallback_policy", &set_fallback_policy);
  m.def("record_history", &record_history);
  m.def("history", &history_with_frames);
  m.def("share_memory", [](const at::Storage& storage) { return py::bytes(share_memory(storage)); });
  m.def("open_memory", [](const py::bytes& handle, size_t size, int64_t device, int file) {
    return open_memory(handle, size, device, file);
  });
  bind_distributed(m);
}

} // namespace acme
