// _efficient_attention_*, which scaled_dot_product_attention calls for jagged tensors: a causal mask counts from either
// end, and a dense batch may have a bias.
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "aten/attention/packed.h"
#include "backend/identity/identity.h"
#include "compat.h"

namespace openreg::packed {
namespace {

constexpr int64_t kAlignLogsumexp = 32, kAlignBias = 16; // of rows

enum Mask : int64_t { kNone, kFromTopLeft, kFromBottomRight };

Call efficient_call(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
    const MaybeTensor& bias, const MaybeTensor& offsets_q, const MaybeTensor& offsets_k, MaybeInt longest_q,
    MaybeInt longest_k, double dropout_p, int64_t mask, std::optional<double> scale, MaybeInt window) {
  Call c{op, "cu_seqlens_q", "cu_seqlens_k"};
  check_tensor(op, "query", query);
  check_offsets(c, query, offsets_q, offsets_k, false);
  check_inputs(c, query, key, value, 4, false);
  TORCH_CHECK(c.heads == c.kv_heads, op, ": expected query and key with the same number of heads, but got ", c.heads,
      " and ", c.kv_heads, "; repeat the heads of key and value with repeat_interleave");
  c.longest = c.queries;
  if (c.packed()) {
    TORCH_CHECK(query.size(0) == 1, op, ": expected packed sequences of shape [1, total, heads, width], but got ",
        query.sizes());
    TORCH_CHECK(longest_q && longest_k, op, ": cu_seqlens_q needs max_seqlen_q and max_seqlen_k");
    TORCH_CHECK(0 <= *longest_q && *longest_q <= c.queries && 0 <= *longest_k && *longest_k <= c.keys, op,
        ": expected max_seqlen_q from 0 to ", c.queries, " and max_seqlen_k from 0 to ", c.keys, ", but got ",
        *longest_q, " and ", *longest_k);
    TORCH_CHECK(!given(bias), op, ": packed sequences take no bias");
    c.longest = *longest_q;
  }
  TORCH_CHECK(mask == kNone || mask == kFromTopLeft || mask == kFromBottomRight, op,
      ": expected custom_mask_type 0 (no mask), 1 (causal, from the top left) or 2 (causal, from the bottom right), "
      "but got ",
      mask);
  c.from_end = mask == kFromBottomRight;
  c.right = mask == kNone ? -1 : 0;
  if (window && *window > 0) {
    TORCH_CHECK(mask != kNone, op, ": window_size needs a causal custom_mask_type, 1 or 2, but got 0");
    c.left = *window - 1;
  }
  check_dropout(c, dropout_p);
  set_scale(c, scale);
  if (given(bias)) {
    check_on_device(c, "bias", *bias, query);
    check_dtype(op, "bias", *bias, query.scalar_type(), "query");
    check_shape(op, "bias", *bias, {c.batch, c.heads, c.queries, c.keys}, "the same as the scores");
  }
  return c;
}

int64_t padded_rows(const Call& c) {
  return at::divup(c.longest, kAlignLogsumexp) * kAlignLogsumexp;
}

kernels::Rows<float> padded_logsumexp(const Call& c, float* data) {
  return {data, c.heads * padded_rows(c), padded_rows(c)};
}

// For a loop, which accepts a last stride of 0 or 1.
Tensor bias_of(const Call& c, const MaybeTensor& bias) {
  return given(bias) ? kernels::expand_bias(*bias, {c.batch, c.heads, c.queries, c.keys}) : Tensor();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt> efficient_forward(const Tensor& query,
    const Tensor& key, const Tensor& value, const MaybeTensor& bias_, const MaybeTensor& cu_seqlens_q,
    const MaybeTensor& cu_seqlens_k, MaybeInt max_seqlen_q, MaybeInt max_seqlen_k, double dropout_p,
    int64_t custom_mask_type, bool compute_log_sumexp, std::optional<double> scale, const MaybeTensor& seqlen_k,
    MaybeInt window_size) {
  constexpr const char* op = "_efficient_attention_forward";
  Call c = efficient_call(op, query, key, value, bias_, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
      dropout_p, custom_mask_type, scale, window_size);
  if (given(seqlen_k)) {
    check_inference(c, "seqlen_k", {&query, &key, &value});
    TORCH_CHECK(c.packed(), op, ": seqlen_k is for packed sequences, but got no cu_seqlens_q");
    c.used_keys =
        check_integers(c, "seqlen_k", *seqlen_k, query, std::array<int64_t, 1>{c.batch}, "one for each sequence");
  }
#if !OPENREG_TORCH_AT_LEAST(2, 15) // before, autograd forgets the window
  if (c.left >= 0) check_inference(c, "window_size", {&query, &key, &value});
#endif
  const Tensor bias = bias_of(c, bias_);
  Tensor out = at::empty({query.size(0), c.queries, c.heads, c.value_width}, query.options());
  Tensor logsumexp =
      at::empty({c.batch, c.heads, compute_log_sumexp ? padded_rows(c) : 0}, query.options().dtype(at::kFloat));
  Tensor seed = at::empty({}, query.options().dtype(at::kLong)), offset = at::empty_like(seed);
  dispatch(c, query, true, [&](auto zero) {
    using T = decltype(zero);
    Inputs<T> in{heads_of<const T>(query), heads_of<const T>(key), heads_of<const T>(value)};
    if (bias.defined()) in.bias = kernels::Heads<const T>::of(bias);
    Outputs<T> to{heads_of<T>(out)};
    to.by_total = false;
    if (compute_log_sumexp) to.logsumexp = padded_logsumexp(c, logsumexp.mutable_data_ptr<float>());
    to.spare_rows = padded_rows(c);
    launch(
        current_stream(query.get_device()),
        [c, in, to, draws = draw(c, query), seed = seed.mutable_data_ptr<int64_t>(),
            offset = offset.mutable_data_ptr<int64_t>()]() mutable {
          const auto drawn = draws();
          *seed = static_cast<int64_t>(drawn[0]);
          *offset = static_cast<int64_t>(drawn[1]);
          in.random = drawn.data();
          forward(c, in, to);
        },
        Site(op));
  });
  return {out, logsumexp, seed, offset, c.longest, c.packed() ? *max_seqlen_k : c.keys};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& grad_out, const Tensor& query,
    const Tensor& key, const Tensor& value, const MaybeTensor& bias_, const Tensor& out,
    const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    const Tensor& logsumexp_, double dropout_p, const Tensor& philox_seed, const Tensor& philox_offset,
    int64_t custom_mask_type, bool bias_requires_grad, std::optional<double> scale, MaybeInt /*num_splits_key*/,
    MaybeInt window_size, bool shared_storage_dqdkdv) {
  constexpr const char* op = "_efficient_attention_backward";
  if (!grad_out.defined()) return {};
  const Call c = efficient_call(op, query, key, value, bias_, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
      dropout_p, custom_mask_type, scale, window_size);
  const std::array<int64_t, 4> out_shape{query.size(0), c.queries, c.heads, c.value_width};
  check_like(c, "grad_out", grad_out, query, query.scalar_type(), out_shape);
  check_like(c, "out", out, query, query.scalar_type(), out_shape);
  check_like(c, "logsumexp", logsumexp_, query, at::kFloat, {c.batch, c.heads, padded_rows(c)});
  const uint64_t *seed = check_random(c, "philox_seed", philox_seed, query, 1),
                 *offset = check_random(c, "philox_offset", philox_offset, query, 1);
  TORCH_CHECK(!bias_requires_grad || given(bias_), op,
      ": bias_requires_grad asks for the gradient of a bias, but got "
      "none; pass bias");
  const Tensor logsumexp = logsumexp_.contiguous(), bias = bias_of(c, bias_);
  Tensor grad_q, grad_k, grad_v, grad_bias, wide_bias;
  if (shared_storage_dqdkdv) {
    TORCH_CHECK(c.queries == c.keys && c.width == c.value_width, op,
        ": shared_storage_dqdkdv needs query, key and value of one shape, but got ", query.sizes(), ", ", key.sizes(),
        " and ", value.sizes());
    const Tensor all = at::empty({query.size(0), c.queries, 3, c.heads, c.width}, query.options());
    grad_q = all.select(2, 0);
    grad_k = all.select(2, 1);
    grad_v = all.select(2, 2);
  } else {
    grad_q = at::empty_like(query);
    grad_k = at::empty_like(key);
    grad_v = at::empty_like(value);
  }
  if (given(bias_)) {
    const int64_t columns = at::divup(c.keys, kAlignBias) * kAlignBias;
    grad_bias = at::zeros({c.batch, c.heads, c.queries, columns}, bias_->options()).slice(3, 0, c.keys);
    if (bias_requires_grad)
      wide_bias = at::zeros({c.batch, c.heads, c.queries, c.keys}, bias_->options().dtype(at::kFloat));
  } else {
    grad_bias = at::empty({}, query.options().dtype(at::kFloat));
  }
  dispatch(c, query, true, [&](auto zero) {
    using T = decltype(zero);
    Inputs<T> in{heads_of<const T>(query), heads_of<const T>(key), heads_of<const T>(value)};
    if (bias.defined()) in.bias = kernels::Heads<const T>::of(bias);
    kernels::Gradients<T> to{heads_of<const T>(grad_out), heads_of<const T>(out)};
    const auto rows = padded_logsumexp(c, nullptr);
    to.logsumexp = {logsumexp.const_data_ptr<float>(), rows.batch, rows.head};
    to.q = heads_of<T>(grad_q);
    to.k = heads_of<T>(grad_k);
    to.v = heads_of<T>(grad_v);
    if (wide_bias.defined()) to.bias = kernels::Heads<float>::of(wide_bias);
    launch(
        current_stream(query.get_device()),
        [c, in, to, seed, offset]() mutable {
          const std::array<uint64_t, 2> drawn{seed ? *seed : 0, offset ? *offset : 0};
          in.random = drawn.data();
          backward(c, in, to, /*by_total=*/false);
        },
        Site(op));
  });
  if (wide_bias.defined()) grad_bias.copy_(wide_bias);
  return {grad_q, grad_k, grad_v, grad_bias};
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("_efficient_attention_forward", efficient_forward);
  m.impl("_efficient_attention_backward", efficient_backward);
}

} // namespace openreg::packed
