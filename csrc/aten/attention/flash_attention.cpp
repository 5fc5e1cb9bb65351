// _flash_attention_* and _efficient_attention_*: attention over packed sequences of unequal lengths, or a dense batch.
// varlen_attn and scaled_dot_product_attention of jagged tensors call them. The results have the semantics and
// layouts of CUDA's kernels; the loops are openreg::attention's.
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <vector>

#include "../../compat.h"
#include "../../ops/attention.h"

namespace openreg {
namespace {

using at::Tensor;
using ops::dtype_name;
using MaybeTensor = std::optional<Tensor>;
using MaybeInt = std::optional<int64_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kAlignLogsumexp = 32, kAlignBias = 16; // of the memory-efficient family's rows

bool given(const MaybeTensor& x) {
  return x && x->defined(); // autograd saves None as an undefined tensor
}

// [batch, length, heads, width] or [total, heads, width].
template <class T>
ops::Heads<T> heads_of(const Tensor& x) {
  T* data;
  if constexpr (std::is_const_v<T>) data = x.const_data_ptr<std::remove_const_t<T>>();
  else data = x.mutable_data_ptr<T>();
  return {data, x.dim() == 4 ? x.stride(0) : 0, x.stride(-2), x.stride(-3), x.stride(-1)};
}

// ---- arguments ----

// The arguments of forward and backward of both families, without tensors: the launched work reads the offsets.
struct Call {
  const char* op;
  const char *offsets_q_name, *offsets_k_name;
  int64_t batch = 0, heads = 0, kv_heads = 0, width = 0, value_width = 0;
  int64_t queries = 0, keys = 0;                   // rows of a dense batch, or of all packed sequences together
  int64_t longest = 0;                             // number of queries
  const int32_t *offsets_q = nullptr, *offsets_k = nullptr; // of packed sequences, batch + 1 of them
  const int32_t* used_keys = nullptr;              // of each sequence
  const int32_t* pages = nullptr;                  // of each sequence, pages_each of them
  int64_t page_count = 0, page_size = 0, pages_each = 0;
  int64_t left = -1, right = -1; // the window; -1 is unlimited
  bool from_end = true;          // whether the last query is at the last key, or the first at the first
  double scale = 1, dropout_p = 0;

  bool packed() const { return offsets_q != nullptr; }
};

void check_tensor(const Call& c, const char* name, const Tensor& x, const Tensor& query) {
  ops::check_same_device(c.op, "query", query, name, x);
}

const int32_t* check_integers(
    const Call& c, const char* name, const Tensor& x, const Tensor& query, at::IntArrayRef shape, const char* what) {
  check_tensor(c, name, x, query);
  TORCH_CHECK(x.scalar_type() == at::kInt, c.op, ": expected ", name, " of int32, but got ",
      dtype_name(x.scalar_type()), "; convert it with .to(torch.int32)");
  TORCH_CHECK(x.is_contiguous(), c.op, ": expected contiguous ", name, "; call .contiguous()");
  TORCH_CHECK(x.sizes() == shape, c.op, ": expected ", name, " of shape ", shape, ", ", what, ", but got ", x.sizes());
  return x.const_data_ptr<int32_t>();
}

void check_offsets(Call& c, const Tensor& query, const MaybeTensor& q, const MaybeTensor& k, bool k_optional) {
  if (!given(q) && !given(k)) return;
  TORCH_CHECK(given(q) && (given(k) || k_optional), c.op, ": expected both ", c.offsets_q_name, " and ",
      c.offsets_k_name, ", or neither, but got only ", given(q) ? c.offsets_q_name : c.offsets_k_name);
  TORCH_CHECK(q->dim() == 1 && q->size(0) > 0, c.op, ": expected ", c.offsets_q_name, " of shape [batch + 1], but got ",
      q->sizes());
  c.batch = q->size(0) - 1;
  c.offsets_q = check_integers(c, c.offsets_q_name, *q, query, q->sizes(), "");
  if (given(k))
    c.offsets_k = check_integers(c, c.offsets_k_name, *k, query, q->sizes(), "that of the offsets of query");
}

// Shapes of query, key and value of `dim` dimensions, [(batch,) length, heads, width]; `pages` where key and value
// are [pages, page size, heads, width].
void check_inputs(Call& c, const Tensor& query, const Tensor& key, const Tensor& value, int64_t dim, bool pages) {
  const auto shape = [](int64_t n) {
    return n == 3 ? "[total, heads, width], because the sequences are packed" : "[batch, length, heads, width]";
  };
  for (const auto& [name, x] : {std::pair{"query", &query}, {"key", &key}, {"value", &value}}) {
    check_tensor(c, name, *x, query);
    const int64_t expected = pages && x != &query ? 4 : dim;
    TORCH_CHECK(x->layout() == at::kStrided && x->dim() == expected, c.op, ": expected ", name, " of shape ",
        pages && x != &query ? "[pages, page size, heads, width]" : shape(expected), ", but got ", x->sizes());
    ops::check_dtype(c.op, name, *x, query.scalar_type(), "query");
  }
  c.heads = query.size(-2);
  c.kv_heads = key.size(-2);
  c.width = query.size(-1);
  c.value_width = value.size(-1);
  c.queries = query.size(-3);
  c.keys = key.size(-3);
  if (dim == 4 && !c.packed()) c.batch = query.size(0);
  TORCH_CHECK(pages || key.dim() == 3 || key.size(0) == query.size(0), c.op, ": expected key of batch ", query.size(0),
      ", that of query, but got shape ", key.sizes());
  TORCH_CHECK(key.size(-1) == c.width && c.width > 0, c.op, ": expected query and key of one width above 0, but got ",
      c.width, " and ", key.size(-1));
  TORCH_CHECK(value.sizes().slice(0, value.dim() - 1) == key.sizes().slice(0, key.dim() - 1), c.op,
      ": expected value of the shape of key except for the width, but got ", value.sizes(), " and ", key.sizes());
  TORCH_CHECK(c.kv_heads > 0 && c.heads > 0 && c.heads % c.kv_heads == 0, c.op,
      ": expected the number of heads of query to be a positive multiple of the heads of key, but got ", c.heads,
      " and ", c.kv_heads);
}

void check_dropout(Call& c, double p) {
  TORCH_CHECK(p >= 0 && p <= 1, c.op, ": expected dropout_p from 0 to 1, but got ", p);
  c.dropout_p = p;
}

void set_scale(Call& c, std::optional<double> scale) {
  c.scale = scale.value_or(1 / std::sqrt(static_cast<double>(c.width)));
}

// A gradient that the backward operator cannot compute, because PyTorch does not pass it these arguments.
void check_inference(const Call& c, const char* name, std::initializer_list<const Tensor*> inputs) {
  const bool differentiates = at::GradMode::is_enabled() &&
      std::any_of(inputs.begin(), inputs.end(), [](const Tensor* x) { return x->requires_grad(); });
  TORCH_CHECK(!differentiates, c.op, ": ", name,
      " is for inference, as PyTorch does not pass it to backward, but an input requires grad; call under "
      "torch.no_grad()");
}

// ---- work ----

// The rows of a sequence, in order: of query and of key.
struct Sequence {
  ops::Range q, k;
};

ops::Range check_range(const Call& c, const char* name, const int32_t* offsets, int64_t b, int64_t rows) {
  const ops::Range range{offsets[b], offsets[b + 1]};
  TORCH_CHECK(0 <= range.begin && range.begin <= range.end && range.end <= rows, c.op, ": expected ", name,
      " to rise from 0 to at most ", rows, ", the rows that are packed, but elements ", b, " and ", b + 1, " are ",
      range.begin, " and ", range.end);
  return range;
}

std::vector<Sequence> sequences_of(const Call& c) {
  std::vector<Sequence> out;
  if (!c.packed()) return {{{0, c.queries}, {0, c.keys}}};
  for (int64_t b = 0; b < c.batch; ++b) {
    const ops::Range q = check_range(c, c.offsets_q_name, c.offsets_q, b, c.queries);
    TORCH_CHECK(q.size() <= c.longest, c.op, ": expected sequences of at most ", c.longest,
        " queries, the maximum passed, but number ", b, " has ", q.size());
    ops::Range k = c.pages ? ops::Range{0, c.keys} : check_range(c, c.offsets_k_name, c.offsets_k, b, c.keys);
    if (c.used_keys) {
      const int64_t used = c.used_keys[b];
      TORCH_CHECK(0 <= used && used <= k.size(), c.op, ": expected sequence ", b, " to use from 0 to ", k.size(),
          " keys, but got ", used);
      k.end = k.begin + used;
    }
    out.push_back({q, k});
  }
  return out;
}

// The memory of a call's inputs.
template <class T>
struct Inputs {
  ops::Heads<const T> q, k, v, bias;
  ops::Rows<const float> slopes;
  const uint64_t* random; // two numbers, of dropout
};

// The scores of sequence `b`, or of the dense batch.
template <class T>
ops::Scores<T> scores_of(const Call& c, const Inputs<T>& in, int64_t b, const Sequence& at) {
  ops::Scores<T> s{c.packed() ? 1 : c.batch, c.heads, c.heads / c.kv_heads, at.q.size(), at.k.size(), c.width,
      c.value_width, 0, 0, static_cast<ops::Acc<T>>(c.scale), in.q, in.k, in.v, in.bias, kInf};
  // Query i is at key i + shift.
  const int64_t shift = c.from_end ? s.keys - s.queries : 0;
  s.left = c.left < 0 ? ops::kAll : std::min(c.left, ops::kAll / 2) - shift;
  s.right = c.right < 0 ? ops::kAll : std::min(c.right, ops::kAll / 2) + shift;
  s.q.data += at.q.begin * s.q.row;
  s.k.data += at.k.begin * s.k.row;
  s.v.data += at.k.begin * s.v.row;
  s.slopes = in.slopes;
  if (c.packed() && s.slopes.data) s.slopes.data += b * s.slopes.batch;
  if (s.keys == 1) s.bias.col = 0;
  if (c.dropout_p > 0) {
    s.dropout = {in.random[0], in.random[1], static_cast<int64_t>(std::round(c.dropout_p * 0x1p32)),
        c.dropout_p == 1 ? 0 : 1 / (1 - c.dropout_p), c.packed() ? b : 0, c.queries, c.keys};
  }
  return s;
}

// f(sequence) for all sequences: one thread each if there are enough, else one after another, each on all threads.
template <class F>
void each_sequence(int64_t count, F f) {
  if (count < at::get_num_threads()) {
    for (int64_t b = 0; b < count; ++b) f(b);
  } else {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) f(b);
    });
  }
}

// f(i) for the packed rows that belong to no sequence.
template <class F>
void each_spare_row(ops::Range Sequence::* rows, const std::vector<Sequence>& sequences, int64_t count, F f) {
  int64_t i = 0;
  for (const Sequence& s : sequences) {
    for (; i < (s.*rows).begin; ++i) f(i);
    i = std::max(i, (s.*rows).end);
  }
  for (; i < count; ++i) f(i);
}

template <class T>
void clear_row(const ops::Heads<T>& x, int64_t heads, int64_t width, int64_t i) {
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t k = 0; k < width; ++k) x.at(0, h, i)[k * x.col] = T(0);
}

// A sequence's keys and values, gathered from their pages.
template <class T>
struct Pages {
  std::vector<T> k, v;

  Pages(const Call& c, ops::Scores<T>& s, int64_t b)
      : k(static_cast<size_t>(s.keys * c.kv_heads * c.width)),
        v(static_cast<size_t>(s.keys * c.kv_heads * c.value_width)) {
    gather(c, b, s.keys, s.k, c.width, k.data());
    gather(c, b, s.keys, s.v, c.value_width, v.data());
    s.k = {k.data(), 0, c.width, c.kv_heads * c.width, 1};
    s.v = {v.data(), 0, c.value_width, c.kv_heads * c.value_width, 1};
  }

  static void gather(const Call& c, int64_t b, int64_t keys, const ops::Heads<const T>& from, int64_t width, T* to) {
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t page = c.pages[b * c.pages_each + j / c.page_size];
      TORCH_CHECK(0 <= page && page < c.page_count, c.op, ": expected pages from 0 to ", c.page_count - 1,
          " in block_table, but sequence ", b, " has ", page);
      for (int64_t h = 0; h < c.kv_heads; ++h)
        for (int64_t i = 0; i < width; ++i) *to++ = from.at(page, h, j % c.page_size)[i * from.col];
    }
  }
};

// logsumexp of sequence b: flash's packed one is [heads, total], the other family's [batch, heads, longest].
template <class A>
ops::Rows<A> rows_of(const ops::Rows<A>& all, bool by_total, int64_t b, const Sequence& at) {
  if (all.data == nullptr) return all;
  return {all.data + (by_total ? at.q.begin : b * all.batch), all.batch, all.head};
}

// The probabilities before dropout, with a minus sign on those it drops: [batch, heads, longest, columns].
template <class T>
void debug_mask(const ops::Scores<T>& s, const ops::Rows<float>& logsumexp, T* mask, int64_t rows, int64_t columns) {
  TORCH_CHECK(
      s.keys <= columns, "_flash_attention_forward: expected sequences of at most max_k keys, but one has ", s.keys);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      for (int64_t i = 0; i < s.queries; ++i) {
        T* to = mask + ((b * s.heads + h) * rows + i) * columns;
        const ops::Range seen = s.seen(i, 0, s.keys);
        const auto dot = [&](int64_t j) {
          float sum = 0;
          for (int64_t k = 0; k < s.width; ++k)
            sum += static_cast<float>(s.q.at(b, h, i)[k * s.q.col]) *
                static_cast<float>(s.k.at(b, h / s.group, j)[k * s.k.col]);
          return sum * s.scale;
        };
        const auto write = [&](int64_t j, bool keep) {
          float p = j < seen.begin || j >= seen.end ? 0 : dot(j);
          if (j >= seen.begin && j < seen.end) {
            if (s.slopes.data) p -= *s.slopes.at(b, h) * static_cast<float>(std::abs(i + s.keys - s.queries - j));
            p = std::exp(p - *logsumexp.at(b, h, i));
          }
          to[j] = static_cast<T>(keep ? p : -p);
        };
        s.each_kept(b, h, i, 0, s.keys, write);
      }
    }
  }
}

template <class T>
struct Outputs {
  ops::Heads<T> out;
  ops::Rows<float> logsumexp; // may be null
  bool by_total;
  int64_t spare_rows;         // the rows of each head, if logsumexp is by batch
  T* debug = nullptr;
  int64_t debug_rows = 0, debug_columns = 0;
};

template <class T>
void forward(const Call& c, const Inputs<T>& in, const Outputs<T>& to) {
  const auto sequences = sequences_of(c);
  if (c.packed()) {
    each_spare_row(&Sequence::q, sequences, c.queries, [&](int64_t i) {
      clear_row(to.out, c.heads, c.value_width, i);
      for (int64_t h = 0; to.by_total && to.logsumexp.data && h < c.heads; ++h) *to.logsumexp.at(0, h, i) = kInf;
    });
  }
  each_sequence(static_cast<int64_t>(sequences.size()), [&](int64_t b) {
    const Sequence& at = sequences[static_cast<size_t>(b)];
    auto s = scores_of(c, in, b, at);
    std::optional<Pages<T>> pages;
    if (c.pages) pages.emplace(c, s, b);
    const auto logsumexp = rows_of(to.logsumexp, to.by_total, b, at);
    if (logsumexp.data && !to.by_total)
      for (int64_t batch = 0; batch < s.batch; ++batch)
        for (int64_t h = 0; h < s.heads; ++h)
          std::fill(logsumexp.at(batch, h, s.queries), logsumexp.at(batch, h, to.spare_rows), kInf);
    auto out = to.out;
    out.data += at.q.begin * out.row;
    ops::forward_loop(s, out, logsumexp);
    if (to.debug)
      debug_mask(
          s, logsumexp, to.debug + b * s.heads * to.debug_rows * to.debug_columns, to.debug_rows, to.debug_columns);
  });
}

template <class T>
struct Grads {
  ops::Heads<const T> grad_out, out;
  ops::Rows<const float> logsumexp;
  bool by_total;
  ops::Heads<T> q, k, v;
  ops::Heads<float> bias; // may be null
};

template <class T>
void backward(const Call& c, const Inputs<T>& in, const Grads<T>& to) {
  const auto sequences = sequences_of(c);
  if (c.packed()) {
    each_spare_row(&Sequence::q, sequences, c.queries, [&](int64_t i) { clear_row(to.q, c.heads, c.width, i); });
    each_spare_row(&Sequence::k, sequences, c.keys, [&](int64_t j) {
      clear_row(to.k, c.kv_heads, c.width, j);
      clear_row(to.v, c.kv_heads, c.value_width, j);
    });
  }
  each_sequence(static_cast<int64_t>(sequences.size()), [&](int64_t b) {
    const Sequence& at = sequences[static_cast<size_t>(b)];
    const auto s = scores_of(c, in, b, at);
    ops::Gradients<T> g{to.grad_out, to.out, rows_of(to.logsumexp, to.by_total, b, at), {}, to.q, to.k, to.v, to.bias};
    g.grad_out.data += at.q.begin * g.grad_out.row;
    g.out.data += at.q.begin * g.out.row;
    g.q.data += at.q.begin * g.q.row;
    g.k.data += at.k.begin * g.k.row;
    g.v.data += at.k.begin * g.v.row;
    ops::backward_loop(s, g);
    if (g.bias.data) ops::bias_loop(s, g, {s.batch, s.heads, s.queries, s.keys});
  });
}

// Calls f with a value of query's dtype.
template <class F>
void dispatch(const Call& c, const Tensor& query, bool float32, F f) {
  switch (query.scalar_type()) {
    case at::kHalf:
      return f(at::Half());
    case at::kBFloat16:
      return f(at::BFloat16());
    case at::kFloat:
      if (float32) return f(float());
      [[fallthrough]];
    default:
      TORCH_CHECK(false, c.op, ": expected query of ", float32 ? "float32, " : "", "float16 or bfloat16, but got ",
          dtype_name(query.scalar_type()), "; convert it with .to()");
  }
}

// Two numbers from the device's generator if there is dropout, else zeros.
ops::Drawn draw(const Call& c, const Tensor& query) {
  return c.dropout_p > 0 ? ops::draw(c.op, query, std::nullopt) : ops::Drawn();
}

void check_like(
    const Call& c, const char* name, const Tensor& x, const Tensor& query, at::ScalarType type, at::IntArrayRef shape) {
  check_tensor(c, name, x, query);
  ops::check_dtype(c.op, name, x, type, "forward's");
  ops::check_shape(c.op, name, x, shape, "that of forward's output");
}

// The address of the numbers from which backward draws dropout again.
const uint64_t* check_random(const Call& c, const char* name, const Tensor& x, const Tensor& query, int64_t count) {
  if (c.dropout_p == 0) return nullptr;
  check_tensor(c, name, x, query);
  TORCH_CHECK(x.element_size() == 8 && x.numel() == count && x.is_contiguous(), c.op, ": expected ", name, " of ",
      count, " 64-bit integers, as forward returned it, but got ", x.sizes(), " of ", dtype_name(x.scalar_type()));
  return static_cast<const uint64_t*>(x.const_data_ptr());
}

// ---- flash: causal masks and windows count from the end ----

Call flash_call(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
    const MaybeTensor& offsets_q, const MaybeTensor& offsets_k, int64_t max_q, double dropout_p, bool is_causal,
    std::optional<double> scale, MaybeInt window_left, MaybeInt window_right, bool pages) {
  Call c{op, "cum_seq_q", "cum_seq_k"};
  ops::check_tensor(op, "query", query);
  check_offsets(c, query, offsets_q, offsets_k, pages);
  check_inputs(c, query, key, value, c.packed() ? 3 : 4, pages);
  TORCH_CHECK(c.value_width == c.width && c.width % 8 == 0 && c.width <= 256, op,
      ": expected query, key and value of one width, a multiple of 8 up to 256, but got ", c.width, " and ",
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
    check_tensor(c, "alibi_slopes", *slopes, query);
    ops::check_dtype(op, "alibi_slopes", *slopes, at::kFloat, "the scores");
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
  ops::check_tensor(op, "query", query);
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
  ops::check_same_device(op, "query", query, "out", out);
  ops::check_dtype(op, "out", out, query.scalar_type(), "query");
  ops::check_shape(op, "out", out, query.sizes(), "that of query");
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
    const Grads<T> to{heads_of<const T>(grad_out), heads_of<const T>(out),
        {logsumexp.const_data_ptr<float>(), c.packed() ? 0 : c.heads * c.queries, c.queries}, c.packed(),
        heads_of<T>(grad_q), heads_of<T>(grad_k), heads_of<T>(grad_v), {}};
    launch(current_stream(query.get_device()), [c, in, to] { backward(c, in, to); }, Site(op));
  });
  return {grad_q, grad_k, grad_v};
}

// ---- memory-efficient: a causal mask counts from either end, and dense scores take a bias ----

enum Mask : int64_t { kNone, kFromTopLeft, kFromBottomRight };

Call efficient_call(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
    const MaybeTensor& bias, const MaybeTensor& offsets_q, const MaybeTensor& offsets_k, MaybeInt longest_q,
    MaybeInt longest_k, double dropout_p, int64_t mask, std::optional<double> scale, MaybeInt window) {
  Call c{op, "cu_seqlens_q", "cu_seqlens_k"};
  ops::check_tensor(op, "query", query);
  check_offsets(c, query, offsets_q, offsets_k, false);
  check_inputs(c, query, key, value, 4, false);
  TORCH_CHECK(c.heads == c.kv_heads, op, ": expected query and key of as many heads, but got ", c.heads, " and ",
      c.kv_heads, "; repeat those of key and value with repeat_interleave");
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
    check_tensor(c, "bias", *bias, query);
    ops::check_dtype(op, "bias", *bias, query.scalar_type(), "query");
    ops::check_shape(op, "bias", *bias, {c.batch, c.heads, c.queries, c.keys}, "that of the scores");
  }
  return c;
}

int64_t padded_rows(const Call& c) {
  return at::divup(c.longest, kAlignLogsumexp) * kAlignLogsumexp;
}

ops::Rows<float> padded_logsumexp(const Call& c, float* data) {
  return {data, c.heads * padded_rows(c), padded_rows(c)};
}

// For a loop, which accepts a last stride of 0 or 1.
Tensor bias_of(const Call& c, const MaybeTensor& bias) {
  return given(bias) ? ops::expand_bias(*bias, {c.batch, c.heads, c.queries, c.keys}) : Tensor();
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
    if (bias.defined()) in.bias = ops::Heads<const T>::of(bias);
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
    if (bias.defined()) in.bias = ops::Heads<const T>::of(bias);
    Grads<T> to{heads_of<const T>(grad_out), heads_of<const T>(out)};
    const auto rows = padded_logsumexp(c, nullptr);
    to.logsumexp = {logsumexp.const_data_ptr<float>(), rows.batch, rows.head};
    to.by_total = false;
    to.q = heads_of<T>(grad_q);
    to.k = heads_of<T>(grad_k);
    to.v = heads_of<T>(grad_v);
    if (wide_bias.defined()) to.bias = ops::Heads<float>::of(wide_bias);
    launch(
        current_stream(query.get_device()),
        [c, in, to, seed, offset]() mutable {
          const std::array<uint64_t, 2> drawn{seed ? *seed : 0, offset ? *offset : 0};
          in.random = drawn.data();
          backward(c, in, to);
        },
        Site(op));
  });
  if (wide_bias.defined()) grad_bias.copy_(wide_bias);
  return {grad_q, grad_k, grad_v, grad_bias};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_flash_attention_forward", flash_forward);
  m.impl("_flash_attention_forward_no_dropout_inplace", flash_forward_inplace);
  m.impl("_flash_attention_backward", flash_backward);
  m.impl("_efficient_attention_forward", efficient_forward);
  m.impl("_efficient_attention_backward", efficient_backward);
}

} // namespace openreg
