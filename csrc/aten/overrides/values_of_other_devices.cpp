// Calls for which CUDA moves a tensor: a value of a device that is written into a tensor of the host or of another
// device, and probabilities on another device.
#include <ATen/ops/_index_put_impl.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/fill_cpu_dispatch.h>
#include <torch/library.h>

#include "aten/direct.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

bool goes_across(const at::Tensor& self, const at::Tensor& value) {
  return on_device(value) && value.device() != self.device() && value.dim() == 0;
}

at::Tensor& fill_with_tensor(at::Tensor& self, const at::Tensor& value) {
  if (C10_UNLIKELY(goes_across(self, value))) return self.fill_(value.item());
  return on_aliases<at::_ops::fill__Tensor, at::cpu::fill_>(self, value);
}

at::Tensor& index_put_impl_(at::Tensor& self, const c10::List<std::optional<at::Tensor>>& indices,
    const at::Tensor& values, bool accumulate, bool unsafe) {
  if (C10_UNLIKELY(goes_across(self, values)))
    return at::_index_put_impl_(self, indices, values.to(self.device()), accumulate, unsafe);
  return detail::call_boxed<at::_ops::_index_put_impl_>(self, indices, values, accumulate, unsafe);
}

at::Tensor& bernoulli_with_tensor(at::Tensor& self, const at::Tensor& p, std::optional<at::Generator> generator) {
  return detail::call_boxed<at::_ops::bernoulli__Tensor>(
      self, on_device(self) ? p.to(self.device()) : p, std::move(generator));
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("fill_.Tensor", fill_with_tensor);
  m.impl("_index_put_impl_", index_put_impl_);
  m.impl("bernoulli_.Tensor", bernoulli_with_tensor);
}

} // namespace openreg
