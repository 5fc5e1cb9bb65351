// exp without a call: at::vec calls a SLEEF function per register, and the call costs more than the computation.
// exp(x) = 2^n exp(r), |r| <= log(2)/2.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <type_traits>

namespace openreg::kernels {

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
using Floats = at::vec::Vectorized<float>;

// Note [Rounding by addition]: a float between 2^23 and 2^24 has no bits after the point, so adding 1.5 * 2^23 rounds
// to an integer. The last bits of the sum are the integer's.
constexpr float kRounding = 12582912;

// a * 2^n, for normal results; n is what is left of the sum `rounded` in Note [Rounding by addition].
C10_ALWAYS_INLINE Floats scale(Floats a, Floats rounded) {
#if defined(CPU_CAPABILITY_AVX512)
  return Floats(_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(rounded), 23))));
#else
  return Floats(_mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(rounded), 23))));
#endif
}
#endif

// first * x^k + … + last, k + 1 coefficients. Not a loop over an array of them, which would broadcast each every time.
template <class V, class... Coefficients>
C10_ALWAYS_INLINE V polynomial(V x, float first, Coefficients... others) {
  V sum(first);
  ((sum = at::vec::fmadd(sum, x, V(others))), ...);
  return sum;
}

// Within 1.01 units in the last place for float; handles infinities and NaN like std::exp.
template <class V>
C10_ALWAYS_INLINE V exp(V x) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<V, Floats>) {
    // The polynomial is from Cephes' expf. NaN passes through min and max as their second operand.
#if defined(CPU_CAPABILITY_AVX512)
    x = V(_mm512_max_ps(_mm512_set1_ps(-110), _mm512_min_ps(_mm512_set1_ps(100), x)));
    const V n = (x * V(1.44269504088896341f)).round();
#else
    x = V(_mm256_max_ps(_mm256_set1_ps(-110), _mm256_min_ps(_mm256_set1_ps(100), x)));
    const V bias(kRounding + 254), rounded = at::vec::fmadd(x, V(1.44269504088896341f), bias), n = rounded - bias;
#endif
    V r = at::vec::fmadd(n, V(-0.693145751953125f), x); // log(2) in two parts, the first exact for all n
    r = at::vec::fmadd(n, V(-1.428606765330187e-06f), r);
    const V p = at::vec::fmadd(polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                   1.6666665459e-1f, 5.0000001201e-1f),
                    r * r, r) +
        V(1);
#if defined(CPU_CAPABILITY_AVX512)
    return V(_mm512_scalef_ps(p, n));
#else
    // 2^n is the product of two powers, as it may be too large or too small for one. The exponents of both, with their
    // bias of 127, add up to n + 254.
    const __m256i sum = _mm256_castps_si256(rounded), half = _mm256_srli_epi32(sum, 1);
    return p * V(_mm256_castsi256_ps(_mm256_slli_epi32(half, 23))) *
        V(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(sum, half), 23)));
#endif
  }
#endif
  return x.exp();
}

// exp(x) for x <= 0, to be added to a sum of at least 1: within 20 units in the last place for float, and at least
// exp(-87) instead of something smaller.
template <class V>
C10_ALWAYS_INLINE V exp_in_sum(V x) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<V, Floats>) {
    // The polynomial is that of at::vec's exp_u20.
    x = at::vec::clamp_min(x, V(-87));
    const V rounded = at::vec::fmadd(x, V(1.44269504088896341f), V(kRounding)), n = rounded - V(kRounding),
            r = at::vec::fmadd(n, V(-0.693147180559945f), x);
    return scale(polynomial(r, 0.00828929059f, 0.0418978221f, 0.166676521f, 0.499991506f, 0.999999701f, 1.0f), rounded);
  }
#endif
  return x.exp_u20();
}

#if defined(CPU_CAPABILITY_AVX512)
// 2^x, within 4 units in the last place, but 0 below -126, because processors are slow to make a denormal number. The
// polynomial is the best one of its degree for the relative error.
C10_ALWAYS_INLINE Floats exp2(Floats x) {
  const Floats n = x.round();
  return Floats(_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126), _CMP_NLT_UQ),
      polynomial(x - n, 0.0013276472454890609f, 0.009675541892647743f, 0.05550713092088699f, 0.24022120237350464f,
          0.6931469440460205f, 1.0000001192092896f),
      n));
}
#endif

} // namespace openreg::kernels
