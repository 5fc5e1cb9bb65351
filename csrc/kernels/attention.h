// Attention's loops, which openreg::attention and ATen's flash and efficient attention (csrc/aten/attention) share.
#pragma once

#include "kernels/philox.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <limits>
#include <optional>

namespace openreg::kernels {

template <class T>
T* data_of(const at::Tensor& x) {
  if constexpr (std::is_const_v<T>) return x.const_data_ptr<std::remove_const_t<T>>();
  else return x.mutable_data_ptr<T>();
}

// A [batch, heads, length, width] tensor with any strides.
template <class T>
struct Heads {
  T* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, col = 0;

  static Heads of(const at::Tensor& x) { return {data_of<T>(x), x.stride(0), x.stride(1), x.stride(2), x.stride(3)}; }
  T* at(int64_t b, int64_t h, int64_t i = 0) const { return data + b * batch + h * head + i * row; }
};

// One number for each row, such as logsumexp: [batch, heads, length]. The rows of a head are next to each other.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t batch = 0, head = 0;

  static Rows of(const at::Tensor& x) {
    TORCH_INTERNAL_ASSERT(x.dim() == 3 && (x.size(2) < 2 || x.stride(2) == 1));
    return {data_of<T>(x), x.stride(0), x.stride(1)};
  }
  T* at(int64_t b, int64_t h, int64_t i = 0) const { return data + b * batch + h * head + i; }
};

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

constexpr int64_t kAll = std::numeric_limits<int64_t>::max() / 4; // a window as wide as any tensor

// Dropout of the probabilities. Each has its own number, so backward draws what forward drew.
struct Dropout {
  uint64_t key, counter;
  int64_t least = 0; // the smallest of 2^32 numbers that keeps a probability; 0 keeps all
  double scale = 1; // of the kept probabilities
  int64_t batch, queries, keys; // the first batch, and how many numbers a head has

  // The mask of kDrawn keys from j on; j is a multiple of kDrawn.
  void mask(int64_t row, int64_t j, uint8_t* keep) const {
    draw_mask(key, counter, row * at::divup(keys, kDrawn) + j / kDrawn, least, keep);
  }
};

// What forward and backward need to know about the scores. A bias broadcasts with strides of 0; its last stride is 0 or
// 1.
template <class T>
struct Scores {
  int64_t batch, heads, group, queries, keys, width, value_width; // `group` heads share a head of k and v
  int64_t left, right; // query i sees the keys from i - left to i + right
  Acc<T> scale;
  Heads<const T> q, k, v, bias;
  Acc<T> nothing = -std::numeric_limits<Acc<T>>::infinity(); // the logsumexp of a row that sees no key
  Dropout dropout{};
  Rows<const float> slopes{}; // ALiBi: the score of query i and key j loses slope * |i - j|, counted from the end

  bool causal() const { return right < keys; }
  // The range of the keys that queries from `begin` to `end` see.
  Range keys_of(int64_t begin, int64_t end) const {
    return {std::clamp<int64_t>(begin - left, 0, keys), std::clamp<int64_t>(end + right, 0, keys)};
  }
  // The keys that a query sees, among `count` keys from j on.
  Range seen(int64_t query, int64_t j, int64_t count) const {
    return {std::clamp<int64_t>(query - left - j, 0, count), std::clamp<int64_t>(query + right + 1 - j, 0, count)};
  }
  // f(k, keep) for `count` keys from j on, a multiple of kDrawn: whether dropout keeps the probability.
  template <class F>
  void each_kept(int64_t b, int64_t h, int64_t query, int64_t j, int64_t count, F f) const {
    uint8_t keep[kDrawn];
    const int64_t row = ((dropout.batch + b) * heads + h) * dropout.queries + query;
    for (int64_t begin = 0; begin < count; begin += kDrawn) {
      dropout.mask(row, j + begin, keep);
      for (int64_t k = begin; k < std::min(count, begin + kDrawn); ++k) f(k, keep[k - begin] != 0);
    }
  }
  const T* bias_at(int64_t b, int64_t h, int64_t query, int64_t j) const {
    return bias.data == nullptr ? nullptr : bias.at(b, h, query) + j * bias.col;
  }
  // Returns true if products of pairs pay. They compute 32 rows and columns at a time. On an AMD EPYC (Zen 5) they took
  // up to 1.7 times as long for 1 query, as long for 16 and 0.7 times as long for 96; with 16 keys, 1.2 times.
  bool paired() const { return width > 0 && value_width > 0 && queries > 16 && keys > 48; }
  // Blocks of queries by keys that justify another thread.
  int64_t grain(int64_t rows, int64_t columns) const {
    return at::divup(kGrain, std::max<int64_t>(rows * columns, 1) * std::max<int64_t>(width + value_width, 1));
  }
};

template <class T>
Scores<T> scores_of(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias, bool causal, double scale) {
  Scores<T> s{q.size(0), q.size(1), q.size(1) / std::max<int64_t>(k.size(1), 1), q.size(2), k.size(2), q.size(3),
      v.size(3), kAll, causal ? 0 : kAll, static_cast<Acc<T>>(scale), Heads<const T>::of(q), Heads<const T>::of(k),
      Heads<const T>::of(v), {}};
  if (bias.defined()) s.bias = Heads<const T>::of(bias);
  if (s.keys == 1) s.bias.col = 0;
  return s;
}

// The scale of the scores: by default 1 / sqrt(width).
double scale_of(const at::Tensor& q, std::optional<double> scale);

std::array<int64_t, 4> scores_shape(const at::Tensor& q, const at::Tensor& k);

// A view of bias with the shape of the scores and a last stride of 0 or 1.
at::Tensor expand_bias(const at::Tensor& bias, at::IntArrayRef shape);

template <class T>
struct Gradients {
  Heads<const T> grad_out, out;
  Rows<const Acc<T>> logsumexp, grad_logsumexp; // the latter may be null
  Heads<T> q, k, v;
  Heads<Acc<T>> bias; // its strides are 0 where bias broadcasts, 0 or 1 for the last
};

// The loops exist for float, double, Half and BFloat16.

// Writes out and logsumexp, which may be null.
template <class T>
void forward_loop(const Scores<T>& s, const Heads<T>& out, const Rows<Acc<T>>& logsumexp);

// Writes the gradients of q, k and v. Each is one sum in one order, for any number of threads.
template <class T>
void backward_loop(const Scores<T>& s, const Gradients<T>& g);

// Adds the gradient of a bias of this shape, whose dimensions of size 1 broadcast, to g.bias.
template <class T>
void bias_loop(const Scores<T>& s, const Gradients<T>& g, std::array<int64_t, 4> shape);

} // namespace openreg::kernels
