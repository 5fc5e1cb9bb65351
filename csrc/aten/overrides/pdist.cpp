// The gradient of the distances between rows, of which there may be none. The CPU's kernel divides by their number.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_pdist_backward_ops.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../native.h"

namespace openreg {
namespace {

at::Tensor pdist_backward(const at::Tensor& grad, const at::Tensor& self, double p, const at::Tensor& pdist) {
  if (self.numel() == 0 && grad.numel() == 0) return at::empty_like(self, at::MemoryFormat::Contiguous);
  return detail::call_boxed<at::_ops::_pdist_backward>(grad, self, p, pdist);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_pdist_backward", pdist_backward);
}

} // namespace openreg
