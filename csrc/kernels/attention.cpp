// The loops of attention, forward and backward: Dao et al. 2022, arXiv:2205.14135, and Dao 2023, arXiv:2307.08691.
// Blocks of scores live in cache, are scaled by a running maximum in forward, and are recomputed from logsumexp in
// backward. The full matrix of scores is never stored.
#include "kernels/attention.h"

#include "kernels/exp.h"
#include "kernels/gemm.h"

#include <cmath>

namespace openreg::kernels {

double scale_of(const at::Tensor& q, std::optional<double> scale) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(q.size(3), 1))));
}

std::array<int64_t, 4> scores_shape(const at::Tensor& q, const at::Tensor& k) {
  return {q.size(0), q.size(1), q.size(2), k.size(2)};
}

at::Tensor expand_bias(const at::Tensor& bias, at::IntArrayRef shape) {
  const bool broadcasts = bias.dim() == 0 || bias.size(-1) == 1;
  return (broadcasts || bias.stride(-1) == 1 ? bias : bias.contiguous()).expand(shape);
}

namespace {

// Rows and columns of a block of scores. A block of columns is a whole number of panels.
constexpr int64_t kQueries = 96, kKeys = 256, kBackwardKeys = 128;

// The block-th range of `size` numbers below `end`.
Range block_range(int64_t block, int64_t size, int64_t end) {
  return {block * size, std::min(end, (block + 1) * size)};
}

// ---- rows of scores ----

template <class A>
using V = at::vec::Vectorized<A>;

// Elements of bias, `count` from i on.
template <class T, class Count>
Vec<T> bias_lanes(const T* bias, int64_t col, int64_t i, Count count) {
  if (col == 0) return Vec<T>(static_cast<Acc<T>>(*bias));
  if constexpr (std::is_same_v<Count, int64_t>) return read(bias + i, count);
  else return read(bias + i);
}

// s = scale * s + bias over n elements.
template <class T>
void scale_row(Acc<T>* s, Acc<T> scale, const T* bias, int64_t bias_col, int64_t n) {
  using A = Acc<T>;
  each_register<A>(n, [&](int64_t i, auto count) {
    V<A> x = V<A>::loadu(s + i) * V<A>(scale);
    if (bias != nullptr) x = x + bias_lanes(bias, bias_col, i, count);
    x.store(s + i);
  });
}

// p = exp(by * (s - max)) over n elements, and 0 up to the end of the last register; returns the sum. p may be s.
// The difference comes first, because a product is rounded, by more than 1 for large scores.
template <class A>
A exp_row(const A* s, A by_, A max, int64_t n, A* out) {
  const V<A> by(by_), m(max);
  V<A> sum(0);
  each_register<A>(n, [&](int64_t i, auto count) {
    V<A> p = ((V<A>::loadu(s + i) - m) * by).exp_u20();
    if constexpr (std::is_same_v<decltype(count), int64_t>) p = V<A>::set(V<A>(0), p, count);
    p.store(out + i);
    sum = sum + p;
  });
  return at::vec::vec_reduce_all<A>([](V<A> a, V<A> b) { return a + b; }, sum);
}

#if defined(CPU_CAPABILITY_AVX512)
// p = exp(by * (s - max)) rounded to bfloat16, two registers of s at a time, by the processor's instruction.
__attribute__((target("avx512bf16"))) inline float exp_row(
    const float* s, float by_, float max, int64_t n, c10::BFloat16* out) {
  constexpr float log2_e = 1.44269504088896341f;
  constexpr int64_t lanes = V<float>::size();
  const V<float> by(by_ * log2_e), m(max);
  V<float> sum[2] = {V<float>(0), V<float>(0)};
  const auto step = [&](const float* from, c10::BFloat16* to) __attribute__((always_inline, target("avx512bf16"))) {
    const V<float> first = exp2((V<float>::loadu(from) - m) * by),
                   second = exp2((V<float>::loadu(from + lanes) - m) * by);
    sum[0] = sum[0] + first;
    sum[1] = sum[1] + second;
    const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
    std::memcpy(to, &both, sizeof both);
  };
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) step(s + i, out + i);
  if (i < n) {
    float rest[2 * lanes];
    std::fill(std::copy_n(s + i, n - i, rest), rest + 2 * lanes, -std::numeric_limits<float>::infinity());
    step(rest, out + i);
  }
  return at::vec::vec_reduce_all<float>([](V<float> a, V<float> b) { return a + b; }, sum[0] + sum[1]);
}
#endif

// s -= slope * |distance - k| over n elements, k being the index.
template <class A>
void slope_row(A* s, float slope, int64_t distance, int64_t n) {
  for (int64_t k = 0; k < n; ++k) s[k] -= static_cast<A>(slope) * static_cast<A>(std::abs(distance - k));
}

// Writes 0 from the end of the last register that n elements take, up to `end`.
template <class E>
void fill_rest(E* s, int64_t n, int64_t end) {
  const int64_t done = at::divup(n, V<E>::size()) * V<E>::size();
  if (done < end) std::fill(s + done, s + end, E(0));
}

// ---- forward ----

// Blocks of queries in task order: under a causal mask a late block has more keys. Threads get consecutive tasks, so
// early and late blocks alternate to give threads equal shares.
inline int64_t block_of(int64_t task, int64_t blocks, bool causal) {
  if (!causal) return task;
  return task % 2 == 0 ? task / 2 : blocks - 1 - task / 2;
}

// One thread's blocks of queries. A head's k and v stay packed until another head comes.
template <class T, class P>
class Forward {
  using A = Acc<T>;
  using E = typename P::Element;
  static constexpr A inf = std::numeric_limits<A>::infinity();
  static constexpr int64_t kRow = kKeys + kPanel<A>; // not a power of 2, to avoid cache conflicts

 public:
  explicit Forward(const Scores<T>& s)
      : s_(s), out_row_(padded<A>(s.value_width)), k_(P::columns(s.keys) * P::terms(s.width)),
        v_(P::columns(s.value_width) * P::depth(s.keys)), q_(kQueries * P::terms(s.width)), scores_(kQueries * kRow),
        rounded_(P::kRounded * kQueries * kRow), out_(kQueries * out_row_) {}

  // logsumexp points to the value of the first query, or is null.
  void block(int64_t b, int64_t h, int64_t begin, const Heads<T>& out, A* logsumexp) {
    const int64_t rows = std::min(kQueries, s_.queries - begin);
    const Range seen = s_.keys_of(begin, begin + rows);
    take_head(b, h / s_.group);
    std::fill_n(max_.data(), rows, -inf);
    std::fill_n(sum_.data(), rows, A(0));
    const int64_t width = P::terms(s_.width);
    for (int64_t i = 0; i < rows; ++i) P::take(s_.q.at(b, h, begin + i), s_.q.col, s_.width, q_ + i * width);
    bool add = false;
    for (int64_t j = seen.begin / kKeys * kKeys; j < seen.end; j += kKeys, add = true) {
      const int64_t keys = std::min(kKeys, seen.end - j);
      P::multiply(rows, keys, Left<E>{q_, width, 1, width}, k_ + j * width, width, scores_, kRow, false);
      for (int64_t i = 0; i < rows; ++i) softmax(b, h, begin + i, i, j, keys);
      P::multiply(rows, s_.value_width, P::template factor<kRow>(probabilities(), rows, keys), v_ + j * P::kPanel,
          P::depth(s_.keys), out_, out_row_, add);
    }
    if (!add) std::fill_n(static_cast<A*>(out_), rows * out_row_, A(0));
    for (int64_t i = 0; i < rows; ++i) {
      // A maximum of -inf is a row that sees no key; a row with a maximum of inf or NaN has no softmax, and exp_u20 has
      // lost that.
      const A max = max_[i] * by_;
      const A by = max == -inf ? 0 : max < inf ? 1 / sum_[i] : std::numeric_limits<A>::quiet_NaN();
      if (logsumexp != nullptr) {
        // If inf marks a row that sees no key, a row that overflows needs another mark.
        if (max == -inf) logsumexp[i] = s_.nothing;
        else if (max == inf) logsumexp[i] = s_.nothing == inf ? std::numeric_limits<A>::quiet_NaN() : inf;
        else logsumexp[i] = max + std::log(sum_[i]);
      }
      narrow(
          out_ + i * out_row_, by * static_cast<A>(s_.dropout.scale), s_.value_width, out.at(b, h, begin + i), out.col);
    }
  }

 private:
  void take_head(int64_t b, int64_t h) {
    if (b == batch_ && h == head_) return;
    P::pack(s_.k.at(b, h), s_.k.col, s_.k.row, s_.width, s_.keys, k_, P::terms(s_.width));
    P::pack(s_.v.at(b, h), s_.v.row, s_.v.col, s_.keys, s_.value_width, v_, P::depth(s_.keys));
    batch_ = b;
    head_ = h;
  }

  // Where a block of probabilities is: in place of the scores, or rounded.
  E* probabilities() const {
    if constexpr (P::kRounded) return rounded_;
    else return scores_;
  }

  // Turns a query's scores, in row i of the block, with `keys` keys from j on, into exponentials relative to the
  // largest score so far, and rescales the earlier sums.
  void softmax(int64_t b, int64_t h, int64_t query, int64_t i, int64_t j, int64_t keys) {
    const Range seen = s_.seen(query, j, keys);
    A* row = scores_ + i * kRow + seen.begin;
    E* all = probabilities() + i * kRow;
    const T* bias = s_.bias_at(b, h, query, j + seen.begin);
    if (!waits_) scale_row(row, s_.scale, bias, s_.bias.col, seen.size());
    if (s_.slopes.data != nullptr)
      slope_row(row, *s_.slopes.at(b, h), query + s_.keys - s_.queries - j - seen.begin, seen.size());
    const A here = max_of(row, seen.size());
    const A max = std::isnan(here) || here > max_[i] ? here : max_[i];
    if (max == -inf) return static_cast<void>(std::fill_n(all, P::span(keys), E(0)));
    if (max != max_[i]) {
      if (max_[i] != -inf) { // else there are no sums yet
        const A shrink = std::exp((max_[i] - max) * by_);
        sum_[i] *= shrink;
        at::vec::map<A>(
            [by = V<A>(shrink)](V<A> x) { return x * by; }, out_ + i * out_row_, out_ + i * out_row_, out_row_);
      }
      max_[i] = max;
    }
    sum_[i] += exp_row(row, by_, max, seen.size(), all + seen.begin);
    std::fill_n(all, seen.begin, E(0));
    fill_rest(all + seen.begin, seen.size(), P::span(keys) - seen.begin);
    if (s_.dropout.least > 0)
      s_.each_kept(b, h, query, j, keys, [&](int64_t k, bool keep) { all[k] = keep ? all[k] : E(0); });
  }

  const Scores<T>& s_;
  // If nothing is added to the scores and the scale keeps their order, exp_row applies it.
  const bool waits_ = s_.bias.data == nullptr && s_.slopes.data == nullptr && s_.scale > 0;
  const A by_ = waits_ ? s_.scale : A(1);
  int64_t out_row_, batch_ = -1, head_ = -1;
  const P products_{};
  Scratch<E> k_, v_, q_;
  Scratch<A> scores_;
  Scratch<E> rounded_;
  Scratch<A> out_;
  std::array<A, kQueries> max_, sum_; // of a row: by_ * max_ is the largest score
};

// ---- backward ----

// With p = exp(scores - logsumexp), delta = sum(grad_out * out) - grad_logsumexp by row, ds = p * (grad_out v^T -
// delta):
//   dv = p^T grad_out,  dq = scale * ds k,  dk = scale * ds^T q,  dbias = ds
// and with dropout, which replaces p with m * p: ds = p * (m * grad_out v^T - delta),  dv = (m * p)^T grad_out.
// One thread's blocks of p and ds, for a range of keys and a range of queries that it has packed.
template <class T, class P>
class Backward {
  using A = Acc<T>;
  using E = typename P::Element;
  static constexpr A inf = std::numeric_limits<A>::infinity();
  static constexpr int64_t kRow = kBackwardKeys + kPanel<A>;

 public:
  Backward(const Scores<T>& s, const Gradients<T>& g, int64_t keys, int64_t queries)
      : s_(s), g_(g), width_(padded<A>(s.width)), value_width_(padded<A>(s.value_width)), terms_(P::terms(s.width)),
        value_terms_(P::terms(s.value_width)), k_columns_(P::columns(keys) * terms_),
        k_rows_(P::columns(s.width) * P::depth(keys)), v_columns_(P::columns(keys) * value_terms_),
        q_(P::depth(queries) * terms_), q_rows_(P::columns(s.width) * P::depth(queries)),
        grad_out_(P::depth(queries) * value_terms_), grad_out_rows_(P::columns(s.value_width) * P::depth(queries)),
        out_(value_terms_), rounded_(P::kRounded * kQueries * kRow), transposed_(P::kRounded * kBackwardKeys * kRow),
        delta_(queries), logsumexp_(queries), p_(kQueries * kRow), ds_(kQueries * kRow),
        dq_(P::depth(queries) * width_), dk_(P::depth(keys) * width_), dv_(P::depth(keys) * value_width_) {}

  void take_keys(int64_t b, int64_t h, Range keys) {
    if (b == batch_ && h == head_ && keys.begin == keys_.begin && keys.end == keys_.end) return;
    const T *k = s_.k.at(b, h, keys.begin), *v = s_.v.at(b, h, keys.begin);
    P::pack(k, s_.k.col, s_.k.row, s_.width, keys.size(), k_columns_, terms_);
    P::pack(k, s_.k.row, s_.k.col, keys.size(), s_.width, k_rows_, P::depth(keys.size()));
    P::pack(v, s_.v.col, s_.v.row, s_.value_width, keys.size(), v_columns_, value_terms_);
    batch_ = b;
    head_ = h;
    keys_ = keys;
  }

  void take_queries(int64_t b, int64_t h, Range queries) {
    const int64_t n = queries.size();
    const A* logsumexp = g_.logsumexp.at(b, h, queries.begin);
    const A* grad_logsumexp = g_.grad_logsumexp.data == nullptr ? nullptr : g_.grad_logsumexp.at(b, h, queries.begin);
    const Heads<const T>& grad = g_.grad_out;
    P::pack(s_.q.at(b, h, queries.begin), s_.q.row, s_.q.col, n, s_.width, q_rows_, P::depth(n));
    P::pack(grad.at(b, h, queries.begin), grad.row, grad.col, n, s_.value_width, grad_out_rows_, P::depth(n));
    for (int64_t i = 0; i < n; ++i) {
      E *grad_out = grad_out_ + i * value_terms_, *out = out_;
      P::take(s_.q.at(b, h, queries.begin + i), s_.q.col, s_.width, q_ + i * terms_);
      P::take(grad.at(b, h, queries.begin + i), grad.col, s_.value_width, grad_out);
      P::take(g_.out.at(b, h, queries.begin + i), g_.out.col, s_.value_width, out);
      const A l = logsumexp[i];
      const double dot = sum<E>(s_.value_width, [](V<A> a, V<A> b) { return a * b; }, grad_out, out);
      delta_[i] = static_cast<A>(dot - (grad_logsumexp == nullptr ? 0 : grad_logsumexp[i]));
      logsumexp_[i] = l == inf ? std::numeric_limits<A>::quiet_NaN() : l;
      if (l == s_.nothing) { // the row sees no key: exp(score - inf) is 0, and so is its product with any finite delta
        logsumexp_[i] = inf;
        delta_[i] = 0;
      }
    }
    query_head_ = h;
    queries_ = queries;
  }

  void clear_queries() { std::fill_n(static_cast<A*>(dq_), queries_.size() * width_, A(0)); }
  void clear_keys() {
    std::fill_n(static_cast<A*>(dk_), keys_.size() * width_, A(0));
    std::fill_n(static_cast<A*>(dv_), keys_.size() * value_width_, A(0));
  }
  void write_queries() const {
    for (int64_t i = 0; i < queries_.size(); ++i)
      narrow(dq_ + i * width_, s_.scale, s_.width, g_.q.at(batch_, query_head_, queries_.begin + i), g_.q.col);
  }
  void write_keys() const {
    for (int64_t j = 0; j < keys_.size(); ++j) {
      narrow(dk_ + j * width_, s_.scale, s_.width, g_.k.at(batch_, head_, keys_.begin + j), g_.k.col);
      narrow(dv_ + j * value_width_, A(1), s_.value_width, g_.v.at(batch_, head_, keys_.begin + j), g_.v.col);
    }
  }

  // Adds the contributions of the ranges to the requested gradients, always in the same order.
  enum Wanted { kOfQueries = 1, kOfKeys = 2, kOfBias = 4 };
  void sweep(int wanted) {
    for (int64_t j = keys_.begin; j < keys_.end; j += kBackwardKeys) {
      for (int64_t i = queries_.begin; i < queries_.end; i += kQueries) {
        // The window leaves the queries that see a key from j on, or before the block's end, and the keys that they
        // see.
        const int64_t key_end = std::min(j + kBackwardKeys, keys_.end),
                      first = std::max(i, i + (j - s_.right - i) / 2 * 2); // even, for pairs of rows
        const int64_t end = std::min({i + kQueries, queries_.end, key_end + s_.left});
        const int64_t rows = end - first, keys = std::min(key_end, s_.keys_of(first, end).end) - j;
        if (rows <= 0 || keys <= 0) continue;
        probabilities(first, rows, j, keys);
        const int64_t row = first - queries_.begin, key = j - keys_.begin;
        const auto add = [&](int64_t m, int64_t n, const auto& a, const E* b, int64_t stride, A* to, int64_t to_row) {
          P::multiply(m, n, a, b, stride, to, to_row, true);
        };
        const int64_t queries_depth = P::depth(queries_.size()), keys_depth = P::depth(keys_.size());
        if (wanted & kOfKeys)
          add(keys, s_.value_width,
              P::transposed(P::template rounded<kRow>(p_, rows, keys, rounded_), rows, transposed_),
              grad_out_rows_ + row * P::kPanel, queries_depth, dv_ + key * value_width_, value_width_);
        const auto ds = P::template rounded<kRow>(ds_, rows, keys, rounded_);
        if (wanted & kOfKeys)
          add(keys, s_.width, P::transposed(ds, rows, transposed_), q_rows_ + row * P::kPanel, queries_depth,
              dk_ + key * width_, width_);
        if (wanted & kOfQueries)
          add(rows, s_.width, ds, k_rows_ + key * P::kPanel, keys_depth, dq_ + row * width_, width_);
        if (wanted & kOfBias) add_to_bias(first, rows, j, keys);
      }
    }
  }

 private:
  void probabilities(int64_t query, int64_t rows, int64_t j, int64_t keys) {
    const int64_t row = query - queries_.begin, key = j - keys_.begin;
    P::multiply(
        rows, keys, Left<E>{q_ + row * terms_, terms_, 1, terms_}, k_columns_ + key * terms_, terms_, p_, kRow, false);
    P::multiply(rows, keys, Left<E>{grad_out_ + row * value_terms_, value_terms_, 1, value_terms_},
        v_columns_ + key * value_terms_, value_terms_, ds_, kRow, false);
    for (int64_t i = 0; i < rows; ++i) {
      A *p = p_ + i * kRow, *ds = ds_ + i * kRow, l = logsumexp_[row + i];
      const Range range = s_.seen(query + i, j, keys);
      const T* bias = s_.bias_at(batch_, query_head_, query + i, j + range.begin);
      const bool drop = s_.dropout.least > 0;
      if (drop) {
        s_.each_kept(batch_, query_head_, query + i, j, keys,
            [&](int64_t k, bool keep) { kept_[k] = keep ? static_cast<A>(s_.dropout.scale) : A(0); });
        for (int64_t k = 0; k < keys; ++k) ds[k] *= kept_[k];
      }
      std::fill_n(p, range.begin, A(0));
      std::fill_n(ds, range.begin, A(0));
      p += range.begin;
      ds += range.begin;
      const int64_t seen = range.size();
      // exp_u20 loses NaN, but a NaN logsumexp must give NaN.
      const V<A> scale(s_.scale), by(l), delta(delta_[row + i]), one(std::isnan(l) ? l : A(1));
      each_register<A>(seen, [&](int64_t k, auto count) {
        V<A> x = V<A>::loadu(p + k) * scale;
        if (bias != nullptr) x = x + bias_lanes(bias, s_.bias.col, k, count);
        V<A> prob = (x - by).exp_u20() * one, grad = prob * (V<A>::loadu(ds + k) - delta);
        if constexpr (std::is_same_v<decltype(count), int64_t>) {
          prob = V<A>::set(V<A>(0), prob, count);
          grad = V<A>::set(V<A>(0), grad, count);
        }
        prob.store(p + k);
        grad.store(ds + k);
      });
      fill_rest(p, seen, keys - range.begin);
      fill_rest(ds, seen, keys - range.begin);
      if (drop)
        for (int64_t k = range.begin; k < keys; ++k) p_[i * kRow + k] *= kept_[k];
    }
  }

  void add_to_bias(int64_t query, int64_t rows, int64_t j, int64_t keys) {
    for (int64_t i = 0; i < rows; ++i) {
      const A* ds = ds_ + i * kRow;
      A* to = g_.bias.at(batch_, query_head_, query + i) + j * g_.bias.col;
      if (g_.bias.col == 0) *to += static_cast<A>(sum<A>(keys, [](V<A> x) { return x; }, ds));
      else at::vec::map2<A>([](V<A> a, V<A> b) { return a + b; }, to, to, ds, keys);
    }
  }

  const Scores<T>& s_;
  const Gradients<T>& g_;
  const P products_{};
  const int64_t width_, value_width_; // of a row of a gradient, padded
  const int64_t terms_, value_terms_; // of a product over the width
  int64_t batch_ = -1, head_ = -1, query_head_ = -1;
  Range keys_{0, 0}, queries_{0, 0};
  // As right factors, packed: columns to multiply with q or grad_out, rows to multiply with p or ds.
  Scratch<E> k_columns_, k_rows_, v_columns_, q_, q_rows_, grad_out_, grad_out_rows_, out_, rounded_, transposed_;
  Scratch<A> delta_, logsumexp_, p_, ds_, dq_, dk_, dv_;
  std::array<A, kBackwardKeys> kept_;
};

// If there are enough heads of k and v, a thread takes entire heads, with all their queries. Otherwise it takes blocks
// of keys for dk and dv, and then blocks of queries for dq, which computes p twice.
template <class T, class P>
void backward_loop_by(const Scores<T>& s, const Gradients<T>& g) {
  using Work = Backward<T, P>;
  const int64_t kv_heads = s.heads / std::max<int64_t>(s.group, 1), pairs = s.batch * kv_heads;
  const bool entire = pairs >= (at::in_parallel_region() ? 1 : at::get_num_threads());
  const int64_t key_step = entire ? s.keys : kBackwardKeys, key_blocks = entire ? 1 : at::divup(s.keys, key_step);
  at::parallel_for(0, pairs * key_blocks, s.grain(s.queries * s.group, key_step), [&](int64_t begin, int64_t end) {
    Work work(s, g, key_step, s.queries);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t pair = task / key_blocks, b = pair / kv_heads, head = pair % kv_heads;
      work.take_keys(b, head, block_range(block_of(task % key_blocks, key_blocks, s.causal()), key_step, s.keys));
      work.clear_keys();
      for (int64_t h = head * s.group; h < (head + 1) * s.group; ++h) {
        work.take_queries(b, h, {0, s.queries});
        if (entire) work.clear_queries();
        work.sweep(entire ? Work::kOfQueries | Work::kOfKeys : Work::kOfKeys);
        if (entire) work.write_queries();
      }
      work.write_keys();
    }
  });
  if (entire) return;
  const int64_t query_blocks = at::divup(s.queries, kQueries);
  at::parallel_for(0, s.batch * s.heads * query_blocks, s.grain(kQueries, s.keys), [&](int64_t begin, int64_t end) {
    Work work(s, g, s.keys, kQueries);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / query_blocks / s.heads, h = task / query_blocks % s.heads;
      work.take_keys(b, h / s.group, {0, s.keys});
      work.take_queries(
          b, h, block_range(block_of(task % query_blocks, query_blocks, s.causal()), kQueries, s.queries));
      work.clear_queries();
      work.sweep(Work::kOfQueries);
      work.write_queries();
    }
  });
}

} // namespace

// ---- entries ----

template <class T>
void forward_loop(const Scores<T>& s, const Heads<T>& out, const Rows<Acc<T>>& logsumexp) {
  const int64_t blocks = at::divup(s.queries, kQueries);
  with_products<T>(s.paired(), [&]<class P>(std::type_identity<P>) {
    at::parallel_for(0, s.batch * s.heads * blocks, s.grain(kQueries, s.keys), [&](int64_t begin, int64_t end) {
      Forward<T, P> forward(s);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t head = task / blocks, b = head / s.heads, h = head % s.heads,
                      first = block_of(task % blocks, blocks, s.causal()) * kQueries;
        forward.block(b, h, first, out, logsumexp.data == nullptr ? nullptr : logsumexp.at(b, h, first));
      }
    });
  });
}

template <class T>
void backward_loop(const Scores<T>& s, const Gradients<T>& g) {
  with_products<T>(s.paired(), [&]<class P>(std::type_identity<P>) { backward_loop_by<T, P>(s, g); });
}

// One thread computes each block of a bias, from all the blocks of scores that share it in turn.
template <class T>
void bias_loop(const Scores<T>& s, const Gradients<T>& g, std::array<int64_t, 4> shape) {
  using Work = Backward<T, Wide<T>>;
  const auto ranges = [](int64_t size, int64_t own, int64_t block) {
    return own == 1 ? std::max<int64_t>(size, 1) : block;
  };
  const int64_t query_step = ranges(s.queries, shape[2], kQueries), key_step = ranges(s.keys, shape[3], kBackwardKeys);
  const int64_t query_blocks = at::divup(s.queries, query_step), key_blocks = at::divup(s.keys, key_step);
  const auto sharing = [](int64_t index, int64_t own, int64_t all) {
    return own == 1 ? Range{0, all} : Range{index, index + 1};
  };
  const int64_t tasks = shape[0] * shape[1] * query_blocks * key_blocks;
  at::parallel_for(0, tasks, s.grain(query_step, key_step), [&](int64_t begin, int64_t end) {
    Work work(s, g, key_step, query_step);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t key_block = task % key_blocks, query_block = task / key_blocks % query_blocks;
      const int64_t head = task / key_blocks / query_blocks;
      const Range batches = sharing(head / shape[1], shape[0], s.batch),
                  heads = sharing(head % shape[1], shape[1], s.heads);
      for (int64_t b = batches.begin; b < batches.end; ++b) {
        for (int64_t h = heads.begin; h < heads.end; ++h) {
          work.take_keys(b, h / s.group, block_range(key_block, key_step, s.keys));
          work.take_queries(b, h, block_range(query_block, query_step, s.queries));
          work.sweep(Work::kOfBias);
        }
      }
    }
  });
}

#define INSTANTIATE(T)                                                                \
  template void forward_loop(const Scores<T>&, const Heads<T>&, const Rows<Acc<T>>&); \
  template void backward_loop(const Scores<T>&, const Gradients<T>&);                 \
  template void bias_loop(const Scores<T>&, const Gradients<T>&, std::array<int64_t, 4>);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(c10::Half)
INSTANTIATE(c10::BFloat16)
#undef INSTANTIATE

} // namespace openreg::kernels
