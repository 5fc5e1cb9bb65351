// The checks of attention over packed sequences, and its work.
#include "aten/attention/packed.h"

#include <vector>

#include "backend/allocator.h"

namespace openreg::packed {

// ---- arguments ----

void check_on_device(const Call& c, const char* name, const Tensor& x, const Tensor& query) {
  check_same_device(c.op, "query", query, name, x);
}

const int32_t* check_integers(
    const Call& c, const char* name, const Tensor& x, const Tensor& query, at::IntArrayRef shape, const char* what) {
  check_on_device(c, name, x, query);
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
    c.offsets_k = check_integers(c, c.offsets_k_name, *k, query, q->sizes(), "the same as the offsets of query");
}

void check_inputs(Call& c, const Tensor& query, const Tensor& key, const Tensor& value, int64_t dim, bool pages) {
  const auto shape = [](int64_t n) {
    return n == 3 ? "[total, heads, width], because the sequences are packed" : "[batch, length, heads, width]";
  };
  for (const auto& [name, x] : {std::pair{"query", &query}, {"key", &key}, {"value", &value}}) {
    check_on_device(c, name, *x, query);
    const int64_t expected = pages && x != &query ? 4 : dim;
    TORCH_CHECK(x->layout() == at::kStrided && x->dim() == expected, c.op, ": expected ", name, " of shape ",
        pages && x != &query ? "[pages, page size, heads, width]" : shape(expected), ", but got ", x->sizes());
    check_dtype(c.op, name, *x, query.scalar_type(), "query");
  }
  c.heads = query.size(-2);
  c.kv_heads = key.size(-2);
  c.width = query.size(-1);
  c.value_width = value.size(-1);
  c.queries = query.size(-3);
  c.keys = key.size(-3);
  if (dim == 4 && !c.packed()) c.batch = query.size(0);
  TORCH_CHECK(pages || key.dim() == 3 || key.size(0) == query.size(0), c.op, ": expected key of batch ", query.size(0),
      ", like query, but got shape ", key.sizes());
  TORCH_CHECK(key.size(-1) == c.width && c.width > 0, c.op,
      ": expected query and key of the same width, above 0, but got ", c.width, " and ", key.size(-1));
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

void check_inference(const Call& c, const char* name, std::initializer_list<const Tensor*> inputs) {
  const bool differentiates = at::GradMode::is_enabled() &&
      std::any_of(inputs.begin(), inputs.end(), [](const Tensor* x) { return x->requires_grad(); });
  TORCH_CHECK(!differentiates, c.op, ": ", name,
      " is for inference, as PyTorch does not pass it to backward, but an input requires grad; call under "
      "torch.no_grad()");
}

kernels::Drawn draw(const Call& c, const Tensor& query) {
  return c.dropout_p > 0 ? kernels::draw(c.op, query, std::nullopt) : kernels::Drawn();
}

void check_like(
    const Call& c, const char* name, const Tensor& x, const Tensor& query, at::ScalarType type, at::IntArrayRef shape) {
  check_on_device(c, name, x, query);
  check_dtype(c.op, name, x, type, "forward's");
  check_shape(c.op, name, x, shape, "the same as forward's output");
}

const uint64_t* check_random(const Call& c, const char* name, const Tensor& x, const Tensor& query, int64_t count) {
  if (c.dropout_p == 0) return nullptr;
  check_on_device(c, name, x, query);
  TORCH_CHECK(x.element_size() == 8 && x.numel() == count && x.is_contiguous(), c.op, ": expected ", name, " of ",
      count, " 64-bit integers, as forward returned it, but got ", x.sizes(), " of ", dtype_name(x.scalar_type()));
  expect_memory(c.op, x);
  return static_cast<const uint64_t*>(x.const_data_ptr());
}

// ---- work ----

// The rows of a sequence in query and in key.
struct Sequence {
  kernels::Range q, k;
};

namespace {

kernels::Range check_range(const Call& c, const char* name, const int32_t* offsets, int64_t b, int64_t rows) {
  const kernels::Range range{offsets[b], offsets[b + 1]};
  TORCH_CHECK(0 <= range.begin && range.begin <= range.end && range.end <= rows, c.op, ": expected ", name,
      " to rise from 0 to at most ", rows, ", the rows that are packed, but elements ", b, " and ", b + 1, " are ",
      range.begin, " and ", range.end);
  return range;
}

std::vector<Sequence> sequences_of(const Call& c) {
  std::vector<Sequence> out;
  if (!c.packed()) return {{{0, c.queries}, {0, c.keys}}};
  for (int64_t b = 0; b < c.batch; ++b) {
    const kernels::Range q = check_range(c, c.offsets_q_name, c.offsets_q, b, c.queries);
    TORCH_CHECK(q.size() <= c.longest, c.op, ": expected sequences of at most ", c.longest,
        " queries, the maximum passed, but number ", b, " has ", q.size());
    kernels::Range k = c.pages ? kernels::Range{0, c.keys} : check_range(c, c.offsets_k_name, c.offsets_k, b, c.keys);
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

// The scores of sequence `b`, or of the dense batch.
template <class T>
kernels::Scores<T> scores_of(const Call& c, const Inputs<T>& in, int64_t b, const Sequence& at) {
  kernels::Scores<T> s{c.packed() ? 1 : c.batch, c.heads, c.heads / c.kv_heads, at.q.size(), at.k.size(), c.width,
      c.value_width, 0, 0, static_cast<kernels::Acc<T>>(c.scale), in.q, in.k, in.v, in.bias, kInf};
  // Query i is at key i + shift.
  const int64_t shift = c.from_end ? s.keys - s.queries : 0;
  s.left = c.left < 0 ? kernels::kAll : std::min(c.left, kernels::kAll / 2) - shift;
  s.right = c.right < 0 ? kernels::kAll : std::min(c.right, kernels::kAll / 2) + shift;
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
void each_spare_row(kernels::Range Sequence::* rows, const std::vector<Sequence>& sequences, int64_t count, F f) {
  int64_t i = 0;
  for (const Sequence& s : sequences) {
    for (; i < (s.*rows).begin; ++i) f(i);
    i = std::max(i, (s.*rows).end);
  }
  for (; i < count; ++i) f(i);
}

template <class T>
void clear_row(const kernels::Heads<T>& x, int64_t heads, int64_t width, int64_t i) {
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t k = 0; k < width; ++k) x.at(0, h, i)[k * x.col] = T(0);
}

// A sequence's keys and values, gathered from their pages.
template <class T>
struct Pages {
  std::vector<T> k, v;

  Pages(const Call& c, kernels::Scores<T>& s, int64_t b)
      : k(static_cast<size_t>(s.keys * c.kv_heads * c.width)),
        v(static_cast<size_t>(s.keys * c.kv_heads * c.value_width)) {
    gather(c, b, s.keys, s.k, c.width, k.data());
    gather(c, b, s.keys, s.v, c.value_width, v.data());
    s.k = {k.data(), 0, c.width, c.kv_heads * c.width, 1};
    s.v = {v.data(), 0, c.value_width, c.kv_heads * c.value_width, 1};
  }

  static void gather(
      const Call& c, int64_t b, int64_t keys, const kernels::Heads<const T>& from, int64_t width, T* to) {
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
kernels::Rows<A> rows_of(const kernels::Rows<A>& all, bool by_total, int64_t b, const Sequence& at) {
  if (all.data == nullptr) return all;
  return {all.data + (by_total ? at.q.begin : b * all.batch), all.batch, all.head};
}

// The probabilities before dropout, with a minus sign on the ones it drops: [batch, heads, longest, columns].
template <class T>
void debug_mask(
    const kernels::Scores<T>& s, const kernels::Rows<float>& logsumexp, T* mask, int64_t rows, int64_t columns) {
  TORCH_CHECK(
      s.keys <= columns, "_flash_attention_forward: expected sequences of at most max_k keys, but one has ", s.keys);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      for (int64_t i = 0; i < s.queries; ++i) {
        T* to = mask + ((b * s.heads + h) * rows + i) * columns;
        const kernels::Range seen = s.seen(i, 0, s.keys);
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

} // namespace

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
    kernels::forward_loop(s, out, logsumexp);
    if (to.debug)
      debug_mask(
          s, logsumexp, to.debug + b * s.heads * to.debug_rows * to.debug_columns, to.debug_rows, to.debug_columns);
  });
}

template <class T>
void backward(const Call& c, const Inputs<T>& in, const kernels::Gradients<T>& to, bool by_total) {
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
    kernels::Gradients<T> g = to;
    g.logsumexp = rows_of(to.logsumexp, by_total, b, at);
    g.grad_out.data += at.q.begin * g.grad_out.row;
    g.out.data += at.q.begin * g.out.row;
    g.q.data += at.q.begin * g.q.row;
    g.k.data += at.k.begin * g.k.row;
    g.v.data += at.k.begin * g.v.row;
    kernels::backward_loop(s, g);
    if (g.bias.data) kernels::bias_loop(s, g, {s.batch, s.heads, s.queries, s.keys});
  });
}

#define INSTANTIATE(T)                                                     \
  template void forward(const Call&, const Inputs<T>&, const Outputs<T>&); \
  template void backward(const Call&, const Inputs<T>&, const kernels::Gradients<T>&, bool);
INSTANTIATE(float)
INSTANTIATE(at::Half)
INSTANTIATE(at::BFloat16)
#undef INSTANTIATE

} // namespace openreg::packed
