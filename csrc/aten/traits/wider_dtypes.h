// Computes in a wider dtype if CUDA has a kernel for a dtype and the CPU does not. See Note [Wider dtypes].
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>

#include "aten/traits/traits.h"
#include "compat.h"

namespace openreg {

// Note [Wider dtypes]
// ATen's CPU kernels lack dtypes that CUDA's have: half types in avg_pool3d, complex32 in most arithmetic. A program
// that works on CUDA must run here, so operators whose row in traits.cpp names dtypes convert such arguments to a wider
// dtype (Half and BFloat16 to Float, ComplexHalf to ComplexFloat, Bool to Byte), run again on the device, and round the
// results to the dtype that CUDA returns. Tensors that an operator writes to (in-place, out=) are written with a copy.
// The conformance check cuda_dtypes finds operators without such a row. They have rows instead of a retry after an
// error, because the CPU's error must stand if CUDA rejects a dtype too, because an error may come after arguments were
// written, and because in async mode it comes too late. The conversions and the wider call are ordinary device
// operators, so they follow stream order and are queued when possible. Autograd, autocast and FakeTensor see only the
// operator itself. Operators for which no wider dtype works have their own kernels in overrides/: histc of integers,
// nansum of complex numbers, abs of bool, and torch.fft of Half, which PyTorch rejects before it calls a kernel.

// Runs the operator in a wider dtype if the arguments on the stack need it; else returns false, with nothing changed.
// `key` is the device's, for the layout of the arguments.
bool run_wider(const Traits& traits, const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey key);

// Sets of dtypes, one bit for each.
constexpr std::uint64_t bit(at::ScalarType type) {
  return std::uint64_t{1} << static_cast<unsigned>(type);
}
constexpr std::uint64_t kHalfs = bit(at::kHalf) | bit(at::kBFloat16), kComplexHalf = bit(at::kComplexHalf);
constexpr std::uint64_t kFloat8s =
    bit(at::kFloat8_e4m3fn) | bit(at::kFloat8_e4m3fnuz) | bit(at::kFloat8_e5m2) | bit(at::kFloat8_e5m2fnuz);

// PyTorch 2.15 has transforms of BFloat16 for CUDA, computed in float32 and not rounded.
constexpr bool kBFloat16Transforms = OPENREG_TORCH_AT_LEAST(2, 15);

// Throws, as cuFFT does, where a transform of `half` precision has a size that is not a power of two.
void check_half_transform(const char* name, at::IntArrayRef sizes);

// Writes the result of an operator to its out= tensor, which is resized; throws where the dtypes do not cast.
at::Tensor& write_out(const char* name, const at::Tensor& result, at::Tensor& out);

} // namespace openreg
