// Three custom operators, one in each style of derivative. torch_acme/meta.py has their fake kernels. Rung 4.
//
// Documents: "Operator Registration", section "Custom Operators"; "Extending dispatcher for a new backend in C++",
// section "Custom operator support".
#include <ATen/ops/abs.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "common.h"

namespace acme {
namespace {

// ---- forward only: asking for a derivative is an error ----

at::Tensor custom_abs(const at::Tensor& x) {
  return compute("custom_abs", {x}, [](at::Tensor to, const Tensors& x) { at::abs_out(to, x[0]); });
}

// ---- a separate operator for the derivative, with a kernel of its own: y = x * sigmoid(x) ----
// torch_acme/meta.py connects the two with torch.library.register_autograd().

at::Tensor swish(const at::Tensor& x) {
  TORCH_CHECK(at::isFloatingType(x.scalar_type()), "swish: expected a float dtype, but got ", x.scalar_type(),
      "; convert x with .to()");
  return compute("swish", {x}, [](at::Tensor to, const Tensors& x) { at::silu_out(to, x[0]); });
}

at::Tensor swish_backward(const at::Tensor& grad, const at::Tensor& x) {
  TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type(),
      "swish_backward: expected grad with the shape and dtype of x");
  return compute(
      "swish_backward", {grad, x}, [](at::Tensor to, const Tensors& x) { to.copy_(at::silu_backward(x[0], x[1])); });
}

// ---- a torch::autograd::Function, whose backward is made of PyTorch's operators: y = scale * x ----

at::Tensor scaled(const at::Tensor& x, double scale) {
  return compute("scaled", {x}, [scale](at::Tensor to, const Tensors& x) { to.copy_(x[0] * scale); });
}

struct Scaled : torch::autograd::Function<Scaled> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double scale) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["scale"] = scale;
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("acme::scaled", "").typed<decltype(scaled)>();
    return op.call(x, scale);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors grads) {
    return {grads[0] * context->saved_data["scale"].toDouble(), at::Tensor()};
  }
};

at::Tensor scaled_autograd(const at::Tensor& x, double scale) {
  return Scaled::apply(x, scale);
}

} // namespace

TORCH_LIBRARY(acme, m) {
  m.set_python_module("torch_acme.meta");
  m.def("custom_abs(Tensor x) -> Tensor");
  m.def("swish(Tensor x) -> Tensor");
  m.def("swish_backward(Tensor grad, Tensor x) -> Tensor");
  m.def("scaled(Tensor x, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(acme, PrivateUse1, m) {
  m.impl("custom_abs", custom_abs);
  m.impl("swish", swish);
  m.impl("swish_backward", swish_backward);
  m.impl("scaled", scaled);
}
TORCH_LIBRARY_IMPL(acme, Autograd, m) {
  m.impl("custom_abs", torch::autograd::autogradNotImplementedFallback());
  m.impl("scaled", scaled_autograd);
}

} // namespace acme
