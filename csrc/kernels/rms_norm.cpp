// The gradients of RMS norm.
#include "kernels/rms_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include <openreg/launch.h>

namespace openreg::kernels {
namespace {

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

// grad_x = grad_sum + rstd * g - x * rstd^3 * mean(g * x) with g = grad_y * weight, for one row; adds (or, for
// the first row, writes) grad_y * x * rstd to grad_weight. grad_sum is null where it is zero.
template <class T>
void rms_norm_backward_row(const T* grad_y, const T* grad_sum, const T* x, const T* weight, double rstd, T* grad_x,
    Acc<T>* grad_weight, bool first, int64_t n) {
  using V = Vec<T>;
  const double mean = sum<T>(n, [](V g, V w, V x) { return g * w * x; }, grad_y, weight, x) / static_cast<double>(n);
  const V r(static_cast<Acc<T>>(rstd)), c(static_cast<Acc<T>>(mean * rstd * rstd * rstd));
  if (grad_sum)
    map([r, c](V g, V w, V x, V d) { return d + (r * g * w - c * x); }, grad_x, n, grad_y, weight, x, grad_sum);
  else map([r, c](V g, V w, V x) { return r * g * w - c * x; }, grad_x, n, grad_y, weight, x);
  add_to_grad_weight(grad_y, x, r, grad_weight, first, n);
}

// Rows go to `parts`, each with its own sum, so that grad_weight does not depend on the number of threads.
// f(i, sum, first) processes row i.
template <class T, class F>
void rows_in_parts(int64_t rows, int64_t parts, int64_t n, Acc<T>* sums, T* grad_weight, F f) {
  parallel_each(parts, n * rows / std::max<int64_t>(parts, 1), [&](int64_t p) {
    const int64_t first = p * rows / parts, last = (p + 1) * rows / parts;
    for (int64_t i = first; i < last; ++i) f(i, sums + p * n, i == first);
  });
  constexpr int64_t block = 64; // columns, so that the inner loop reads consecutive elements
  parallel_each(at::divup(n, block), block * parts, [&](int64_t b) {
    const int64_t begin = b * block, count = std::min(block, n - begin);
    double total[block] = {};
    for (int64_t p = 0; p < parts; ++p)
      for (int64_t i = 0; i < count; ++i) total[i] += sums[p * n + begin + i];
    for (int64_t i = 0; i < count; ++i) grad_weight[begin + i] = static_cast<T>(total[i]);
  });
}

} // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm_gradients(const at::Tensor& grad_y_, const at::Tensor& grad_sum_,
    const at::Tensor& x_, const at::Tensor& weight_, const at::Tensor& rstd_, double eps) {
  const auto contiguous = [](const at::Tensor& given) { return given.defined() ? given.contiguous() : given; };
  const at::Tensor grad_y = contiguous(grad_y_), grad_sum = contiguous(grad_sum_), x = contiguous(x_),
                   weight = contiguous(weight_), rstd = contiguous(rstd_);
  at::Tensor grad_x = at::empty(x.sizes(), x.options()), grad_weight = at::empty(weight.sizes(), weight.options());
  const int64_t n = x.size(-1), rows = n ? x.numel() / n : 0, parts = std::min<int64_t>(rows, 32);
  at::Tensor partial = at::empty({parts, n}, x.options().dtype(at::toOpMathType(x.scalar_type())));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rms_norm_gradients", [&] {
    using T = scalar_t;
    launch(current_stream(x.get_device()),
        [=, g = grad_y.const_data_ptr<T>(), d = grad_sum.defined() ? grad_sum.const_data_ptr<T>() : nullptr,
            x = x.const_data_ptr<T>(), w = weight.const_data_ptr<T>(),
            rstd = rstd.defined() ? rstd.const_data_ptr<Acc<T>>() : nullptr, dx = grad_x.mutable_data_ptr<T>(),
            dw = grad_weight.mutable_data_ptr<T>(), part = partial.mutable_data_ptr<Acc<T>>()] {
          rows_in_parts(rows, parts, n, part, dw, [&](int64_t row, Acc<T>* sum, bool first) {
            const int64_t i = row * n;
            const double r = rstd ? rstd[row] : 1 / std::sqrt(mean_square(x + i, n) + eps);
            rms_norm_backward_row(g + i, d ? d + i : nullptr, x + i, w, r, dx + i, sum, first, n);
          });
        });
  });
  return {grad_x, grad_weight};
}

} // namespace openreg::kernels
