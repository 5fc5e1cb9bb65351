// cross_entropy: loss = lse - (1 - s) * x[target] - s * mean(x) + z * lse^2, lse = logsumexp(x), over the last
// dimension. Label smoothing s: Szegedy et al. 2015, arXiv:1512.00567. z-loss: Chowdhery et al. 2022,
// arXiv:2204.02311.
// lse is an output: backward needs no other per-row tensor, and the softmax is not kept.
#include "kernels/cross_entropy.h"
#include "ops/autograd.h"
#include "ops/checks.h"

namespace openreg::ops {
namespace {
using namespace kernels;

void check_cross_entropy(const char* op, const Tensor& logits, const Tensor& target, int64_t /*ignore_index*/,
    double label_smoothing, double /*z_loss*/, std::string_view reduction) {
  check_floating(op, "logits", logits);
  TORCH_CHECK(logits.dim() >= 1, op,
      ": expected logits of at least one dimension, the classes, but got a scalar; use logits.unsqueeze(0)");
  TORCH_SYM_CHECK(
      logits.sym_size(-1).sym_gt(0), op, ": expected logits of at least one class, but got shape ", logits.sym_sizes());
  check_target(op, "logits", logits, target);
  check_loss_options(op, label_smoothing, reduction);
}

std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits_, const Tensor& target_, int64_t ignore_index,
    double label_smoothing, double z_loss, std::string_view reduction) {
  constexpr const char* op = "cross_entropy";
  check_cross_entropy(op, logits_, target_, ignore_index, label_smoothing, z_loss, reduction);
  const auto options = options_of(ignore_index, label_smoothing, z_loss, reduction);
  const Tensor logits = logits_.contiguous(), target = target_.to(at::kLong).contiguous();
  const auto wide = logits.options().dtype(at::toOpMathType(logits.scalar_type()));
  const bool none = options.reduction == Reduction::kNone;
  Tensor logsumexp = at::empty(target.sizes(), wide), losses = at::empty(target.sizes(), wide),
         loss = none ? losses : at::empty({}, wide);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, logits.scalar_type(), op, [&] {
    using T = scalar_t;
    launch(current_stream(logits.get_device()),
        [=, n = logits.size(-1), rows = target.numel(), x = logits.const_data_ptr<T>(),
            t = target.const_data_ptr<int64_t>(), lse = logsumexp.mutable_data_ptr<Acc<T>>(),
            each = losses.mutable_data_ptr<Acc<T>>(), loss = loss.mutable_data_ptr<Acc<T>>()] {
          const int64_t count = count_targets(op, t, rows, n, options.ignore_index);
          const auto of_row = [&](int64_t i) {
            const T* row = x + i * n;
            lse[i] = logsumexp_row(row, n);
            each[i] = t[i] == options.ignore_index ? 0 : cross_entropy_row(options, row, t[i], lse[i], n);
          };
          parallel_each(rows, n, of_row, kExpGrain);
          if (options.reduction != Reduction::kNone) *loss = reduce_losses(options, each, rows, count);
        });
  });
  return {loss, logsumexp};
}

void check_cross_entropy_backward(const char* op, const std::optional<Tensor>& grad_loss,
    const std::optional<Tensor>& grad_logsumexp, const Tensor& logits, const Tensor& target, const Tensor& logsumexp,
    int64_t ignore_index, double label_smoothing, double z_loss, std::string_view reduction) {
  check_cross_entropy(op, logits, target, ignore_index, label_smoothing, z_loss, reduction);
  const auto check = [&](const char* name, const Tensor& x, SymIntArrayRef shape, const char* of) {
    check_same_device(op, "logits", logits, name, x);
    check_dtype(op, name, x, at::toOpMathType(logits.scalar_type()), "its cross_entropy output");
    check_shape(op, name, x, shape, of);
  };
  const auto rows = target.sym_sizes();
  check("logsumexp", logsumexp, rows, "the same as target");
  if (grad_loss)
    check(
        "grad_loss", *grad_loss, reduction == "none" ? rows : SymIntArrayRef(), "the same as its cross_entropy output");
  if (grad_logsumexp) check("grad_logsumexp", *grad_logsumexp, rows, "the same as target");
}

Tensor cross_entropy_backward(const std::optional<Tensor>& grad_loss_, const std::optional<Tensor>& grad_logsumexp_,
    const Tensor& logits_, const Tensor& target_, const Tensor& logsumexp_, int64_t ignore_index,
    double label_smoothing, double z_loss, std::string_view reduction) {
  constexpr const char* op = "cross_entropy_backward";
  check_cross_entropy_backward(
      op, grad_loss_, grad_logsumexp_, logits_, target_, logsumexp_, ignore_index, label_smoothing, z_loss, reduction);
  const auto options = options_of(ignore_index, label_smoothing, z_loss, reduction);
  const bool none = options.reduction == Reduction::kNone;
  const Tensor logits = logits_.contiguous(), target = target_.to(at::kLong).contiguous(),
               logsumexp = logsumexp_.contiguous(), grad_loss = contiguous(grad_loss_),
               grad_logsumexp = contiguous(grad_logsumexp_);
  Tensor grad_logits = at::empty(logits.sizes(), logits.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, logits.scalar_type(), op, [&] {
    using T = scalar_t;
    using A = Acc<T>;
    launch(current_stream(logits.get_device()),
        [=, n = logits.size(-1), rows = target.numel(), x = logits.const_data_ptr<T>(),
            t = target.const_data_ptr<int64_t>(), lse = logsumexp.const_data_ptr<A>(),
            of_loss = grad_loss_ ? grad_loss.const_data_ptr<A>() : nullptr,
            of_lse = grad_logsumexp_ ? grad_logsumexp.const_data_ptr<A>() : nullptr,
            dx = grad_logits.mutable_data_ptr<T>()] {
          const double scale = row_scale(options, count_targets(op, t, rows, n, options.ignore_index));
          const auto of_row = [&](int64_t i) {
            const bool counts = of_loss != nullptr && t[i] != options.ignore_index;
            const double g = counts ? scale * of_loss[none ? i : 0] : 0, h = of_lse != nullptr ? of_lse[i] : 0;
            cross_entropy_backward_row(options, x + i * n, t[i], lse[i], g, h, dx + i * n, n);
          };
          parallel_each(rows, n, of_row, kExpGrain);
        });
  });
  return grad_logits;
}

// ---- autograd: see Note [Derivatives] ----

struct CrossEntropyForward {
  static auto forward(AutogradContext*, const Tensor& logits, const Tensor& target, int64_t ignore_index,
      double label_smoothing, double z_loss, std::string_view reduction) {
    const auto out = op<cross_entropy>("openreg::cross_entropy")
                         .call(logits, target, ignore_index, label_smoothing, z_loss, reduction);
    return saving(out, logits, target, std::get<1>(out), ignore_index, label_smoothing, z_loss, reduction);
  }

  template <class... Options>
  static Tensor backward(AutogradContext*, const variable_list& grad, const Tensor& logits, const Tensor& target,
      const Tensor& logsumexp, Options... options) {
    if (!grad[0].defined() && !grad[1].defined()) return {};
    return op<cross_entropy_backward>("openreg::cross_entropy_backward")
        .call(if_defined(grad[0]), if_defined(grad[1]), logits, target, logsumexp, options...);
  }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.cross_entropy");
  m.def(
      "cross_entropy(Tensor logits, Tensor target, *, int ignore_index=-100, float label_smoothing=0.0, "
      "float z_loss=0.0, str reduction=\"mean\") -> (Tensor loss, Tensor logsumexp)");
  m.def(
      "cross_entropy_backward(Tensor? grad_loss, Tensor? grad_logsumexp, Tensor logits, Tensor target, "
      "Tensor logsumexp, *, int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, "
      "str reduction=\"mean\") -> Tensor");
  checked_by("cross_entropy", check_cross_entropy);
  checked_by("cross_entropy_backward", check_cross_entropy_backward);
  autocast(m, "cross_entropy", Cast::kFloat32);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("cross_entropy", cross_entropy);
  m.impl("cross_entropy_backward", cross_entropy_backward);
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("cross_entropy", autograd<CrossEntropyForward, cross_entropy>("openreg::cross_entropy"));
  m.impl("cross_entropy_backward", differentiate_by_reference());
}

} // namespace openreg::ops
