// Bindings for the end of the process.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace openreg {
void bind_exit(pybind11::module_& m);
} // namespace openreg
