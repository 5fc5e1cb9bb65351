// Loops over contiguous memory: the arithmetic types, vectors and sums that kernels use.
#pragma once

#include <ATen/cpu/vec/functional.h>

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

namespace openreg::ops {

// The number of elements of elementwise work that justify another thread, as in ATen.
constexpr int64_t kGrain = 32768;
// exp takes about ten times as long as an addition, for which torch's grain size is chosen.
constexpr int64_t kExpGrain = kGrain / 8;

// The type that a kernel computes and accumulates in: float for the half types, else T.
template <class T>
using Acc = at::opmath_type<T>;
template <class T>
using Vec = at::vec::Vectorized<Acc<T>>;

template <class T>
constexpr int64_t kLanes = Vec<T>::size();

// kLanes elements of T.
template <class T>
Vec<T> read(const T* p) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return Vec<T>::loadu(p);
  } else {
    Vec<T> out;
    at::vec::load_to_float<T>(p, out);
    return out;
  }
}

// The first `count` lanes from p, the rest 0.
template <class T>
Vec<T> read(const T* p, int64_t count) {
  T lanes[kLanes<T>] = {};
  std::copy_n(p, count, lanes);
  return read(lanes);
}

// Elements of T that fill a register: write() stores them from one Vec, or two if T is a half type.
template <class T>
constexpr int64_t kChunk = at::vec::Vectorized<T>::size();

template <class T>
void write(const Vec<T>* values, T* p) {
  if constexpr (std::is_same_v<T, Acc<T>>) values->store(p);
  else at::vec::convert_from_float<T>(values[0], values[1]).store(p);
}

// Sum of f(a[i], b[i], …) over i < n. Vectors within a block, double between blocks: the error does
// not grow with n.
template <class T, class F, class... P>
double sum(int64_t n, F f, const P*... a) {
  constexpr int64_t lanes = kLanes<T>, block = 512 * lanes;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = std::min(n, begin + block);
    Vec<T> part[4] = {Vec<T>(0), Vec<T>(0), Vec<T>(0), Vec<T>(0)}; // four, because an addition takes four cycles
    int64_t i = begin;
    for (; i + 4 * lanes <= end; i += 4 * lanes)
      for (int64_t k = 0; k < 4; ++k) part[k] = part[k] + f(read(a + i + k * lanes)...);
    for (; i + lanes <= end; i += lanes) part[0] = part[0] + f(read(a + i)...);
    if (i < end) part[1] = part[1] + Vec<T>::set(Vec<T>(0), f(read(a + i, end - i)...), end - i);
    Acc<T> out[lanes];
    ((part[0] + part[1]) + (part[2] + part[3])).store(out);
    for (const Acc<T> lane : out) total += lane;
  }
  return total;
}

// The largest of n elements; -inf if there are none, NaN if any element is NaN.
template <class T>
Acc<T> max_of(const T* x, int64_t n) {
  using V = Vec<T>;
  constexpr int64_t lanes = kLanes<T>;
  const V least(-std::numeric_limits<Acc<T>>::infinity());
  V part[4] = {least, least, least, least};
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes)
    for (int64_t k = 0; k < 4; ++k) part[k] = at::vec::maximum(part[k], read(x + i + k * lanes));
  for (; i + lanes <= n; i += lanes) part[0] = at::vec::maximum(part[0], read(x + i));
  if (i < n) part[1] = at::vec::maximum(part[1], V::set(least, read(x + i, n - i), n - i));
  return at::vec::vec_reduce_all<Acc<T>>([](V a, V b) { return at::vec::maximum(a, b); },
      at::vec::maximum(at::vec::maximum(part[0], part[1]), at::vec::maximum(part[2], part[3])));
}

} // namespace openreg::ops
