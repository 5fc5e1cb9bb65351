// Products of pairs of bfloat16, with oneDNN.
#include "kernels/gemm.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>

#include <exception>

namespace openreg::kernels {
namespace {

// gemm_pairs() without oneDNN.
void plain_gemm_pairs(int64_t m, int64_t n, int64_t k, const c10::BFloat16* a, int64_t a_row, const c10::BFloat16* b,
    int64_t b_row, float* c, int64_t c_row, bool add) {
  for (int64_t i = 0; i < m; ++i, a += a_row, c += c_row) {
    if (!add) std::fill_n(c, n, 0.f);
    for (int64_t p = 0; p < k; p += 2) {
      const float first = a[p], second = a[p + 1];
      const c10::BFloat16* pair = b + p * b_row;
      for (int64_t j = 0; j < n; ++j, pair += 2) c[j] += first * pair[0] + second * pair[1];
    }
  }
}

} // namespace

bool has_bfloat16_products() {
#if defined(CPU_CAPABILITY_AVX512)
  if (!at::globalContext().userEnabledMkldnn()) return false; // brgemm would raise
  static const bool has = [] {
    if (!__builtin_cpu_supports("avx512bf16")) return false;
    try {
      const c10::BFloat16 a[2] = {1.f, 2.f}, b[4] = {3.f, 4.f, 5.f, 6.f}; // columns (3, 4) and (5, 6)
      float c[2] = {};
      at::native::cpublas::brgemm(1, 2, 2, 2, 2, 2, false, a, b, c, /*is_vnni=*/true);
      at::native::cpublas::brgemm_release(true);
      return c[0] == 11 && c[1] == 17;
    } catch (const std::exception&) { // ONEDNN_MAX_CPU_ISA may forbid it
      return false;
    }
  }();
  return has;
#else
  return false;
#endif
}

void gemm_pairs(int64_t m, int64_t n, int64_t k, const c10::BFloat16* a, int64_t a_row, const c10::BFloat16* b,
    int64_t b_row, float* c, int64_t c_row, bool add) {
  constexpr int64_t columns = 512; // at a time, which stay in cache with their part of B
  for (int64_t j = 0; j < n; j += columns) {
    const int64_t count = std::min(columns, n - j);
    try {
      at::native::cpublas::brgemm(m, count, k, a_row, b_row, c_row, add, a, b + 2 * j, c + j, /*is_vnni=*/true);
    } catch (const std::exception&) { // raised before it computes if the user has disabled oneDNN since the loop began
      plain_gemm_pairs(m, count, k, a, a_row, b + 2 * j, b_row, c + j, c_row, add);
    }
  }
}

void pack_pairs(
    const c10::BFloat16* b, int64_t row, int64_t col, int64_t k, int64_t n, c10::BFloat16* to, int64_t to_row) {
  int64_t i = 0;
  if (row == 1 && col % 2 == 0) { // transposes the pairs, each as large as a float
    i = k / 2 * 2;
    at::vec::transpose_mxn<float>(reinterpret_cast<const float*>(b), col / 2, reinterpret_cast<float*>(to), to_row,
        static_cast<int>(n), static_cast<int>(k / 2));
  }
  for (; i < k; i += 2) {
    const c10::BFloat16* from = b + i * row;
    c10::BFloat16* pairs = to + i * to_row;
    int64_t j = 0;
#if defined(CPU_CAPABILITY_AVX512)
    for (; col == 1 && i + 1 < k && j + 16 <= n; j += 16) {
      const auto widened = [](const c10::BFloat16* x) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
      };
      _mm512_storeu_si512(
          pairs + 2 * j, _mm512_or_si512(widened(from + j), _mm512_slli_epi32(widened(from + row + j), 16)));
    }
#endif
    for (; j < n; ++j) {
      pairs[2 * j] = from[j * col];
      pairs[2 * j + 1] = i + 1 < k ? from[row + j * col] : c10::BFloat16(0.f);
    }
  }
}

void transpose(const c10::BFloat16* x, int64_t row, int64_t m, int64_t n, c10::BFloat16* to, int64_t to_row) {
  constexpr int64_t block = 32;
  for (int64_t i = 0; i < m; i += block)
    for (int64_t j = 0; j < n; j += block)
      at::vec::transpose_mxn<c10::BFloat16>(x + i * row + j, row, to + j * to_row + i, to_row,
          static_cast<int>(std::min(block, m - i)), static_cast<int>(std::min(block, n - j)));
}

void release_pairs() {
  at::native::cpublas::brgemm_release(true);
}

} // namespace openreg::kernels
