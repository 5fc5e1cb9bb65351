// _flash_attention_*, which varlen_attn calls: causal masks and windows count from the end.
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

Call flash_call(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
    const MaybeTensor& offsets_q, const MaybeTensor& offsets_k, int64_t max_q, double dropout_p, bool is_causal,
    std::optional<double> scale, MaybeInt window_left, MaybeInt window_right, bool pages) {
  Call c{op, "cum_seq_q", "cum_seq_k"};
  check_tensor(op, "query", query);
  check_offsets(c, query, offsets_q, offsets_k, pages);
  check_inputs(c, query, key, value, c.packed() ? 3 : 4, pages);
  TORCH_CHECK(c.value_width == c.width && c.width % 8 == 0 && c.width <= 256, op,
      ": expected query, key and value of the same width, a multiple of 8 up to 256, but got ", c.width, " and ",
      c.value_width, "; pad them with torch.nn.functional.pad, and pass scale");
  c.longest = c.packed() ? max_q : c.queries;
  TORCH_CHECK(c.longest >= 0, op, ": expected max_q of at least 0, but got ", max_q);
  check_dropout(c, dropout_p);
  set_scale(c, scale);
  c.left = window_left.value_or(-1);
  c.right = is_causal ? 0 : window_right.value_or(-1);
  return c;
}

struct Flash {
  Tensor logsumexp, random, unused, debug;
};

// Writes to `out`, of query's shape.
Flash flash(const char* op, const Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value,
    const MaybeTensor& offsets_q, const MaybeTensor& offsets_k, int64_t max_q, int64_t max_k, double dropout_p,
    bool is_causal, bool return_debug_mask, std::optional<double> scale, MaybeInt window_left, MaybeInt window_right,
    const MaybeTensor& used_keys, const MaybeTensor& slopes, const MaybeTensor& table) {
  Call c = flash_call(op, query, key, value, offsets_q, offsets_k, max_q, dropout_p, is_causal, scale, window_left,
      window_right, given(table));
  const std::array<int64_t, 1> of_batch{c.batch};
  for (const auto& [name, x] : {std::pair{"seqused_k", &used_keys}, {"alibi_slopes", &slopes}, {"block_table", &table}})
    if (given(*x)) check_inference(c, name, {&query, &key, &value});
  if (given(used_keys)) {
    TORCH_CHECK(c.packed(), op, ": seqused_k is for packed sequences, but got no cum_seq_q");
    c.used_keys = check_integers(c, "seqused_k", *used_keys, query, of_batch, "one for each sequence");
  }
  if (given(table)) {
    TORCH_CHECK(c.packed() && c.used_keys, op, ": block_table needs cum_seq_q and seqused_k");
    TORCH_CHECK(table->dim() == 2, op, ": expected block_table of shape [batch, pages], but got ", table->sizes());
    c.pages_each = table->size(1);
    c.pages = check_integers(c, "block_table", *table, query, {c.batch, c.pages_each}, "pages of each sequence");
    c.page_count = key.size(0);
    c.page_size = key.size(1);
    c.keys = c.pages_each * c.page_size;
  }
  Tensor contiguous_slopes;
  if (given(slopes)) {
    check_on_device(c, "alibi_slopes", *slopes, query);
    check_dtype(op, "alibi_slopes", *slopes, at::kFloat, "the scores");
    TORCH_CHECK(slopes->sizes() == at::IntArrayRef{c.heads} || slopes->sizes() == at::IntArrayRef({c.batch, c.heads}),
        op, ": expected alibi_slopes of shape ", at::IntArrayRef{c.heads}, " or ", at::IntArrayRef({c.batch, c.heads}),
        ", but got ", slopes->sizes());
    contiguous_slopes = slopes->contiguous();
  }
  TORCH_CHECK(!return_debug_mask || c.dropout_p > 0, op,
      ": return_debug_mask returns the mask of dropout, but got dropout_p=0; pass return_debug_mask=False");

  Flash f;
  f.logsumexp = c.packed() ? at::empty({c.heads, c.queries}, query.options().dtype(at::kFloat))
                           : at::empty({c.batch, c.heads, c.queries}, query.options().dtype(at::kFloat));
  f.random = at::empty({2}, query.options().dtype(at::kUInt64));
  f.unused = at::empty({}, query.options().dtype(at::kUInt64));
  int64_t columns = 0;
  if (return_debug_mask) {
    const int64_t block = c.width > 64 ? 128 : 256;
    TORCH_CHECK(!c.packed() || max_k >= 0, op, ": expected max_k of at least 0, but got ", max_k);
    const int64_t keys = c.packed() ? max_k : c.keys;
    columns = keys <= 128 ? 128 : at::divup(keys, block) * block;
    f.debug = at::zeros({c.batch, c.heads, c.longest, columns}, query.options());
  } else {
    f.debug = at::empty({0}, query.options());
  }
  dispatch(c, query, false, [&](auto zero) {
    using T = decltype(zero);
    Inputs<T> in{heads_of<const T>(query), heads_of<const T>(key), heads_of<const T>(value)};
    if (contiguous_slopes.defined())
      in.slopes = {contiguous_slopes.const_data_ptr<float>(), contiguous_slopes.dim() == 2 ? c.heads : 0, 1};
    Outputs<T> to{heads_of<T>(out)};
    to.by_total = c.packed();
    to.logsumexp = {f.logsumexp.mutable_data_ptr<float>(), c.packed() ? 0 : c.heads * c.queries, c.queries};
    to.spare_rows = c.queries;
    if (return_debug_mask) to.debug = f.debug.template mutable_data_ptr<T>();
    to.debug_rows = c.longest;
    to.debug_columns = columns;
    launch(
        current_stream(query.get_device()),
        [c, in, to, draws = draw(c, query), random = f.random.mutable_data_ptr<uint64_t>(),
            unused = f.unused.mutable_data_ptr<uint64_t>()]() mutable {
          const auto drawn = draws();
          random[0] = drawn[0];
          random[1] = drawn[1];
          *unused = 0;
          in.random = drawn.data();
          forward(c, in, to);
        },
        Site(c.op));
  });
  return f;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward(const Tensor& query, const Tensor& key,
    const Tensor& value, const MaybeTensor& cum_seq_q, const MaybeTensor& cum_seq_k, int64_t max_q, int64_t max_k,
    double dropout_p, bool is_causal, bool return_debug_mask, std::optional<double> scale, MaybeInt window_size_left,
    MaybeInt window_size_right, const MaybeTensor& seqused_k, const MaybeTensor& alibi_slopes,
    const MaybeTensor& block_table, MaybeInt /*num_splits*/) {
  constexpr const char* op = "_flash_attention_forward";
  check_tensor(op, "query", query);
  Tensor out = at::empty_like(query);
  auto f = flash(op, out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
      return_debug_mask, scale, window_size_left, window_size_right, seqused_k, alibi_slopes, block_table);
  return {out, f.logsumexp, f.random, f.unused, f.debug};
}

Tensor flash_forward_inplace(Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value,
    const MaybeTensor& cum_seq_q, const MaybeTensor& cum_seq_k, int64_t max_q, int64_t max_k, double dropout_p,
    bool is_causal, bool return_debug_mask, std::optional<double> scale, MaybeInt window_size_left,
    MaybeInt window_size_right, const MaybeTensor& seqused_k, const MaybeTensor& alibi_slopes,
    const MaybeTensor& block_table, MaybeInt /*num_splits*/) {
  constexpr const char* op = "_flash_attention_forward_no_dropout_inplace";
  TORCH_CHECK(dropout_p == 0 && !return_debug_mask, op, ": expected dropout_p=0 and return_debug_mask=False, but got ",
      dropout_p, " and ", return_debug_mask);
  check_same_device(op, "query", query, "out", out);
  check_dtype(op, "out", out, query.scalar_type(), "query");
  check_shape(op, "out", out, query.sizes(), "the same as query");
  at::assert_no_internal_overlap(out);
  for (const Tensor& x : {query, key, value}) at::assert_no_overlap(out, x);
  return flash(op, out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, 0, is_causal, false, scale,
      window_size_left, window_size_right, seqused_k, alibi_slopes, block_table)
      .logsumexp;
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& logsumexp_, const Tensor& cum_seq_q, const Tensor& cum_seq_k,
    int64_t max_q, int64_t /*max_k*/, double dropout_p, bool is_causal, const Tensor& rng_state,
    const Tensor& /*unused*/, std::optional<double> scale, MaybeInt window_size_left, MaybeInt window_size_right) {
  constexpr const char* op = "_flash_attention_backward";
  const Call c = flash_call(op, query, key, value, cum_seq_q, cum_seq_k, max_q, dropout_p, is_causal, scale,
      window_size_left, window_size_right, false);
  check_like(c, "grad_out", grad_out, query, query.scalar_type(), query.sizes());
  check_like(c, "out", out, query, query.scalar_type(), query.sizes());
  if (c.packed()) check_like(c, "logsumexp", logsumexp_, query, at::kFloat, {c.heads, c.queries});
  else check_like(c, "logsumexp", logsumexp_, query, at::kFloat, {c.batch, c.heads, c.queries});
  const uint64_t* random = check_random(c, "rng_state", rng_state, query, 2);
  const Tensor logsumexp = logsumexp_.contiguous();
  Tensor grad_q = at::empty_like(query), grad_k = at::empty_like(key), grad_v = at::empty_like(value);
  dispatch(c, query, false, [&](auto zero) {
    using T = decltype(zero);
    const Inputs<T> in{heads_of<const T>(query), heads_of<const T>(key), heads_of<const T>(value), {}, {}, random};
    const kernels::Gradients<T> to{heads_of<const T>(grad_out), heads_of<const T>(out),
        {logsumexp.const_data_ptr<float>(), c.packed() ? 0 : c.heads * c.queries, c.queries}, {}, heads_of<T>(grad_q),
        heads_of<T>(grad_k), heads_of<T>(grad_v), {}};
    launch(current_stream(query.get_device()), [c, in, to] { backward(c, in, to, c.packed()); }, Site(op));
  });
  return {grad_q, grad_k, grad_v};
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("_flash_attention_forward", flash_forward);
  m.impl("_flash_attention_forward_no_dropout_inplace", flash_forward_inplace);
  m.impl("_flash_attention_backward", flash_backward);
}

} // namespace openreg::packed
