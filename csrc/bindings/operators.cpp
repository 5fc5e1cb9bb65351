// Python bindings of operators: their kernels, the fallback, and checks of arguments.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <set>
#include <string>
#include <unordered_map>

#include "aten/autograd_fallback.h"
#include "aten/boxed.h"
#include "aten/fallback.h"
#include "aten/kernel_kind.h"
#include "aten/meta_kernels.h"
#include "aten/traits/host_scalars.h"
#include "backend/new_tensor.h"
#include "backend/serialization.h"
#include "ops/checks.h"

// From torch/csrc/jit/python/pybind_utils.h, which takes three seconds to compile.
namespace torch::jit {
TORCH_PYTHON_API c10::IValue toIValue(py::handle object, const c10::TypePtr& type, std::optional<int32_t> size);
} // namespace torch::jit

namespace openreg {
namespace {

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
  return THPVariable_Wrap(empty_strided_on(index, size, stride, reinterpret_cast<THPDtype*>(args[2])->scalar_type));
  END_HANDLE_TH_ERRORS
}
PyMethodDef empty_strided_method = {
    "empty_strided", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&empty_strided)), METH_FASTCALL, nullptr};

// The operators' checks, by name: see csrc/ops/checks.h.
std::unordered_map<std::string, ops::Check>& checks() {
  static auto* all = new std::unordered_map<std::string, ops::Check>;
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
  using Named = std::pair<const std::string, ops::Check>;
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

void ops::add_check(const char* op, Check check) {
  checks().insert_or_assign(op, std::move(check));
}

void bind_operators(py::module_& m) {
  m.def("register_boxed_kernels", &register_boxed_kernels);
  m.def("kernel_kind", &kernel_kind);
  m.def("set_python_meta_kernels", &set_python_meta_kernels);
  m.def("set_host_scalars", &set_host_scalars);
  m.def("route_operator", &route_operator);
  m.def("set_fallback_policy", &set_fallback_policy);
  set_fallback_warning([](const std::string& message) {
    py::gil_scoped_acquire gil;
    if (PyErr_WarnEx(PyExc_UserWarning, message.c_str(), 1) < 0) throw py::error_already_set();
  });
  m.def("set_missing_reasons", &set_missing_reasons);
  m.def("fallback_decision", [](const std::string& name, const std::string& overload) {
    const auto decision =
        fallback_decision(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
    return std::pair(decision.runs, decision.why);
  });
  m.def("fallback_report", [] {
    std::vector<std::tuple<std::string, uint64_t, uint64_t, uint64_t>> rows;
    for (auto& row : fallback_report()) rows.emplace_back(row.name, row.calls, row.bytes, row.nanoseconds);
    return rows;
  });
  m.def("reset_fallback_report", &reset_fallback_report);
  m.def("set_autograd_fallback", &set_autograd_fallback);
  // An operator's check, a function of its arguments; None if it has none.
  m.def("check_of", [](const std::string& op) -> py::object {
    const auto found = checks().find(op);
    if (found == checks().end()) return py::none();
    const py::capsule self(&*found);
    return py::reinterpret_steal<py::object>(PyCFunction_New(&check_method, self.ptr()));
  });
  m.attr("empty_strided") = py::reinterpret_steal<py::object>(PyCFunction_New(&empty_strided_method, nullptr));
  m.def("copy_metadata", &copy_metadata);
}

} // namespace openreg
