// custom_abs: y = |x|, forward only.
// Every dtype and layout that torch.abs takes, with its output strides; the modulus of a complex x is real.
// Not differentiable by design: autogradNotImplementedFallback makes backward through it an error, on
// every device, where torch's default would warn and give partial gradients.
#include "op.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/ops/clone.h>

namespace openreg::ops {
namespace {

template <class T, class Real>
void abs_loop(const T* x, Real* y, int64_t n) {
  if constexpr (c10::is_complex<T>::value) {
    // In float for complex32: the modulus may be in range where its square is not.
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

Tensor custom_abs(const Tensor& input) {
  const auto type = input.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(type != at::kBool && !c10::isBarebonesUnsignedType(type) && !c10::isBitsType(type) &&
          type != at::kFloat8_e8m0fnu && type != at::kFloat4_e2m1fn_x2,
      "custom_abs: not implemented for ", dtype_name(type), "; convert input with .to()");
  // Elementwise over memory as it lies: a dense input of any order of dimensions needs no copy.
  const Tensor x = input.is_non_overlapping_and_dense() ? input : input.clone(at::MemoryFormat::Preserve);
  Tensor y = at::empty_like(x, x.options().dtype(c10::toRealValueType(type)));
  AT_DISPATCH_V2(type, "custom_abs", AT_WRAP([&] {
    using Real = typename c10::scalar_value_type<scalar_t>::type;
    launch(current_stream(x.get_device()),
        [from = x.const_data_ptr<scalar_t>(), to = y.mutable_data_ptr<Real>(), n = x.numel()] {
          at::parallel_for(
              0, n, kGrain, [&](int64_t begin, int64_t end) { abs_loop(from + begin, to + begin, end - begin); });
        });
  }),
      AT_EXPAND(AT_ALL_TYPES), AT_EXPAND(AT_COMPLEX_TYPES), at::kComplexHalf, at::kHalf, at::kBFloat16,
      at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz);
  return y;
}

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.custom_abs");
  m.def("custom_abs(Tensor input) -> Tensor");
}
TORCH_LIBRARY_IMPL(openreg, PrivateUse1, m) {
  m.impl("custom_abs", custom_abs);
}
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("custom_abs", torch::autograd::autogradNotImplementedFallback());
}

} // namespace openreg::ops
