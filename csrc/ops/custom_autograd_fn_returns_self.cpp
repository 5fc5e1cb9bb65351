// custom_autograd_fn_returns_self: y = x, and dx = 0.5 dy. The output shares x's memory.
// From PyTorch's in-tree OpenReg, where it shows an autograd::Function whose forward returns its input.
#include "op.h"

#include <ATen/ops/alias.h>

namespace openreg::ops {
namespace {

struct ReturnsSelf : torch::autograd::Function<ReturnsSelf> {
  static constexpr bool is_traceable = true;

  // Function makes a view of an input that forward returns, so that it can have this node as its grad_fn.
  static Tensor forward(AutogradContext*, const Tensor& input) { return input; }

  static variable_list backward(AutogradContext*, const variable_list& grad) { return {grad[0] * 0.5}; }
};

Tensor custom_autograd_fn_returns_self_autograd(const Tensor& input) {
  return ReturnsSelf::apply(input);
}

// Note [Identity operators]
// The autograd kernel never calls the operator again: what it does is made of ATen's views, which
// compilers, functionalization and ADInplaceOrView know, so that writes through the output stay right.
// This kernel runs where autograd is off altogether (inference mode), and as the Functionalize kernel
// keeps the operator, whose output aliases its input, out of functionalized graphs. No kernel touches
// memory, so these are the kernels of every device.
Tensor custom_autograd_fn_returns_self(const Tensor& input) {
  return at::alias(input);
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
