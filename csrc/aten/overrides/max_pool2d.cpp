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
    const auto* in = input.const_data_ptr<scalar_t>();
    auto* out = output.mutable_data_ptr<scalar_t>();
    launch(current_stream(self.device().index()),
        [=, planes = self.numel() / std::max<int64_t>(h * w, 1), h = h, w = w, kh = kh, kw = kw, sh = sh, sw = sw,
            ph = ph, pw = pw, dh = dh, dw = dw] {
          at::parallel_for(0, planes, at::divup(32768, oh * ow * kh * kw), [&](int64_t begin, int64_t end) {
            for (int64_t plane = begin; plane < end; ++plane) {
              const scalar_t* x = in + plane * h * w;
              scalar_t* y = out + plane * oh * ow;
              for (int64_t i = 0; i < oh; ++i)
                for (int64_t j = 0; j < ow; ++j) {
                  scalar_t best = std::numeric_limits<scalar_t>::has_infinity
                      ? -std::numeric_limits<scalar_t>::infinity()
                      : std::numeric_limits<scalar_t>::lowest();
                  for (int64_t r = i * sh - ph, a = 0; a < kh; ++a, r += dh)
                    for (int64_t c = j * sw - pw, b = 0; b < kw; ++b, c += dw)
                      if (r >= 0 && r < h && c >= 0 && c < w) {
                        const scalar_t value = x[r * w + c];
                        if (value > best || at::_isnan(value)) best = value;
                      }
                  y[i * ow + j] = best;
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
