// quantize_rowwise: q = round(x / scale), scale = max(|x|) / 127, for each row of the last dimension, and
// dequantize_rowwise: q * scale. Symmetric int8 quantization; Dettmers et al. 2022, arXiv:2208.07339, section 2.
// Forward only: rounding has no useful derivative.
#include "kernels/byte_vectors.h"
#include "ops/autograd.h"
#include "ops/checks.h"

#include <cmath>

namespace openreg::ops {
namespace {
using namespace kernels;

// One row of n elements; returns scale.
template <class T>
float quantize_row(const T* x, int8_t* q, int64_t n) {
  constexpr int64_t lanes = kLanes<T>;
  const auto scale = static_cast<float>(max_of(x, n, [](Vec<T> x) { return x.abs(); }, 0) / 127);
  if (!(scale > 0) || std::isinf(scale)) {
    std::fill_n(q, n, int8_t{0});
    return scale;
  }
  const Vec<T> step(static_cast<Acc<T>>(scale)), most(127), least(-127);
  const auto quantized = [=](Vec<T> x) { return at::vec::clamp(x / step, least, most); };
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) write_bytes<T>(quantized(read(x + i)), q + i);
  if (i < n)
    on_copies<lanes>(n - i, [&](const T* x, int8_t* q) { write_bytes<T>(quantized(read(x)), q); }, x + i, q + i);
  return scale;
}

// One row of n elements.
template <class T>
void dequantize_row(const int8_t* q, float scale, T* y, int64_t n) {
  constexpr int64_t chunk = kChunk<T>, lanes = kLanes<T>;
  const Vec<T> step(static_cast<Acc<T>>(scale));
  const auto one_chunk = [&](const int8_t* q, T* y) {
    Vec<T> out[chunk / lanes];
    for (int64_t k = 0; k < chunk / lanes; ++k) out[k] = read_bytes<T>(q + k * lanes) * step;
    write(out, y);
  };
  int64_t i = 0;
  for (; i + chunk <= n; i += chunk) one_chunk(q + i, y + i);
  if (i < n) on_copies<chunk>(n - i, one_chunk, q + i, y + i);
}

void check_quantize_rowwise(const char* op, const Tensor& x) {
  check_floating(op, "x", x);
  check_rows(op, "x", x);
}

std::tuple<Tensor, Tensor> quantize_rowwise(const Tensor& x_) {
  constexpr const char* op = "quantize_rowwise";
  check_quantize_rowwise(op, x_);
  const Tensor x = x_.contiguous();
  Tensor q = at::empty(x.sizes(), x.options().dtype(at::kChar));
  Tensor scale = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), op, [&] {
    using T = scalar_t;
    launch(current_stream(x.get_device()),
        [n = x.size(-1), rows = scale.numel(), x = x.const_data_ptr<T>(), q = q.mutable_data_ptr<int8_t>(),
            scale = scale.mutable_data_ptr<float>()] {
          parallel_each(rows, n, [&](int64_t i) { scale[i] = quantize_row(x + i * n, q + i * n, n); });
        });
  });
  return {q, scale};
}

void check_dequantize_rowwise(
    const char* op, const Tensor& q, const Tensor& scale, std::optional<at::ScalarType> dtype) {
  check_tensor(op, "q", q);
  TORCH_CHECK(q.scalar_type() == at::kChar, op, ": expected q of int8, but got ", dtype_name(q.scalar_type()),
      "; make it with quantize_rowwise");
  check_rows(op, "q", q);
  check_same_device(op, "q", q, "scale", scale);
  check_dtype(op, "scale", scale, at::kFloat, "its quantize_rowwise output");
  check_shape(op, "scale", scale, rows_of(q), "the same as q without its last dimension");
  TORCH_CHECK(!dtype || is_floating(*dtype), op,
      ": expected dtype to be float32, float64, float16 or bfloat16, but got ", dtype_name(*dtype),
      "; convert the result with .to()");
}

Tensor dequantize_rowwise(const Tensor& q_, const Tensor& scale_, std::optional<at::ScalarType> dtype) {
  constexpr const char* op = "dequantize_rowwise";
  check_dequantize_rowwise(op, q_, scale_, dtype);
  const auto type = dtype.value_or(at::kFloat);
  const Tensor q = q_.contiguous(), scale = scale_.contiguous();
  Tensor y = at::empty(q.sizes(), q.options().dtype(type));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, op, [&] {
    using T = scalar_t;
    launch(current_stream(q.get_device()),
        [n = q.size(-1), rows = scale.numel(), q = q.const_data_ptr<int8_t>(), scale = scale.const_data_ptr<float>(),
            y = y.mutable_data_ptr<T>()] {
          parallel_each(rows, n, [&](int64_t i) { dequantize_row(q + i * n, scale[i], y + i * n, n); });
        });
  });
  return y;
}

// PyTorch converts a dtype to a Python object through an unchecked table, so an invalid dtype number must not reach the
// references in meta/.
Tensor known_dtype(
    c10::DispatchKeySet keys, const Tensor& q, const Tensor& scale, std::optional<at::ScalarType> dtype) {
  const int number = static_cast<int>(dtype.value_or(at::kFloat));
  TORCH_CHECK(number >= 0 && number < static_cast<int>(at::ScalarType::Undefined),
      "dequantize_rowwise: expected dtype to be float32, float64, float16 or bfloat16, but got ", number,
      ", which is not a dtype");
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  return op<dequantize_rowwise>("openreg::dequantize_rowwise").redispatch(keys & below, q, scale, dtype);
}

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.quantize_rowwise");
  m.def("quantize_rowwise(Tensor x) -> (Tensor q, Tensor scale)");
  m.def("dequantize_rowwise(Tensor q, Tensor scale, *, ScalarType? dtype=None) -> Tensor");
  checked_by("quantize_rowwise", check_quantize_rowwise);
  checked_by("dequantize_rowwise", check_dequantize_rowwise);
  autocast(m, "dequantize_rowwise", Cast::kFloat32); // of the scale
}
TORCH_LIBRARY_IMPL(openreg, BackendSelect, m) {
  m.impl("dequantize_rowwise", known_dtype);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("quantize_rowwise", quantize_rowwise);
  m.impl("dequantize_rowwise", dequantize_rowwise);
}
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("quantize_rowwise", torch::autograd::autogradNotImplementedFallback());
  m.impl("dequantize_rowwise", torch::autograd::autogradNotImplementedFallback());
}

} // namespace openreg::ops
