#include "host_scalars.h"

namespace openreg {
namespace {

auto& table() {
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
  const auto found = table().find(name);
  return found == table().end() ? HostScalars::kAny : found->second;
}

} // namespace

HostScalars host_scalars(std::string_view name) {
  constexpr std::string_view kForeach = "aten::_foreach_";
  if (!name.starts_with(kForeach)) return find(std::string(name));
  // CUDA calls the operator itself for each element of lists that are not all on one device.
  const auto each = find("aten::" + std::string(name.substr(kForeach.size())));
  return each == HostScalars::kNone ? each : HostScalars::kAny;
}

void set_host_scalars(const std::unordered_map<std::string, int>& counts) {
  for (const auto& [name, count] : counts) table().emplace(name, count ? HostScalars::kOne : HostScalars::kNone);
}

} // namespace openreg
