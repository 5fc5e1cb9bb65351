// rms_norm: y = x * rstd * weight, rstd = (mean(x^2) + eps)^(-1/2), over the last dimension.
// Zhang & Sennrich 2019, arXiv:1910.07467.
// rstd is an output so that backward does not have to recompute it. It is differentiable, and rms_norm_backward is
// differentiable in rstd as in its other arguments, which the second derivative needs.
#include "kernels/rms_norm.h"
#include "ops/autograd.h"
#include "ops/checks.h"

namespace openreg::ops {
namespace {
using namespace kernels;

void check_rms_norm(const char* op, const Tensor& x, const Tensor& weight) {
  check_norm(op, "x", x, weight);
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x_, const Tensor& weight_, double eps) {
  check_rms_norm("rms_norm", x_, weight_);
  const Tensor x = x_.contiguous(), weight = weight_.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::toOpMathType(x.scalar_type())));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rms_norm", [&] {
    using T = scalar_t;
    launch(current_stream(x.get_device()),
        [=, n = x.size(-1), rows = rstd.numel(), x = x.const_data_ptr<T>(), w = weight.const_data_ptr<T>(),
            y = y.mutable_data_ptr<T>(), r = rstd.mutable_data_ptr<Acc<T>>()] {
          parallel_each(rows, n, [&](int64_t i) { r[i] = rms_norm_row(x + i * n, w, y + i * n, n, eps); });
        });
  });
  return {y, rstd};
}

void check_rms_norm_backward(
    const char* op, const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  check_norm(op, "x", x, weight);
  check_like(op, "grad_y", grad_y, "x", x);
  check_same_device(op, "x", x, "rstd", rstd);
  check_dtype(op, "rstd", rstd, at::toOpMathType(x.scalar_type()), "its rms_norm output");
  check_shape(op, "rstd", rstd, rows_of(x), "the same as x without its last dimension");
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  check_rms_norm_backward("rms_norm_backward", grad_y, x, weight, rstd);
  return rms_norm_gradients(grad_y, /*grad_sum=*/Tensor(), x, weight, rstd, /*eps=*/0);
}

// ---- autograd: see Note [Derivatives] ----

struct RmsNorm {
  static auto forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps) {
    const auto out = op<rms_norm>("openreg::rms_norm").call(x, weight, eps);
    const Tensor& rstd = std::get<1>(out);
    if (!x.requires_grad()) ctx->mark_non_differentiable({rstd});
    return saving(out, x, weight, rstd);
  }

  static std::tuple<Tensor, Tensor> backward(
      AutogradContext*, const variable_list& grad, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
    const Tensor &grad_y = grad[0], &grad_rstd = grad[1];
    Tensor grad_x, grad_weight;
    if (grad_y.defined())
      std::tie(grad_x, grad_weight) = op<rms_norm_backward>("openreg::rms_norm_backward").call(grad_y, x, weight, rstd);
    if (grad_rstd.defined()) {
      // d rstd / dx = -rstd^3 * x / n
      const Tensor scale = grad_rstd * rstd.pow(3) / c10::Scalar(-x.sym_size(-1));
      const Tensor through_rstd = (scale.unsqueeze(-1) * x).to(x.scalar_type());
      grad_x = grad_x.defined() ? grad_x + through_rstd : through_rstd;
    }
    return {grad_x, grad_weight};
  }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.rms_norm");
  m.def("rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor rstd) -> (Tensor grad_x, Tensor grad_weight)");
  checked_by("rms_norm", check_rms_norm);
  checked_by("rms_norm_backward", check_rms_norm_backward);
  autocast(m, "rms_norm", Cast::kFloat32);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_backward", rms_norm_backward);
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("rms_norm", autograd<RmsNorm, rms_norm>("openreg::rms_norm"));
  m.impl("rms_norm_backward", differentiate_by_reference());
}

} // namespace openreg::ops
