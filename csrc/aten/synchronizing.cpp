#include "synchronizing.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <unordered_map>

namespace openreg {
namespace {

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

// Indices are moved to the device, and a mask there becomes indices, whose number the host must know.
bool indices_wait(const c10::IValue& indices) {
  for (const std::optional<at::Tensor>& index : indices.toOptionalTensorList())
    if (index && index->defined() && is_mask(*index) != index->is_cpu()) return true;
  return false;
}

bool index(const c10::IValue* arguments) {
  return indices_wait(arguments[1]);
}

// One mask and one value is a masked_fill_(). CUDA does this only for a number, but here Python creates a device tensor
// for both.
bool index_put(const c10::IValue* arguments) {
  const auto indices = arguments[1].toOptionalTensorList();
  int masks = 0, others = 0;
  for (const std::optional<at::Tensor>& each : indices)
    if (each && each->defined()) ++(is_mask(*each) ? masks : others);
  if (masks == 1 && others == 0 && arguments[2].toTensor().dim() == 0) return false;
  return indices_wait(arguments[1]);
}

// Rules for the operators whose tags do not tell.
const std::unordered_map<std::string, Synchronizes> kRules = {
    {"aten::index", &index},
    {"aten::index_put", &index_put},
    {"aten::index_put_", &index_put},
    {"aten::_index_put_impl_", &index_put},
    {"aten::_unsafe_index", &index},
    {"aten::_unsafe_index_put", &index_put},
    // masked_fill_(mask, value): reads the value, which may be on the host.
    {"aten::masked_fill_",
        [](const c10::IValue* arguments) { return arguments[2].isTensor() && !arguments[2].toTensor().is_cpu(); }},
    // multinomial(probabilities, num_samples, replacement): reads the probabilities if it samples by sorting.
    {"aten::multinomial",
        [](const c10::IValue* arguments) { return !arguments[2].toBool() || arguments[1].toInt() == 1; }},
    // normal(mean, std): reads std.
    {"aten::normal", [](const c10::IValue* arguments) { return arguments[1].isTensor(); }},
    // repeat_interleave(repeats, *, output_size): sums the repeats.
    {"aten::repeat_interleave", [](const c10::IValue* arguments) { return arguments[1].isNone(); }},
    // linalg_lstsq has the tag because of the CPU's drivers.
    {"aten::linalg_lstsq", nullptr},
};

} // namespace

Synchronizes synchronizes_on_cuda(const c10::OperatorHandle& op) {
  if (const auto known = kRules.find(op.schema().name()); known != kRules.end()) return known->second;
  const bool waits = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  return waits ? [](const c10::IValue*) { return true; } : Synchronizes(nullptr);
}

} // namespace openreg
