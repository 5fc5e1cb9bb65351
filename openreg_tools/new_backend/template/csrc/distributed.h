// torch.distributed on the device. Rung 11.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace acme {

void bind_distributed(py::module_& m);

} // namespace acme
