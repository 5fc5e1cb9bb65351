// custom_autograd_fn_aliasing: y = a view of x, and dx = 0.5 dy.
// From PyTorch's in-tree OpenReg, where it shows an autograd::Function whose forward returns a view.
#include "ops/autograd.h"

namespace openreg::ops {
namespace {

// See Note [Identity operators].
Tensor custom_autograd_fn_aliasing(const Tensor& input) {
  return at::alias(input);
}

struct Aliasing {
  static Tensor view(const Tensor& input) { return at::alias(input); }
  static Tensor gradient(const Tensor& grad) { return grad * 0.5; }
};

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
  m.impl("custom_autograd_fn_aliasing",
      autograd_of_view<Aliasing, custom_autograd_fn_aliasing>("openreg::custom_autograd_fn_aliasing"));
}

} // namespace openreg::ops
