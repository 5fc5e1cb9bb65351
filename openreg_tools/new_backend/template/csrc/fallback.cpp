// Operators without a kernel run on the CPU, on copies, and are counted. Rung 4.
//
// Documents: "Facilitating New Backend Integration by PrivateUse1", section "Register kernels for the new backend", 1;
// "Operator Registration", sections "Basics" (Step 2) and "Selective Fallback".
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>

#include "common.h"

namespace acme {
namespace {

std::mutex mutex;
std::string policy = std::getenv("ACME_FALLBACK") ? std::getenv("ACME_FALLBACK") : "allow";
std::map<std::string, int64_t> counts;

void count(const std::string& name) {
  std::lock_guard lock(mutex);
  const int64_t calls = ++counts[name];
  TORCH_CHECK_NOT_IMPLEMENTED(policy != "error", name,
      " has no kernel for acme, and ACME_FALLBACK is \"error\". Register a kernel for PrivateUse1, or allow the "
      "fallback "
      "with torch.acme.set_fallback_policy(\"allow\").");
  if (policy == "warn" && calls == 1) TORCH_WARN(name, " has no kernel for acme and runs on the CPU.");
}

// Gives the CPU's default generator the numbers of the device's, for operators that take no generator.
class LentGenerator {
 public:
  explicit LentGenerator(c10::DeviceIndex device)
      : host_(at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())) {
    std::lock_guard lock(host_->mutex_);
    saved_ = host_->get_state();
    host_->set_state(*for_fallback(std::nullopt, device).get_state().unsafeGetTensorImpl());
  }
  ~LentGenerator() {
    std::lock_guard lock(host_->mutex_);
    host_->set_state(*saved_);
  }

 private:
  at::CPUGeneratorImpl* host_;
  c10::intrusive_ptr<c10::TensorImpl> saved_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  count(toString(op.operator_name()));
  c10::DeviceIndex device = current_device();
  bool takes_generator = false;
  const size_t first = stack->size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kDevice)
      device = value.toTensor().device().index();
    // PyTorch's fallback copies tensors, but a kernel of the CPU takes no generator of another device.
    if (!schema.arguments()[i].type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) continue;
    takes_generator = true;
    value = for_fallback(value.toOptional<at::Generator>(), device);
  }
  std::optional<LentGenerator> lent;
  if (!takes_generator && op.hasTag(at::Tag::nondeterministic_seeded)) lent.emplace(device);
  // A view of a copy would not share memory with the tensor, so it is an error.
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// PyTorch calls convolution_overrideable and its backward on devices that it does not know. The CPU has them under
// other names, and the backward with one argument more.
void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool backward = op.schema().name() == "aten::convolution_backward_overrideable";
  if (backward) {
    const auto first = stack->end() - static_cast<ptrdiff_t>(op.schema().arguments().size());
    stack->insert(first + 3, std::vector<int64_t>{first->toTensor().size(1)}); // the sizes of the bias
  }
  const char* name = backward ? "aten::convolution_backward" : "aten::convolution";
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);
}

} // namespace

std::map<std::string, int64_t> fallback_counts(bool reset) {
  std::lock_guard lock(mutex);
  return reset ? std::exchange(counts, {}) : counts;
}

std::string set_fallback_policy(const std::string& wanted) {
  TORCH_CHECK_VALUE(wanted == "allow" || wanted == "warn" || wanted == "error",
      "set_fallback_policy: expected \"allow\", \"warn\" or \"error\", but got \"", wanted, "\"");
  std::lock_guard lock(mutex);
  return std::exchange(policy, wanted);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
}

} // namespace acme
