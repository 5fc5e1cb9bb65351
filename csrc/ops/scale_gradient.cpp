// scale_gradient: y = a view of x, and dx = scale * dy; with scale -1 the gradient reversal layer.
// Ganin & Lempitsky 2015, arXiv:1409.7495.
#include "op.h"

namespace openreg::ops {
namespace {

// See Note [Identity operators].
Tensor scale_gradient(const Tensor& x, double) {
  return at::alias(x);
}

struct ScaleGradient : torch::autograd::Function<ScaleGradient> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, double scale) {
    ctx->saved_data["scale"] = scale;
    static const auto op = find<decltype(scale_gradient)>("openreg::scale_gradient");
    if (auto y = in_outer_transforms(op, x, scale)) return *y;
    return at::alias(x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad) {
    return {grad[0] * ctx->saved_data["scale"].toDouble(), Tensor()};
  }
};

Tensor scale_gradient_autograd(const Tensor& x, double scale) {
  const Tensor y = apply<ScaleGradient>(without_tangent(x), scale);
  return has_tangent(x) ? with_tangent(y, tangent(x) * scale) : y;
}

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
  m.impl("scale_gradient", scale_gradient_autograd);
}

} // namespace openreg::ops
