// RMS norm of a row and its gradients, which rms_norm and fused_add_rms_norm share.
#pragma once

#include "kernels/loops.h"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <tuple>

namespace openreg::kernels {

template <class T>
double mean_square(const T* x, int64_t n) {
  return sum<T>(n, [](Vec<T> x) { return x * x; }, x) / static_cast<double>(n);
}

// One row of n elements; returns rstd.
template <class T>
Acc<T> rms_norm_row(const T* x, const T* weight, T* y, int64_t n, double eps) {
  const auto rstd = static_cast<Acc<T>>(1 / std::sqrt(mean_square(x, n) + eps));
  map([r = Vec<T>(rstd)](Vec<T> x, Vec<T> w) { return x * r * w; }, y, n, x, weight);
  return rstd;
}

// The gradients of x and weight in y = x * rstd * weight, and grad_sum added to that of x. grad_sum may be undefined;
// rstd is recomputed if it is.
std::tuple<at::Tensor, at::Tensor> rms_norm_gradients(const at::Tensor& grad_y, const at::Tensor& grad_sum,
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd, double eps);

} // namespace openreg::kernels
