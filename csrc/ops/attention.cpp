// attention: out = softmax(scale * q k^T + bias) v, and the logsumexp of each row of scores.
// Dao et al. 2022, arXiv:2205.14135, and Dao 2023, arXiv:2307.08691: blocks of scores live in cache, are scaled
// by a running maximum in forward, and are computed again from logsumexp in backward. No matrix of scores exists.
// logsumexp is an output, and differentiable: its gradient joins the sum over out * grad_out in backward.
#include "gemm.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

namespace openreg::ops {
namespace {

// Rows and columns of a block of scores. A block of columns is a whole number of panels.
constexpr int64_t kQueries = 96, kKeys = 256, kBackwardKeys = 128;

// ---- shapes ----

// A [batch, heads, length, width] tensor of any strides.
template <class T>
struct Heads {
  T* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, col = 0;

  static Heads of(const Tensor& x) {
    T* data;
    if constexpr (std::is_const_v<T>) data = x.const_data_ptr<std::remove_const_t<T>>();
    else data = x.mutable_data_ptr<T>();
    return {data, x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
  }
  T* at(int64_t b, int64_t h, int64_t i = 0) const { return data + b * batch + h * head + i * row; }
};

// What forward and backward know about the scores. A bias broadcasts by strides of 0; its last is 0 or 1.
template <class T>
struct Scores {
  int64_t batch, heads, group, queries, keys, width, value_width; // `group` heads share a head of k and v
  bool causal;
  Acc<T> scale;
  Heads<const T> q, k, v, bias;

  // Keys that queries before `end` see, at most.
  int64_t keys_before(int64_t end) const { return causal ? std::min(keys, end) : keys; }
  // Of `count` keys from j on, those that a query sees.
  int64_t seen(int64_t query, int64_t j, int64_t count) const {
    return causal ? std::clamp<int64_t>(query + 1 - j, 0, count) : count;
  }
  const T* bias_at(int64_t b, int64_t h, int64_t query, int64_t j) const {
    return bias.data == nullptr ? nullptr : bias.at(b, h, query) + j * bias.col;
  }
  // Blocks of queries by keys that are worth another thread.
  int64_t grain(int64_t rows, int64_t columns) const {
    return at::divup(kGrain, std::max<int64_t>(rows * columns, 1) * std::max<int64_t>(width + value_width, 1));
  }
};

double scale_of(const Tensor& q, std::optional<double> scale) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(q.size(3), 1))));
}

std::array<int64_t, 4> scores_shape(const Tensor& q, const Tensor& k) {
  return {q.size(0), q.size(1), q.size(2), k.size(2)};
}

// A view of bias with the shape of the scores, its last stride 0 or 1.
Tensor expand_bias(const Tensor& bias, at::IntArrayRef shape) {
  const bool broadcasts = bias.dim() == 0 || bias.size(-1) == 1;
  return (broadcasts || bias.stride(-1) == 1 ? bias : bias.contiguous()).expand(shape);
}

template <class T>
Scores<T> scores_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, bool causal, double scale) {
  Scores<T> s{q.size(0), q.size(1), q.size(1) / std::max<int64_t>(k.size(1), 1), q.size(2), k.size(2), q.size(3),
      v.size(3), causal, static_cast<Acc<T>>(scale), Heads<const T>::of(q), Heads<const T>::of(k),
      Heads<const T>::of(v), {}};
  if (bias.defined()) s.bias = Heads<const T>::of(bias);
  if (s.keys == 1) s.bias.col = 0;
  return s;
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

// s = exp(scale * s - max) over n elements, and 0 up to the end of the last register; returns the sum.
template <class A>
A exp_row(A* s, A scale, A max, int64_t n) {
  const V<A> by(scale), m(max);
  V<A> sum(0);
  each_register<A>(n, [&](int64_t i, auto count) {
    V<A> p = at::vec::fmsub(V<A>::loadu(s + i), by, m).exp_u20();
    if constexpr (std::is_same_v<decltype(count), int64_t>) p = V<A>::set(V<A>(0), p, count);
    p.store(s + i);
    sum = sum + p;
  });
  return at::vec::vec_reduce_all<A>([](V<A> a, V<A> b) { return a + b; }, sum);
}

// 0 from the end of the last register that n elements take up to `end`.
template <class A>
void fill_rest(A* s, int64_t n, int64_t end) {
  const int64_t done = at::divup(n, V<A>::size()) * V<A>::size();
  if (done < end) std::fill(s + done, s + end, A(0));
}

// ---- forward ----

// Blocks of queries in the order of tasks: under a causal mask a late block has more keys, so early and late ones
// alternate, and threads, which get consecutive tasks, get even shares.
int64_t block_of(int64_t task, int64_t blocks, bool causal) {
  if (!causal) return task;
  return task % 2 == 0 ? task / 2 : blocks - 1 - task / 2;
}

// One thread's blocks of queries. A head's k and v stay packed until another head comes.
template <class T>
class Forward {
  using A = Acc<T>;
  static constexpr A inf = std::numeric_limits<A>::infinity();
  static constexpr int64_t kRow = kKeys + kPanel<A>; // not a power of 2, for the caches' sake

 public:
  explicit Forward(const Scores<T>& s)
      : s_(s), out_row_(padded<A>(s.value_width)), k_(padded<A>(s.keys) * s.width), v_(out_row_ * s.keys),
        q_(kQueries * s.width), scores_(kQueries * kRow), out_(kQueries * out_row_) {}

  // logsumexp is that of the first query.
  void block(int64_t b, int64_t h, int64_t begin, const Heads<T>& out, A* logsumexp) {
    const int64_t rows = std::min(kQueries, s_.queries - begin), end = s_.keys_before(begin + rows);
    take_head(b, h / s_.group);
    std::fill_n(max_.data(), rows, -inf);
    std::fill_n(sum_.data(), rows, A(0));
    std::fill_n(static_cast<A*>(out_), rows * out_row_, A(0));
    for (int64_t i = 0; i < rows; ++i) widen(s_.q.at(b, h, begin + i), s_.q.col, s_.width, q_ + i * s_.width);
    for (int64_t j = 0; j < end; j += kKeys) {
      const int64_t keys = std::min(kKeys, end - j);
      gemm<A>(rows, keys, s_.width, q_, s_.width, 1, k_ + j * s_.width, s_.width, scores_, kRow, false);
      for (int64_t i = 0; i < rows; ++i) softmax(b, h, begin + i, i, j, keys);
      gemm<A>(rows, s_.value_width, keys, scores_, kRow, 1, v_ + j * kPanel<A>, s_.keys, out_, out_row_, true);
    }
    for (int64_t i = 0; i < rows; ++i) {
      // A maximum of -inf is a row that sees nothing; one of inf or NaN has no softmax, and exp_u20 has lost that.
      const A max = max_[i];
      const A by = max == -inf ? 0 : max < inf ? 1 / sum_[i] : std::numeric_limits<A>::quiet_NaN();
      logsumexp[i] = std::abs(max) == inf ? max : max + std::log(sum_[i]);
      narrow(out_ + i * out_row_, by, s_.value_width, out.at(b, h, begin + i), out.col);
    }
  }

 private:
  void take_head(int64_t b, int64_t h) {
    if (b == batch_ && h == head_) return;
    pack(s_.k.at(b, h), s_.k.col, s_.k.row, s_.width, s_.keys, k_, s_.width);
    pack(s_.v.at(b, h), s_.v.row, s_.v.col, s_.keys, s_.value_width, v_, s_.keys);
    batch_ = b;
    head_ = h;
  }

  // Turns scores of a query, in row i of the block, with `keys` keys from j on, into exponentials relative to the
  // largest score so far, and the sums made before into such.
  void softmax(int64_t b, int64_t h, int64_t query, int64_t i, int64_t j, int64_t keys) {
    A* row = scores_ + i * kRow;
    const int64_t seen = s_.seen(query, j, keys);
    const T* bias = s_.bias_at(b, h, query, j);
    // Without a bias the scale waits for exp_row, if it keeps the order.
    const bool waits = bias == nullptr && s_.scale > 0;
    if (!waits) scale_row(row, s_.scale, bias, s_.bias.col, seen);
    const A by = waits ? s_.scale : A(1), here = max_of(row, seen) * by;
    const A max = std::isnan(here) || here > max_[i] ? here : max_[i];
    if (max == -inf) return static_cast<void>(std::fill_n(row, keys, A(0)));
    if (max != max_[i]) {
      const A shrink = std::exp(max_[i] - max);
      sum_[i] *= shrink;
      at::vec::map<A>(
          [by = V<A>(shrink)](V<A> x) { return x * by; }, out_ + i * out_row_, out_ + i * out_row_, out_row_);
      max_[i] = max;
    }
    sum_[i] += exp_row(row, by, max, seen);
    fill_rest(row, seen, keys);
  }

  const Scores<T>& s_;
  int64_t out_row_, batch_ = -1, head_ = -1;
  Scratch<A> k_, v_, q_, scores_, out_;
  std::array<A, kQueries> max_, sum_;
};

template <class T>
void forward_loop(const Scores<T>& s, const Heads<T>& out, Acc<T>* logsumexp) {
  const int64_t blocks = at::divup(s.queries, kQueries);
  at::parallel_for(0, s.batch * s.heads * blocks, s.grain(kQueries, s.keys), [&](int64_t begin, int64_t end) {
    Forward<T> forward(s);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / blocks, first = block_of(task % blocks, blocks, s.causal) * kQueries;
      forward.block(head / s.heads, head % s.heads, first, out, logsumexp + head * s.queries + first);
    }
  });
}

// ---- backward ----

template <class T>
struct Gradients {
  Heads<const T> grad_out, out;
  const Acc<T>*logsumexp, *grad_logsumexp; // [batch, heads, queries]; the latter may be null
  Heads<T> q, k, v;
  Heads<Acc<T>> bias; // its strides are 0 where bias broadcasts, 0 or 1 for the last
};

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// With p = exp(scores - logsumexp), delta = sum(grad_out * out) - grad_logsumexp by row, ds = p * (grad_out v^T -
// delta):
//   dv = p^T grad_out,  dq = scale * ds k,  dk = scale * ds^T q,  dbias = ds
// One thread's blocks of p and ds, between a range of keys and a range of queries that it has packed.
template <class T>
class Backward {
  using A = Acc<T>;
  static constexpr A inf = std::numeric_limits<A>::infinity();
  static constexpr int64_t kRow = kBackwardKeys + kPanel<A>;

 public:
  Backward(const Scores<T>& s, const Gradients<T>& g, int64_t keys, int64_t queries)
      : s_(s), g_(g), width_(padded<A>(s.width)), value_width_(padded<A>(s.value_width)),
        k_columns_(padded<A>(keys) * s.width), k_rows_(width_ * keys), v_columns_(padded<A>(keys) * s.value_width),
        q_(queries * s.width), q_rows_(width_ * queries), grad_out_(queries * s.value_width),
        grad_out_rows_(value_width_ * queries), out_(s.value_width), delta_(queries), logsumexp_(queries),
        p_(kQueries * kRow), ds_(kQueries * kRow), dq_(queries * width_), dk_(keys * width_), dv_(keys * value_width_) {
  }

  void take_keys(int64_t b, int64_t h, Range keys) {
    if (b == batch_ && h == head_ && keys.begin == keys_.begin && keys.end == keys_.end) return;
    const T *k = s_.k.at(b, h, keys.begin), *v = s_.v.at(b, h, keys.begin);
    pack(k, s_.k.col, s_.k.row, s_.width, keys.size(), k_columns_, s_.width);
    pack(k, s_.k.row, s_.k.col, keys.size(), s_.width, k_rows_, keys.size());
    pack(v, s_.v.col, s_.v.row, s_.value_width, keys.size(), v_columns_, s_.value_width);
    batch_ = b;
    head_ = h;
    keys_ = keys;
  }

  void take_queries(int64_t b, int64_t h, Range queries) {
    const int64_t n = queries.size(), first = (b * s_.heads + h) * s_.queries + queries.begin;
    pack(s_.q.at(b, h, queries.begin), s_.q.row, s_.q.col, n, s_.width, q_rows_, n);
    pack(g_.grad_out.at(b, h, queries.begin), g_.grad_out.row, g_.grad_out.col, n, s_.value_width, grad_out_rows_, n);
    for (int64_t i = 0; i < n; ++i) {
      A* grad_out = grad_out_ + i * s_.value_width;
      widen(s_.q.at(b, h, queries.begin + i), s_.q.col, s_.width, q_ + i * s_.width);
      widen(g_.grad_out.at(b, h, queries.begin + i), g_.grad_out.col, s_.value_width, grad_out);
      widen(g_.out.at(b, h, queries.begin + i), g_.out.col, s_.value_width, static_cast<A*>(out_));
      const A l = g_.logsumexp[first + i];
      const double dot = sum<A>(s_.value_width, [](V<A> a, V<A> b) { return a * b; }, grad_out, static_cast<A*>(out_));
      delta_[i] = static_cast<A>(dot - (g_.grad_logsumexp == nullptr ? 0 : g_.grad_logsumexp[first + i]));
      logsumexp_[i] = l == inf ? std::numeric_limits<A>::quiet_NaN() : l;
      if (l == -inf) { // the row sees nothing: exp(score - inf) is 0, and so is its product with any finite delta
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

  // Adds what the ranges give each other, always in the same order, to the gradients that are wanted.
  enum Wanted { kOfQueries = 1, kOfKeys = 2, kOfBias = 4 };
  void sweep(int wanted) {
    for (int64_t j = keys_.begin; j < keys_.end; j += kBackwardKeys) {
      for (int64_t i = queries_.begin; i < queries_.end; i += kQueries) {
        // A causal mask leaves queries from j on, and keys before the last query's end.
        const int64_t end = std::min(i + kQueries, queries_.end), first = s_.causal ? std::max(i, j) : i;
        const int64_t rows = end - first, keys = std::min({kBackwardKeys, keys_.end - j, s_.keys_before(end) - j});
        if (rows <= 0 || keys <= 0) continue;
        probabilities(first, rows, j, keys);
        const int64_t row = first - queries_.begin, key = j - keys_.begin;
        if (wanted & kOfKeys) {
          gemm<A>(keys, s_.value_width, rows, p_, 1, kRow, grad_out_rows_ + row * kPanel<A>, queries_.size(),
              dv_ + key * value_width_, value_width_, true);
          gemm<A>(keys, s_.width, rows, ds_, 1, kRow, q_rows_ + row * kPanel<A>, queries_.size(), dk_ + key * width_,
              width_, true);
        }
        if (wanted & kOfQueries)
          gemm<A>(rows, s_.width, keys, ds_, kRow, 1, k_rows_ + key * kPanel<A>, keys_.size(), dq_ + row * width_,
              width_, true);
        if (wanted & kOfBias) add_to_bias(first, rows, j, keys);
      }
    }
  }

 private:
  void probabilities(int64_t query, int64_t rows, int64_t j, int64_t keys) {
    const int64_t row = query - queries_.begin, key = j - keys_.begin;
    gemm<A>(
        rows, keys, s_.width, q_ + row * s_.width, s_.width, 1, k_columns_ + key * s_.width, s_.width, p_, kRow, false);
    gemm<A>(rows, keys, s_.value_width, grad_out_ + row * s_.value_width, s_.value_width, 1,
        v_columns_ + key * s_.value_width, s_.value_width, ds_, kRow, false);
    for (int64_t i = 0; i < rows; ++i) {
      A *p = p_ + i * kRow, *ds = ds_ + i * kRow, l = logsumexp_[row + i];
      const int64_t seen = s_.seen(query + i, j, keys);
      const T* bias = s_.bias_at(batch_, query_head_, query + i, j);
      // exp_u20 loses NaN, which a NaN logsumexp asks for.
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
      fill_rest(p, seen, keys);
      fill_rest(ds, seen, keys);
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
  const int64_t width_, value_width_; // of a row, padded
  int64_t batch_ = -1, head_ = -1, query_head_ = -1;
  Range keys_{0, 0}, queries_{0, 0};
  // As right factors, packed: columns to multiply with q or grad_out, rows to multiply with p or ds.
  Scratch<A> k_columns_, k_rows_, v_columns_, q_, q_rows_, grad_out_, grad_out_rows_, out_, delta_, logsumexp_;
  Scratch<A> p_, ds_, dq_, dk_, dv_;
};

// A thread takes whole heads of k and v, with all their queries, where there are enough of them; else blocks of
// keys for dk and dv, and then blocks of queries for dq, which computes p twice. Either way a gradient is one sum
// in one order.
template <class T>
void backward_loop(const Scores<T>& s, const Gradients<T>& g) {
  using Work = Backward<T>;
  const int64_t kv_heads = s.heads / std::max<int64_t>(s.group, 1), pairs = s.batch * kv_heads;
  const Range all_keys{0, s.keys}, all_queries{0, s.queries};
  const auto heads_of = [&](int64_t head) { return Range{head * s.group, (head + 1) * s.group}; };
  if (pairs >= at::get_num_threads()) {
    at::parallel_for(0, pairs, s.grain(s.queries * s.group, s.keys), [&](int64_t begin, int64_t end) {
      Work work(s, g, s.keys, s.queries);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t b = task / kv_heads, head = task % kv_heads;
        work.take_keys(b, head, all_keys);
        work.clear_keys();
        for (int64_t h = heads_of(head).begin; h < heads_of(head).end; ++h) {
          work.take_queries(b, h, all_queries);
          work.clear_queries();
          work.sweep(Work::kOfQueries | Work::kOfKeys);
          work.write_queries();
        }
        work.write_keys();
      }
    });
  } else {
    const int64_t key_blocks = at::divup(s.keys, kBackwardKeys), query_blocks = at::divup(s.queries, kQueries);
    const auto keys_of = [&](int64_t block) {
      return Range{block * kBackwardKeys, std::min(s.keys, (block + 1) * kBackwardKeys)};
    };
    const auto queries_of = [&](int64_t block) {
      return Range{block * kQueries, std::min(s.queries, (block + 1) * kQueries)};
    };
    at::parallel_for(
        0, pairs * key_blocks, s.grain(s.queries * s.group, kBackwardKeys), [&](int64_t begin, int64_t end) {
          Work work(s, g, kBackwardKeys, s.queries);
          for (int64_t task = begin; task < end; ++task) {
            const int64_t pair = task / key_blocks, b = pair / kv_heads, head = pair % kv_heads;
            work.take_keys(b, head, keys_of(block_of(task % key_blocks, key_blocks, s.causal)));
            work.clear_keys();
            for (int64_t h = heads_of(head).begin; h < heads_of(head).end; ++h) {
              work.take_queries(b, h, all_queries);
              work.sweep(Work::kOfKeys);
            }
            work.write_keys();
          }
        });
    at::parallel_for(0, s.batch * s.heads * query_blocks, s.grain(kQueries, s.keys), [&](int64_t begin, int64_t end) {
      Work work(s, g, s.keys, kQueries);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t b = task / query_blocks / s.heads, h = task / query_blocks % s.heads;
        work.take_keys(b, h / s.group, all_keys);
        work.take_queries(b, h, queries_of(block_of(task % query_blocks, query_blocks, s.causal)));
        work.clear_queries();
        work.sweep(Work::kOfQueries);
        work.write_queries();
      }
    });
  }
}

// dbias alone. Each block of a bias is the work of one thread, which takes all that share it in turn.
template <class T>
void bias_loop(const Scores<T>& s, const Gradients<T>& g, std::array<int64_t, 4> shape) {
  using Work = Backward<T>;
  const auto ranges = [](int64_t size, int64_t own, int64_t block) {
    return own == 1 ? std::max<int64_t>(size, 1) : block;
  };
  const int64_t query_step = ranges(s.queries, shape[2], kQueries), key_step = ranges(s.keys, shape[3], kBackwardKeys);
  const int64_t query_blocks = at::divup(s.queries, query_step), key_blocks = at::divup(s.keys, key_step);
  const auto range = [](int64_t block, int64_t step, int64_t end) {
    return Range{block * step, std::min(end, (block + 1) * step)};
  };
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
          work.take_keys(b, h / s.group, range(key_block, key_step, s.keys));
          work.take_queries(b, h, range(query_block, query_step, s.queries));
          work.sweep(Work::kOfBias);
        }
      }
    }
  });
}

// ---- torch ----

void check_scores(
    const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias) {
  check_floating(op, "q", q);
  for (const auto& [name, x] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}})
    TORCH_CHECK(
        x->dim() == 4, op, ": expected ", name, " of shape [batch, heads, length, width], but got ", x->sizes());
  for (const auto& [name, x] : {std::pair{"k", &k}, {"v", &v}}) {
    check_same_device(op, "q", q, name, *x);
    check_dtype(op, name, *x, q.scalar_type(), "q");
  }
  TORCH_CHECK(k.size(0) == q.size(0) && k.size(3) == q.size(3), op, ": expected k of batch ", q.size(0), " and width ",
      q.size(3), ", those of q, but got shape ", k.sizes());
  TORCH_CHECK(v.sizes().slice(0, 3) == k.sizes().slice(0, 3), op, ": expected v of batch, heads and length ",
      k.sizes().slice(0, 3), ", those of k, but got shape ", v.sizes());
  TORCH_CHECK(k.size(1) == 0 ? q.size(1) == 0 : q.size(1) % k.size(1) == 0, op, ": expected heads of q a multiple of ",
      k.size(1), ", those of k and v, but got ", q.size(1));
  if (!bias) return;
  check_same_device(op, "q", q, "bias", *bias);
  check_dtype(op, "bias", *bias, q.scalar_type(), "q");
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
        [s = scores_of<T>(q, k, v, bias, causal, scale), out = Heads<T>::of(out),
            l = logsumexp.mutable_data_ptr<Acc<T>>()] { forward_loop(s, out, l); });
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
    Gradients<T> g{Heads<const T>::of(grad_out), Heads<const T>::of(out), logsumexp.const_data_ptr<A>(),
        grad_logsumexp.defined() ? grad_logsumexp.const_data_ptr<A>() : nullptr, Heads<T>::of(grad_q),
        Heads<T>::of(grad_k), Heads<T>::of(grad_v), {}};
    if (bias_grad) g.bias = Heads<A>::of(expanded);
    launch(current_stream(q.get_device()), [s = scores_of<T>(q, k, v, bias, causal, scale), g, bias_shape, bias_grad] {
      backward_loop(s, g);
      if (bias_grad) bias_loop(s, g, bias_shape);
    });
  });
  return {grad_q, grad_k, grad_v, grad_bias.to(q.scalar_type())};
}

// ---- autograd: see Note [Operator calls] ----

const auto& forward_op() {
  static const auto op = find<decltype(attention)>("openreg::attention");
  return op;
}
const auto& backward_op() {
  static const auto op = find<decltype(attention_backward)>("openreg::attention_backward");
  return op;
}

std::optional<Tensor> if_defined(const Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

struct Attention : torch::autograd::Function<Attention> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
      const std::optional<Tensor>& bias, bool causal, std::optional<double> scale) {
    BelowAutograd below_autograd;
    auto [out, logsumexp] = forward_op().call(q, k, v, bias, causal, scale);
    ctx->save_for_backward({q, k, v, bias.value_or(Tensor()), out, logsumexp});
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["scale"] = scale;
    const bool bias_grad = bias && bias->requires_grad();
    ctx->saved_data["bias_grad"] = bias_grad;
    if (!q.requires_grad() && !k.requires_grad() && !bias_grad) ctx->mark_non_differentiable({logsumexp});
    ctx->set_materialize_grads(false);
    return {out, logsumexp};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad) {
    const auto saved = ctx->get_saved_variables();
    if (!grad[0].defined() && !grad[1].defined()) return variable_list(6);
    const Tensor& out = saved[4];
    const bool bias_grad = ctx->saved_data["bias_grad"].toBool();
    auto [grad_q, grad_k, grad_v, grad_bias] = backward_op().call(grad[0].defined() ? grad[0] : at::zeros_like(out),
        if_defined(grad[1]), saved[0], saved[1], saved[2], if_defined(saved[3]), out, saved[5],
        ctx->saved_data["causal"].toBool(), ctx->saved_data["scale"].toOptional<double>(), bias_grad);
    return {grad_q, grad_k, grad_v, bias_grad ? grad_bias : Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> attention_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
    const std::optional<Tensor>& bias, bool causal, std::optional<double> scale) {
  if (any_tangent(q, k, v, bias))
    return decompose(forward_op(), q, k, v, bias, causal, scale); // see Note [Forward mode]
  auto out = apply<Attention>(q, k, v, bias, causal, scale);
  return {out[0], out[1]};
}

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
  m.impl("attention", attention_autograd);
  m.impl("attention_backward", differentiate_by_reference());
}

} // namespace openreg::ops
