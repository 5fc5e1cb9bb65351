// The check that a sparse tensor's indices are coalesced. PyTorch calls it, and this stub, without the dispatcher; its
// headers do not declare the stub.
#include <ATen/native/DispatchStub.h>

#include "aten/cpu_call.h"
#include "backend/identity/identity.h"

namespace at::native {
DECLARE_DISPATCH(at::Tensor (*)(const at::Tensor&, at::IntArrayRef), flatten_indices_stub)
} // namespace at::native

namespace openreg {
namespace {

at::Tensor flatten_indices(const at::Tensor& indices, at::IntArrayRef size) {
  CpuCall call("flatten_indices");
  const auto& alias = call.alias(indices);
  return call.result(call.run([&] { return at::native::flatten_indices_stub(at::kCPU, alias, size); }));
}

[[maybe_unused]] const bool flatten_indices_registered =
    register_stub(at::native::flatten_indices_stub, &flatten_indices);

} // namespace
} // namespace openreg
