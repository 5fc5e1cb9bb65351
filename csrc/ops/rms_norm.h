// Shared by rms_norm and fused_add_rms_norm: their checks, and the gradient of weight.
#pragma once

#include "checks.h"
#include "loops.h"

#include <cmath>

namespace openreg::ops {

inline void check_row(const char* op, const char* name, const Tensor& x, const Tensor& weight) {
  check_floating(op, name, x);
  check_rows(op, name, x);
  check_kind_like(op, "weight", weight, name, x);
  const auto last = x.sym_sizes().slice(x.dim() - 1);
  TORCH_CHECK(same(weight.sym_sizes(), last), op, ": expected weight of shape ", last, ", the last dimension of ", name,
      ", but got ", weight.sym_sizes());
}

template <class T>
double mean_square(const T* x, int64_t n) {
  return sum<T>(n, [](Vec<T> x) { return x * x; }, x) / static_cast<double>(n);
}

// Adds (or, for the first row, writes) grad_y * x * rstd to grad_weight.
template <class T>
void add_to_grad_weight(const T* grad_y, const T* x, Vec<T> rstd, Acc<T>* grad_weight, bool first, int64_t n) {
  using V = Vec<T>;
  const auto add = [&](int64_t i, V part, int64_t count) {
    if (!first) part = part + V::loadu(grad_weight + i, count);
    part.store(grad_weight + i, static_cast<int>(count));
  };
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) add(i, read(grad_y + i) * read(x + i) * rstd, kLanes<T>);
  if (i < n) add(i, read(grad_y + i, n - i) * read(x + i, n - i) * rstd, n - i);
}

// Rows go to a fixed number of parts, each with its own sum, so that grad_weight does not depend on the number of
// threads. f(i, sum, first) processes row i.
inline int64_t parts_of(int64_t rows) {
  return std::min<int64_t>(rows, 32);
}
template <class T, class F>
void rows_in_parts(int64_t rows, int64_t n, Acc<T>* sums, T* grad_weight, F f) {
  const int64_t parts = parts_of(rows), per_part = at::divup(kGrain * parts, n * rows + 1);
  at::parallel_for(0, parts, per_part, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t first = p * rows / parts, last = (p + 1) * rows / parts;
      for (int64_t i = first; i < last; ++i) f(i, sums + p * n, i == first);
    }
  });
  at::parallel_for(0, n, at::divup(kGrain, parts + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double total = 0;
      for (int64_t p = 0; p < parts; ++p) total += sums[p * n + i];
      grad_weight[i] = static_cast<T>(total);
    }
  });
}

} // namespace openreg::ops
