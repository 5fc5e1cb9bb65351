// One kernel of each kind, for built-in operators. Add yours here. Rungs 4 and 6.
//
// Documents: "Extending dispatcher for a new backend in C++", sections "Register kernels for the new backend" (required
// and composite operators) and "Autograd support for the new backend"; "Operator Registration", sections "Basics" and
// "PyTorch STUB"; "Facilitating New Backend Integration by PrivateUse1", section "Register kernels", 1 and 2.
#include <ATen/Dispatch.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/native/UnaryOps.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/abs_native.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/elu_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/selu.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "common.h"

namespace acme {
namespace {

// ---- a required operator: fill_ has no other implementation ----

at::Tensor& fill_scalar(at::Tensor& self, const at::Scalar& value) {
  launch(native_stream(self), "fill_", [x = View(self, true), value] { x.tensor().fill_(value); });
  return self;
}

// ---- an operator through its stub: ATen's abs_out allocates and promotes, and then calls abs_stub ----

void abs_kernel(at::TensorIteratorBase& iter) {
  const View to(iter.tensor_base(0), true), from(iter.tensor_base(1));
  launch(native_stream(iter.device(0).index()), "abs", [to, from] {
    at::Tensor result = to.tensor();
    if (from.dtype == at::kBool) result.copy_(from.tensor()); // which CUDA supports, and the CPU does not
    else at::abs_out(result, from.tensor());
  });
}

// ---- a composite operator with a kernel of its own: PyTorch decomposes selu into elu ----
// The kernel replaces the decomposition, and with it the derivative. So the operator also needs an autograd::Function
// at AutogradPrivateUse1, which is how a backend replaces any of PyTorch's derivatives.

constexpr double kAlpha = 1.6732632423543772848170429916717, kScale = 1.0507009873554804934193349852946;

at::Tensor selu(const at::Tensor& self) {
  return compute("selu", {self}, [](at::Tensor to, const Tensors& x) { at::elu_out(to, x[0], kAlpha, kScale); });
}

struct Selu : torch::autograd::Function<Selu> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& self) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({self});
    return at::selu(self);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors grads) {
    return {at::elu_backward(grads[0], kAlpha, kScale, 1, /*is_result=*/false, context->get_saved_variables()[0])};
  }
};

at::Tensor selu_autograd(const at::Tensor& self) {
  // A C++ Function has no rule for torch.func's transforms and for forward mode. elu has.
  const bool transformed = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
      self._fw_grad(0).defined();
  return transformed ? at::elu(self, kAlpha, kScale) : Selu::apply(self);
}

// ---- random numbers: element i is a function of the seed, the offset and i, so the order of computing is free ----

at::Tensor& uniform(at::Tensor& self, double from, double to, std::optional<at::Generator> generator) {
  TORCH_CHECK(from <= to, "uniform_: expected from <= to, but got ", from, " and ", to);
  if (self.is_complex()) return at::view_as_real(self).uniform_(from, to, generator), self;
  const auto [seed, offset] = reserve(generator, self.device().index(), 4);
  const at::Tensor dense = self.is_contiguous() ? self : at::empty_like(self, at::MemoryFormat::Contiguous);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "uniform_", [&] {
    launch(native_stream(self), "uniform_",
        [=, x = dense.mutable_data_ptr<scalar_t>(), n = dense.numel(), seed = seed, offset = offset] {
          scalar_t* out = local(x);
          for (int64_t i = 0; i < n; ++i) {
            at::Philox4_32 engine(seed, static_cast<uint64_t>(i), offset / 4);
            const uint64_t bits = engine(), more = engine();
            const double unit = static_cast<double>((bits << 32 | more) >> 11) * 0x1p-53; // in [0, 1)
            const auto value = static_cast<scalar_t>(from + unit * (to - from));
            out[i] = static_cast<double>(value) < to ? value : static_cast<scalar_t>(from); // rounded up to `to`
          }
        });
  });
  if (!self.is_same(dense)) self.copy_(dense);
  return self;
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("fill_.Scalar", fill_scalar);
  m.impl("abs.out", TORCH_FN(at::native::abs_out));
  m.impl("selu", selu);
  m.impl("uniform_", uniform);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("selu", selu_autograd);
}

} // namespace acme

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(abs_stub, &acme::abs_kernel)
} // namespace at::native
