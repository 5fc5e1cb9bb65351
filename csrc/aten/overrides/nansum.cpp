// nansum of complex numbers, which CUDA supports and the CPU rejects: a number counts if neither part is NaN.
#include <ATen/ops/isnan.h>
#include <ATen/ops/nansum_cpu_dispatch.h>
#include <ATen/ops/nansum_ops.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "aten/direct.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

at::Tensor without_nan(const at::Tensor& self) {
  return at::where(at::isnan(self), at::Scalar(0), self);
}

// Returns true if the sum is complex. It has the dtype of self unless one is given.
bool is_complex(const at::Tensor& self, std::optional<at::ScalarType> dtype) {
  return self.is_complex() || (dtype && c10::isComplexType(*dtype));
}

at::Tensor nansum(
    const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim, std::optional<at::ScalarType> dtype) {
  if (!is_complex(self, dtype)) return on_aliases<at::_ops::nansum, at::cpu::nansum>(self, dim, keepdim, dtype);
  return at::sum(without_nan(self), dim, keepdim, dtype);
}

at::Tensor& nansum_out(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim,
    std::optional<at::ScalarType> dtype, at::Tensor& out) {
  if (!is_complex(self, dtype))
    return on_aliases<at::_ops::nansum_out, at::cpu::nansum_outf>(self, dim, keepdim, dtype, out);
  return at::sum_out(out, without_nan(self), dim, keepdim, dtype);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("nansum", nansum);
  m.impl("nansum.out", nansum_out);
}

} // namespace openreg
