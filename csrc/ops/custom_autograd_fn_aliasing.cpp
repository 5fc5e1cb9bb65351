// custom_autograd_fn_aliasing: y = a view of x, and dx = 0.5 dy.
// From PyTorch's in-tree OpenReg, where it shows an autograd::Function whose forward returns a view.
#include "op.h"

namespace openreg::ops {
namespace {

// See Note [Identity operators].
Tensor custom_autograd_fn_aliasing(const Tensor& input) {
  return at::alias(input);
}

struct Aliasing : torch::autograd::Function<Aliasing> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext*, const Tensor& input) {
    static const auto op = find<decltype(custom_autograd_fn_aliasing)>("openreg::custom_autograd_fn_aliasing");
    if (auto y = in_outer_transforms(op, input)) return *y;
    return at::alias(input);
  }

  static variable_list backward(AutogradContext*, const variable_list& grad) { return {grad[0] * 0.5}; }
};

Tensor custom_autograd_fn_aliasing_autograd(const Tensor& input) {
  const Tensor y = apply<Aliasing>(without_tangent(input));
  return has_tangent(input) ? with_tangent(y, tangent(input) * 0.5) : y;
}

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.custom_autograd_fn_aliasing");
  m.def("custom_autograd_fn_aliasing(Tensor(a) input) -> Tensor(a)");
}
TORCH_LIBRARY_IMPL(openreg, CompositeExplicitAutograd, m) {
  m.impl("custom_autograd_fn_aliasing", custom_autograd_fn_aliasing);
}
TORCH_LIBRARY_IMPL(openreg, Functionalize, m) {
  m.impl("custom_autograd_fn_aliasing", custom_autograd_fn_aliasing);
}
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("custom_autograd_fn_aliasing", custom_autograd_fn_aliasing_autograd);
}

} // namespace openreg::ops
