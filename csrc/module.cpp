// Python bindings: what openreg_ops needs of C++ that torch does not offer already.
#include <torch/extension.h>

#include "aten/autograd_fallback.h"
#include "aten/fallback.h"
#include "aten/native.h"
#include "backend/generator.h"
#include "runtime/device.h"
#include "runtime/memory.h"
#include "runtime/stream.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("native_kernels") = openreg::register_native_kernels();
  m.def("device_count", &openreg::device_count);
  m.def("device_memory", &openreg::device_memory);
  m.def("current_device", &openreg::current_device);
  m.def("exchange_device", [](int device) {
    return openreg::exchange_device(openreg::checked_index(static_cast<c10::DeviceIndex>(device)));
  });
  m.def("checked_index", [](int device) {
    return static_cast<int>(openreg::checked_index(static_cast<c10::DeviceIndex>(device)));
  });
  m.def("default_generator", [](int device) { return openreg::default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("launch_count", &openreg::launch_count);
  m.def("set_fallback_policy", &openreg::set_fallback_policy);
  openreg::set_fallback_warning([](const std::string& message) {
    py::gil_scoped_acquire gil;
    if (PyErr_WarnEx(PyExc_UserWarning, message.c_str(), 1) < 0) throw py::error_already_set();
  });
  m.def("fallback_report", [] {
    std::vector<std::tuple<std::string, uint64_t, uint64_t, uint64_t>> rows;
    for (auto& r : openreg::fallback_report()) rows.emplace_back(r.name, r.calls, r.bytes, r.nanoseconds);
    return rows;
  });
  m.def("reset_fallback_report", &openreg::reset_fallback_report);
  m.def("route_operator", &openreg::route_operator);
  m.def("set_autograd_fallback", &openreg::set_autograd_fallback);
  m.def("set_poison", &openreg::set_poison);
  m.def("poison", &openreg::poison);
}
