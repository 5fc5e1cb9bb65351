#include "aten/traits/host_scalars.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <optional>

#include "backend/map_tensors.h"

namespace openreg {
namespace {

auto& counts_table() {
  static auto* all = new std::unordered_map<std::string, HostScalars>{
      {"aten::addcmul", HostScalars::kLast}, // aten/src/ATen/native/cuda/PointwiseOpsKernel.cu takes tensor2
      {"aten::addcmul_", HostScalars::kLast},
      {"aten::addcdiv", HostScalars::kNone}, // no allow_cpu_scalars() in build_ternary_op()
      {"aten::addcdiv_", HostScalars::kNone},
      {"aten::mse_loss", HostScalars::kNone},     // gpu_kernel() in cuda/BinaryMiscOpsKernels.cu takes no CPU scalars
      {"aten::smooth_l1_loss", HostScalars::kNone},
      {"aten::where", HostScalars::kAny},         // moves them to the device
      {"aten::index", HostScalars::kAny},         // indices
      {"aten::_index_put_impl_", HostScalars::kAny},
      {"aten::lerp", HostScalars::kNone}, // the form with a number; the others have a rule by argument
      {"aten::lerp_", HostScalars::kNone},
  };
  return *all;
}

// The one argument that may be a CPU scalar, for operators in which the others may not; an empty one: none may.
const std::unordered_map<std::string, std::string_view> kByArgument = {
    {"aten::addcmul", "tensor2"},
    {"aten::addcmul.out", "tensor2"},
    {"aten::lerp.Tensor", "weight"}, // cuda/Lerp.cu
    {"aten::lerp.Tensor_out", "weight"},
    {"aten::lerp_.Tensor", "weight"},
    {"aten::masked_fill_.Scalar", ""},
    {"aten::masked_fill_.Tensor", "value"},
    {"aten::index_fill_.int_Scalar", ""},
    {"aten::index_fill_.int_Tensor", "value"},
    {"aten::binary_cross_entropy", "weight"}, // multiplied after the kernel
    {"aten::binary_cross_entropy.out", "weight"},
    {"aten::_fused_adagrad_", ""},
    {"aten::_fused_adagrad_.tensor_lr", "lr"},
    {"aten::_fused_adam_", ""},
    {"aten::_fused_adam_.tensor_lr", "lr"},
    {"aten::_fused_adamw_", ""},
    {"aten::_fused_adamw_.tensor_lr", "lr"},
    {"aten::_fused_sgd_", ""},
    {"aten::_fused_sgd_.tensor_lr", "lr"},
};

HostScalars find(const std::string& name) {
  const auto found = counts_table().find(name);
  return found == counts_table().end() ? HostScalars::kAny : found->second;
}

void check_by_argument(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto* first = stack.data() + stack.size() - arguments.size();
  const std::string_view accepted = kByArgument.at(toString(op.operator_name()));
  std::optional<c10::Device> device; // of the first tensor
  for (size_t i = 0; i < arguments.size(); ++i)
    visit_tensors(first[i], [&](const at::Tensor& t) {
      if (!t.defined() || (t.is_cpu() && t.dim() == 0 && arguments[i].name() == accepted)) return;
      if (!device) device = t.device();
      TORCH_CHECK(t.device() == *device,
          "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
          t.device(), "! (when checking argument for argument ", arguments[i].name(), " in method wrapper_openreg__",
          std::string_view(op.schema().name()).substr(std::strlen("aten::")), ")");
    });
}

} // namespace

ScalarCheck scalar_check(const c10::OperatorHandle& op) {
  return kByArgument.count(toString(op.operator_name())) ? &check_by_argument : nullptr;
}

HostScalars host_scalars_of_each(const std::string& name) {
  return kByArgument.count(name + ".Tensor") ? HostScalars::kLast : find(name);
}

HostScalars host_scalars(std::string_view name) {
  constexpr std::string_view kForeach = "aten::_foreach_";
  if (!name.starts_with(kForeach)) return find(std::string(name));
  // If the lists are not all on one device, CUDA calls the operator itself for each element.
  const auto each = host_scalars_of_each("aten::" + std::string(name.substr(kForeach.size())));
  return each == HostScalars::kNone ? each : HostScalars::kAny;
}

void set_host_scalars(const std::unordered_map<std::string, int>& counts) {
  for (const auto& [name, count] : counts) counts_table().emplace(name, count ? HostScalars::kOne : HostScalars::kNone);
}

void check_scalar(const char* name, bool another) {
  const HostScalars accepted = host_scalars(name);
  TORCH_CHECK(accepted != HostScalars::kNone, name,
      ": Expected all tensors to be on the same device, but found a 0-dim CPU tensor among tensors on openreg. This "
      "operator takes no CPU scalars, as on CUDA; move it with .to()");
  TORCH_CHECK(!another || accepted == HostScalars::kAny, name,
      ": Expected all tensors to be on the same device, but found more than one 0-dim CPU tensor. This operator takes "
      "one CPU scalar, as on CUDA; move the others with .to()");
}

void check_scalar_is_last(const char* name) {
  TORCH_CHECK(host_scalars(name) != HostScalars::kLast, name,
      ": Expected all tensors to be on the same device, but found a 0-dim CPU tensor among tensors on openreg. This "
      "operator takes a CPU scalar as its last tensor only, as on CUDA; move it with .to()");
}

} // namespace openreg
