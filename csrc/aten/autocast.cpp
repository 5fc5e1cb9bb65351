// Autocast on the device: the operator lists and policies that PyTorch uses on its other accelerators.
#include <ATen/ATen.h>
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/library.h>

#include "backend/identity/identity.h"

namespace openreg {
namespace {

// The lists name these types without their namespace.
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;

// Its backward overflows in half precision, so PyTorch refuses it under autocast on every accelerator.
at::Tensor binary_cross_entropy(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t) {
  TORCH_CHECK(false,
      "binary_cross_entropy: unsafe to autocast, since its gradient overflows in half precision; use "
      "binary_cross_entropy_with_logits (BCEWithLogitsLoss), or run it inside torch.autocast(\"openreg\", "
      "enabled=False)");
}

// TorchScript's operator asks only CUDA. It gives the answer of is_autocast_enabled() in
// openreg_ops/torch_patches/autocast.py.
[[maybe_unused]] const bool script_asks_the_device = [] {
  const auto operators = torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString("aten::is_autocast_enabled"));
  TORCH_CHECK(operators.size() == 1, "openreg_ops: expected one TorchScript operator aten::is_autocast_enabled");
  torch::jit::deregisterOperator(c10::FunctionSchema(operators.front()->schema()));
  torch::jit::registerOperator(torch::jit::Operator(
      "aten::is_autocast_enabled() -> bool",
      [](torch::jit::Stack& stack) {
        torch::jit::push(
            stack, at::autocast::is_autocast_enabled(identity.type) || at::autocast::is_autocast_enabled(at::kCUDA));
      },
      c10::AliasAnalysisKind::CONSERVATIVE));
  return true;
}();

} // namespace

// Operators without a policy pass through. For CUDA, PyTorch has registered this and the policies.
OPENREG_LIBRARY_IMPL(_, autocast, m) {
  if (is_cuda()) return;
  m.fallback(torch::CppFunction::makeFallthrough());
}

OPENREG_LIBRARY_IMPL(aten, autocast, m) {
  if (is_cuda()) return;
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_SET_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  m.impl("binary_cross_entropy", binary_cross_entropy);
}

} // namespace openreg
