// Python bindings of graphs.
#include <Python.h>

#include <frameobject.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "backend/graph.h"
#include "runtime/device.h"
#include "runtime/graph/graph.h"
#include "runtime/process/fork.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

constexpr std::array kNotTheProgram{"/torch/", "/torchinductor_", "<eval_with_key>", "/openreg_ops/", "/openreg_tools/",
    "/_pytest/", "/pluggy/", "/contextlib.py", "/reprlib.py", "/typing_extensions.py"};

// The Python line that the calling thread is executing, outside torch, pytest and our packages; empty on a
// thread that C++ started, such as autograd's.
std::string python_line() {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return {};
  const py::gil_scoped_acquire gil;
  auto frame =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  std::string line;
  while (frame) {
    auto* at = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(at)));
    const auto file = code.attr("co_filename").cast<std::string>();
    line = file + ":" + std::to_string(PyFrame_GetLineNumber(at));
    if (std::none_of(kNotTheProgram.begin(), kNotTheProgram.end(),
            [&](const char* part) { return file.find(part) != std::string::npos; }))
      return line;
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(at)));
  }
  return line;
}

at::GraphCaptureMode mode_of(const std::string& name) {
  if (name == "global" || name == "default") return at::GraphCaptureMode::Global;
  if (name == "thread_local") return at::GraphCaptureMode::ThreadLocal;
  TORCH_CHECK_VALUE(name == "relaxed",
      "capture_begin: expected capture_error_mode \"global\", \"thread_local\" or \"relaxed\", but got \"", name, "\"");
  return at::GraphCaptureMode::Relaxed;
}

// The nodes, for the tools.
py::list nodes_of(const DeviceGraph& graph) {
  py::list nodes;
  const auto captured = graph.graph();
  TORCH_CHECK(captured, "no graph has been captured; capture one first");
  for (const GraphNode& node : captured->nodes) {
    py::list uses;
    for (const MemoryUse& use : node.uses)
      uses.append(py::make_tuple(reinterpret_cast<uintptr_t>(use.address), use.bytes, use.written));
    nodes.append(py::make_tuple(node.site.name ? node.site.name
            : node.site.function               ? node.site.function
                                               : "",
        node.where, py::make_tuple(node.stream.device, node.stream.id), node.after,
        node.declared ? py::object(uses) : py::object(py::none())));
  }
  return nodes;
}

} // namespace

void bind_graphs(py::module_& m) {
  set_where_is_caller(&python_line);
  py::class_<DeviceGraph>(m, "Graph")
      .def(py::init([](bool keep_graph) { return std::make_unique<DeviceGraph>(at::GraphImplArgs{keep_graph}); }),
          py::arg("keep_graph") = false)
      .def(
          "capture_begin",
          [](DeviceGraph& self, std::optional<PoolId> pool, const std::string& mode) {
            self.capture_begin(pool.value_or(PoolId{}), mode_of(mode));
          },
          py::arg("pool") = std::nullopt, py::arg("capture_error_mode") = "global")
      .def("capture_end", torch::wrap_pybind_function([](DeviceGraph& self) { self.capture_end(); }))
      .def("register_generator_state", &DeviceGraph::register_generator_state)
      .def("instantiate", &DeviceGraph::instantiate)
      .def("replay", torch::wrap_pybind_function_no_gil([](DeviceGraph& self) { self.replay(); }))
      .def("reset", &DeviceGraph::reset)
      .def("pool", &DeviceGraph::pool)
      .def("enable_debug_mode", &DeviceGraph::enable_debug_mode)
      .def("debug_dump",
          torch::wrap_pybind_function([](DeviceGraph& self, const std::string& path) { self.debug_dump(path); }))
      .def("_nodes", &nodes_of);
  m.def("is_current_stream_capturing", [] { return !forked() && is_capturing(current_stream(current_device())); });
}

} // namespace openreg
