// ldexp with out=, which may have another dtype, as on CUDA: the CPU's composite fails an internal assertion there.
#include <ATen/native/Resize.h>
#include <ATen/ops/ldexp.h>
#include <torch/library.h>

#include "../native.h"

namespace openreg {
namespace {

at::Tensor& ldexp_out(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  TORCH_CHECK(out.device() == self.device() || self.dim() == 0, "ldexp: out is on ", out.device(), " but self is on ",
      self.device(), "; move one with .to()");
  const at::Tensor result = at::ldexp(self, other); // before out, which may be an argument, changes
  TORCH_CHECK(c10::canCast(result.scalar_type(), out.scalar_type()), "ldexp: result type ", result.scalar_type(),
      " can't be cast to the desired output type ", out.scalar_type());
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("ldexp.out", ldexp_out);
}

} // namespace openreg
