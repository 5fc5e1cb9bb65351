// Overrides PyTorch's autograd for a built-in operator, as PyTorch's documents do with selu: a
// torch::autograd::Function at AutogradPrivateUse1, the inference kernel at PrivateUse1.
#include <ATen/ops/elu.h>
#include <ATen/ops/elu_backward.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "backend/identity/identity.h"

namespace openreg {
namespace {

constexpr double kAlpha = 1.6732632423543772848170429916717, kScale = 1.0507009873554804934193349852946;

// Inference: at::elu is one native kernel.
at::Tensor selu_inference(const at::Tensor& self) {
  return at::elu(self, kAlpha, kScale);
}

struct Selu : torch::autograd::Function<Selu> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& self) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({self});
    return selu_inference(self);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    // Computed from the input, not the result: near -scale*alpha a half-precision result has lost its digits.
    // elu_backward is differentiable, so this is twice differentiable.
    return {at::elu_backward(grads[0], kAlpha, kScale, 1.0, /*is_result=*/false, ctx->get_saved_variables()[0])};
  }
};

// A C++ autograd::Function has no rule for functional transforms or forward mode; at::elu has.
bool transformed(const at::Tensor& self) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
      self._fw_grad(0).defined();
}

at::Tensor selu_autograd(const at::Tensor& self) {
  return transformed(self) ? selu_inference(self) : Selu::apply(self);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("selu", selu_inference);
}
OPENREG_LIBRARY_IMPL(aten, autograd, m) {
  m.impl("selu", selu_autograd);
}

} // namespace openreg
