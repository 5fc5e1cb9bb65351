// What torch_acme's Python code calls: the module torch_acme._C. Every rung.
//
// Document: "Extending dispatcher for a new backend in C++", section "Build an extension".
#include <pybind11/chrono.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/csrc/utils/pybind.h>

#include "common.h"

namespace torch { // from the Python part of combined_traceback.h, which the wheel lacks
TORCH_PYTHON_API std::vector<py::object> py_symbolize(std::vector<CapturedTraceback*>& tracebacks);
TORCH_PYTHON_API void installCapturedTracebackPython();
} // namespace torch

namespace acme {

void bind_distributed(py::module_& m); // distributed.cpp

PYBIND11_MODULE(_C, m) {
  torch::installCapturedTracebackPython();
  m.def("device_count", &acme_device_count);
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("exchange_device", [](int64_t index) { return static_cast<int>(exchange_device(checked_index(index))); });
  m.def("default_generator", [](int64_t index) { return default_generator(checked_index(index)); });
  m.def("fallback_counts", &fallback_counts);
  m.def("set_fallback_policy", &set_fallback_policy);
  m.def("record_history", &record_history);
  m.def("history", [] { // tuples: whether allocated, address, size, device, stream, frames
    py::list out;
    for (const auto& entry : history()) {
      std::vector<torch::CapturedTraceback*> frames;
      if (entry.context_) frames.push_back(static_cast<torch::CapturedTraceback*>(entry.context_.get()));
      out.append(py::make_tuple(static_cast<int>(entry.action_), entry.addr_, entry.size_,
          static_cast<int>(entry.device_), reinterpret_cast<intptr_t>(entry.stream_),
          frames.empty() ? py::list() : torch::py_symbolize(frames).front()));
    }
    return out;
  });
  m.def("share_memory", [](const at::Storage& storage) { return py::bytes(share_memory(storage)); });
  m.def("open_memory", [](const py::bytes& handle, size_t size, int64_t device, int file) {
    return open_memory(handle, size, device, file);
  });
  bind_distributed(m);
}

} // namespace acme
