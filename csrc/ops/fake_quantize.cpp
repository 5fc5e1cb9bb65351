// fake_quantize: y = scale * clamp(round(x / scale), quant_min - zero_point, quant_max - zero_point), the effect of
// quantizing x to integers and back. One scale and zero_point, or one for each index along axis.
// Its gradient counts rounding as the identity, "straight through" (Bengio et al. 2013, arXiv:1308.3432):
// the gradient of x passes where x is in range. The gradient of scale is LSQ's (Esser et al. 2020, arXiv:1902.08153).
#include "kernels/loops.h"
#include "ops/autograd.h"
#include "ops/checks.h"

#include <cmath>

namespace openreg::ops {
namespace {
using namespace kernels;

// The values of x for one scale: multiples of scale from low to high.
template <class T>
struct Grid {
  Vec<T> scale, inverse, low, high;

  Grid(Acc<T> scale, int32_t zero_point, int64_t quant_min, int64_t quant_max)
      : scale(scale), inverse(1 / scale), low(static_cast<Acc<T>>(quant_min) - static_cast<Acc<T>>(zero_point)),
        high(static_cast<Acc<T>>(quant_max) - static_cast<Acc<T>>(zero_point)) {}

  Vec<T> round(Vec<T> x) const { return (x * inverse).round(); }
  Vec<T> clamp(Vec<T> steps) const { return at::vec::clamp(steps, low, high); }

  void quantize(const T* x, T* y, int64_t n) const {
    at::vec::map<T>([this](Vec<T> x) { return clamp(round(x)) * scale; }, y, x, n);
  }
  // dx = dy in range, else 0; returns the sum of dy * (clamp(round(x / scale)) - (x / scale in range, else 0)).
  double backward(const T* grad_y, const T* x, T* grad_x, int64_t n) const {
    const Vec<T> zero(0);
    at::vec::map2<T>(
        [&](Vec<T> g, Vec<T> x) {
          const Vec<T> steps = round(x);
          return Vec<T>::blendv(zero, g, clamp(steps) == steps);
        },
        grad_x, grad_y, x, n);
    const auto to_scale = [&](Vec<T> g, Vec<T> x) {
      const Vec<T> steps = round(x), kept = clamp(steps);
      return g * (kept - Vec<T>::blendv(zero, x * inverse, kept == steps));
    };
    return sum<T>(n, to_scale, grad_y, x);
  }
};

// A contiguous x as rows of `inner` elements with one scale each, divided into pieces, which threads share.
struct Pieces {
  static constexpr int64_t kLength = kGrain;
  int64_t channels = 1, inner = 1, rows = 1;

  Pieces(const Tensor& x, std::optional<int64_t> axis) {
    const int64_t at = axis ? c10::maybe_wrap_dim(*axis, x.dim()) : -1;
    if (axis) channels = x.size(at);
    inner = c10::multiply_integers(x.sizes().slice(at + 1));
    rows = c10::multiply_integers(x.sizes().slice(0, at + 1));
  }
  int64_t in_row() const { return at::divup(inner, kLength); }
  int64_t count() const { return rows * in_row(); }

  // f(piece, channel, first element, elements)
  template <class F>
  void each(const F& f) const {
    parallel_each(count(), std::min(inner, kLength), [&](int64_t i) {
      const int64_t row = i / in_row(), first = i % in_row() * kLength;
      f(i, row % channels, row * inner + first, std::min(kLength, inner - first));
    });
  }
};

// The axis, if rows of one scale are too short for vectors along it and a transposed x may have longer ones; else 0.
int64_t axis_to_move(const Tensor& x, std::optional<int64_t> axis) {
  return axis && Pieces(x, axis).inner < 16 ? c10::maybe_wrap_dim(*axis, x.dim()) : 0;
}

void check_fake_quantize(const char* op, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
    int64_t quant_min, int64_t quant_max, std::optional<int64_t> axis) {
  check_floating(op, "x", x);
  TORCH_CHECK(!axis || (-x.dim() <= *axis && *axis < x.dim()), op, ": expected axis to be one of the ", x.dim(),
      " dimensions of x, but got ", *axis);
  TORCH_CHECK(
      quant_min <= quant_max, op, ": expected quant_min of at most quant_max, but got ", quant_min, " and ", quant_max);
  check_same_device(op, "x", x, "scale", scale);
  check_same_device(op, "x", x, "zero_point", zero_point);
  TORCH_CHECK(scale.scalar_type() == at::toOpMathType(x.scalar_type()), op, ": expected scale of ",
      dtype_name(at::toOpMathType(x.scalar_type())), " for x of ", dtype_name(x.scalar_type()), ", but got ",
      dtype_name(scale.scalar_type()), "; convert it with .to()");
  TORCH_CHECK(zero_point.scalar_type() == at::kInt, op, ": expected zero_point of int32, but got ",
      dtype_name(zero_point.scalar_type()), "; convert it with .to()");
  const auto shape = axis ? x.sym_sizes().slice(c10::maybe_wrap_dim(*axis, x.dim()), 1) : SymIntArrayRef();
  const char* of = axis ? "the size of x along axis" : "one number because axis is None";
  check_shape(op, "scale", scale, shape, of);
  check_shape(op, "zero_point", zero_point, shape, of);
}

Tensor fake_quantize(const Tensor& x_, const Tensor& scale_, const Tensor& zero_point_, int64_t quant_min,
    int64_t quant_max, std::optional<int64_t> axis) {
  check_fake_quantize("fake_quantize", x_, scale_, zero_point_, quant_min, quant_max, axis);
  if (const int64_t at = axis_to_move(x_, axis))
    return fake_quantize(x_.movedim(at, 0), scale_, zero_point_, quant_min, quant_max, 0).movedim(0, at).contiguous();
  const Tensor x = x_.contiguous(), scale = scale_.contiguous(), zero_point = zero_point_.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "fake_quantize", [&] {
    using T = scalar_t;
    launch(current_stream(x.get_device()),
        [=, pieces = Pieces(x, axis), x = x.const_data_ptr<T>(), s = scale.const_data_ptr<Acc<T>>(),
            z = zero_point.const_data_ptr<int32_t>(), y = y.mutable_data_ptr<T>()] {
          pieces.each([&](int64_t, int64_t c, int64_t first, int64_t n) {
            Grid<T>(s[c], z[c], quant_min, quant_max).quantize(x + first, y + first, n);
          });
        });
  });
  return y;
}

void check_fake_quantize_backward(const char* op, const Tensor& grad_y, const Tensor& x, const Tensor& scale,
    const Tensor& zero_point, int64_t quant_min, int64_t quant_max, std::optional<int64_t> axis) {
  check_fake_quantize(op, x, scale, zero_point, quant_min, quant_max, axis);
  check_like(op, "grad_y", grad_y, "x", x);
}

std::tuple<Tensor, Tensor> fake_quantize_backward(const Tensor& grad_y_, const Tensor& x_, const Tensor& scale_,
    const Tensor& zero_point_, int64_t quant_min, int64_t quant_max, std::optional<int64_t> axis) {
  constexpr const char* op = "fake_quantize_backward";
  check_fake_quantize_backward(op, grad_y_, x_, scale_, zero_point_, quant_min, quant_max, axis);
  if (const int64_t at = axis_to_move(x_, axis)) {
    auto [grad_x, grad_scale] =
        fake_quantize_backward(grad_y_.movedim(at, 0), x_.movedim(at, 0), scale_, zero_point_, quant_min, quant_max, 0);
    return {grad_x.movedim(0, at).contiguous(), grad_scale};
  }
  const Tensor grad_y = grad_y_.contiguous(), x = x_.contiguous(), scale = scale_.contiguous(),
               zero_point = zero_point_.contiguous();
  Tensor grad_x = at::empty(x.sizes(), x.options()), grad_scale = at::empty(scale.sizes(), scale.options());
  // Pieces do not depend on the number of threads, and so grad_scale does not.
  const Pieces pieces(x, axis);
  Tensor partial = at::empty({pieces.count()}, x.options().dtype(at::kDouble));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), op, [&] {
    using T = scalar_t;
    launch(current_stream(x.get_device()),
        [=, dy = grad_y.const_data_ptr<T>(), x = x.const_data_ptr<T>(), s = scale.const_data_ptr<Acc<T>>(),
            z = zero_point.const_data_ptr<int32_t>(), dx = grad_x.mutable_data_ptr<T>(),
            ds = grad_scale.mutable_data_ptr<Acc<T>>(), part = partial.mutable_data_ptr<double>()] {
          pieces.each([&](int64_t i, int64_t c, int64_t first, int64_t n) {
            part[i] = Grid<T>(s[c], z[c], quant_min, quant_max).backward(dy + first, x + first, dx + first, n);
          });
          at::parallel_for(0, pieces.channels, 1, [&](int64_t begin, int64_t end) {
            for (int64_t c = begin; c < end; ++c) {
              double total = 0;
              for (int64_t row = c; row < pieces.rows; row += pieces.channels)
                for (int64_t i = 0; i < pieces.in_row(); ++i) total += part[row * pieces.in_row() + i];
              ds[c] = std::isfinite(s[c]) ? static_cast<Acc<T>>(total) : 0;
            }
          });
        });
  });
  return {grad_x, grad_scale};
}

// ---- autograd: see Note [Derivatives] ----

// The reference has this gradient too, so forward mode and other devices can run it.
struct FakeQuantize {
  static auto forward(AutogradContext*, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
      int64_t quant_min, int64_t quant_max, std::optional<int64_t> axis) {
    return saving(op<fake_quantize>("openreg::fake_quantize").call(x, scale, zero_point, quant_min, quant_max, axis), x,
        scale, zero_point, quant_min, quant_max, axis);
  }
  template <class... Saved>
  static auto backward(AutogradContext*, const variable_list& grad, const Saved&... saved) {
    return op<fake_quantize_backward>("openreg::fake_quantize_backward").call(grad[0], saved...);
  }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.fake_quantize");
  m.def(
      "fake_quantize(Tensor x, Tensor scale, Tensor zero_point, int quant_min, int quant_max, int? axis=None) -> "
      "Tensor");
  m.def(
      "fake_quantize_backward(Tensor grad_y, Tensor x, Tensor scale, Tensor zero_point, int quant_min, int quant_max, "
      "int? axis=None) -> (Tensor grad_x, Tensor grad_scale)");
  checked_by("fake_quantize", check_fake_quantize);
  checked_by("fake_quantize_backward", check_fake_quantize_backward);
  autocast(m, "fake_quantize", Cast::kFloat32);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("fake_quantize", fake_quantize);
  m.impl("fake_quantize_backward", fake_quantize_backward);
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("fake_quantize", autograd<FakeQuantize, fake_quantize>("openreg::fake_quantize"));
  m.impl("fake_quantize_backward", differentiate_by_reference());
}

} // namespace openreg::ops
