// Trials, which find out whether a kernel accepts the calls of a signature. See Note [Queued operators].
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

namespace openreg {

enum class Verdict { kUnknown, kAccepted, kRefused };
Verdict verdict_of(uint64_t signature);
void remember(uint64_t signature, bool accepted);

struct KeptWarnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { all.push_back(warning); }
  std::vector<c10::Warning> all;
};

// Host memory for one trial: tensors like `x`, all zeros, so that they are valid as indices. Undefined if that takes
// too much memory.
class Scratch {
 public:
  at::Tensor like(const at::Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides);
  at::Tensor like(const at::Tensor& x) { return like(x, x.sizes(), x.strides()); }
  // Two elements of each dimension, or fewer.
  at::Tensor tiny(const at::Tensor& x);

 private:
  size_t bytes_ = 0;
};

// Whether `kernel` raises nothing and warns of nothing.
template <class Kernel>
bool accepts(const Kernel& kernel) {
  at::DisableRecordFunctionGuard unseen;
  KeptWarnings warnings;
  c10::WarningUtils::WarningHandlerGuard keep(&warnings);
  try {
    kernel();
  } catch (const std::exception&) {
    return false;
  }
  return warnings.all.empty();
}

} // namespace openreg
