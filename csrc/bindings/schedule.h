// Python bindings of orders, for openreg_ops/openreg/schedules.py.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace openreg {

void bind_schedules(pybind11::module_& m);

} // namespace openreg
