// Copies between every pair of host, pinned host and devices: ATen's CPU copy over aliases, which
// brings every dtype conversion, layout, overlap check and conj/neg bit with it.
#include <ATen/ops/copy.h>
#include <ATen/ops/resize.h>
#include <torch/library.h>

#include "native.h"

namespace openreg {
namespace {

// copy_() arrives here when either side is on the device. non_blocking copies finish before the
// call returns (Note [Launch mode]).
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool /*non_blocking*/) {
  CpuCall call("aten::copy_", CpuCall::kAny);
  const at::Tensor& from = call.alias(self);
  at::Tensor to = call.alias(destination, /*write=*/true);
  call.run([&] { to.copy_(from); });
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  if (destination.sizes() != self.sizes()) destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

// A quantized tensor's quantizer is set where it is made; what is copied is its integers.
TORCH_LIBRARY_IMPL(aten, QuantizedPrivateUse1, m) {
  m.impl("_copy_from", copy_from);
}

// The alias keeps the lazy conj and neg bits and the CPU's copy resolves them. Without this their
// fallbacks would clone the source, and clone copies.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

} // namespace openreg
