// Python bindings of graphs and private memory pools.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace openreg {

void bind_graphs(pybind11::module_& m);

} // namespace openreg
