// scale_gradient: y = a view of x, and dx = scale * dy; with scale -1 the gradient reversal layer.
// Ganin & Lempitsky 2015, arXiv:1409.7495.
#include "ops/autograd.h"

namespace openreg::ops {
namespace {

// See Note [Identity operators].
Tensor scale_gradient(const Tensor& x, double) {
  return at::alias(x);
}

struct ScaleGradient {
  static Tensor view(const Tensor& x) { return at::alias(x); }
  static Tensor gradient(const Tensor& grad, double scale) { return grad * scale; }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.scale_gradient");
  m.def("scale_gradient(Tensor(a) x, float scale) -> Tensor(a)");
}
TORCH_LIBRARY_IMPL(openreg, CompositeExplicitAutograd, m) {
  m.impl("scale_gradient", scale_gradient);
}
TORCH_LIBRARY_IMPL(openreg, Functionalize, m) {
  m.impl("scale_gradient", scale_gradient);
}
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("scale_gradient", autograd_of_view<ScaleGradient, scale_gradient>("openreg::scale_gradient"));
}

} // namespace openreg::ops
