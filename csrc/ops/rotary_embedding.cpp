// rotary_embedding: rotates every pair (a, b) of elements of a row by the angle of its position,
// (a * cos - b * sin, b * cos + a * sin). Su et al. 2021, arXiv:2104.09864.
// The pairs are (x[i], x[i + D/2]), as in GPT-NeoX and Llama, or, interleaved, (x[2i], x[2i + 1]), as in the paper.
// Backward rotates by the opposite angle, so it is the same kernel.
#include "kernels/loops.h"
#include "kernels/strided_rows.h"
#include "ops/autograd.h"
#include "ops/checks.h"

namespace openreg::ops {
namespace {
using namespace kernels;

// kChunk pairs: the two elements of a pair are adjacent if interleaved, else `half` apart.
template <bool interleaved, class T, class Table>
void rotate_chunk(const T* x, const Table* cos, const Table* sin, T* y, int64_t half, Vec<T> sign) {
  constexpr int64_t lanes = kLanes<T>, count = kChunk<T> / lanes;
  Vec<T> out[2 * count]; // in the order of memory
  for (int64_t k = 0; k < count; ++k) {
    const Vec<T> c = read(cos + k * lanes), s = read(sin + k * lanes) * sign;
    if constexpr (interleaved) {
      const auto [a, b] = at::vec::deinterleave2(read(x + 2 * k * lanes), read(x + (2 * k + 1) * lanes));
      std::tie(out[2 * k], out[2 * k + 1]) = at::vec::interleave2(a * c - b * s, b * c + a * s);
    } else {
      const Vec<T> a = read(x + k * lanes), b = read(x + half + k * lanes);
      out[k] = a * c - b * s;
      out[count + k] = b * c + a * s;
    }
  }
  write(out, y);
  write(out + count, y + (interleaved ? kChunk<T> : half));
}

// One row of 2 * half elements.
template <bool interleaved, class T, class Table>
void rotate_row(const T* x, const Table* cos, const Table* sin, T* y, int64_t half, Vec<T> sign) {
  constexpr int64_t chunk = kChunk<T>, step = interleaved ? 2 : 1;
  int64_t i = 0;
  for (; i + chunk <= half; i += chunk)
    rotate_chunk<interleaved>(x + step * i, cos + i, sin + i, y + step * i, half, sign);
  const int64_t rest = half - i;
  if (!rest) return;
  T in[2 * chunk] = {}, out[2 * chunk];
  Table c[chunk] = {}, s[chunk] = {};
  std::copy_n(cos + i, rest, c);
  std::copy_n(sin + i, rest, s);
  std::copy_n(x + step * i, step * rest, in);
  if constexpr (!interleaved) std::copy_n(x + half + i, rest, in + chunk);
  rotate_chunk<interleaved>(in, c, s, out, chunk, sign);
  std::copy_n(out, step * rest, y + step * i);
  if constexpr (!interleaved) std::copy_n(out + chunk, rest, y + half + i);
}

void check_tables(const char* op, const char* name, const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_floating(op, name, x);
  check_rows(op, name, x);
  const SymInt d = x.sym_size(-1), half = d / 2;
  TORCH_SYM_CHECK((d % 2).sym_eq(0), op, ": expected ", name, " with a last dimension of even size, but got ", d,
      "; rotate a part of it");
  check_same_device(op, name, x, "cos", cos);
  check_same_device(op, name, x, "sin", sin);
  const auto wide = at::toOpMathType(x.scalar_type());
  if (cos.scalar_type() != wide) check_dtype(op, "cos", cos, x.scalar_type(), name);
  check_dtype(op, "sin", sin, cos.scalar_type(), "cos");
  TORCH_CHECK(cos.dim() >= 1 && expect(cos.sym_size(-1).sym_eq(half)), op, ": expected cos with a last dimension of ",
      half, ", half that of ", name, ", but got ", cos.sym_sizes(),
      "; if the table covers both halves, pass cos[..., :", half, "]");
  at::SymDimVector full(x.sym_sizes());
  full.back() = half;
  TORCH_CHECK(broadcasts(cos.sym_sizes(), full), op, ": expected cos to broadcast to ", SymIntArrayRef(full),
      ", but got ", cos.sym_sizes(), "; give it at most as many dimensions, each of that size or 1");
  check_shape(op, "sin", sin, cos.sym_sizes(), "the same as cos");
}

void check_rotary_embedding(const char* op, const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_tables(op, "x", x, cos, sin);
}
void check_rotary_embedding_backward(const char* op, const Tensor& grad_y, const Tensor& cos, const Tensor& sin) {
  check_tables(op, "grad_y", grad_y, cos, sin);
}

Tensor rotate(const Tensor& x_, const Tensor& cos_, const Tensor& sin_, bool interleaved, int sign) {
  at::DimVector full(x_.sizes());
  full.back() /= 2;
  const Tensor x = with_dense_rows(x_), cos = with_dense_rows(cos_).expand(full),
               sin = with_dense_rows(sin_).expand(full);
  Tensor y = at::empty(x.sizes(), x.options());
  const int64_t half = full.back(), rows = half ? x.numel() / (2 * half) : 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rotary_embedding", [&] {
    using T = scalar_t;
    const auto run = [&]<class Table>(const Table* c) {
      launch(current_stream(x.get_device()),
          [=, scattered = !x.is_contiguous(), at = RowOffsets<3>({x, cos, sin}), x = x.const_data_ptr<T>(),
              s = sin.const_data_ptr<Table>(), y = y.mutable_data_ptr<T>()] {
            at::parallel_for(0, rows, at::divup(kGrain, 2 * half + 1), [&](int64_t begin, int64_t end) {
              // A processor prefetches only within a page, and the rows of a transposed x may be a page apart.
              constexpr int64_t kAhead = 8;
              auto row = at, ahead = at;
              row.seek(begin);
              if (scattered) ahead.seek(begin + kAhead);
              const Vec<T> with_sign(static_cast<Acc<T>>(sign));
              for (int64_t i = begin; i < end; ++i, row.next()) {
                if (scattered) {
                  const T* next = x + ahead.offset[0];
                  for (int64_t k = 0; k < 2 * half; k += 64 / sizeof(T)) __builtin_prefetch(next + k);
                  ahead.next();
                }
                const auto [of_x, of_cos, of_sin] = row.offset;
                (interleaved ? rotate_row<true, T, Table> : rotate_row<false, T, Table>)(x + of_x, c + of_cos,
                    s + of_sin, y + 2 * half * i, half, with_sign);
              }
            });
          });
    };
    if (cos.scalar_type() == x.scalar_type()) run(cos.const_data_ptr<T>());
    else run(cos.const_data_ptr<Acc<T>>());
  });
  return y;
}

Tensor rotary_embedding(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check_rotary_embedding("rotary_embedding", x, cos, sin);
  return rotate(x, cos, sin, interleaved, 1);
}

Tensor rotary_embedding_backward(const Tensor& grad_y, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check_rotary_embedding_backward("rotary_embedding_backward", grad_y, cos, sin);
  return rotate(grad_y, cos, sin, interleaved, -1);
}

// ---- autograd: see Note [Derivatives] ----

// The first and the second elements of all pairs. chunk() would guard on a size that a compiler may not know.
std::pair<Tensor, Tensor> members(const Tensor& x, bool interleaved) {
  const c10::SymInt half = x.sym_size(-1) / 2;
  if (!interleaved) return {x.narrow_symint(-1, 0, half), x.narrow_symint(-1, half, half)};
  return {x.slice(-1, 0, std::nullopt, 2).narrow_symint(-1, 0, half),
      x.slice(-1, 1, std::nullopt, 2).narrow_symint(-1, 0, half)};
}

// g summed to the shape of a table, like sum_to_size(), which would guard on sizes that a compiler may not know.
Tensor summed_to(Tensor g, const Tensor& table) {
  while (g.dim() > table.dim()) g = g.sum(0);
  for (int64_t d = 0; d < g.dim(); ++d) {
    const bool shared = TORCH_GUARD_OR_FALSE(table.sym_size(d).sym_eq(1));
    if (shared && !TORCH_GUARD_OR_FALSE(g.sym_size(d).sym_eq(1))) g = g.sum(d, /*keepdim=*/true);
  }
  return g.to(table.scalar_type());
}

struct RotaryEmbedding {
  static auto forward(AutogradContext*, const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
    // The derivative needs x only if the tables require a gradient, which is rare.
    const bool tables = cos.requires_grad() || sin.requires_grad();
    return saving(op<rotary_embedding>("openreg::rotary_embedding").call(x, cos, sin, interleaved), cos, sin,
        tables ? std::optional(x) : std::nullopt, interleaved);
  }

  static std::tuple<Tensor, Tensor, Tensor> backward(AutogradContext* ctx, const variable_list& grad, const Tensor& cos,
      const Tensor& sin, const std::optional<Tensor>& x, bool interleaved) {
    Tensor grad_x, grad_cos, grad_sin;
    if (ctx->needs_input_grad(0))
      grad_x = op<rotary_embedding_backward>("openreg::rotary_embedding_backward").call(grad[0], cos, sin, interleaved);
    if (x) {
      const auto wide = at::toOpMathType(grad[0].scalar_type());
      const auto [x1, x2] = members(x->to(wide), interleaved);
      const auto [g1, g2] = members(grad[0].to(wide), interleaved);
      grad_cos = summed_to(g1 * x1 + g2 * x2, cos);
      grad_sin = summed_to(g2 * x1 - g1 * x2, sin);
    }
    return {grad_x, grad_cos, grad_sin};
  }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.rotary_embedding");
  m.def("rotary_embedding(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor");
  m.def("rotary_embedding_backward(Tensor grad_y, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor");
  checked_by("rotary_embedding", check_rotary_embedding);
  checked_by("rotary_embedding_backward", check_rotary_embedding_backward);
  autocast(m, "rotary_embedding", Cast::kPromote);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("rotary_embedding", rotary_embedding);
  m.impl("rotary_embedding_backward", rotary_embedding_backward);
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("rotary_embedding", autograd<RotaryEmbedding, rotary_embedding>("openreg::rotary_embedding"));
  m.impl("rotary_embedding_backward", differentiate_by_reference());
}

} // namespace openreg::ops
