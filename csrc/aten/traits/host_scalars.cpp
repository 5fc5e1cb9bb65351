#include "aten/traits/host_scalars.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <optional>

#include "backend/map_tensors.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

auto& counts_of_yaml() {
  static auto* all = new std::unordered_map<std::string, int>;
  return *all;
}

} // namespace

CpuScalars cpu_scalars(std::string_view name) {
  const Traits& row = row_of(name);
  if (row.only_cpu_scalar) return *row.only_cpu_scalar ? CpuScalars::kLast : CpuScalars::kNone;
  if (row.cpu_scalars != CpuScalars::kDerived) return row.cpu_scalars;
  const auto found = counts_of_yaml().find(std::string(name));
  if (found == counts_of_yaml().end()) return CpuScalars::kAny;
  return found->second ? CpuScalars::kOne : CpuScalars::kNone;
}

void set_host_scalars(const std::unordered_map<std::string, int>& counts) {
  counts_of_yaml() = counts;
}

void check_cpu_scalar(const Traits& traits, const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto* first = stack.data() + stack.size() - arguments.size();
  std::optional<c10::Device> device; // of the first tensor
  for (size_t i = 0; i < arguments.size(); ++i)
    visit_tensors(first[i], [&](const at::Tensor& t) {
      if (!t.defined() || (t.is_cpu() && t.dim() == 0 && arguments[i].name() == traits.only_cpu_scalar)) return;
      if (!device) device = t.device();
      TORCH_CHECK(t.device() == *device,
          "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
          t.device(), "! (when checking argument for argument ", arguments[i].name(), " in method wrapper_openreg__",
          std::string_view(op.schema().name()).substr(std::strlen("aten::")), ")");
    });
}

void check_scalar(const char* name, bool another) {
  const CpuScalars accepted = cpu_scalars(name);
  TORCH_CHECK(accepted != CpuScalars::kNone, name,
      ": Expected all tensors to be on the same device, but found a 0-dim CPU tensor among tensors on ", identity.name,
      ". This "
      "operator takes no CPU scalars, as on CUDA; move it with .to()");
  TORCH_CHECK(!another || accepted == CpuScalars::kAny, name,
      ": Expected all tensors to be on the same device, but found more than one 0-dim CPU tensor. This operator takes "
      "one CPU scalar, as on CUDA; move the others with .to()");
}

void check_scalar_is_last(const char* name) {
  TORCH_CHECK(cpu_scalars(name) != CpuScalars::kLast, name,
      ": Expected all tensors to be on the same device, but found a 0-dim CPU tensor among tensors on ", identity.name,
      ". This "
      "operator takes a CPU scalar as its last tensor only, as on CUDA; move it with .to()");
}

} // namespace openreg
