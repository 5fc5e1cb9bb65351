// attention: out = softmax(scale * q k^T + bias) v, and the logsumexp of each row of scores.
// The loops are in kernels/attention.cpp. logsumexp is an output, and differentiable: its gradient joins the sum over
// out * grad_out in backward.
#include "kernels/attention.h"
#include "ops/autograd.h"
#include "ops/checks.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace openreg::ops {
namespace {
using namespace kernels;

// ---- torch ----

void check_attention(
    const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias) {
  check_floating(op, "q", q);
  for (const auto& [name, x] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}}) {
    check_tensor(op, name, *x);
    TORCH_CHECK(
        x->dim() == 4, op, ": expected ", name, " of shape [batch, heads, length, width], but got ", x->sym_sizes());
  }
  for (const auto& [name, x] : {std::pair{"k", &k}, {"v", &v}}) {
    check_kind_like(op, name, *x, "q", q);
  }
  const auto of_q = q.sym_sizes(), of_k = k.sym_sizes(), of_v = v.sym_sizes();
  TORCH_CHECK(expect(of_k[0].sym_eq(of_q[0])) && expect(of_k[3].sym_eq(of_q[3])), op, ": expected k of batch ", of_q[0],
      " and width ", of_q[3], ", like q, but got shape ", of_k);
  TORCH_CHECK(same(rows_of(v), rows_of(k)), op, ": expected v of batch, heads and length ", rows_of(k),
      ", like k, but got shape ", of_v);
  const SymInt &heads = of_q[1], &shared = of_k[1]; // `||` would read a size that may not be known yet
  TORCH_SYM_CHECK((heads % shared.max(1)).sym_eq(0).sym_and(shared.sym_ne(0).sym_or(heads.sym_eq(0))), op,
      ": expected the number of heads of q to be a multiple of ", shared, ", the heads of k and v, but got ", heads);
  if (!bias) return;
  check_kind_like(op, "bias", *bias, "q", q);
  const std::array<SymInt, 4> scores{of_q[0], of_q[1], of_q[2], of_k[2]};
  TORCH_CHECK(broadcasts(bias->sym_sizes(), scores), op, ": expected bias broadcastable to ", SymIntArrayRef(scores),
      ", the scores, but got ", bias->sym_sizes());
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
    const std::optional<Tensor>& bias_, bool causal, std::optional<double> scale_) {
  check_attention("attention", q, k, v, bias_);
  const double scale = scale_of(q, scale_);
  const Tensor bias = bias_ ? expand_bias(*bias_, scores_shape(q, k)) : Tensor();
  // With the memory layout of [batch, length, heads, width], which the next layer needs.
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

void check_attention_backward(const char* op, const Tensor& grad_out, const std::optional<Tensor>& grad_logsumexp,
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, const Tensor& out,
    const Tensor& logsumexp, bool /*causal*/, std::optional<double> /*scale*/, bool bias_grad) {
  check_attention(op, q, k, v, bias);
  const auto check = [&](const char* name, const Tensor& x, at::ScalarType type, SymIntArrayRef shape) {
    check_same_device(op, "q", q, name, x);
    check_dtype(op, name, x, type, "its attention output");
    check_shape(op, name, x, shape, "the same as its attention output");
  };
  const auto type = q.scalar_type(), wide = at::toOpMathType(type);
  const std::array<SymInt, 4> of_out{q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
  check("grad_out", grad_out, type, of_out);
  check("out", out, type, of_out);
  check("logsumexp", logsumexp, wide, rows_of(q));
  if (grad_logsumexp) check("grad_logsumexp", *grad_logsumexp, wide, rows_of(q));
  TORCH_CHECK(!bias_grad || bias, op, ": bias_grad asks for the gradient of a bias, but got none; pass bias");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& grad_out,
    const std::optional<Tensor>& grad_logsumexp_, const Tensor& q, const Tensor& k, const Tensor& v,
    const std::optional<Tensor>& bias_, const Tensor& out, const Tensor& logsumexp_, bool causal,
    std::optional<double> scale_, bool bias_grad) {
  constexpr const char* op = "attention_backward";
  check_attention_backward(op, grad_out, grad_logsumexp_, q, k, v, bias_, out, logsumexp_, causal, scale_, bias_grad);
  const double scale = scale_of(q, scale_);
  const Tensor bias = bias_ ? expand_bias(*bias_, scores_shape(q, k)) : Tensor();
  const Tensor logsumexp = logsumexp_.contiguous(), grad_logsumexp = contiguous(grad_logsumexp_);
  Tensor grad_q = at::empty_like(q);
  // No query head, so no work writes these.
  Tensor grad_k = q.size(1) ? at::empty_like(k) : at::zeros_like(k),
         grad_v = q.size(1) ? at::empty_like(v) : at::zeros_like(v);
  std::array<int64_t, 4> bias_shape{1, 1, 1, 1};
  Tensor grad_bias = at::empty({0}, q.options()), expanded;
  if (bias_grad) {
    grad_bias = at::zeros(bias_->sizes(), logsumexp.options());
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
  checked_by("attention", check_attention);
  checked_by("attention_backward", check_attention_backward);
  autocast(m, "attention", Cast::kLower);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("attention", attention);
  m.impl("attention_backward", attention_backward);
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("attention", autograd<Attention, attention>("openreg::attention"));
  m.impl("attention_backward", differentiate_by_reference());
}

} // namespace openreg::ops
