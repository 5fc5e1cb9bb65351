// custom_abs: y = |x|, forward only; with custom_abs_, in place, and an out= form.
// Supports every dtype and layout that torch.abs does, with its output strides; the modulus of a complex x is real.
// Not differentiable by design: autogradNotImplementedFallback makes backward through it an error on every device;
// torch's default would warn and give partial gradients.
#include "kernels/loops.h"
#include "ops/autograd.h"
#include "ops/checks.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/clone.h>

namespace openreg::ops {
namespace {
using namespace kernels;

template <class T, class Real>
void abs_loop(const T* x, Real* y, int64_t n) {
  if constexpr (c10::is_complex<T>::value) {
    // In float for complex32: the modulus may be in range even if its square is not.
    using Wide = c10::complex<at::opmath_type<Real>>;
    for (int64_t i = 0; i < n; ++i) y[i] = static_cast<Real>(std::abs(Wide(x[i])));
  } else if constexpr (sizeof(T) == 1 && !std::is_integral_v<T>) {
    for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(std::abs(static_cast<float>(x[i])));
  } else if constexpr (std::is_unsigned_v<T>) {
    std::copy_n(x, n, y);
  } else {
    at::vec::map([](auto v) { return v.abs(); }, y, x, n);
  }
}

void check_custom_abs(const char* op, const Tensor& input, const std::optional<Tensor>& out) {
  check_tensor(op, "input", input);
  const auto type = input.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(type != at::kBool && !c10::isBarebonesUnsignedType(type) && !c10::isBitsType(type) &&
          type != at::kFloat8_e8m0fnu && type != at::kFloat4_e2m1fn_x2,
      op, ": not implemented for ", dtype_name(type), "; convert input with .to()");
  if (!out) return;
  check_same_device(op, "input", input, "out", *out);
  const auto real = c10::toRealValueType(type);
  TORCH_CHECK(out->scalar_type() == real, op, ": expected out of ", dtype_name(real),
      ", the dtype of the result, but got ", dtype_name(out->scalar_type()), "; convert it with .to()");
}

void check_custom_abs_(const char* op, const Tensor& input) {
  check_custom_abs(op, input, std::nullopt);
  TORCH_CHECK(!input.is_complex(), op, ": expected input of a real dtype, in which the result is stored, but got ",
      dtype_name(input.scalar_type()), "; use custom_abs");
}

// x is dense, and y, which may be x, has its strides.
void abs_into(const Tensor& x, const Tensor& y) {
  AT_DISPATCH_V2(x.scalar_type(), "custom_abs", AT_WRAP([&] {
    using Real = typename c10::scalar_value_type<scalar_t>::type;
    launch(current_stream(x.get_device()),
        [from = x.const_data_ptr<scalar_t>(), to = y.mutable_data_ptr<Real>(), n = x.numel()] {
          at::parallel_for(
              0, n, kGrain, [&](int64_t begin, int64_t end) { abs_loop(from + begin, to + begin, end - begin); });
        });
  }),
      AT_EXPAND(AT_ALL_TYPES), AT_EXPAND(AT_COMPLEX_TYPES), at::kComplexHalf, at::kHalf, at::kBFloat16,
      at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz);
}

Tensor custom_abs(const Tensor& input) {
  check_custom_abs("custom_abs", input, std::nullopt);
  // Elementwise in memory order: a dense input with any order of dimensions needs no copy.
  const Tensor x = input.is_non_overlapping_and_dense() ? input : input.clone(at::MemoryFormat::Preserve);
  Tensor y = new_like(x, c10::toRealValueType(x.scalar_type()));
  abs_into(x, y);
  return y;
}

Tensor& custom_abs_(Tensor& input) {
  check_custom_abs_("custom_abs_", input);
  at::assert_no_internal_overlap(input);
  if (input.is_non_overlapping_and_dense()) abs_into(input, input);
  else input.copy_(custom_abs(input));
  return input;
}

Tensor& custom_abs_out(const Tensor& input, Tensor& out) {
  check_custom_abs("custom_abs", input, out);
  at::assert_no_internal_overlap(out);
  at::assert_no_partial_overlap(out, input);
  at::native::resize_output(out, input.sizes());
  if (input.is_non_overlapping_and_dense() && input.strides() == out.strides()) abs_into(input, out);
  else out.copy_(custom_abs(input));
  return out;
}

// ---- functionalization ----

// Graphs hold no writes: each form that writes becomes the form that does not, and its result replaces the tensor that
// was written to. Torch does this automatically for an operator that returns nothing, but these return their argument.
Tensor& write_functional(const Tensor& input, Tensor& out) {
  namespace functional = at::functionalization::impl;
  const bool constant = !functional::isFunctionalTensor(out);
  TORCH_CHECK(!constant || !functional::isFunctionalTensor(input),
      "custom_abs: out is a constant of the graph that is being traced, "
      "and input is not; make out inside the traced function, or pass it in");
  functional::sync(input);
  functional::sync(out);
  Tensor result;
  {
    at::AutoDispatchSkipFunctionalize below;
    result = op<custom_abs>().call(functional::from_functional_tensor(input, /*assert_functional=*/false));
    if (constant) return out.copy_(result);
  }
  functional::replace_(out, result);
  functional::commit_update(out);
  functional::sync(out);
  return out;
}

Tensor& custom_abs_functionalize(Tensor& input) {
  check_custom_abs_("custom_abs_", input);
  return write_functional(input, input);
}

Tensor& custom_abs_out_functionalize(const Tensor& input, Tensor& out) {
  check_custom_abs("custom_abs", input, out);
  return write_functional(input, out);
}

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.custom_abs");
  m.def("custom_abs(Tensor input) -> Tensor");
  m.def("custom_abs_(Tensor(a!) input) -> Tensor(a!)");
  m.def("custom_abs.out(Tensor input, *, Tensor(a!) out) -> Tensor(a!)");
  checked_by("custom_abs", check_custom_abs);
  checked_by("custom_abs_", check_custom_abs_);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("custom_abs", custom_abs);
  m.impl("custom_abs_", custom_abs_);
  m.impl("custom_abs.out", custom_abs_out);
}
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("custom_abs", torch::autograd::autogradNotImplementedFallback());
  m.impl("custom_abs_", torch::autograd::autogradNotImplementedFallback());
  m.impl("custom_abs.out", refuse_gradients()); // like torch's own out= forms
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("custom_abs", without_derivative<custom_abs>("openreg::custom_abs"));
}
TORCH_LIBRARY_IMPL(openreg, ADInplaceOrView, m) {
  m.impl("custom_abs_", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
  m.impl("custom_abs.out", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
}
TORCH_LIBRARY_IMPL(openreg, Functionalize, m) {
  m.impl("custom_abs_", custom_abs_functionalize);
  m.impl("custom_abs.out", custom_abs_out_functionalize);
}

} // namespace openreg::ops
