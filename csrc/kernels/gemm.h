// Products of matrix blocks, on the calling thread, for attention, linear_cross_entropy and grouped_linear.
// torch does not export its BLAS (at::native::cpublas::gemm), and calling at::mm costs as much as the smallest of these
// blocks. The scheme is from BLIS (Van Zee & van de Geijn 2015): the right factor is packed once into panels of kPanel
// columns, [panel][k][kPanel], and a tile of C of kTile rows by one panel stays in registers while k runs. Packing also
// widens the half types and takes any strides.
// An element of C is one sum in the order of k in gemm(): it depends neither on the tile that it falls in nor on
// threads.
#pragma once

#include "kernels/loops.h"

#include <cstring>
#include <memory>
#include <new>

namespace openreg::kernels {

// Columns of a panel: two registers.
template <class A>
constexpr int64_t kPanel = 2 * at::vec::Vectorized<A>::size();

// Rows of a tile, so that its sums fill the registers except those for the factors: 12 of 16 in AVX2, 24 of 32 in
// AVX-512.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kTile = 12;
#else
constexpr int64_t kTile = 6;
#endif

template <class A>
constexpr int64_t padded(int64_t n) {
  return at::divup(n, kPanel<A>) * kPanel<A>;
}

// One thread's uninitialized memory, aligned to cache lines: a vector that spans two lines costs two loads.
template <class A>
class Scratch {
 public:
  explicit Scratch(int64_t n) : memory_(static_cast<A*>(::operator new(sizeof(A) * static_cast<size_t>(n), kLine))) {}
  operator A*() const { return memory_.get(); }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(A* memory) const { ::operator delete(memory, kLine); }
  };
  std::unique_ptr<A, Free> memory_;
};

// f(i, count) for each register-sized part of n elements: `count` elements from i on.
template <class A, class F>
void each_register(int64_t n, F f) {
  constexpr int64_t lanes = at::vec::Vectorized<A>::size();
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) f(i, std::integral_constant<int64_t, lanes>());
  if (i < n) f(i, n - i);
}

// to = x, whose elements are `col` apart, widened to Acc<T>.
template <class T>
void widen(const T* x, int64_t col, int64_t n, Acc<T>* to) {
  if (col != 1) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Acc<T>>(x[i * col]);
    return;
  }
  each_register<Acc<T>>(n, [&](int64_t i, auto count) {
    if constexpr (std::is_same_v<decltype(count), int64_t>) read(x + i, count).store(to + i, static_cast<int>(count));
    else read(x + i).store(to + i);
  });
}

// to = by * x, rounded to T, its elements `col` apart.
template <class T>
void narrow(const Acc<T>* x, Acc<T> by, int64_t n, T* to, int64_t col) {
  int64_t i = 0;
  for (; col == 1 && i + kChunk<T> <= n; i += kChunk<T>) {
    Vec<T> part[kChunk<T> / kLanes<T>];
    for (int64_t k = 0; k < kChunk<T> / kLanes<T>; ++k) part[k] = Vec<T>::loadu(x + i + k * kLanes<T>) * Vec<T>(by);
    write(part, to + i);
  }
  for (; i < n; ++i) to[i * col] = static_cast<T>(x[i] * by);
}

// Packs B, of k by n elements at b[i * row + j * col], into padded(n) / kPanel panels of `stride` rows each, from
// row 0 of `to`; columns from n on are 0.
template <class T>
void pack(const T* b, int64_t row, int64_t col, int64_t k, int64_t n, Acc<T>* to, int64_t stride) {
  constexpr int64_t panel = kPanel<Acc<T>>;
  for (int64_t j = 0; j < n; j += panel, to += stride * panel) {
    const int64_t columns = std::min(panel, n - j);
    const T* from = b + j * col;
    if (columns < panel) std::fill_n(to, k * panel, Acc<T>(0));
    if (col == 1 && columns == panel) {
      for (int64_t i = 0; i < k; ++i)
        for (int64_t l = 0; l < panel; l += kLanes<T>) read(from + i * row + l).store(to + i * panel + l);
      continue;
    }
    constexpr int64_t block = 16; // rows at a time, so that source and destination stay in cache
    for (int64_t i = 0; i < k; i += block) {
      const int64_t end = std::min(k, i + block);
      if constexpr (sizeof(T) < sizeof(double)) {
        if (row == 1) { // transposes in registers
          T rows[block * panel];
          at::vec::transpose_mxn<T>(from + i, col, rows, panel, static_cast<int>(columns), static_cast<int>(end - i));
          for (int64_t r = i; r < end; ++r) widen(rows + (r - i) * panel, 1, columns, to + r * panel);
          continue;
        }
      }
      for (int64_t l = 0; l < columns; ++l)
        for (int64_t r = i; r < end; ++r) to[r * panel + l] = static_cast<Acc<T>>(from[r * row + l * col]);
    }
  }
}

// A tile of `rows` rows: c (+)= a * b over one panel. Uses the compiler's own vectors, because it keeps an array of
// at::vec vectors in memory.
template <class A, int64_t rows>
void gemm_tile(
    int64_t k, const A* a, int64_t a_row, int64_t a_col, const A* b, A* c, int64_t c_row, int64_t columns, bool add) {
  typedef A Vector __attribute__((vector_size(sizeof(A) * kPanel<A> / 2)));
  constexpr int64_t lanes = kPanel<A> / 2;
  const auto load = [](Vector& v, const A* p) { std::memcpy(&v, p, sizeof v); };
  const auto store = [](A* p, const Vector& v) { std::memcpy(p, &v, sizeof v); };
  Vector sum[rows][2];
#pragma GCC unroll 16
  for (int64_t i = 0; i < rows; ++i) sum[i][0] = sum[i][1] = Vector{};
  for (int64_t p = 0; p < k; ++p, b += 2 * lanes, a += a_col) {
    Vector first, second;
    load(first, b);
    load(second, b + lanes);
#pragma GCC unroll 16
    for (int64_t i = 0; i < rows; ++i) {
      const A x = a[i * a_row];
      sum[i][0] += x * first;
      sum[i][1] += x * second;
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < rows; ++i, c += c_row) {
    if (columns == 2 * lanes) {
      for (int64_t half = 0; half < 2; ++half) {
        if (Vector old; add) {
          load(old, c + half * lanes);
          sum[i][half] += old;
        }
        store(c + half * lanes, sum[i][half]);
      }
    } else {
      A row[2 * lanes];
      store(row, sum[i][0]);
      store(row + lanes, sum[i][1]);
      for (int64_t j = 0; j < columns; ++j) c[j] = add ? c[j] + row[j] : row[j];
    }
  }
}

template <class A, int64_t rows = kTile>
void gemm_rows(int64_t count, int64_t k, const A* a, int64_t a_row, int64_t a_col, const A* b, A* c, int64_t c_row,
    int64_t columns, bool add) {
  if (count == rows) gemm_tile<A, rows>(k, a, a_row, a_col, b, c, c_row, columns, add);
  else if constexpr (rows > 1) gemm_rows<A, rows - 1>(count, k, a, a_row, a_col, b, c, c_row, columns, add);
}

// C = A * B, or C += A * B: m by n from k terms. A is at a[i * a_row + p * a_col], B in panels of `stride` rows,
// and C has rows of consecutive elements, c_row apart.
template <class A>
void gemm(int64_t m, int64_t n, int64_t k, const A* a, int64_t a_row, int64_t a_col, const A* b, int64_t stride, A* c,
    int64_t c_row, bool add) {
  for (int64_t j = 0; j < n; j += kPanel<A>, b += stride * kPanel<A>)
    for (int64_t i = 0; i < m; i += kTile)
      gemm_rows<A>(std::min(kTile, m - i), k, a + i * a_row, a_row, a_col, b, c + i * c_row + j, c_row,
          std::min(kPanel<A>, n - j), add);
}

// ---- bfloat16 with oneDNN ----
// Processors with AVX-512 BF16 or AMX multiply pairs of bfloat16 and accumulate in float32, at twice the rate of
// float32 products or more. at::native::cpublas::brgemm uses this if the right factor is stored in pairs of rows: [k /
// 2][n][2]. It is used for bfloat16 alone, because of these measurements with the block sizes of attention and
// linear_cross_entropy. GFLOP/s on a core of an AMD EPYC (Zen 5, AVX-512, no AMX): the code above 226 to 246; brgemm
// 366 to 483 in bfloat16, 188 to 242 in float32, 35 to 70 in float16, for which there are instructions only with
// AMX-FP16.

// Returns true if the processor has these instructions, and oneDNN uses them.
bool has_bfloat16_products();

// C = A * B, or C += A * B: m by n from k terms, k even. Rows are `a_row` apart in A and `c_row` in C; rows of
// pairs are 2 * b_row apart in B.
void gemm_pairs(int64_t m, int64_t n, int64_t k, const c10::BFloat16* a, int64_t a_row, const c10::BFloat16* b,
    int64_t b_row, float* c, int64_t c_row, bool add);

// Packs B, of k by n elements at b[i * row + j * col], in pairs of rows, 2 * to_row apart; zeros complete an odd k.
void pack_pairs(
    const c10::BFloat16* b, int64_t row, int64_t col, int64_t k, int64_t n, c10::BFloat16* to, int64_t to_row);

// to = x transposed: m rows of n elements become n rows.
void transpose(const c10::BFloat16* x, int64_t row, int64_t m, int64_t n, c10::BFloat16* to, int64_t to_row);

// Releases the state that the processor's matrix unit holds for this thread.
void release_pairs();
struct Pairs {
  bool used = true;
  ~Pairs() {
    if (used) release_pairs();
  }
};

// ---- either, for loops over blocks ----
// A packed right factor of k by n elements takes columns(n) * stride elements. Its stride is terms(k), or depth(k) if
// products use some of its rows. Column j, a multiple of 128, begins j * stride elements after the first, and row i, a
// multiple of 2, i * kPanel elements. Where products use some rows of a left factor or of a result, it has memory for
// depth(m) rows.

// m by k elements of a left factor, at data[i * row + p * col]; row or col is 1. kRow is row if the compiler knows it.
template <class Element, int64_t kRow = 0>
struct Left {
  const Element* data;
  int64_t row, col, k;
};

// Products in Acc<T>.
template <class T>
struct Wide {
  using Element = Acc<T>;
  static constexpr int64_t kPanel = openreg::kernels::kPanel<Element>, kRounded = 0;
  static int64_t columns(int64_t n) { return padded<Element>(n); }
  static int64_t terms(int64_t k) { return k; }
  static int64_t depth(int64_t k) { return k; }
  static void take(const T* x, int64_t col, int64_t n, Element* to) { widen(x, col, n, to); }
  static void pack(const T* b, int64_t row, int64_t col, int64_t k, int64_t n, Element* to, int64_t stride) {
    openreg::kernels::pack(b, row, col, k, n, to, stride);
  }
  // A product reads span(k) elements of a row of which a loop has computed k.
  static int64_t span(int64_t k) { return k; }
  // x, m rows that a loop has filled up to span(k), as a left factor.
  template <int64_t kRow>
  static Left<Element, kRow> factor(const Element* x, int64_t /*m*/, int64_t k) {
    return {x, kRow, 1, k};
  }
  // x, m rows of numbers in Acc<T>, as a left factor. `to` has room for kRounded such blocks.
  template <int64_t kRow>
  static Left<Element, kRow> rounded(const Element* x, int64_t m, int64_t k, Element* /*to*/) {
    return factor<kRow>(x, m, k);
  }
  template <int64_t kRow>
  static Left<Element> transposed(const Left<Element, kRow>& x, int64_t m, Element* /*to*/) {
    return {x.data, 1, kRow, m};
  }
  template <int64_t kRow>
  static void multiply(int64_t m, int64_t n, const Left<Element, kRow>& a, const Element* b, int64_t stride, Element* c,
      int64_t c_row, bool add) {
    // Constant strides save a few percent.
    if constexpr (kRow > 0) gemm<Element>(m, n, a.k, a.data, kRow, 1, b, stride, c, c_row, add);
    else if (a.col == 1) gemm<Element>(m, n, a.k, a.data, a.row, 1, b, stride, c, c_row, add);
    else gemm<Element>(m, n, a.k, a.data, 1, a.col, b, stride, c, c_row, add);
  }
};

// Products of pairs of bfloat16. Sizes are rounded up to multiples of kStep, because oneDNN generates code for each
// size and there should be few. The elements that this adds to a factor are 0 where they could change a result.
struct Paired {
  using Element = c10::BFloat16;
  static constexpr int64_t kPanel = 128, kRounded = 1, kStep = 32;
  static int64_t whole(int64_t n) { return at::divup(n, kStep) * kStep; }
  static int64_t columns(int64_t n) { return at::divup(n, kPanel) * kPanel; }
  static int64_t terms(int64_t k) { return at::divup(k, 2) * 2; }
  static int64_t depth(int64_t k) { return whole(k) + kStep; } // a part may begin anywhere
  static void take(const Element* x, int64_t col, int64_t n, Element* to) {
    if (col == 1) std::copy_n(x, n, to);
    else
      for (int64_t i = 0; i < n; ++i) to[i] = x[i * col];
    std::fill(to + n, to + terms(n), Element(0.f));
  }
  static void pack(const Element* b, int64_t row, int64_t col, int64_t k, int64_t n, Element* to, int64_t stride) {
    for (int64_t j = 0; j < n; j += kPanel, to += stride * kPanel) {
      pack_pairs(b + j * col, row, col, k, std::min(kPanel, n - j), to, kPanel);
      std::fill(to + terms(k) * kPanel, to + stride * kPanel, Element(0.f));
    }
  }
  static int64_t span(int64_t k) { return whole(k); }
  template <int64_t row>
  static Left<Element, row> factor(Element* x, int64_t m, int64_t k) {
    for (int64_t i = m; i < whole(m); ++i) std::fill_n(x + i * row, whole(k), Element(0.f));
    return {x, row, 1, whole(k)};
  }
  template <int64_t row>
  static Left<Element, row> rounded(const float* x, int64_t m, int64_t k, Element* to) {
    for (int64_t i = 0; i < m; ++i) {
      narrow(x + i * row, 1.f, k, to + i * row, 1);
      std::fill(to + i * row + k, to + i * row + whole(k), Element(0.f));
    }
    return factor<row>(to, m, k);
  }
  template <int64_t kRow>
  static Left<Element> transposed(const Left<Element, kRow>& x, int64_t m, Element* to) {
    transpose(x.data, x.row, whole(m), x.k, to, x.row);
    return {to, x.row, 1, whole(m)};
  }
  template <int64_t kRow>
  static void multiply(int64_t m, int64_t n, const Left<Element, kRow>& a, const Element* b, int64_t stride, float* c,
      int64_t c_row, bool add) {
    for (int64_t j = 0; j < n; j += kPanel, b += stride * kPanel)
      gemm_pairs(whole(m), std::min(kPanel, whole(n - j)), a.k, a.data, a.row, b, kPanel, c + j, c_row, add);
  }
  Pairs release;
};

// f(products): Paired if T is bfloat16 and the processor has it, else Wide<T>.
template <class T, class F>
void with_products(bool paired, F f) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, c10::BFloat16>)
    if (paired && has_bfloat16_products()) return f(std::type_identity<Paired>());
#endif
  f(std::type_identity<Wide<T>>());
}

} // namespace openreg::kernels
