// Looks through the wrappers of torch.func.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/functorch/BatchedTensorImpl.h>

namespace openreg {

// The tensor inside vmap's wrappers. A wrapper never requires a gradient; the wrapped tensor may, outside of vmap.
inline const at::Tensor& unbatched(const at::Tensor& t) {
  const auto* batched = at::functorch::maybeGetBatchedImpl(t);
  return batched ? unbatched(batched->value()) : t;
}

// Returns true if autograd records operations on `t`. For a tensor of a gradient transform it does, because an outer
// transform may record them. A tensor of a transform that has ended counts as the tensor that it wraps.
inline bool is_recorded(const at::Tensor& t) {
  const auto wrapped = [](const at::Tensor& t) { return t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper); };
  const at::Tensor& inner = unbatched(t);
  const at::Tensor now = wrapped(inner) ? unbatched(inner.view_as(inner)) : inner;
  return now.requires_grad() || wrapped(now);
}

} // namespace openreg
