// custom_autograd_fn_returns_self: y = x, and dx = 0.5 dy. The output shares x's memory.
// From PyTorch's in-tree OpenReg, where it shows an autograd::Function whose forward returns its input.
#include "op.h"

namespace openreg::ops {
namespace {

// See Note [Identity operators].
Tensor custom_autograd_fn_returns_self(const Tensor& input) {
  return at::alias(input);
}

struct ReturnsSelf : torch::autograd::Function<ReturnsSelf> {
  static constexpr bool is_traceable = true;

  // Function makes a view of an input that forward returns, so that it can have this node as its grad_fn.
  static Tensor forward(AutogradContext*, const Tensor& input) {
    static const auto op = find<decltype(custom_autograd_fn_returns_self)>("openreg::custom_autograd_fn_returns_self");
    return in_outer_transforms(op, input).value_or(input);
  }

  static variable_list backward(AutogradContext*, const variable_list& grad) { return {grad[0] * 0.5}; }
};

Tensor custom_autograd_fn_returns_self_autograd(const Tensor& input) {
  const Tensor y = apply<ReturnsSelf>(without_tangent(input));
  return has_tangent(input) ? with_tangent(y, tangent(input) * 0.5) : y;
}

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.custom_autograd_fn_returns_self");
  m.def("custom_autograd_fn_returns_self(Tensor input) -> Tensor");
}
TORCH_LIBRARY_IMPL(openreg, CompositeExplicitAutograd, m) {
  m.impl("custom_autograd_fn_returns_self", custom_autograd_fn_returns_self);
}
TORCH_LIBRARY_IMPL(openreg, Functionalize, m) {
  m.impl("custom_autograd_fn_returns_self", custom_autograd_fn_returns_self);
}
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("custom_autograd_fn_returns_self", custom_autograd_fn_returns_self_autograd);
}

} // namespace openreg::ops
