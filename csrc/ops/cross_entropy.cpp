// cross_entropy: loss = lse - (1 - s) * x[target] - s * mean(x) + z * lse^2, lse = logsumexp(x), over the last
// dimension. Label smoothing s: Szegedy et al. 2015, arXiv:1512.00567. z-loss: Chowdhery et al. 2022,
// arXiv:2204.02311.
// lse is an output: backward needs no other tensor of the rows, and no softmax is kept.
#include "cross_entropy.h"

#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <optional>
#include <tuple>

namespace openreg::ops {
namespace {

void check_logits(const char* op, const Tensor& logits) {
  check_floating(op, "logits", logits);
  TORCH_CHECK(logits.dim() >= 1, op,
      ": expected logits of at least one dimension, the classes, but got a scalar; use logits.unsqueeze(0)");
  TORCH_CHECK(logits.size(-1) > 0, op, ": expected logits of at least one class, but got shape ", logits.sizes());
}

std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits_, const Tensor& target_, int64_t ignore_index,
    double label_smoothing, double z_loss, std::string_view reduction) {
  constexpr const char* op = "cross_entropy";
  check_logits(op, logits_);
  check_target(op, "logits", logits_, target_);
  const auto options = check_options(op, ignore_index, label_smoothing, z_loss, reduction);
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
          at::parallel_for(0, rows, at::divup(kExpGrain, n), [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
              const T* row = x + i * n;
              lse[i] = logsumexp_row(row, n);
              each[i] = t[i] == options.ignore_index ? 0 : cross_entropy_row(options, row, t[i], lse[i], n);
            }
          });
          if (options.reduction != Reduction::kNone) *loss = reduce_losses(options, each, rows, count);
        });
  });
  return {loss, logsumexp};
}

Tensor cross_entropy_backward(const std::optional<Tensor>& grad_loss_, const std::optional<Tensor>& grad_logsumexp_,
    const Tensor& logits_, const Tensor& target_, const Tensor& logsumexp_, int64_t ignore_index,
    double label_smoothing, double z_loss, std::string_view reduction) {
  constexpr const char* op = "cross_entropy_backward";
  check_logits(op, logits_);
  check_target(op, "logits", logits_, target_);
  const auto options = check_options(op, ignore_index, label_smoothing, z_loss, reduction);
  const auto wide = at::toOpMathType(logits_.scalar_type());
  const bool none = options.reduction == Reduction::kNone;
  const auto check = [&](const char* name, const Tensor& x, at::IntArrayRef shape, const char* of) {
    check_same_device(op, "logits", logits_, name, x);
    check_dtype(op, name, x, wide, "its cross_entropy output");
    check_shape(op, name, x, shape, of);
    return x.contiguous();
  };
  const Tensor logsumexp = check("logsumexp", logsumexp_, target_.sizes(), "that of target");
  Tensor grad_loss, grad_logsumexp;
  if (grad_loss_)
    grad_loss =
        check("grad_loss", *grad_loss_, none ? target_.sizes() : at::IntArrayRef(), "that of its cross_entropy output");
  if (grad_logsumexp_) grad_logsumexp = check("grad_logsumexp", *grad_logsumexp_, target_.sizes(), "that of target");

  const Tensor logits = logits_.contiguous(), target = target_.to(at::kLong).contiguous();
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
          at::parallel_for(0, rows, at::divup(kExpGrain, n), [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
              const bool counts = of_loss != nullptr && t[i] != options.ignore_index;
              const double g = counts ? scale * of_loss[none ? i : 0] : 0, h = of_lse != nullptr ? of_lse[i] : 0;
              cross_entropy_backward_row(options, x + i * n, t[i], lse[i], g, h, dx + i * n, n);
            }
          });
        });
  });
  return grad_logits;
}

// ---- autograd: see Note [Operator calls] ----

const auto& forward_op() {
  static const auto op = find<decltype(cross_entropy)>("openreg::cross_entropy");
  return op;
}
const auto& backward_op() {
  static const auto op = find<decltype(cross_entropy_backward)>("openreg::cross_entropy_backward");
  return op;
}

std::optional<Tensor> if_defined(const Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

// The arguments after the tensors, kept for backward.
struct Saved {
  static constexpr const char *kIgnore = "ignore_index", *kSmoothing = "label_smoothing", *kZ = "z_loss",
                              *kReduction = "reduction";
  static void save(
      AutogradContext* ctx, int64_t ignore_index, double label_smoothing, double z_loss, std::string_view reduction) {
    ctx->saved_data[kIgnore] = ignore_index;
    ctx->saved_data[kSmoothing] = label_smoothing;
    ctx->saved_data[kZ] = z_loss;
    ctx->saved_data[kReduction] = std::string(reduction);
  }
  explicit Saved(AutogradContext* ctx)
      : ignore_index(ctx->saved_data[kIgnore].toInt()), label_smoothing(ctx->saved_data[kSmoothing].toDouble()),
        z_loss(ctx->saved_data[kZ].toDouble()), reduction(ctx->saved_data[kReduction].toStringRef()) {}

  int64_t ignore_index;
  double label_smoothing, z_loss;
  std::string reduction;
};

struct CrossEntropyForward : torch::autograd::Function<CrossEntropyForward> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target, int64_t ignore_index,
      double label_smoothing, double z_loss, std::string_view reduction) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [loss, logsumexp] = forward_op().call(logits, target, ignore_index, label_smoothing, z_loss, reduction);
    ctx->save_for_backward({logits, target, logsumexp});
    ctx->set_materialize_grads(false);
    Saved::save(ctx, ignore_index, label_smoothing, z_loss, reduction);
    return {loss, logsumexp};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad) {
    const auto saved = ctx->get_saved_variables();
    const Saved o(ctx);
    Tensor grad_logits;
    if (grad[0].defined() || grad[1].defined())
      grad_logits = backward_op().call(if_defined(grad[0]), if_defined(grad[1]), saved[0], saved[1], saved[2],
          o.ignore_index, o.label_smoothing, o.z_loss, o.reduction);
    return {grad_logits, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> cross_entropy_autograd(const Tensor& logits, const Tensor& target, int64_t ignore_index,
    double label_smoothing, double z_loss, std::string_view reduction) {
  auto out = CrossEntropyForward::apply(logits, target, ignore_index, label_smoothing, z_loss, reduction);
  return {out[0], out[1]};
}

// The derivative of cross_entropy_backward, of ATen operators, so that it can be differentiated again.
// Row by row, with p = exp(x - lse), q the smoothed target, u = 1 + 2 * z * lse, a the gradient of dx:
//   <a, dx> = (g * u + h) * sum(a * p) - g * sum(a * q)
struct CrossEntropyBackward : torch::autograd::Function<CrossEntropyBackward> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const std::optional<Tensor>& grad_loss,
      const std::optional<Tensor>& grad_logsumexp, const Tensor& logits, const Tensor& target, const Tensor& logsumexp,
      int64_t ignore_index, double label_smoothing, double z_loss, std::string_view reduction) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward(
        {grad_loss.value_or(Tensor()), grad_logsumexp.value_or(Tensor()), logits, target, logsumexp});
    Saved::save(ctx, ignore_index, label_smoothing, z_loss, reduction);
    return backward_op().call(
        grad_loss, grad_logsumexp, logits, target, logsumexp, ignore_index, label_smoothing, z_loss, reduction);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad) {
    const auto saved = ctx->get_saved_variables();
    const Saved o(ctx);
    const Tensor &grad_loss = saved[0], &grad_logsumexp = saved[1], &target = saved[3], &lse = saved[4];
    const auto half = saved[2].scalar_type(), type = lse.scalar_type(); // half types in float32
    const Tensor a = grad[0].to(type), p = (saved[2].to(type) - lse.unsqueeze(-1)).exp(),
                 valid = target.ne(o.ignore_index);
    const Tensor ap = (a * p).sum(-1), u = 1 + 2 * o.z_loss * lse;
    Tensor of_loss, of_logsumexp, w = at::zeros_like(lse), of_lse = at::zeros_like(lse);
    if (grad_loss.defined()) {
      Tensor scale = valid.to(type);
      if (o.reduction == "mean") scale = scale / scale.sum().clamp_min(1);
      const Tensor index = at::where(valid, target, 0).to(at::kLong).unsqueeze(-1), g = grad_loss * scale;
      const Tensor aq = (1 - o.label_smoothing) * a.gather(-1, index).squeeze(-1) + o.label_smoothing * a.mean(-1);
      of_loss = (u * ap - aq) * scale;
      if (o.reduction != "none") of_loss = of_loss.sum();
      w = g * u;
      of_lse = 2 * o.z_loss * g * ap;
    }
    if (grad_logsumexp.defined()) {
      of_logsumexp = ap;
      w = w + grad_logsumexp;
    }
    return {of_loss, of_logsumexp, (a * p * w.unsqueeze(-1)).to(half), Tensor(), of_lse - w * ap, Tensor(), Tensor(),
        Tensor(), Tensor()};
  }
};

Tensor cross_entropy_backward_autograd(const std::optional<Tensor>& grad_loss,
    const std::optional<Tensor>& grad_logsumexp, const Tensor& logits, const Tensor& target, const Tensor& logsumexp,
    int64_t ignore_index, double label_smoothing, double z_loss, std::string_view reduction) {
  return CrossEntropyBackward::apply(
      grad_loss, grad_logsumexp, logits, target, logsumexp, ignore_index, label_smoothing, z_loss, reduction);
}

// Autocast runs it in float32, as it runs torch's own losses.
std::tuple<Tensor, Tensor> cross_entropy_autocast(const Tensor& logits, const Tensor& target, int64_t ignore_index,
    double label_smoothing, double z_loss, std::string_view reduction) {
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  const Tensor wide = c10::isReducedFloatingType(logits.scalar_type()) ? logits.to(at::kFloat) : logits;
  return forward_op().call(wide, target, ignore_index, label_smoothing, z_loss, reduction);
}

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
}
TORCH_LIBRARY_IMPL(openreg, PrivateUse1, m) {
  m.impl("cross_entropy", cross_entropy);
  m.impl("cross_entropy_backward", cross_entropy_backward);
}
TORCH_LIBRARY_IMPL(openreg, AutogradPrivateUse1, m) {
  m.impl("cross_entropy", cross_entropy_autograd);
  m.impl("cross_entropy_backward", cross_entropy_backward_autograd);
}
TORCH_LIBRARY_IMPL(openreg, AutocastPrivateUse1, m) {
  m.impl("cross_entropy", cross_entropy_autocast);
}
TORCH_LIBRARY_IMPL(openreg, AutocastCPU, m) {
  m.impl("cross_entropy", cross_entropy_autocast);
}
TORCH_LIBRARY_IMPL(openreg, AutocastCUDA, m) {
  m.impl("cross_entropy", cross_entropy_autocast);
}

} // namespace openreg::ops
