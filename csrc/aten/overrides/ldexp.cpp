// ldexp with out=, which may have another dtype, as on CUDA: the CPU's composite fails an internal assertion there.
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/ldexp.h>
#include <torch/library.h>

#include "aten/traits/wider_dtypes.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

at::Tensor& ldexp_out(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  // Every elementwise operator checks this.
  at::assert_no_internal_overlap(out);
  if (!out.is_same(self)) at::assert_no_partial_overlap(out, self);
  const at::Tensor result = at::ldexp(self, other); // before out, which may be an argument, changes
  TORCH_CHECK(out.device() == result.device(), "ldexp: out is on ", out.device(), " but the arguments are on ",
      result.device(), "; move one with .to()");
  TORCH_CHECK(!out.is_same(self) || out.sizes() == result.sizes(), "output with shape ", out.sizes(),
      " doesn't match the broadcast shape ", result.sizes());
  return write_out("ldexp", result, out);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("ldexp.out", ldexp_out);
}

} // namespace openreg
