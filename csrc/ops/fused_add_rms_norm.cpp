// fused_add_rms_norm: sum = x + residual, y = sum * rstd * weight, rstd = (mean(sum^2) + eps)^(-1/2), over
// the last dimension. Zhang & Sennrich 2019, arXiv:1910.07467. vLLM's kernel of this name has the same two
// outputs, but overwrites its arguments with them.
// y is computed from the stored sum, rounded to its dtype, so that backward sees the same numbers. Backward recomputes
// rstd, because it reads the row of sum anyway.
#include "kernels/rms_norm.h"
#include "ops/autograd.h"
#include "ops/checks.h"

namespace openreg::ops {
namespace {
using namespace kernels;

// One row of n elements.
template <class T>
void forward_row(const T* x, const T* residual, const T* weight, T* y, T* s, int64_t n, double eps) {
  map([](Vec<T> x, Vec<T> r) { return x + r; }, s, n, x, residual);
  rms_norm_row(s, weight, y, n, eps);
}

void check_fused_add_rms_norm(const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight) {
  check_norm(op, "x", x, weight);
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
          parallel_each(rows, n, [&](int64_t row) {
            const int64_t i = row * n;
            forward_row(x + i, r + i, w, y + i, s + i, n, eps);
          });
        });
  });
  return {y, total};
}

void check_fused_add_rms_norm_backward(const char* op, const Tensor& grad_y, const std::optional<Tensor>& grad_sum,
    const Tensor& sum, const Tensor& weight) {
  check_norm(op, "sum", sum, weight);
  check_like(op, "grad_y", grad_y, "sum", sum);
  if (grad_sum) check_like(op, "grad_sum", *grad_sum, "sum", sum);
}

std::tuple<Tensor, Tensor> fused_add_rms_norm_backward(
    const Tensor& grad_y, const std::optional<Tensor>& grad_sum, const Tensor& sum, const Tensor& weight, double eps) {
  check_fused_add_rms_norm_backward("fused_add_rms_norm_backward", grad_y, grad_sum, sum, weight);
  return rms_norm_gradients(grad_y, grad_sum.value_or(Tensor()), sum, weight, /*rstd=*/Tensor(), eps);
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
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("fused_add_rms_norm", fused_add_rms_norm);
  m.impl("fused_add_rms_norm_backward", fused_add_rms_norm_backward);
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("fused_add_rms_norm", autograd<FusedAddRmsNorm, fused_add_rms_norm>("openreg::fused_add_rms_norm"));
  m.impl("fused_add_rms_norm_backward", differentiate_by_reference());
}

} // namespace openreg::ops
