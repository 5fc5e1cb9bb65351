// Looks through the wrappers of torch.func.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/functorch/BatchedTensorImpl.h>

namespace openreg {

// The tensor inside of vmap's wrappers. A wrapper never requires a gradient; what it wraps may, outside of vmap.
inline const at::Tensor& unbatched(const at::Tensor& t) {
  const auto* batched = at::functorch::maybeGetBatchedImpl(t);
  return batched ? unbatched(batched->value()) : t;
}

// Whether autograd records what is done with `t`. For a tensor of a gradient transform the answer is yes, because
// one further out may.
inline bool is_recorded(const at::Tensor& t) {
  const at::Tensor& inner = unbatched(t);
  return inner.requires_grad() || inner.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

} // namespace openreg
