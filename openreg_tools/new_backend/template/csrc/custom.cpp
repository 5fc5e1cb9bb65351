// Three custom operators, one in each style of derivative. torch_acme/meta.py has their fake kernels. Rung 4.
//
// Documents: "Operator Registration", section "Custom Operators"; "Extending dispatcher for a new backend in C++", section
// "Custom operator support".
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "common.h"

namespace acme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Runs f(x, i) for each element i of float32 tensors of one shape.
template <class Function>
at::Tensor map(const char* name, at::TensorList inputs, Function f) {
  for (const at::Tensor& x : inputs)
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.sizes() == inputs[0].sizes(), name,
        ": expected float32 tensors of one shape, but got ", x.scalar_type(), x.sizes(), "; convert them with .to()");
  const at::Tensor a = inputs[0].contiguous(), b = inputs[inputs.size() - 1].contiguous();
  at::Tensor result = at::empty(a.sizes(), a.options());
  launch(native_stream(a), name,
      [f, x = a.const_data_ptr<float>(), y = b.const_data_ptr<float>(), to = result.mutable_data_ptr<float>(),
          n = a.numel()] {
        const float *first = local(x), *last = local(y);
        float* out = local(to);
        for (int64_t i = 0; i < n; ++i) out[i] = f(first[i], last[i]);
      });
  return result;
}

// ---- forward only: asking for a derivative is an error ----

at::Tensor custom_abs(const at::Tensor& x) {
  return map("custom_abs", {x}, [](float x, float) { return std::abs(x); });
}

// ---- a separate operator for the derivative, with a kernel of its own: y = x * sigmoid(x) ----
// torch_acme/meta.py connects the two with torch.library.register_autograd().

float sigmoid(float x) {
  return 1 / (1 + std::exp(-x));
}

at::Tensor swish(const at::Tensor& x) {
  return map("swish", {x}, [](float x, float) { return x * sigmoid(x); });
}

at::Tensor swish_backward(const at::Tensor& grad, const at::Tensor& x) {
  return map("swish_backward", {grad, x}, [](float grad, float x) {
    const float s = sigmoid(x);
    return grad * (s + x * s * (1 - s));
  });
}

// ---- a torch::autograd::Function, whose backward is made of PyTorch's operators: y = scale * x ----

at::Tensor scaled(const at::Tensor& x, double scale) {
  return map("scaled", {x}, [scale](float x, float) { return static_cast<float>(scale) * x; });
}

struct Scaled : torch::autograd::Function<Scaled> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, double scale) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["scale"] = scale;
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("acme::scaled", "").typed<decltype(scaled)>();
    return op.call(x, scale);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
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
