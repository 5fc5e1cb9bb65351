// narrow_copy is a copy of narrow, as on CUDA. The CPU's kernel checks its arguments by itself, with other errors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/narrow_copy_ops.h>
#include <torch/library.h>

#include "aten/direct.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

at::Tensor narrow_copy(const at::Tensor& self, int64_t dim, c10::SymInt start, c10::SymInt length) {
  return self.narrow_symint(dim, std::move(start), std::move(length)).clone(at::MemoryFormat::Contiguous);
}

at::Tensor& narrow_copy_out(
    const at::Tensor& self, int64_t dim, c10::SymInt start, c10::SymInt length, at::Tensor& out) {
  self.narrow_symint(dim, start, length); // for its errors
  return detail::call_boxed<at::_ops::narrow_copy_out>(self, dim, std::move(start), std::move(length), out);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("narrow_copy", narrow_copy);
  m.impl("narrow_copy.out", narrow_copy_out);
}

} // namespace openreg
