// Masks and quantized numbers: bytes read and written as the vectors that a kernel computes with.
#pragma once

#include "kernels/loops.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cstring>
#include <type_traits>

namespace openreg::kernels {

// kLanes<T> bytes, signed or not, as numbers. (g++ 12 would convert one by one.)
template <class T, class Byte>
Vec<T> read_bytes(const Byte* p) {
  static_assert(sizeof(Byte) == 1);
#ifdef __AVX2__
  const auto* bytes = reinterpret_cast<const __m128i*>(p);
#endif
#if defined(__AVX512F__)
  if constexpr (sizeof(Acc<T>) == 4) {
    const __m128i x = _mm_loadu_si128(bytes);
    return _mm512_cvtepi32_ps(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x));
  } else {
    const __m128i x = _mm_loadl_epi64(bytes);
    return _mm512_cvtepi32_pd(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(Acc<T>) == 4) {
    const __m128i x = _mm_loadl_epi64(bytes);
    return _mm256_cvtepi32_ps(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
  } else {
    const __m128i x = _mm_loadu_si32(bytes);
    return _mm256_cvtepi32_pd(std::is_signed_v<Byte> ? _mm_cvtepi8_epi32(x) : _mm_cvtepu8_epi32(x));
  }
#else
  Acc<T> lanes[kLanes<T>];
  std::copy_n(p, kLanes<T>, lanes);
  return Vec<T>::loadu(lanes);
#endif
}

// Rounds to the nearest integers, ties to even, and writes kLanes<T> of them. They must be in range.
template <class T>
void write_bytes(Vec<T> x, int8_t* p) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Acc<T>) == 4)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
  else _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi64_epi8(_mm512_cvtpd_epi64(x)));
#elif defined(__AVX2__)
  __m128i low, high;
  if constexpr (sizeof(Acc<T>) == 4) {
    const __m256i numbers = _mm256_cvtps_epi32(x);
    low = _mm256_castsi256_si128(numbers), high = _mm256_extracti128_si256(numbers, 1);
  } else {
    low = high = _mm256_cvtpd_epi32(x);
  }
  const __m128i words = _mm_packs_epi32(low, high), bytes = _mm_packs_epi16(words, words);
  std::memcpy(p, &bytes, static_cast<size_t>(kLanes<T>));
#else
  Acc<T> lanes[kLanes<T>];
  x.round().store(lanes);
  for (int64_t i = 0; i < kLanes<T>; ++i) p[i] = static_cast<int8_t>(lanes[i]);
#endif
}

} // namespace openreg::kernels
