// Python bindings of collectives.
#include "backend/distributed/process_group.h"

#include <torch/csrc/utils/pybind.h>

#include "compat.h"

namespace openreg {

void bind_distributed(py::module_& m) {
  py::class_<DistributedBackend, c10::intrusive_ptr<DistributedBackend>, c10d::Backend>(m, "DistributedBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>())
#if !OPENREG_TORCH_AT_LEAST(2, 15)
      // split_group() copies these, and Gloo's cannot be copied before 2.15; if None, it uses the backend's own.
      .def_property_readonly("options", [](DistributedBackend&) { return py::none(); })
#endif
      // new_group() calls it on the processes outside the group, for NCCL, which must know about each split.
      .def("perform_nocolor_split", [](DistributedBackend&, at::Device) {});
}

} // namespace openreg
