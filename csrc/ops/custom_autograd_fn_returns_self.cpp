// custom_autograd_fn_returns_self: y = x, and dx = 0.5 dy. The output shares x's memory.
// From PyTorch's in-tree OpenReg, where it shows an autograd::Function whose forward returns its input.
#include "ops/autograd.h"

namespace openreg::ops {
namespace {

// See Note [Identity operators].
Tensor custom_autograd_fn_returns_self(const Tensor& input) {
  return at::alias(input);
}

struct ReturnsSelf {
  // If forward returns an input, Function returns a view of it, which can have this node as its grad_fn.
  static Tensor view(const Tensor& input) { return input; }
  static Tensor gradient(const Tensor& grad) { return grad * 0.5; }
};

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
  m.impl("custom_autograd_fn_returns_self",
      autograd_of_view<ReturnsSelf, custom_autograd_fn_returns_self>("openreg::custom_autograd_fn_returns_self"));
}

} // namespace openreg::ops
