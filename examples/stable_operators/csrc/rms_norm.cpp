// rms_norm: y = x * rstd * weight, rstd = (mean(x^2) + eps)^(-1/2), over the last dimension.
// Zhang & Sennrich 2019, arXiv:1910.07467.
// rstd is an output so that backward does not have to recompute it. The derivatives, the fake kernels and everything
// else are in src/stable_operators/rms_norm.py.
#include "kernels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

namespace stable_operators {
namespace {

// f(0) + … + f(n - 1) in double, in four sums, because an addition takes four cycles.
template <class F>
double sum(int64_t n, F f) {
  double part[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int64_t k = 0; k < 4; ++k) part[k] += static_cast<double>(f(i + k));
  for (; i < n; ++i) part[0] += static_cast<double>(f(i));
  return (part[0] + part[1]) + (part[2] + part[3]);
}

// One row of n elements; returns rstd.
template <class T>
Wide<T> rms_norm_row(const T* x, const T* weight, T* y, int64_t n, double eps) {
  using W = Wide<T>;
  const double mean = sum(n, [x](int64_t i) { return W(x[i]) * W(x[i]); }) / static_cast<double>(n);
  const auto rstd = static_cast<W>(1 / std::sqrt(mean + eps));
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(W(x[i]) * rstd * W(weight[i]));
  return rstd;
}

// dx = rstd * g - x * rstd^3 * mean(g * x) with g = dy * weight, for one row; adds dy * x * rstd to grad_weight.
template <class T>
void rms_norm_backward_row(
    const T* grad_y, const T* x, const T* weight, Wide<T> rstd, T* grad_x, Wide<T>* grad_weight, int64_t n) {
  using W = Wide<T>;
  const double mean = sum(n, [=](int64_t i) { return W(grad_y[i]) * W(weight[i]) * W(x[i]); }) / static_cast<double>(n);
  const auto c = static_cast<W>(mean * rstd * rstd * rstd);
  for (int64_t i = 0; i < n; ++i) {
    const W g = grad_y[i], xi = x[i];
    grad_x[i] = static_cast<T>(rstd * g * W(weight[i]) - c * xi);
    grad_weight[i] += g * xi * rstd;
  }
}

Kind check_row(const char* op, const Tensor& x, const Tensor& weight) {
  const Kind kind = check_floating(op, "x", x);
  if (x.dim() == 0) fail(op, ": expected x of at least one dimension, but got a scalar; use x.unsqueeze(0)");
  check_kind(op, "weight", weight, kind.dtype, "x", "x", kind);
  check_shape(op, "weight", weight, x.sizes().slice(x.dim() - 1, 1), "the last dimension of x");
  return kind;
}

// rstd has a number for each row of x.
Sizes rows_of(const Tensor& x) {
  return x.sizes().slice(0, x.dim() - 1);
}

std::tuple<Tensor, Tensor> rms_norm(Tensor x, Tensor weight, double eps) {
  const Kind kind = check_row("rms_norm", x, weight);
  make_contiguous(x, weight);
  Tensor y = memory(x.sizes(), kind.dtype, kind), rstd = memory(rows_of(x), wide_dtype(kind.dtype), kind);
  dispatch(kind, [&]<class T>(T*) {
    run(kind, "stable_operators::rms_norm",
        [=, n = weight.numel(), rows = rstd.numel(), x = x.read<T>(), w = weight.read<T>(), y = y.write<T>(),
            r = rstd.write<Wide<T>>()] {
          parallel(rows, n, [=](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) r[i] = rms_norm_row(x + i * n, w, y + i * n, n, eps);
          });
        });
  });
  return {std::move(y), std::move(rstd)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor rstd) {
  constexpr const char* op = "rms_norm_backward";
  const Kind kind = check_row(op, x, weight);
  check_like(op, "grad_y", grad_y, "x", x, kind);
  check_kind(op, "rstd", rstd, wide_dtype(kind.dtype), "its rms_norm output", "x", kind);
  check_shape(op, "rstd", rstd, rows_of(x), "the same as x without its last dimension");

  make_contiguous(grad_y, x, weight, rstd);
  Tensor grad_x = memory(x.sizes(), kind.dtype, kind), grad_weight = memory(weight.sizes(), kind.dtype, kind);
  // Rows go to a fixed number of parts, each with its own sum, so that grad_weight does not depend on the number
  // of threads.
  const int64_t n = weight.numel(), rows = rstd.numel(), parts = std::min<int64_t>(rows, 32);
  const std::array<int64_t, 2> shape = {parts, n};
  Tensor partial = memory(Sizes(shape.data(), shape.size()), wide_dtype(kind.dtype), kind);
  dispatch(kind, [&]<class T>(T*) {
    run(kind, "stable_operators::rms_norm_backward",
        [=, g = grad_y.read<T>(), x = x.read<T>(), w = weight.read<T>(), r = rstd.read<Wide<T>>(),
            dx = grad_x.write<T>(), dw = grad_weight.write<T>(), sums = partial.write<Wide<T>>()] {
          parallel(parts, n * rows / (parts + 1), [=](int64_t begin, int64_t end) {
            for (int64_t p = begin; p < end; ++p) {
              std::fill_n(sums + p * n, n, Wide<T>(0));
              for (int64_t i = p * rows / parts; i < (p + 1) * rows / parts; ++i)
                rms_norm_backward_row(g + i * n, x + i * n, w, r[i], dx + i * n, sums + p * n, n);
            }
          });
          parallel(n, parts, [=](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i)
              dw[i] = static_cast<T>(sum(parts, [=](int64_t p) { return sums[p * n + i]; }));
          });
        });
  });
  return {std::move(grad_x), std::move(grad_weight)};
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(stable_operators, m) {
  m.set_python_module("stable_operators.registration");
  m.def("rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor rstd) -> (Tensor grad_x, Tensor grad_weight)");
}
STABLE_TORCH_LIBRARY_IMPL(stable_operators, CPU, m) {
  m.impl("rms_norm", boxed<rms_norm>);
  m.impl("rms_norm_backward", boxed<rms_norm_backward>);
}
STABLE_TORCH_LIBRARY_IMPL(stable_operators, PrivateUse1, m) {
  m.impl("rms_norm", boxed<rms_norm>);
  m.impl("rms_norm_backward", boxed<rms_norm_backward>);
}

} // namespace stable_operators
