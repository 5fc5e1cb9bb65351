#include "aten/traits/cuda_rules.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "backend/identity/identity.h"

namespace openreg {
namespace {

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

bool on_device(const c10::IValue& value) {
  return value.isTensor() && !value.toTensor().is_cpu();
}

constexpr int64_t kMaxOfBag = 2; // the mode of an embedding bag

} // namespace

namespace conditions {

bool always(const c10::IValue*) {
  return true;
}

bool is_not_empty(const c10::IValue* arguments) {
  return arguments[0].toTensor().numel() > 0;
}

// index(self, indices)
bool index_has_mask(const c10::IValue* arguments) {
  const auto indices = arguments[1].toOptionalTensorList();
  return std::any_of(indices.begin(), indices.end(),
      [](const std::optional<at::Tensor>& index) { return index && index->defined() && is_mask(*index); });
}

// Indices are moved to the device, and a mask there becomes indices, whose number the host must know.
bool index_waits(const c10::IValue* arguments) {
  const auto indices = arguments[1].toOptionalTensorList();
  return std::any_of(indices.begin(), indices.end(), [](const std::optional<at::Tensor>& index) {
    return index && index->defined() && is_mask(*index) != index->is_cpu();
  });
}

// index_put(self, indices, values): one mask and one value is a masked_fill_(). CUDA does this only for a number, but
// here Python creates a device tensor for both.
bool index_put_waits(const c10::IValue* arguments) {
  int masks = 0, others = 0;
  for (const std::optional<at::Tensor>& index : arguments[1].toOptionalTensorVector())
    if (index && index->defined()) ++(is_mask(*index) ? masks : others);
  if (masks == 1 && others == 0 && arguments[2].toTensor().dim() == 0) return false;
  return index_waits(arguments);
}

// masked_fill_(self, mask, value): reads the value, which may be on the host.
bool masked_fill_reads_value(const c10::IValue* arguments) {
  return on_device(arguments[2]);
}

// index_fill_(self, dim, index, value): reads a value that is a tensor.
bool index_fill_reads_value(const c10::IValue* arguments) {
  return on_device(arguments[3]);
}

// where(condition, self, other): copies a value that is a CPU tensor.
bool where_moves_value(const c10::IValue* arguments) {
  return std::any_of(arguments, arguments + 3, [](const c10::IValue& value) { return value.toTensor().is_cpu(); });
}

// equal(self, other): compares values, unless sizes or memory tell.
bool equal_compares_values(const c10::IValue* arguments) {
  const at::Tensor &self = arguments[0].toTensor(), &other = arguments[1].toTensor();
  if (self.numel() == 0 || self.sizes() != other.sizes()) return false;
  return !self.is_alias_of(other) || self.storage_offset() != other.storage_offset() ||
      self.strides() != other.strides();
}

// isin(elements, test_elements, assume_unique): sorts many elements. Either may be a number.
bool isin_sorts(const c10::IValue* arguments) {
  if (!arguments[1].isTensor() || arguments[2].toBool()) return false;
  const int64_t numel = arguments[0].isTensor() ? arguments[0].toTensor().numel() : 1;
  const auto most = 10 * std::pow(static_cast<double>(numel), 0.145);
  return numel > 0 && arguments[1].toTensor().numel() >= static_cast<int64_t>(most);
}

// mode(self, dim): sorts a long dimension.
bool mode_sorts(const c10::IValue* arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  return self.dim() > 0 && self.numel() > 0 && self.size(arguments[1].toInt()) > 2048;
}

// segment_reduce(data, reduce, lengths, indices, offsets, axis, unsafe)
bool segment_reduce_checks_lengths(const c10::IValue* arguments) {
  return arguments[2].isTensor() && !arguments[6].toBool();
}

// linalg_matrix_exp(self): chooses the degree of its polynomials by the norms.
bool matrix_exp_reads_norms(const c10::IValue* arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  return self.numel() > 0 && self.size(-1) > 1;
}

// normal(mean, std)
bool normal_reads_std(const c10::IValue* arguments) {
  return arguments[1].isTensor();
}

// repeat_interleave(repeats, *, output_size): sums the repeats.
bool repeat_interleave_sums(const c10::IValue* arguments) {
  return arguments[1].isNone();
}

// bincount(self, weights)
bool bincount_has_weights(const c10::IValue* arguments) {
  return arguments[1].isTensor() && arguments[1].toTensor().defined();
}

// _embedding_bag_backward(grad, indices, offsets, offset2bag, bag_size, maximum_indices, num_weights, scale, mode,
// sparse), which calls the dense one.
bool embedding_bag_takes_max(const c10::IValue* arguments) {
  return arguments[8].toInt() == kMaxOfBag && !arguments[9].toBool();
}

// _embedding_bag_dense_backward(grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale, mode)
bool dense_embedding_bag_takes_max(const c10::IValue* arguments) {
  return arguments[7].toInt() == kMaxOfBag;
}

// nll_loss2d_forward(self, target, weight, reduction)
bool nll_loss2d_reduces(const c10::IValue* arguments) {
  return arguments[3].toInt() != at::Reduction::None;
}

// put_(self, index, source, accumulate): the CPU's kernel refuses to put without accumulating.
bool put_accumulates(const c10::IValue* arguments) {
  return arguments[3].toBool();
}

// scatter(self, dim, index, src, reduce): returns early without an index.
bool scatter_has_index(const c10::IValue* arguments) {
  return arguments[2].toTensor().numel() > 0;
}

// scatter_reduce(self, dim, index, src, reduce)
bool scatter_multiplies(const c10::IValue* arguments) {
  return arguments[4].toStringRef() == "prod" && scatter_has_index(arguments);
}

} // namespace conditions

void refuse_nondeterministic(const std::string& op) {
  if (at::globalContext().deterministicAlgorithms())
    at::globalContext().alertNotDeterministic(c10::str(op, " on ", identity.name, ", as on CUDA,"));
}

} // namespace openreg
