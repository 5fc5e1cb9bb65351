// fused_add_rms_norm: sum = x + residual, y = sum * rstd * weight, rstd = (mean(sum^2) + eps)^(-1/2), over
// the last dimension. Zhang & Sennrich 2019, arXiv:1910.07467. vLLM's kernel of this name has the same two
// outputs, but overwrites its arguments with them.
// y is computed from the stored sum, rounded to its dtype, so that backward sees the same numbers. Backward recomputes
// rstd, because it reads the row of sum anyway.
#include "autograd.h"
#include "rms_norm.h"

namespace openreg::ops {
namespace {

// One row of n elements.
template <class T>
void forward_row(const T* x, const T* residual, const T* weight, T* y, T* s, int64_t n, double eps) {
  map([](Vec<T> x, Vec<T> r) { return x + r; }, s, n, x, residual);
  const Vec<T> rstd(static_cast<Acc<T>>(1 / std::sqrt(mean_square(s, n) + eps)));
  map([rstd](Vec<T> s, Vec<T> w) { return s * rstd * w; }, y, n, s, weight);
}

// grad_x = grad_sum + rstd * g - s * rstd^3 * mean(g * s) with g = grad_y * weight, for one row; adds (or, for
// the first row, writes) grad_y * s * rstd to grad_weight. grad_sum is null where it is zero.
template <class T>
void backward_row(const T* grad_y, const T* grad_sum, const T* s, const T* weight, T* grad_x, Acc<T>* grad_weight,
    bool first, int64_t n, double eps) {
  using V = Vec<T>;
  const double rstd = 1 / std::sqrt(mean_square(s, n) + eps);
  const double mean = sum<T>(n, [](V g, V w, V s) { return g * w * s; }, grad_y, weight, s) / static_cast<double>(n);
  const V r(static_cast<Acc<T>>(rstd)), c(static_cast<Acc<T>>(mean * rstd * rstd * rstd));
  if (grad_sum)
    map([r, c](V g, V w, V s, V d) { return d + (r * g * w - c * s); }, grad_x, n, grad_y, weight, s, grad_sum);
  else map([r, c](V g, V w, V s) { return r * g * w - c * s; }, grad_x, n, grad_y, weight, s);
  add_to_grad_weight(grad_y, s, r, grad_weight, first, n);
}

void check_fused_add_rms_norm(const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight) {
  check_row(op, "x", x, weight);
  check_like(op, "residual", residual, "x", x);
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(
    const Tensor& x_, const Tensor& residual_, const Tensor& weight_, double eps) {
  constexpr const char* op = "fused_add_rms_norm";
  check_fused_add_rms_norm(op, x_, residual_, weight_);
  const Tensor x = x_.contiguous(), residual = residual_.contiguous(), weight = weight_.contiguous();
  Tensor y = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
  const int64_t n = x.size(-1), rows = n ? x.numel() / n : 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), op, [&] {
    using T = scalar_t;
    launch(current_stream(x.get_device()),
        [=, x = x.const_data_ptr<T>(), r = residual.const_data_ptr<T>(), w = weight.const_data_ptr<T>(),
            y = y.mutable_data_ptr<T>(), s = total.mutable_data_ptr<T>()] {
          at::parallel_for(0, rows, at::divup(kGrain, n + 1), [&](int64_t begin, int64_t end) {
            for (int64_t i = begin * n; i < end * n; i += n) forward_row(x + i, r + i, w, y + i, s + i, n, eps);
          });
        });
  });
  return {y, total};
}

void check_fused_add_rms_norm_backward(const char* op, const Tensor& grad_y, const std::optional<Tensor>& grad_sum,
    const Tensor& sum, const Tensor& weight) {
  check_row(op, "sum", sum, weight);
  check_like(op, "grad_y", grad_y, "sum", sum);
  if (grad_sum) check_like(op, "grad_sum", *grad_sum, "sum", sum);
}

std::tuple<Tensor, Tensor> fused_add_rms_norm_backward(const Tensor& grad_y_, const std::optional<Tensor>& grad_sum_,
    const Tensor& sum_, const Tensor& weight_, double eps) {
  constexpr const char* op = "fused_add_rms_norm_backward";
  check_fused_add_rms_norm_backward(op, grad_y_, grad_sum_, sum_, weight_);
  const Tensor grad_y = grad_y_.contiguous(), grad_sum = contiguous(grad_sum_), total = sum_.contiguous(),
               weight = weight_.contiguous();
  Tensor grad_x = at::empty(total.sizes(), total.options());
  Tensor grad_weight = at::empty(weight.sizes(), weight.options());
  const int64_t n = total.size(-1), rows = n ? total.numel() / n : 0;
  Tensor partial = at::empty({parts_of(rows), n}, total.options().dtype(at::toOpMathType(total.scalar_type())));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, total.scalar_type(), op, [&] {
    using T = scalar_t;
    launch(current_stream(total.get_device()),
        [=, g = grad_y.const_data_ptr<T>(), d = grad_sum.defined() ? grad_sum.const_data_ptr<T>() : nullptr,
            s = total.const_data_ptr<T>(), w = weight.const_data_ptr<T>(), dx = grad_x.mutable_data_ptr<T>(),
            dw = grad_weight.mutable_data_ptr<T>(), part = partial.mutable_data_ptr<Acc<T>>()] {
          rows_in_parts(rows, n, part, dw, [&](int64_t row, Acc<T>* sum, bool first) {
            const int64_t i = row * n;
            backward_row(g + i, d ? d + i : nullptr, s + i, w, dx + i, sum, first, n, eps);
          });
        });
  });
  return {grad_x, grad_weight};
}

// ---- autograd: see Note [Derivatives] ----

struct FusedAddRmsNorm {
  static auto forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
    const auto out = op<fused_add_rms_norm>("openreg::fused_add_rms_norm").call(x, residual, weight, eps);
    const Tensor& sum = std::get<1>(out);
    if (!x.requires_grad() && !residual.requires_grad()) ctx->mark_non_differentiable({sum});
    return saving(out, sum, weight, eps);
  }

  static std::tuple<Tensor, Tensor, Tensor> backward(
      AutogradContext*, const variable_list& grad, const Tensor& sum, const Tensor& weight, double eps) {
    const Tensor &grad_y = grad[0], &grad_sum = grad[1];
    if (!grad_y.defined()) return {grad_sum, grad_sum, Tensor()};
    auto [grad_x, grad_weight] = op<fused_add_rms_norm_backward>("openreg::fused_add_rms_norm_backward")
                                     .call(grad_y, if_defined(grad_sum), sum, weight, eps);
    return {grad_x, grad_x, grad_weight};
  }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.fused_add_rms_norm");
  m.def("fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps=1e-6) -> (Tensor y, Tensor sum)");
  m.def(
      "fused_add_rms_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor sum, Tensor weight, float eps) "
      "-> (Tensor grad_x, Tensor grad_weight)");
  checked_by("fused_add_rms_norm", check_fused_add_rms_norm);
  checked_by("fused_add_rms_norm_backward", check_fused_add_rms_norm_backward);
  autocast(m, "fused_add_rms_norm", Cast::kFloat32);
}
TORCH_LIBRARY_IMPL(openreg, PrivateUse1, m) {
  m.impl("fused_add_rms_norm", fused_add_rms_norm);
  m.impl("fused_add_rms_norm_backward", fused_add_rms_norm_backward);
}
TORCH_LIBRARY_IMPL(openreg, AutogradPrivateUse1, m) {
  m.impl("fused_add_rms_norm", autograd<FusedAddRmsNorm, fused_add_rms_norm>("openreg::fused_add_rms_norm"));
  m.impl("fused_add_rms_norm_backward", differentiate_by_reference());
}

} // namespace openreg::ops
