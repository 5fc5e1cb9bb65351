// attention: out = softmax(scale * q k^T + bias) v, and the logsumexp of each row of scores.
// The loops are in attention.h. logsumexp is an output, and differentiable: its gradient joins the sum over
// out * grad_out in backward.
#include "attention.h"
#include "autograd.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace openreg::ops {
namespace {

// ---- torch ----

void check_scores(
    const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias) {
  check_floating(op, "q", q);
  for (const auto& [name, x] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}})
    TORCH_CHECK(
        x->dim() == 4, op, ": expected ", name, " of shape [batch, heads, length, width], but got ", x->sizes());
  for (const auto& [name, x] : {std::pair{"k", &k}, {"v", &v}}) {
    check_kind_like(op, name, *x, "q", q);
  }
  TORCH_CHECK(k.size(0) == q.size(0) && k.size(3) == q.size(3), op, ": expected k of batch ", q.size(0), " and width ",
      q.size(3), ", those of q, but got shape ", k.sizes());
  TORCH_CHECK(v.sizes().slice(0, 3) == k.sizes().slice(0, 3), op, ": expected v of batch, heads and length ",
      k.sizes().slice(0, 3), ", those of k, but got shape ", v.sizes());
  TORCH_CHECK(k.size(1) == 0 ? q.size(1) == 0 : q.size(1) % k.size(1) == 0, op, ": expected heads of q a multiple of ",
      k.size(1), ", those of k and v, but got ", q.size(1));
  if (!bias) return;
  check_kind_like(op, "bias", *bias, "q", q);
  const auto shape = scores_shape(q, k);
  bool broadcasts = bias->dim() <= 4;
  for (int64_t i = 1; broadcasts && i <= bias->dim(); ++i)
    broadcasts = bias->size(-i) == 1 || bias->size(-i) == shape[4 - static_cast<size_t>(i)];
  TORCH_CHECK(broadcasts, op, ": expected bias broadcastable to ", at::IntArrayRef(shape), ", the scores, but got ",
      bias->sizes());
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
    const std::optional<Tensor>& bias_, bool causal, std::optional<double> scale_) {
  check_scores("attention", q, k, v, bias_);
  const double scale = scale_of(q, scale_);
  const Tensor bias = bias_ ? expand_bias(*bias_, scores_shape(q, k)) : Tensor();
  // In the memory of [batch, length, heads, width], which is what the layer after it wants.
  Tensor out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  Tensor logsumexp = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::toOpMathType(q.scalar_type())));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention", [&] {
    using T = scalar_t;
    launch(current_stream(q.get_device()),
        [s = scores_of<T>(q, k, v, bias, causal, scale), out = Heads<T>::of(out), l = Rows<Acc<T>>::of(logsumexp)] {
          forward_loop(s, out, l);
        });
  });
  return {out, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& grad_out,
    const std::optional<Tensor>& grad_logsumexp_, const Tensor& q, const Tensor& k, const Tensor& v,
    const std::optional<Tensor>& bias_, const Tensor& out, const Tensor& logsumexp_, bool causal,
    std::optional<double> scale_, bool bias_grad) {
  constexpr const char* op = "attention_backward";
  check_scores(op, q, k, v, bias_);
  const auto check = [&](const char* name, const Tensor& x, at::ScalarType type, at::IntArrayRef shape) {
    check_same_device(op, "q", q, name, x);
    check_dtype(op, name, x, type, "its attention output");
    check_shape(op, name, x, shape, "that of its attention output");
  };
  const auto wide = at::toOpMathType(q.scalar_type());
  const std::array<int64_t, 4> out_shape{q.size(0), q.size(1), q.size(2), v.size(3)};
  check("grad_out", grad_out, q.scalar_type(), out_shape);
  check("out", out, q.scalar_type(), out_shape);
  check("logsumexp", logsumexp_, wide, q.sizes().slice(0, 3));
  if (grad_logsumexp_) check("grad_logsumexp", *grad_logsumexp_, wide, q.sizes().slice(0, 3));
  TORCH_CHECK(!bias_grad || bias_, op, ": bias_grad asks for the gradient of a bias, but got none; pass bias");

  const double scale = scale_of(q, scale_);
  const Tensor bias = bias_ ? expand_bias(*bias_, scores_shape(q, k)) : Tensor();
  const Tensor logsumexp = logsumexp_.contiguous(),
               grad_logsumexp = grad_logsumexp_ ? grad_logsumexp_->contiguous() : Tensor();
  Tensor grad_q = at::empty_like(q);
  // No query head: no work that would write these.
  Tensor grad_k = q.size(1) ? at::empty_like(k) : at::zeros_like(k),
         grad_v = q.size(1) ? at::empty_like(v) : at::zeros_like(v);
  std::array<int64_t, 4> bias_shape{1, 1, 1, 1};
  Tensor grad_bias = at::empty({0}, q.options()), expanded;
  if (bias_grad) {
    grad_bias = at::zeros(bias_->sizes(), q.options().dtype(wide));
    expanded = expand_bias(grad_bias, scores_shape(q, k));
    std::copy(bias_->sizes().rbegin(), bias_->sizes().rend(), bias_shape.rbegin());
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), op, [&] {
    using T = scalar_t;
    using A = Acc<T>;
    Gradients<T> g{Heads<const T>::of(grad_out), Heads<const T>::of(out), Rows<const A>::of(logsumexp),
        grad_logsumexp.defined() ? Rows<const A>::of(grad_logsumexp) : Rows<const A>(), Heads<T>::of(grad_q),
        Heads<T>::of(grad_k), Heads<T>::of(grad_v), {}};
    if (bias_grad) g.bias = Heads<A>::of(expanded);
    launch(current_stream(q.get_device()), [s = scores_of<T>(q, k, v, bias, causal, scale), g, bias_shape, bias_grad] {
      backward_loop(s, g);
      if (bias_grad) bias_loop(s, g, bias_shape);
    });
  });
  return {grad_q, grad_k, grad_v, grad_bias.to(q.scalar_type())};
}

// ---- autograd: see Note [Derivatives] ----

struct Attention {
  static auto forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
      const std::optional<Tensor>& bias, bool causal, std::optional<double> scale) {
    const auto result = op<attention>("openreg::attention").call(q, k, v, bias, causal, scale);
    const auto& [out, logsumexp] = result;
    const bool bias_grad = bias && bias->requires_grad();
    if (!q.requires_grad() && !k.requires_grad() && !bias_grad) ctx->mark_non_differentiable({logsumexp});
    return saving(result, q, k, v, bias, out, logsumexp, causal, scale, bias_grad);
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(AutogradContext*, const variable_list& grad,
      const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, const Tensor& out,
      const Tensor& logsumexp, bool causal, std::optional<double> scale, bool bias_grad) {
    if (!grad[0].defined() && !grad[1].defined()) return {};
    auto gradients = op<attention_backward>("openreg::attention_backward")
                         .call(grad[0].defined() ? grad[0] : at::zeros_like(out), if_defined(grad[1]), q, k, v, bias,
                             out, logsumexp, causal, scale, bias_grad);
    if (!bias_grad) std::get<3>(gradients) = Tensor();
    return gradients;
  }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.attention");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? bias=None, *, bool causal=False, float? scale=None) -> "
      "(Tensor out, Tensor logsumexp)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_logsumexp, Tensor q, Tensor k, Tensor v, Tensor? bias, "
      "Tensor out, Tensor logsumexp, *, bool causal=False, float? scale=None, bool bias_grad=False) -> "
      "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias)");
  autocast(m, "attention", Cast::kLower);
}
TORCH_LIBRARY_IMPL(openreg, PrivateUse1, m) {
  m.impl("attention", attention);
  m.impl("attention_backward", attention_backward);
}
TORCH_LIBRARY_IMPL(openreg, AutogradPrivateUse1, m) {
  m.impl("attention", autograd<Attention, attention>("openreg::attention"));
  m.impl("attention_backward", differentiate_by_reference());
}

} // namespace openreg::ops
