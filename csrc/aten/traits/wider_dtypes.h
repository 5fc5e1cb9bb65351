// Computes in a wider dtype if CUDA has a kernel for a dtype and the CPU does not. See Note [Wider dtypes].
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <string>

#include "compat.h"

namespace openreg {

// Note [Wider dtypes]
// ATen's CPU kernels lack dtypes that CUDA's have: half types in avg_pool3d, complex32 in most arithmetic. A program
// that works on CUDA must run here, so these operators, listed in wider.cpp, convert such arguments to a wider dtype
// (Half and BFloat16 to Float, ComplexHalf to ComplexFloat, Bool to Byte), run again on the device, and round the
// results to the dtype that CUDA returns. Tensors that an operator writes to (in-place, out=) are written with a copy.
// This is a list instead of a retry after an error, because the CPU's error must stand if CUDA rejects a dtype too,
// because an error may come after arguments were written, and because in async mode it comes too late. The conversions
// and the wider call are ordinary device operators, so they follow stream order and are queued when possible.
// Autograd, autocast and FakeTensor see only the operator itself. Operators for which no wider dtype works have their
// own kernels in overrides/: histc of integers, nansum of complex numbers, abs of bool, and torch.fft of Half, which
// PyTorch rejects before it calls a kernel.

class Wider {
 public:
  // How the operator of this name computes in a wider dtype; null: the CPU's kernel has every dtype of CUDA's.
  static const Wider* of(const std::string& name);

  // Runs the operator in a wider dtype if the arguments on the stack need it; else returns false, with nothing changed.
  // `key` is the device's, for the layout of the arguments.
  bool run(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey key) const;

  // By the dtypes that the CPU lacks, one bit for each, and by whether the operator promotes the types of its
  // arguments.
  enum Rule { kOneType, kPromotes, kTransform };
  Wider(std::uint64_t lacks, Rule rule) : lacks_(lacks), rule_(rule) {}

 private:
  bool lacks(at::ScalarType type) const { return (lacks_ >> static_cast<unsigned>(type)) & 1; }

  std::uint64_t lacks_;
  Rule rule_;
};

// PyTorch 2.15 has transforms of BFloat16 for CUDA, computed in float32 and not rounded.
constexpr bool kBFloat16Transforms = OPENREG_TORCH_AT_LEAST(2, 15);

// Throws, as cuFFT does, where a transform of `half` precision has a size that is not a power of two.
void check_half_transform(const char* name, at::IntArrayRef sizes);

// Writes the result of an operator to its out= tensor, which is resized; throws where the dtypes do not cast.
at::Tensor& write_out(const char* name, const at::Tensor& result, at::Tensor& out);

} // namespace openreg
