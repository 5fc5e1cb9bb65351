// Overrides a composite operator with the device's own kernel, as PyTorch's documents do with max_pool2d: PyTorch's
// composite also computes the indices (8 bytes per element), which only backward reads. Ours computes them only if
// there will be a backward.
// A composite operator that a backend overrides loses its derivative along with its decomposition, so the backend
// registers both keys.
#include <ATen/Dispatch.h>
#include <ATen/NumericUtils.h>
#include <ATen/Parallel.h>
#include <ATen/native/Pool.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "backend/identity/identity.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

at::Tensor decomposed(const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool ceil_mode) {
  return std::get<0>(at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil_mode));
}

// Height and width of a parameter that may be one number for both.
std::pair<int64_t, int64_t> pair_of(at::IntArrayRef values) {
  return {values[0], values[values.size() == 1 ? 0 : 1]};
}

// ATen's kernels count windows in int and reject what does not fit.
bool fit_in_int(at::IntArrayRef values) {
  return std::ranges::all_of(values, [](int64_t x) { return std::in_range<int>(x); });
}

// y[j] = max(y[j], x[first + j * stride]) for the n elements j whose column is one of the w columns of x. NaN is the
// largest. Comparisons that branch take five times as long for random numbers.
template <class T>
void max_of_columns(const T* x, int64_t w, int64_t first, int64_t stride, T* y, int64_t n) {
  const int64_t end = first < w ? std::min(n, at::divup(w - first, stride)) : 0;
  for (int64_t j = first < 0 ? at::divup(-first, stride) : 0; j < end; ++j) {
    const T value = x[first + j * stride], larger = value > y[j] ? value : y[j];
    y[j] = at::_isnan(value) ? value : larger;
  }
}

at::Tensor max_pool2d(const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool ceil_mode) {
  // Malformed parameters get ATen's own errors, and channels-last images its own kernel.
  const bool plain = (self.dim() == 3 || self.dim() == 4) &&
      self.suggest_memory_format() == at::MemoryFormat::Contiguous && self.numel() > 0 && !self.is_complex() &&
      self.scalar_type() != at::kBool;
  const bool given = (kernel.size() == 1 || kernel.size() == 2) && stride.size() <= 2 && padding.size() >= 1 &&
      padding.size() <= 2 && dilation.size() >= 1 && dilation.size() <= 2 &&
      std::ranges::all_of(std::array{kernel, stride, padding, dilation}, fit_in_int);
  if (!plain || !given) return decomposed(self, kernel, stride, padding, dilation, ceil_mode);
  const auto [kh, kw] = pair_of(kernel);
  const auto [sh, sw] = pair_of(stride.empty() ? kernel : stride);
  const auto [ph, pw] = pair_of(padding);
  const auto [dh, dw] = pair_of(dilation);
  const int64_t h = self.size(-2), w = self.size(-1);
  const int64_t oh = at::native::pooling_output_shape<int64_t>(h, kh, ph, sh, dh, ceil_mode);
  const int64_t ow = at::native::pooling_output_shape<int64_t>(w, kw, pw, sw, dw, ceil_mode);
  at::native::pool2d_shape_check(
      self, kh, kw, sh, sw, ph, pw, dh, dw, self.size(-3), h, w, oh, ow, at::MemoryFormat::Contiguous);

  const at::Tensor input = self.contiguous();
  auto sizes = self.sizes().vec();
  sizes[sizes.size() - 2] = oh;
  sizes[sizes.size() - 1] = ow;
  const at::Tensor output = at::empty(sizes, self.options());
  AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "max_pool2d", [&] {
    using Limits = std::numeric_limits<scalar_t>;
    const scalar_t least = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    const auto* in = input.const_data_ptr<scalar_t>();
    auto* out = output.mutable_data_ptr<scalar_t>();
    launch(current_stream(self.device().index()),
        [=, planes = self.numel() / std::max<int64_t>(h * w, 1), h = h, w = w, kh = kh, kw = kw, sh = sh, sw = sw,
            ph = ph, pw = pw, dh = dh, dw = dw] {
          at::parallel_for(0, planes, at::divup(32768, oh * ow * kh * kw), [&](int64_t begin, int64_t end) {
            for (int64_t plane = begin; plane < end; ++plane) {
              const scalar_t* x = in + plane * h * w;
              scalar_t* y = out + plane * oh * ow;
              for (int64_t i = 0; i < oh; ++i, y += ow) {
                std::fill_n(y, ow, least);
                for (int64_t r = i * sh - ph, a = 0; a < kh; ++a, r += dh)
                  for (int64_t c = -pw, b = 0; r >= 0 && r < h && b < kw; ++b, c += dw)
                    max_of_columns(x + r * w, w, c, sw, y, ow);
              }
            }
          });
        });
  });
  return output;
}

at::Tensor max_pool2d_autograd(const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  if ((self.requires_grad() && at::GradMode::is_enabled()) || self._fw_grad(0).defined())
    return decomposed(self, kernel, stride, padding, dilation, ceil_mode);
  // Through the dispatcher, so that fake tensors, modes and functionalization see the call.
  at::AutoDispatchBelowADInplaceOrView below;
  return at::max_pool2d(self, kernel, stride, padding, dilation, ceil_mode);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("max_pool2d", max_pool2d);
}
OPENREG_LIBRARY_IMPL(aten, autograd, m) {
  m.impl("max_pool2d", max_pool2d_autograd);
}

} // namespace openreg
