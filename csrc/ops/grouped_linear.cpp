// grouped_linear: y = x @ weights[e].T + bias[e] for the rows of x that belong to group e: first group_sizes[0] rows,
// then group_sizes[1], and so on. The expert layer of a mixture of experts: Shazeer et al. 2017, arXiv:1701.06538.
// Every product is divided into tiles of one size, over all groups, and the threads share the tiles: groups may have
// any size, and a result does not depend on the number of threads.
// No bias is an empty list. The dispatcher does not look at the tensors of a `Tensor[]? bias`, so it would miss
// transforms and tensor subclasses that reach the operator only through the bias (c10::impl::DispatchKeyExtractor).
#include "kernels/gemm.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "runtime/graph/graph.h"

#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>

#include <omp.h>

#include <vector>

namespace openreg::ops {
namespace {
using namespace kernels;

// ---- products of matrices in memory ----

template <class T>
struct Matrix {
  T* data;
  int64_t row, col;

  static Matrix of(const Tensor& x) {
    if constexpr (std::is_const_v<T>) return {x.const_data_ptr<std::remove_const_t<T>>(), x.stride(0), x.stride(1)};
    else return {x.mutable_data_ptr<T>(), x.stride(0), x.stride(1)};
  }
  Matrix t() const { return {data, col, row}; }
  Matrix part(int64_t i, int64_t j) const { return {data + i * row + j * col, row, col}; }
  Tensor tensor(int64_t rows, int64_t columns) const {
    return at::from_blob(const_cast<std::remove_const_t<T>*>(data), {rows, columns}, {row, col},
        at::TensorOptions().dtype(c10::CppTypeToScalarType<std::remove_const_t<T>>::value));
  }
};

template <class T>
std::vector<Matrix<T>> matrices(at::TensorList list) {
  std::vector<Matrix<T>> out;
  for (const Tensor& x : list) out.push_back(Matrix<T>::of(x));
  return out;
}

// Part of one group's result.
struct Tile {
  int64_t group, row, column, rows, columns;
};
constexpr int64_t kSide = 256, kDepth = 512; // of a tile, and how many terms it adds at a time
constexpr int64_t kFew = 32; // rows

// The tiles of a result with `columns` columns, where group e has rows [first[e], first[e + 1]).
std::vector<Tile> tiles_of(const std::vector<int64_t>& first, int64_t columns) {
  std::vector<Tile> out;
  for (int64_t e = 0; e + 1 < static_cast<int64_t>(first.size()); ++e)
    for (int64_t row = first[e]; row < first[e + 1]; row += kSide)
      for (int64_t column = 0; column < columns; column += kSide)
        out.push_back({e, row, column, std::min(kSide, first[e + 1] - row), std::min(kSide, columns - column)});
  return out;
}

// c += a * b for `rows` rows of a and `columns` columns of b, of k consecutive elements each.
template <class A, int64_t rows, int64_t columns>
void add_dots(int64_t k, const A* a, int64_t a_row, const A* b, int64_t b_col, A* c, int64_t c_row) {
  constexpr int64_t lanes = at::vec::Vectorized<A>::size();
  typedef A Vector __attribute__((vector_size(sizeof(A) * lanes)));
  Vector sum[rows][columns] = {};
  int64_t p = 0;
  for (; p + lanes <= k; p += lanes) {
    Vector x, y[columns];
#pragma GCC unroll 4
    for (int64_t j = 0; j < columns; ++j) std::memcpy(&y[j], b + j * b_col + p, sizeof x);
#pragma GCC unroll 4
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(&x, a + i * a_row + p, sizeof x);
#pragma GCC unroll 4
      for (int64_t j = 0; j < columns; ++j) sum[i][j] += x * y[j];
    }
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < rows; ++i)
#pragma GCC unroll 4
    for (int64_t j = 0; j < columns; ++j) {
      A total = 0;
      for (int64_t l = 0; l < lanes; ++l) total += sum[i][j][l];
      for (int64_t q = p; q < k; ++q) total += a[i * a_row + q] * b[j * b_col + q];
      c[i * c_row + j] += total;
    }
}

// c += a * b for m rows of a and `columns` columns of b.
template <class A, int64_t columns>
void add_rows_of_dots(int64_t m, int64_t k, const A* a, int64_t a_row, const A* b, int64_t b_col, A* c, int64_t c_row) {
  for (; m >= 4; m -= 4, a += 4 * a_row, c += 4 * c_row) add_dots<A, 4, columns>(k, a, a_row, b, b_col, c, c_row);
  if (m == 3) add_dots<A, 3, columns>(k, a, a_row, b, b_col, c, c_row);
  if (m == 2) add_dots<A, 2, columns>(k, a, a_row, b, b_col, c, c_row);
  if (m == 1) add_dots<A, 1, columns>(k, a, a_row, b, b_col, c, c_row);
}

// One thread's products: c = a @ b, or bias + a @ b, over the size of a tile. ATen's products of tiles took twice as
// long in float32 (MKL) and 4 to 80 times in float16 on an AMD EPYC (Zen 5).
template <class T>
class Product {
  using A = Acc<T>;
  static constexpr int64_t kRow = kSide + kPanel<A>; // not a power of 2, to avoid cache conflicts

 public:
  void operator()(
      const Tile& tile, int64_t depth, Matrix<const T> a, Matrix<const T> b, const T* bias, Matrix<T> c) const {
    for (int64_t i = 0; i < tile.rows; ++i) {
      if (bias != nullptr) widen(bias, 1, tile.columns, sums_ + i * kRow);
      else std::fill_n(sums_ + i * kRow, tile.columns, A(0));
    }
    for (int64_t p = 0; p < depth; p += kDepth, a = a.part(0, kDepth), b = b.part(kDepth, 0)) {
      const int64_t k = std::min(kDepth, depth - p);
      if (tile.rows <= kFew && a.col == 1 && b.row == 1) {
        add_few(tile, k, a, b);
        continue;
      }
      pack(b.data, b.row, b.col, k, tile.columns, b_, k);
      const auto add = [&](const A* left, int64_t row, int64_t col) {
        gemm<A>(tile.rows, tile.columns, k, left, row, col, b_, k, sums_, kRow, true);
      };
      if constexpr (std::is_same_v<T, A>) {
        add(a.data, a.row, a.col);
      } else if (a.row == 1) {
        for (int64_t i = 0; i < k; ++i) widen(a.data + i * a.col, 1, tile.rows, a_ + i * kSide);
        add(a_, 1, kSide);
      } else {
        for (int64_t i = 0; i < tile.rows; ++i) widen(a.data + i * a.row, a.col, k, a_ + i * kDepth);
        add(a_, kDepth, 1);
      }
    }
    for (int64_t i = 0; i < tile.rows; ++i) narrow(sums_ + i * kRow, A(1), tile.columns, c.part(i, 0).data, 1);
  }

 private:
  // Packing b would take longer than the products of few rows: 10 times as long for one row.
  void add_few(const Tile& tile, int64_t k, Matrix<const T> a, Matrix<const T> b) const {
    constexpr int64_t columns = 4;
    constexpr bool wide = std::is_same_v<T, A>;
    for (int64_t i = 0; !wide && i < tile.rows; ++i) widen(a.data + i * a.row, 1, k, a_ + i * kDepth);
    for (int64_t j = 0; j < tile.columns; j += columns) {
      const int64_t count = std::min(columns, tile.columns - j);
      const A *left = a_, *right = b_;
      int64_t row = kDepth, col = kDepth;
      if constexpr (wide) {
        left = a.data;
        right = b.data + j * b.col;
        row = a.row;
        col = b.col;
      } else {
        for (int64_t l = 0; l < count; ++l) widen(b.data + (j + l) * b.col, 1, k, b_ + l * kDepth);
      }
      if (count == columns) add_rows_of_dots<A, columns>(tile.rows, k, left, row, right, col, sums_ + j, kRow);
      else
        for (int64_t l = 0; l < count; ++l)
          add_rows_of_dots<A, 1>(tile.rows, k, left, row, right + l * col, col, sums_ + j + l, kRow);
    }
  }

  Scratch<A> a_{std::is_same_v<T, A> ? 0 : kSide * kDepth}, b_{kSide * kDepth}, sums_{kSide * kRow};
};

// Products of tiles with ATen, and so with oneDNN: for bfloat16, if the processor multiplies it. On an AMD EPYC (Zen
// 5), packed pairs (gemm.h) took 1.1 to 1.4 times as long.
class OneDnnProduct {
  using T = c10::BFloat16;

 public:
  // Within parallel_for, oneDNN runs a product on one thread but still splits it by OpenMP's number of threads if the
  // processor has AMX, which changes the rounding.
  OneDnnProduct() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneDnnProduct() { omp_set_num_threads(threads_); }
  OneDnnProduct(const OneDnnProduct&) = delete;
  OneDnnProduct& operator=(const OneDnnProduct&) = delete;

  void operator()(
      const Tile& tile, int64_t depth, Matrix<const T> a, Matrix<const T> b, const T* bias, Matrix<T> c) const {
    for (int64_t i = 0; bias != nullptr && i < tile.rows; ++i) std::copy_n(bias, tile.columns, c.part(i, 0).data);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    Tensor out = c.tensor(tile.rows, tile.columns);
    at::cpu::addmm_out(out, out, a.tensor(tile.rows, depth), b.tensor(depth, tile.columns), bias == nullptr ? 0 : 1, 1);
  }

 private:
  int threads_; // of the calling thread
};

// f(tile, product) for each tile, whose result is a sum of about `depth` products.
template <class T, class F>
void for_each_tile(const std::vector<Tile>& tiles, int64_t depth, const F& f) {
  const auto loop = [&]<class P>(std::type_identity<P>) {
    const int64_t grain = at::divup(kGrain, kSide * kSide * (depth + 1));
    at::parallel_for(0, static_cast<int64_t>(tiles.size()), grain, [&](int64_t begin, int64_t end) {
      const P product;
      for (int64_t i = begin; i < end; ++i) f(tiles[i], product);
    });
  };
  if constexpr (std::is_same_v<T, c10::BFloat16>)
    if (has_bfloat16_products()) return loop(std::type_identity<OneDnnProduct>());
  loop(std::type_identity<Product<T>>());
}

// ---- groups ----

// The row of x with which each group begins, and the number of rows. Read when the operator is called, so that it can
// reject wrong sizes; in a graph, read by each replay.
class FirstRows {
 public:
  FirstRows(const char* op, const Tensor& x, const Tensor& group_sizes) // contiguous, int64
      : op_(op), n_(group_sizes.numel()), rows_(x.size(0)), sizes_(group_sizes.const_data_ptr<int64_t>()) {
    if (!capturing(x.get_device())) read_ = run(current_stream(x.get_device()), [&] { return read(); });
  }
  // Called inside the launched work.
  std::vector<int64_t> operator()() const { return read_.empty() ? read() : read_; }

 private:
  std::vector<int64_t> read() const {
    std::vector<int64_t> first(1, 0);
    int64_t sum = 0; // or INT64_MAX
    for (int64_t e = 0; e < n_; ++e) {
      TORCH_CHECK(sizes_[e] >= 0, op_, ": expected group_sizes of at least 0, but got ", sizes_[e], " for group ", e);
      if (__builtin_add_overflow(sum, sizes_[e], &sum)) sum = std::numeric_limits<int64_t>::max();
      first.push_back(sum);
    }
    TORCH_CHECK(
        sum == rows_, op_, ": expected group_sizes that sum to ", rows_, ", the rows of x, but got a sum of ", sum);
    return first;
  }

  const char* op_;
  int64_t n_, rows_;
  const int64_t* sizes_;
  std::vector<int64_t> read_;
};

void check_groups(const char* op, const Tensor& x, at::TensorList weights, const Tensor& group_sizes) {
  check_floating(op, "x", x);
  TORCH_CHECK(x.dim() == 2, op, ": expected x of shape [rows, in], but got ", x.sym_sizes(), "; flatten its rows");
  TORCH_CHECK(!weights.empty(), op, ": expected at least one weight, but got none");
  for (size_t e = 0; e < weights.size(); ++e) {
    const Tensor& weight = weights[e];
    const std::string name = "weights[" + std::to_string(e) + "]";
    check_kind_like(op, name.c_str(), weight, "x", x);
    TORCH_CHECK(e > 0 || (weight.dim() == 2 && expect(weight.sym_size(1).sym_eq(x.sym_size(1)))), op,
        ": expected weights[0] of shape [out, ", x.sym_size(1), "], for the columns of x, but got ",
        weight.sym_sizes());
    check_shape(op, name.c_str(), weight, weights[0].sym_sizes(), "the same as weights[0]");
  }
  check_same_device(op, "x", x, "group_sizes", group_sizes);
  check_integers(op, "group_sizes", group_sizes);
  check_shape(op, "group_sizes", group_sizes, {static_cast<int64_t>(weights.size())}, "a number for each weight");
}

void check_grouped_linear(
    const char* op, const Tensor& x, at::TensorList weights, at::TensorList bias, const Tensor& group_sizes) {
  check_groups(op, x, weights, group_sizes);
  TORCH_CHECK(bias.empty() || bias.size() == weights.size(), op, ": expected bias of a tensor for each of the ",
      weights.size(), " weights, but got ", bias.size());
  for (size_t e = 0; e < bias.size(); ++e) {
    const std::string name = "bias[" + std::to_string(e) + "]";
    check_kind_like(op, name.c_str(), bias[e], "x", x);
    check_shape(op, name.c_str(), bias[e], weights[0].sym_sizes().slice(0, 1), "a number for each row of a weight");
  }
}

Tensor grouped_linear(const Tensor& x, at::TensorList weights, at::TensorList bias_, const Tensor& group_sizes) {
  constexpr const char* op = "grouped_linear";
  check_grouped_linear(op, x, weights, bias_, group_sizes);
  const Tensor sizes = group_sizes.to(at::kLong).contiguous();
  const FirstRows rows(op, x, sizes);
  std::vector<Tensor> bias;
  for (const Tensor& b : bias_) bias.push_back(b.contiguous());
  const int64_t in = x.size(1), out = weights[0].size(0);
  Tensor y = at::empty({x.size(0), out}, x.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), op, [&] {
    using T = scalar_t;
    std::vector<const T*> b;
    for (const Tensor& row : bias) b.push_back(row.const_data_ptr<T>());
    launch(current_stream(x.get_device()),
        [=, x = Matrix<const T>::of(x), w = matrices<const T>(weights), y = Matrix<T>::of(y)] {
          const auto first = rows();
          for_each_tile<T>(tiles_of(first, out), in, [&](const Tile& tile, const auto& product) {
            product(tile, in, x.part(tile.row, 0), w[tile.group].part(tile.column, 0).t(),
                b.empty() ? nullptr : b[tile.group] + tile.column, y.part(tile.row, tile.column));
          });
        });
  });
  return y;
}

// Sums of `count` <= kSumColumns columns over n rows. Sums are vectors within a block of rows and doubles between
// blocks.
template <class T>
constexpr int64_t kSumColumns = 4 * kLanes<T>;
template <class T>
void sum_rows(const T* x, int64_t n, int64_t stride, int64_t count, T* out) {
  double total[kSumColumns<T>] = {};
  for (int64_t begin = 0; begin < n; begin += 256) {
    Vec<T> part[4] = {Vec<T>(0), Vec<T>(0), Vec<T>(0), Vec<T>(0)};
    for (int64_t i = begin; i < std::min(n, begin + 256); ++i) {
      const T* row = x + i * stride;
      for (int64_t k = 0; k < 4; ++k) {
        const int64_t left = count - k * kLanes<T>;
        if (left >= kLanes<T>) part[k] = part[k] + read(row + k * kLanes<T>);
        else if (left > 0) part[k] = part[k] + read(row + k * kLanes<T>, left);
      }
    }
    Acc<T> sums[kSumColumns<T>];
    for (int64_t k = 0; k < 4; ++k) part[k].store(sums + k * kLanes<T>);
    for (int64_t k = 0; k < kSumColumns<T>; ++k) total[k] += sums[k];
  }
  std::transform(total, total + count, out, [](double sum) { return static_cast<T>(sum); });
}

void check_grouped_linear_backward(
    const char* op, const Tensor& grad_y, const Tensor& x, at::TensorList weights, const Tensor& group_sizes) {
  check_groups(op, x, weights, group_sizes);
  check_kind_like(op, "grad_y", grad_y, "x", x);
  check_shape(op, "grad_y", grad_y, {x.sym_size(0), weights[0].sym_size(0)}, "the rows of x and of a weight");
}

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> grouped_linear_backward(const Tensor& grad_y_,
    const Tensor& x, at::TensorList weights, const Tensor& group_sizes, std::array<bool, 3> output_mask) {
  constexpr const char* op = "grouped_linear_backward";
  check_grouped_linear_backward(op, grad_y_, x, weights, group_sizes);
  const Tensor sizes = group_sizes.to(at::kLong).contiguous();
  const FirstRows read(op, x, sizes);
  const Tensor grad_y = grad_y_.contiguous();
  const int64_t groups = static_cast<int64_t>(weights.size()), in = x.size(1), out = weights[0].size(0);
  Tensor grad_x;
  std::vector<Tensor> grad_weights, grad_bias;
  if (output_mask[0]) grad_x = at::empty(x.sizes(), x.options());
  for (int64_t e = 0; e < groups; ++e) {
    if (output_mask[1]) grad_weights.push_back(at::empty({out, in}, x.options()));
    if (output_mask[2]) grad_bias.push_back(at::empty({out}, x.options()));
  }
  const Stream stream = current_stream(x.get_device());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), op, [&] {
    using T = scalar_t;
    const auto dy = Matrix<const T>::of(grad_y);
    if (output_mask[0])
      launch(stream, [=, w = matrices<const T>(weights), dx = Matrix<T>::of(grad_x)] {
        const auto first = read();
        for_each_tile<T>(tiles_of(first, in), out, [&](const Tile& tile, const auto& product) {
          product(tile, out, dy.part(tile.row, 0), w[tile.group].part(0, tile.column), nullptr,
              dx.part(tile.row, tile.column));
        });
      });
    if (output_mask[1])
      launch(stream, [=, x = Matrix<const T>::of(x), dw = matrices<T>(grad_weights)] {
        const auto first = read();
        std::vector<int64_t> stacked; // the gradients, stacked on top of each other
        for (int64_t e = 0; e <= groups; ++e) stacked.push_back(e * out);
        for_each_tile<T>(
            tiles_of(stacked, in), at::divup(first.back(), groups), [&](const Tile& tile, const auto& product) {
              const int64_t e = tile.group, row = tile.row - stacked[e];
              product(tile, first[e + 1] - first[e], dy.part(first[e], row).t(), x.part(first[e], tile.column), nullptr,
                  dw[e].part(row, tile.column));
            });
      });
    std::vector<T*> db;
    for (const Tensor& row : grad_bias) db.push_back(row.mutable_data_ptr<T>());
    if (output_mask[2])
      launch(stream, [=] {
        const auto first = read();
        const int64_t chunks = at::divup(out, kSumColumns<T>), rows = first.back() / groups + 1;
        parallel_each(groups * chunks, kSumColumns<T> * rows, [&](int64_t i) {
          const int64_t e = i / chunks, column = i % chunks * kSumColumns<T>;
          sum_rows(dy.data + first[e] * out + column, first[e + 1] - first[e], out,
              std::min(kSumColumns<T>, out - column), db[e] + column);
        });
      });
  });
  return {grad_x, grad_weights, grad_bias};
}

// ---- autograd: see Note [Derivatives] ----

struct GroupedLinear {
  static auto forward(
      AutogradContext*, const Tensor& x, at::TensorList weights, at::TensorList bias, const Tensor& group_sizes) {
    return saving(op<grouped_linear>("openreg::grouped_linear").call(x, weights, bias, group_sizes), x, weights,
        group_sizes, static_cast<int64_t>(bias.size()));
  }

  static auto backward(AutogradContext* ctx, const variable_list& grad, const Tensor& x, at::TensorList weights,
      const Tensor& group_sizes, int64_t biases) {
    const auto& backward_op = op<grouped_linear_backward>("openreg::grouped_linear_backward");
    const auto wanted = [&](size_t first, size_t count) {
      for (size_t i = first; i < first + count; ++i)
        if (ctx->needs_input_grad(i)) return true;
      return false;
    };
    const std::array<bool, 3> mask{wanted(0, 1), wanted(1, weights.size()), wanted(1 + weights.size(), biases)};
    // torch.autograd.grad(is_grads_batched=True) has its own vmap, which does not support operators with lists.
    const bool batched = grad[0].key_set().has(c10::DispatchKey::Batched);
    auto gradients = batched ? decompose(backward_op, grad[0], x, weights, group_sizes, mask)
                             : backward_op.call(grad[0], x, weights, group_sizes, mask);
    std::get<1>(gradients).resize(weights.size());
    std::get<2>(gradients).resize(biases);
    return gradients;
  }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.grouped_linear");
  m.def("grouped_linear(Tensor x, Tensor[] weights, Tensor[] bias, Tensor group_sizes) -> Tensor");
  m.def(
      "grouped_linear_backward(Tensor grad_y, Tensor x, Tensor[] weights, Tensor group_sizes, bool[3] output_mask) -> "
      "(Tensor grad_x, Tensor[] grad_weights, Tensor[] grad_bias)");
  checked_by("grouped_linear", check_grouped_linear);
  checked_by("grouped_linear_backward", check_grouped_linear_backward);
  autocast(m, "grouped_linear", Cast::kLower);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("grouped_linear", grouped_linear);
  m.impl("grouped_linear_backward", grouped_linear_backward);
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("grouped_linear", autograd<GroupedLinear, grouped_linear>("openreg::grouped_linear"));
  m.impl("grouped_linear_backward", differentiate_by_reference());
}

} // namespace openreg::ops
