// Python bindings of graphs, private memory pools, and calls of compiled graphs.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace openreg {

void bind_graphs(pybind11::module_& m);
void bind_compiled_graphs(pybind11::module_& m);

} // namespace openreg
