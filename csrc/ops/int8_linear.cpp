// int8_linear: y = x @ (weight_q * weight_scale).T + bias, with the rows of x quantized to int8 first, so that it
// multiplies int8 numbers and sums them in int32. Dettmers et al. 2022, arXiv:2208.07339, section 2.
// The matrix product is ATen's _int_mm, for which oneDNN uses the processor's int8 instructions. oneDNN's kernel for
// blocks (at::native::cpublas::brgemm) was at most 1.06 times as fast on an AMD EPYC (Zen 5, VNNI, no AMX).
#include "kernels/loops.h"
#include "ops/autograd.h"
#include "ops/checks.h"

#include <ATen/ops/_int_mm.h>

namespace openreg::ops {
namespace {
using namespace kernels;

// |q| <= 127 and |weight_q| <= 128: the sum of more products could exceed 2^31.
constexpr int64_t kMostColumns = 132104;

// y = total * scale * weight_scale + bias for one row of n elements; no bias if it is null.
template <class T>
void scale_row(const int32_t* total, float scale, const Acc<T>* weight_scale, const Acc<T>* bias, T* y, int64_t n) {
  constexpr int64_t chunk = kChunk<T>, lanes = kLanes<T>;
  const auto s = static_cast<Acc<T>>(scale);
  int64_t i = 0;
  for (; i + chunk <= n; i += chunk) {
    Vec<T> out[chunk / lanes];
    for (int64_t k = 0; k < chunk / lanes; ++k) {
      const int64_t at = i + k * lanes;
      Acc<T> sums[lanes];
      std::copy_n(total + at, lanes, sums);
      out[k] = Vec<T>::loadu(sums) * Vec<T>(s) * Vec<T>::loadu(weight_scale + at);
      if (bias) out[k] = out[k] + Vec<T>::loadu(bias + at);
    }
    write(out, y + i);
  }
  for (; i < n; ++i) {
    const Acc<T> value = static_cast<Acc<T>>(total[i]) * s * weight_scale[i];
    y[i] = static_cast<T>(bias ? value + bias[i] : value);
  }
}

void check_int8_linear(const char* op, const Tensor& x, const Tensor& weight_q, const Tensor& weight_scale,
    const std::optional<Tensor>& bias) {
  check_floating(op, "x", x);
  check_rows(op, "x", x);
  check_same_device(op, "x", x, "weight_q", weight_q);
  TORCH_CHECK(weight_q.scalar_type() == at::kChar, op, ": expected weight_q of int8, but got ",
      dtype_name(weight_q.scalar_type()), "; make it with quantize_rowwise");
  const SymInt columns = x.sym_size(-1);
  TORCH_CHECK(weight_q.dim() == 2 && expect(weight_q.sym_size(1).sym_eq(columns)), op,
      ": expected weight_q of shape [N, ", columns, "], with the last dimension of x, but got ", weight_q.sym_sizes());
  TORCH_SYM_CHECK(columns.sym_le(kMostColumns), op, ": expected at most ", kMostColumns, " columns, but got ", columns,
      ", whose sums could leave int32; split x and weight_q");
  check_same_device(op, "x", x, "weight_scale", weight_scale);
  check_dtype(op, "weight_scale", weight_scale, at::kFloat, "a scale of quantize_rowwise");
  check_shape(op, "weight_scale", weight_scale, weight_q.sym_sizes().slice(0, 1), "the rows of weight_q");
  if (!bias) return;
  check_same_device(op, "x", x, "bias", *bias);
  if (bias->scalar_type() != at::kFloat) check_dtype(op, "bias", *bias, x.scalar_type(), "x");
  check_shape(op, "bias", *bias, weight_q.sym_sizes().slice(0, 1), "the rows of weight_q");
}

Tensor int8_linear(
    const Tensor& x, const Tensor& weight_q, const Tensor& weight_scale_, const std::optional<Tensor>& bias_) {
  static const auto quantize = find<std::tuple<Tensor, Tensor>(const Tensor&)>("openreg::quantize_rowwise");
  check_int8_linear("int8_linear", x, weight_q, weight_scale_, bias_);
  const int64_t columns = x.size(-1), n = weight_q.size(0);
  at::DimVector shape(x.sizes());
  shape.back() = n;
  Tensor y = at::empty(shape, x.options());
  const int64_t rows = n ? y.numel() / n : 0;
  if (rows == 0) return y;
  auto [q, scale_] = quantize.call(x.reshape({rows, columns}));
  const Tensor scale = std::move(scale_);
  const auto wide = at::toOpMathType(x.scalar_type());
  // _int_mm (torch 2.13) mishandles strides that do not belong to a matrix, such as the strides of an expanded weight
  // and the (1, 1) of a transposed column, so it never gets any.
  const Tensor weight = weight_q.contiguous(), columns_first = columns == 1 ? weight.view({1, n}) : weight.t();
  const Tensor total = at::_int_mm(q, columns_first), weight_scale = weight_scale_.to(wide).contiguous(),
               bias = bias_ ? bias_->to(wide).contiguous() : Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "int8_linear", [&] {
    using T = scalar_t;
    launch(current_stream(x.get_device()),
        [=, total = total.const_data_ptr<int32_t>(), scale = scale.const_data_ptr<float>(),
            weight_scale = weight_scale.const_data_ptr<Acc<T>>(),
            bias = bias.defined() ? bias.const_data_ptr<Acc<T>>() : nullptr, y = y.mutable_data_ptr<T>()] {
          parallel_each(
              rows, n, [&](int64_t i) { scale_row(total + i * n, scale[i], weight_scale, bias, y + i * n, n); });
        });
  });
  return y;
}

// Autocast leaves x, and therefore the result, alone; scales and bias are used in float32.
Tensor int8_linear_autocast(
    const Tensor& x, const Tensor& weight_q, const Tensor& weight_scale, const std::optional<Tensor>& bias) {
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  const auto wide = [](const Tensor& x) { return c10::isReducedFloatingType(x.scalar_type()) ? x.to(at::kFloat) : x; };
  return op<int8_linear>("openreg::int8_linear")
      .call(x, weight_q, wide(weight_scale), bias ? std::optional(wide(*bias)) : bias);
}

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.int8_linear");
  m.def("int8_linear(Tensor x, Tensor weight_q, Tensor weight_scale, Tensor? bias=None) -> Tensor");
  checked_by("int8_linear", check_int8_linear);
  autocast(m, "int8_linear", int8_linear_autocast);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("int8_linear", int8_linear);
}
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("int8_linear", torch::autograd::autogradNotImplementedFallback());
}

} // namespace openreg::ops
