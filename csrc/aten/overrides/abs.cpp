// Supports a built-in operator through its stub, as PyTorch's documents do with abs: ATen's own abs_out runs on device
// tensors (output, type promotion, complex to real) and calls the device's stub.
#include <ATen/TensorIterator.h>
#include <ATen/native/UnaryOps.h>
#include <ATen/ops/abs_native.h>
#include <torch/library.h>

#include "aten/deferred/deferred.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

// The device computes like the CPU, so the device's stub is the CPU's, called through run(). CUDA also supports bool,
// where abs is the identity.
void abs_kernel(at::TensorIteratorBase& iter) {
  for (int i = 0; i < iter.ntensors(); ++i) expect_memory("aten::abs", iter.tensor_base(i));
  if (iter.common_dtype() == at::kBool) {
    iter.tensor(0).copy_(iter.tensor(1));
    return;
  }
  const Stream stream = current_stream(iter.device(0).index());
  if (C10_UNLIKELY(detail::captures(stream)))
    capture_unary(stream, "aten::abs", iter, [](auto& on_memory) { at::native::abs_stub(at::kCPU, on_memory); });
  else run(stream, [&] { at::native::abs_stub(at::kCPU, iter); });
}

[[maybe_unused]] const bool abs_registered = register_stub(at::native::abs_stub, &abs_kernel);

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("abs.out", TORCH_FN(at::native::abs_out));
}

} // namespace openreg
