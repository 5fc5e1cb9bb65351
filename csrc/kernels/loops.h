// Loops over contiguous memory: the arithmetic types, vectors and sums that kernels use.
#pragma once

#include <ATen/cpu/vec/functional.h>

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <utility>

namespace openreg::kernels {

// The number of elements of elementwise work that justify another thread, as in ATen.
constexpr int64_t kGrain = 32768;
// exp takes about ten times as long as an addition, for which torch's grain size is chosen.
constexpr int64_t kExpGrain = kGrain / 8;

// f(i) for each i < count, on several threads if there are enough of them; each processes `size` elements.
template <class F>
void parallel_each(int64_t count, int64_t size, const F& f, int64_t grain = kGrain) {
  at::parallel_for(0, count, at::divup(grain, size + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

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

// Elements of T as Acc<T>: those of one register, in one Vec, or two if T is a half type.
template <class T>
using Chunk = std::array<Vec<T>, kChunk<T> / kLanes<T>>;

// Note [Order in a chunk]: the two vectors of a bfloat16 chunk are its even and its odd elements. A shift and a mask
// separate them; the first and the second half would take more instructions. So a chunk is for arithmetic on each
// element, and for sums in any order.
template <class T>
C10_ALWAYS_INLINE Chunk<T> read_chunk(const T* p) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
#if defined(CPU_CAPABILITY_AVX512)
    const __m512i both = _mm512_loadu_si512(p);
    return {Vec<T>(_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))),
        Vec<T>(_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-65536))))};
#elif defined(CPU_CAPABILITY_AVX2)
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {Vec<T>(_mm256_castsi256_ps(_mm256_slli_epi32(both, 16))),
        Vec<T>(_mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(-65536))))};
#endif
  }
  if constexpr (std::is_same_v<T, Acc<T>>) return {read(p)};
  else return {read(p), read(p + kLanes<T>)};
}

// The register that holds a chunk.
template <class T>
C10_ALWAYS_INLINE at::vec::Vectorized<T> pack(const Chunk<T>& chunk) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    // Rounds to the nearest, to even in the middle: adds 0x7fff, or 0x8000 if the last bit that stays is set.
#if defined(CPU_CAPABILITY_AVX512)
    const auto round = [](__m512 value) {
      const __m512i bits = _mm512_castps_si512(value),
                    last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1)),
                    rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
      return _mm512_mask_mov_epi32(
          rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    };
    return _mm512_mask_mov_epi16(_mm512_srli_epi32(round(chunk[0]), 16), 0xaaaaaaaa, round(chunk[1]));
#elif defined(CPU_CAPABILITY_AVX2)
    const auto round = [](__m256 value) {
      const __m256i bits = _mm256_castps_si256(value),
                    last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
    };
    const auto without_nan = [](__m256i rounded, __m256 value) {
      return _mm256_blendv_epi8(
          rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q)));
    };
    __m256i even = round(chunk[0]), odd = round(chunk[1]);
    if (C10_UNLIKELY(_mm256_movemask_ps(_mm256_cmp_ps(chunk[0], chunk[1], _CMP_UNORD_Q)))) {
      even = without_nan(even, chunk[0]);
      odd = without_nan(odd, chunk[1]);
    }
    return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
#endif
  }
  if constexpr (std::is_same_v<T, Acc<T>>) return chunk[0];
  else return at::vec::convert_from_float<T>(chunk[0], chunk[1]);
}

// f(a, b, …) of every vector of chunks.
template <class T, class F, class... C>
C10_ALWAYS_INLINE Chunk<T> for_each(F f, const C&... chunks) {
  if constexpr (std::is_same_v<T, Acc<T>>) return {f(chunks[0]...)};
  else return {f(chunks[0]...), f(chunks[1]...)};
}

// f(p...) of `count` elements, fewer than the chunk that f takes: on copies, filled up with zeros. What f writes is
// copied back. A null pointer stays null.
template <int64_t chunk, class F, class... P>
void on_copies(int64_t count, F f, P*... p) {
  const auto back = [count]<class Element>(const auto& copy, Element* to) {
    if constexpr (!std::is_const_v<Element>)
      if (to != nullptr) std::copy_n(copy.data(), count, to);
  };
  [&](std::array<std::remove_const_t<P>, static_cast<size_t>(chunk)>... copy) {
    ((p == nullptr ? nullptr : std::copy_n(p, count, copy.data())), ...);
    f((p == nullptr ? nullptr : copy.data())...);
    (back(copy, p), ...);
  }(std::array<std::remove_const_t<P>, static_cast<size_t>(chunk)>{}...);
}

// y[i] = f(a[i], b[i], …) for i < n. y may be one of the others.
template <class T, class F, class... P>
void map(F f, T* y, int64_t n, const P*... a) {
  int64_t i = 0;
  for (; i + kChunk<T> <= n; i += kChunk<T>) pack<T>(for_each<T>(f, read_chunk(a + i)...)).store(y + i);
  if (i == n) return;
  const auto rest = [&](const T* p) {
    T in[kChunk<T>] = {};
    std::copy(p + i, p + n, in);
    return read_chunk(in);
  };
  pack<T>(for_each<T>(f, rest(a)...)).store(y + i, static_cast<int>(n - i));
}

// f(a[i], b[i], …) of all i < n, combined: lane by lane, beginning with `start`.
template <class T, class Combine, class F, class... P>
C10_ALWAYS_INLINE Vec<T> reduce(int64_t n, Vec<T> start, Combine combine, F f, const P*... a) {
  constexpr int64_t lanes = kLanes<T>;
  Vec<T> part[4] = {start, start, start, start}; // four, because an addition or a maximum takes four cycles
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < 4; k += kChunk<T> / lanes) {
      const auto chunk = for_each<T>(f, read_chunk(a + i + k * lanes)...);
      part[k] = combine(part[k], chunk.front());
      if constexpr (chunk.size() > 1) part[k + 1] = combine(part[k + 1], chunk.back());
    }
  }
  for (; i + lanes <= n; i += lanes) part[0] = combine(part[0], f(read(a + i)...));
  if (i < n) part[1] = combine(part[1], Vec<T>::set(start, f(read(a + i, n - i)...), n - i));
  return combine(combine(part[0], part[1]), combine(part[2], part[3]));
}

// Sum of f(a[i], b[i], …) over i < n. Vectors within a block, double between blocks: the error does
// not grow with n.
template <class T, class F, class... P>
double sum(int64_t n, F f, const P*... a) {
  // Several sums, because an addition takes four cycles: one would take as long as a tenth of a row of 1024 floats.
  constexpr int64_t block = 512 * kLanes<T>, sums = std::min<int64_t>(4, kLanes<T>);
  double total = 0;
  for (int64_t i = 0; i < n; i += block) {
    Acc<T> lanes[kLanes<T>];
    reduce<T>(std::min(block, n - i), Vec<T>(0), std::plus<>(), f, (a + i)...).store(lanes);
    double part[sums] = {};
    for (int64_t k = 0; k < kLanes<T>; k += sums)
      for (int64_t l = 0; l < sums; ++l) part[l] += lanes[k + l];
    for (const double sum : part) total += sum;
  }
  return total;
}

// The largest f(x[i]) of n elements; `least` if there are none, NaN if any is NaN.
template <class T, class F = std::identity>
Acc<T> max_of(const T* x, int64_t n, F f = {}, Acc<T> least = -std::numeric_limits<Acc<T>>::infinity()) {
  const auto larger = [](Vec<T> a, Vec<T> b) { return at::vec::maximum(a, b); };
  return at::vec::vec_reduce_all<Acc<T>>(larger, reduce<T>(n, Vec<T>(least), larger, f, x));
}

} // namespace openreg::kernels
