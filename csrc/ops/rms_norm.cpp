// rms_norm: y = x * rstd * weight, rstd = (mean(x^2) + eps)^(-1/2), over the last dimension.
// Zhang & Sennrich 2019, arXiv:1910.07467.
// rstd is an output so that backward need not recompute it. It is differentiable, and rms_norm_backward
// is in rstd as in its other arguments, which is what makes the second derivative right.
#include "op.h"

#include <cmath>
#include <tuple>

namespace openreg::ops {
namespace {

// One row of n elements; returns rstd.
template <class T>
Acc<T> rms_norm_row(const T* x, const T* weight, T* y, int64_t n, double eps) {
  const double mean = sum<T>(n, [](Vec<T> x) { return x * x; }, x) / static_cast<double>(n);
  const auto rstd = static_cast<Acc<T>>(1 / std::sqrt(mean + eps));
  at::vec::map2<T>([r = Vec<T>(rstd)](Vec<T> x, Vec<T> w) { return x * r * w; }, y, x, weight, n);
  return rstd;
}

// dx = rstd * g - x * rstd^3 * mean(g * x) with g = dy * weight, for one row; adds (or, for the first
// row, writes) dy * x * rstd to grad_weight.
template <class T>
void rms_norm_backward_row(
    const T* grad_y, const T* x, const T* weight, Acc<T> rstd, T* grad_x, Acc<T>* grad_weight, bool first, int64_t n) {
  using V = Vec<T>;
  const double mean = sum<T>(n, [](V g, V x, V w) { return g * w * x; }, grad_y, x, weight) / static_cast<double>(n);
  const V r(rstd), c(static_cast<Acc<T>>(mean * rstd * rstd * rstd));
  at::vec::map3<T>([r, c](V g, V x, V w) { return r * g * w - c * x; }, grad_x, grad_y, x, weight, n);
  const auto add = [&](int64_t i, V part, int64_t count) {
    if (!first) part = part + V::loadu(grad_weight + i, count);
    part.store(grad_weight + i, static_cast<int>(count));
  };
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) add(i, read(grad_y + i) * read(x + i) * r, kLanes<T>);
  if (i < n) add(i, read(grad_y + i, n - i) * read(x + i, n - i) * r, n - i);
}

// rstd has a number for each row of x.
at::IntArrayRef rows_of(const Tensor& x) {
  return x.sizes().slice(0, x.dim() - 1);
}

void check_x(const char* op, const Tensor& x) {
  check_floating(op, "x", x);
  TORCH_CHECK(x.dim() >= 1, op, ": expected x of at least one dimension, but got a scalar; use x.unsqueeze(0)");
}

void check_weight(const char* op, const Tensor& x, const Tensor& weight) {
  check_same_device(op, "x", x, "weight", weight);
  check_dtype(op, "weight", weight, x.scalar_type(), "x");
  check_shape(op, "weight", weight, x.sizes().slice(x.dim() - 1), "the last dimension of x");
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x_, const Tensor& weight_, double eps) {
  check_x("rms_norm", x_);
  check_weight("rms_norm", x_, weight_);
  const Tensor x = x_.contiguous(), weight = weight_.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor rstd = at::empty(rows_of(x), x.options().dtype(at::toOpMathType(x.scalar_type())));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rms_norm", [&] {
    using T = scalar_t;
    launch(current_stream(x.get_device()),
        [=, n = x.size(-1), rows = rstd.numel(), x = x.const_data_ptr<T>(), w = weight.const_data_ptr<T>(),
            y = y.mutable_data_ptr<T>(), r = rstd.mutable_data_ptr<Acc<T>>()] {
          at::parallel_for(0, rows, at::divup(kGrain, n + 1), [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) r[i] = rms_norm_row(x + i * n, w, y + i * n, n, eps);
          });
        });
  });
  return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad_y_, const Tensor& x_, const Tensor& weight_, const Tensor& rstd_) {
  constexpr const char* op = "rms_norm_backward";
  check_x(op, x_);
  check_weight(op, x_, weight_);
  check_same_device(op, "x", x_, "grad_y", grad_y_);
  check_dtype(op, "grad_y", grad_y_, x_.scalar_type(), "x");
  check_shape(op, "grad_y", grad_y_, x_.sizes(), "that of x");
  check_same_device(op, "x", x_, "rstd", rstd_);
  check_dtype(op, "rstd", rstd_, at::toOpMathType(x_.scalar_type()), "its rms_norm output");
  check_shape(op, "rstd", rstd_, rows_of(x_), "that of x without its last dimension");

  const Tensor grad_y = grad_y_.contiguous(), x = x_.contiguous(), weight = weight_.contiguous(),
               rstd = rstd_.contiguous();
  Tensor grad_x = at::empty(x.sizes(), x.options());
  Tensor grad_weight = at::empty(weight.sizes(), weight.options());
  // Rows go to a fixed number of parts, each with a sum of its own, so that grad_weight does not depend
  // on the number of threads.
  const int64_t n = x.size(-1), rows = rstd.numel(), parts = std::min<int64_t>(rows, 32);
  Tensor partial = at::empty({parts, n}, rstd.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), op, [&] {
    using T = scalar_t;
    launch(current_stream(x.get_device()),
        [=, g = grad_y.const_data_ptr<T>(), x = x.const_data_ptr<T>(), w = weight.const_data_ptr<T>(),
            r = rstd.const_data_ptr<Acc<T>>(), dx = grad_x.mutable_data_ptr<T>(),
            dw = grad_weight.mutable_data_ptr<T>(), part = partial.mutable_data_ptr<Acc<T>>()] {
          const int64_t per_part = at::divup(kGrain * parts, n * rows + 1);
          at::parallel_for(0, parts, per_part, [&](int64_t begin, int64_t end) {
            for (int64_t p = begin; p < end; ++p) {
              const int64_t first = p * rows / parts, last = (p + 1) * rows / parts;
              for (int64_t i = first; i < last; ++i)
                rms_norm_backward_row(g + i * n, x + i * n, w, r[i], dx + i * n, part + p * n, i == first, n);
            }
          });
          at::parallel_for(0, n, at::divup(kGrain, parts + 1), [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
              double total = 0;
              for (int64_t p = 0; p < parts; ++p) total += part[p * n + i];
              dw[i] = static_cast<T>(total);
            }
          });
        });
  });
  return {grad_x, grad_weight};
}

// ---- autograd: see Note [Operator calls] ----

const auto& forward_op() {
  static const auto op = find<decltype(rms_norm)>("openreg::rms_norm");
  return op;
}
const auto& backward_op() {
  static const auto op = find<decltype(rms_norm_backward)>("openreg::rms_norm_backward");
  return op;
}

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps) {
    BelowAutograd below_autograd;
    auto [y, rstd] = forward_op().call(x, weight, eps);
    ctx->save_for_backward({x, weight, rstd});
    if (!x.requires_grad()) ctx->mark_non_differentiable({rstd});
    ctx->set_materialize_grads(false);
    return {y, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &rstd = saved[2], &grad_y = grad[0], &grad_rstd = grad[1];
    Tensor grad_x, grad_weight;
    if (grad_y.defined()) std::tie(grad_x, grad_weight) = backward_op().call(grad_y, x, weight, rstd);
    if (grad_rstd.defined()) {
      // d rstd / dx = -rstd^3 * x / n
      const Tensor scale = grad_rstd * rstd.pow(3) / c10::Scalar(-x.sym_size(-1));
      const Tensor through_rstd = (scale.unsqueeze(-1) * x).to(x.scalar_type());
      grad_x = grad_x.defined() ? grad_x + through_rstd : through_rstd;
    }
    return {grad_x, grad_weight, Tensor()};
  }
};

std::tuple<Tensor, Tensor> rms_norm_autograd(const Tensor& x, const Tensor& weight, double eps) {
  if (any_tangent(x, weight)) return decompose(forward_op(), x, weight, eps); // see Note [Forward mode]
  auto out = apply<RmsNorm>(x, weight, eps);
  return {out[0], out[1]};
}

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.rms_norm");
  m.def("rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor rstd) -> (Tensor grad_x, Tensor grad_weight)");
  autocast(m, "rms_norm", Cast::kFloat32);
}
TORCH_LIBRARY_IMPL(openreg, PrivateUse1, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_backward", rms_norm_backward);
}
TORCH_LIBRARY_IMPL(openreg, AutogradPrivateUse1, m) {
  m.impl("rms_norm", rms_norm_autograd);
  m.impl("rms_norm_backward", differentiate_by_reference());
}

} // namespace openreg::ops
