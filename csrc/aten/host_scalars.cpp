#include "host_scalars.h"

#include <c10/util/Exception.h>

namespace openreg {
namespace {

auto& counts_table() {
  static auto* all = new std::unordered_map<std::string, HostScalars>{
      {"aten::addcmul", HostScalars::kLast}, // aten/src/ATen/native/cuda/PointwiseOpsKernel.cu takes tensor2
      {"aten::addcmul_", HostScalars::kLast},
      {"aten::addcdiv", HostScalars::kNone}, // no allow_cpu_scalars() in build_ternary_op()
      {"aten::addcdiv_", HostScalars::kNone},
      {"aten::lerp", HostScalars::kLast}, // cuda/Lerp.cu takes weight
      {"aten::lerp_", HostScalars::kLast},
      {"aten::masked_fill_", HostScalars::kLast}, // the value
      {"aten::index_fill_", HostScalars::kLast},  // the value
      {"aten::mse_loss", HostScalars::kNone},     // gpu_kernel() in cuda/BinaryMiscOpsKernels.cu takes no CPU scalars
      {"aten::smooth_l1_loss", HostScalars::kNone},
      {"aten::where", HostScalars::kAny},         // moves them to the device
      {"aten::index", HostScalars::kAny},         // indices
      {"aten::_index_put_impl_", HostScalars::kAny},
      {"aten::binary_cross_entropy", HostScalars::kAny}, // the weight
      {"aten::_fused_adagrad_", HostScalars::kAny},      // the learning rate
      {"aten::_fused_adam_", HostScalars::kAny},
      {"aten::_fused_adamw_", HostScalars::kAny},
      {"aten::_fused_sgd_", HostScalars::kAny},
  };
  return *all;
}

HostScalars find(const std::string& name) {
  const auto found = counts_table().find(name);
  return found == counts_table().end() ? HostScalars::kAny : found->second;
}

} // namespace

HostScalars host_scalars(std::string_view name) {
  constexpr std::string_view kForeach = "aten::_foreach_";
  if (!name.starts_with(kForeach)) return find(std::string(name));
  // If the lists are not all on one device, CUDA calls the operator itself for each element.
  const auto each = find("aten::" + std::string(name.substr(kForeach.size())));
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
