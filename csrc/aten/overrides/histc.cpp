// histc of integers, which CUDA supports and the CPU rejects: counted exactly, in integers.
#include <ATen/Dispatch.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc_cpu_dispatch.h>
#include <ATen/ops/histc_ops.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "aten/direct.h"
#include "aten/traits/cuda_rules.h"
#include "aten/traits/wider_dtypes.h"
#include "backend/identity/identity.h"
#include "backend/sync_debug.h"

namespace openreg {
namespace {

// Counts the elements of x from min to max in `bins` bins of equal width, all half-open except the last.
template <typename T>
void count(const T* x, int64_t numel, T* counts, int64_t bins, int64_t min, int64_t max) {
  std::fill_n(counts, bins, T(0));
  const auto width = static_cast<__int128>(max) - min;
  for (int64_t i = 0; i < numel; ++i) {
    const auto value = static_cast<int64_t>(x[i]);
    if (value < min || value > max) continue;
    const auto bin = static_cast<int64_t>((static_cast<__int128>(value) - min) * bins / width);
    auto& counted = counts[std::min(bin, bins - 1)];
    counted = static_cast<T>(static_cast<std::uint64_t>(counted) + 1);
  }
}

at::Tensor integers(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  TORCH_CHECK(bins > 0, "histc: expected bins to be positive, but got bins=", bins);
  auto low = min.to<int64_t>(), high = max.to<int64_t>();
  if (low == high && self.numel()) {
    const auto [least, most] = at::aminmax(self);
    low = least.item().to<int64_t>();
    high = most.item().to<int64_t>();
  }
  if (low == high) { // one wider on both sides, where there is room
    low -= low > std::numeric_limits<int64_t>::min();
    high += high < std::numeric_limits<int64_t>::max();
  }
  TORCH_CHECK(low < high, "histc: expected max to be larger than min, but got min=", low, " and max=", high);
  const at::Tensor input = self.contiguous(), output = at::empty({bins}, self.options());
  AT_DISPATCH_INTEGRAL_TYPES(self.scalar_type(), "histc", [&] {
    launch(current_stream(self.device().index()),
        [x = input.const_data_ptr<scalar_t>(), numel = input.numel(), counts = output.mutable_data_ptr<scalar_t>(),
            bins, low, high] { count(x, numel, counts, bins, low, high); });
  });
  return output;
}

bool is_integral(const at::Tensor& self) {
  return c10::isIntegralType(self.scalar_type(), /*includeBool=*/false);
}

// On CUDA, the host reads the range of the elements if none is given, and floats are counted in no fixed order.
void as_on_cuda(const at::Tensor& self, const at::Scalar& min, const at::Scalar& max) {
  if (!self.is_floating_point()) return; // integers() reads the range as CUDA does
  refuse_nondeterministic("aten::histc");
  if (self.numel() > 0 && min.toDouble() == max.toDouble()) synchronizes("aten::histc");
}

at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  as_on_cuda(self, min, max);
  return is_integral(self) ? integers(self, bins, min, max)
                           : on_aliases<at::_ops::histc, at::cpu::histc>(self, bins, min, max);
}

at::Tensor& histc_out(
    const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max, at::Tensor& out) {
  as_on_cuda(self, min, max);
  if (!is_integral(self)) return on_aliases<at::_ops::histc_out, at::cpu::histc_outf>(self, bins, min, max, out);
  TORCH_CHECK(out.device() == self.device(), "histc: out is on ", out.device(), " but self is on ", self.device(),
      "; move one with .to()");
  TORCH_CHECK(out.scalar_type() == self.scalar_type(), "histc: expected out of dtype ", self.scalar_type(),
      ", the dtype of self, but got ", out.scalar_type());
  return write_out("histc", integers(self, bins, min, max), out);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("histc", histc);
  m.impl("histc.out", histc_out);
}

} // namespace openreg
