// dropout_add: out = residual + x * mask / (1 - p), where each element of mask is 0 with probability p.
// Srivastava et al. 2014, JMLR 15:1929; fused with the residual's addition as in flash-attention's layer norms.
// Element i's random number is a function of i and of two numbers drawn from the generator, so it does not depend on
// the number of threads.
#include "kernels/byte_vectors.h"
#include "kernels/philox.h"
#include "ops/autograd.h"
#include "ops/checks.h"

#include <cmath>

namespace openreg::ops {
namespace {
using namespace kernels;

// ---- dropout ----

constexpr int64_t kBlock = kDrawn;

// 1 / (1 - p), or 0 for p = 1, which leaves no element to scale.
double scale_of(double p) {
  return p == 1 ? 0 : 1 / (1 - p);
}

// residual + x * mask * scale, or, without a residual, x * mask * scale, for one block.
template <class T>
void multiply_add_block(const T* x, const uint8_t* mask, Acc<T> scale, const T* residual, T* out) {
  for (int64_t i = 0; i < kBlock; i += kChunk<T>) {
    Vec<T> y[kChunk<T> / kLanes<T>];
    for (int64_t k = 0; k < kChunk<T> / kLanes<T>; ++k) {
      const int64_t at = i + k * kLanes<T>;
      y[k] = read(x + at) * (read_bytes<T>(mask + at) * Vec<T>(scale));
      if (residual) y[k] = y[k] + read(residual + at);
    }
    write(y, out + i);
  }
}

// Calls f(begin, count) for the blocks of n elements, in parallel; the last may be shorter than kBlock.
template <class F>
void for_each_block(int64_t n, F f) {
  parallel_each(
      at::divup(n, kBlock), 4 * kBlock, [&](int64_t block) { f(block, std::min(kBlock, n - block * kBlock)); });
}

// multiply_add_block of the first `count` elements.
template <class T>
void multiply_add(const T* x, const uint8_t* mask, Acc<T> scale, const T* residual, T* out, int64_t count) {
  if (count == kBlock) return multiply_add_block(x, mask, scale, residual, out);
  const auto block = [scale](const T* x, const uint8_t* mask, const T* residual, T* out) {
    multiply_add_block(x, mask, scale, residual, out);
  };
  on_copies<kBlock>(count, block, x, mask, residual, out);
}

void check_probability(const char* op, double p) {
  TORCH_CHECK(p >= 0 && p <= 1, op, ": expected p from 0 to 1, but got ", p, "; it is the probability of a zero");
}

void check_dropout_add(
    const char* op, const Tensor& x, const Tensor& residual, double p, const std::optional<at::Generator>& generator) {
  check_floating(op, "x", x);
  check_like(op, "residual", residual, "x", x);
  check_probability(op, p);
  if (generator && generator->defined()) check_generator(op, x, *generator);
}

std::tuple<Tensor, Tensor> dropout_add(
    const Tensor& x_, const Tensor& residual_, double p, const std::optional<at::Generator>& generator) {
  constexpr const char* op = "dropout_add";
  check_dropout_add(op, x_, residual_, p, generator);
  const Drawn drawn = draw(op, x_, generator);
  const Tensor x = x_.contiguous(), residual = residual_.contiguous();
  Tensor out = at::empty(x.sizes(), x.options()), mask = at::empty(x.sizes(), x.options().dtype(at::kBool));
  const auto least = static_cast<int64_t>(std::round(p * 0x1p32)); // of 2^32 numbers; p = 1 is above all
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), op, [&] {
    using T = scalar_t;
    launch(current_stream(x.get_device()),
        [=, n = x.numel(), scale = static_cast<Acc<T>>(scale_of(p)), x = x.const_data_ptr<T>(),
            residual = residual.const_data_ptr<T>(), out = out.mutable_data_ptr<T>(),
            mask = mask.mutable_data_ptr<bool>()] {
          const auto [key, counter] = drawn();
          for_each_block(n, [&](int64_t block, int64_t count) {
            alignas(64) uint8_t keep[kBlock];
            draw_mask(key, counter, block, least, keep);
            const int64_t at = block * kBlock;
            std::memcpy(mask + at, keep, static_cast<size_t>(count));
            multiply_add(x + at, keep, scale, residual + at, out + at, count);
          });
        });
  });
  return {out, mask};
}

void check_dropout_add_backward(const char* op, const Tensor& grad_out, const Tensor& mask, double p) {
  check_floating(op, "grad_out", grad_out);
  check_same_device(op, "grad_out", grad_out, "mask", mask);
  check_dtype(op, "mask", mask, at::kBool, "its dropout_add output");
  check_shape(op, "mask", mask, grad_out.sym_sizes(), "the same as grad_out");
  check_probability(op, p);
}

Tensor dropout_add_backward(const Tensor& grad_out_, const Tensor& mask_, double p) {
  constexpr const char* op = "dropout_add_backward";
  check_dropout_add_backward(op, grad_out_, mask_, p);
  const Tensor grad_out = grad_out_.contiguous(), mask = mask_.contiguous();
  Tensor grad_x = at::empty(grad_out.sizes(), grad_out.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad_out.scalar_type(), op, [&] {
    using T = scalar_t;
    launch(current_stream(grad_out.get_device()),
        [n = grad_out.numel(), scale = static_cast<Acc<T>>(scale_of(p)), grad_out = grad_out.const_data_ptr<T>(),
            mask = mask.const_data_ptr<bool>(), grad_x = grad_x.mutable_data_ptr<T>()] {
          for_each_block(n, [&](int64_t block, int64_t count) {
            uint8_t keep[kBlock] = {};
            const int64_t at = block * kBlock;
            std::memcpy(keep, mask + at, static_cast<size_t>(count));
            multiply_add<T>(grad_out + at, keep, scale, nullptr, grad_x + at, count);
          });
        });
  });
  return grad_x;
}

// ---- autograd: see Note [Derivatives] ----

struct DropoutAdd {
  static auto forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual, double p,
      const std::optional<at::Generator>& generator) {
    const auto result = op<dropout_add>("openreg::dropout_add").call(x, residual, p, generator);
    const Tensor& mask = std::get<1>(result);
    ctx->mark_non_differentiable({mask});
    return saving(result, mask, p);
  }

  static std::tuple<Tensor, Tensor> backward(
      AutogradContext* ctx, const variable_list& grad, const Tensor& mask, double p) {
    if (!grad[0].defined()) return {};
    Tensor grad_x;
    if (ctx->needs_input_grad(0))
      grad_x = op<dropout_add_backward>("openreg::dropout_add_backward").call(grad[0], mask, p);
    return {grad_x, grad[0]};
  }
};

} // namespace

// ---- registration ----

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.set_python_module("openreg_ops.meta.dropout_add");
  m.def("dropout_add(Tensor x, Tensor residual, float p, *, Generator? generator=None) -> (Tensor out, Tensor mask)",
      {at::Tag::nondeterministic_seeded});
  m.def("dropout_add_backward(Tensor grad_out, Tensor mask, float p) -> Tensor");
  checked_by("dropout_add", check_dropout_add);
  checked_by("dropout_add_backward", check_dropout_add_backward);
  autocast(m, "dropout_add", Cast::kPromote);
}
OPENREG_LIBRARY_IMPL(openreg, dense, m) {
  m.impl("dropout_add", dropout_add);
  m.impl("dropout_add_backward", dropout_add_backward);
}
OPENREG_LIBRARY_IMPL(openreg, autograd, m) {
  m.impl("dropout_add", autograd<DropoutAdd, dropout_add>("openreg::dropout_add"));
  m.impl("dropout_add_backward", differentiate_by_reference());
}

} // namespace openreg::ops
