// rms_norm of a DTensor whose normalized dimension is sharded: ATen adds epsilon to the mean in place, which a mean
// over shards cannot do.
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "backend/identity/identity.h"

namespace openreg {
namespace {

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight, std::optional<double> eps) {
  std::vector<int64_t> dims(normalized_shape.size());
  std::iota(dims.begin(), dims.end(), -static_cast<int64_t>(dims.size()));
  const at::Tensor wide = input.to(at::toOpMathType(input.scalar_type()));
  const bool is_double = c10::toRealValueType(wide.scalar_type()) == at::kDouble;
  const double smallest = is_double ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  const at::Tensor rstd = wide.pow(2).mean(dims, /*keepdim=*/true).add(eps.value_or(smallest)).rsqrt();
  at::Tensor result = wide.mul(rstd);
  if (weight && weight->defined()) result = result.mul(*weight);
  return {result.type_as(input), rstd};
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, autograd, m) {
  m.impl("_fused_rms_norm", rms_norm);
}

} // namespace openreg
