// Python bindings of calls of compiled graphs.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace openreg {

void bind_compiled_graphs(pybind11::module_& m);

} // namespace openreg
