#include "aten/traits/cuda_rules.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <unordered_map>

namespace openreg {
namespace {

using Rules = std::unordered_map<std::string, CudaRule>;

bool always(const c10::IValue*) {
  return true;
}

bool unless_empty(const c10::IValue* arguments) {
  return arguments[0].toTensor().numel() > 0;
}

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

// index_fill(self, dim, index, value): reads a value that is a tensor.
bool index_fill(const c10::IValue* arguments) {
  return arguments[3].isTensor() && !arguments[3].toTensor().is_cpu();
}

// where(condition, self, other): copies a value that is a CPU tensor.
bool where(const c10::IValue* arguments) {
  return std::any_of(arguments, arguments + 3, [](const c10::IValue& each) { return each.toTensor().is_cpu(); });
}

// isin(elements, test_elements, assume_unique): sorts many elements. Either may be a number.
bool isin(const c10::IValue* arguments) {
  if (!arguments[1].isTensor() || arguments[2].toBool()) return false;
  const int64_t numel = arguments[0].isTensor() ? arguments[0].toTensor().numel() : 1;
  const auto most = 10 * std::pow(static_cast<double>(numel), 0.145);
  return numel > 0 && arguments[1].toTensor().numel() >= static_cast<int64_t>(most);
}

// Whether a call waits, for the operators whose tags do not tell.
const Rules kSynchronizing = {
    {"aten::index", &index},
    {"aten::index_put", &index_put},
    {"aten::index_put_", &index_put},
    {"aten::_index_put_impl_", &index_put},
    {"aten::_unsafe_index", &index},
    {"aten::_unsafe_index_put", &index_put},
    // masked_fill_(mask, value): reads the value, which may be on the host.
    {"aten::masked_fill_",
        [](const c10::IValue* arguments) { return arguments[2].isTensor() && !arguments[2].toTensor().is_cpu(); }},
    {"aten::index_fill", &index_fill},
    {"aten::index_fill_", &index_fill},
    // equal(self, other): compares values, unless sizes or memory tell.
    {"aten::equal",
        [](const c10::IValue* arguments) {
          const at::Tensor &self = arguments[0].toTensor(), &other = arguments[1].toTensor();
          if (self.numel() == 0 || self.sizes() != other.sizes()) return false;
          return !self.is_alias_of(other) || self.storage_offset() != other.storage_offset() ||
              self.strides() != other.strides();
        }},
    {"aten::isin", &isin},
    // mode(self, dim): sorts a long dimension.
    {"aten::mode",
        [](const c10::IValue* arguments) {
          const at::Tensor& self = arguments[0].toTensor();
          return self.dim() > 0 && self.numel() > 0 && self.size(arguments[1].toInt()) > 2048;
        }},
    // segment_reduce(data, reduce, lengths, indices, offsets, axis, unsafe): checks the lengths.
    {"aten::segment_reduce",
        [](const c10::IValue* arguments) { return arguments[2].isTensor() && !arguments[6].toBool(); }},
    {"aten::where.self", &where},
    {"aten::where.self_out", &where},
    {"aten::_ctc_loss_backward", &always},
    {"aten::_linalg_eigh", &unless_empty},
    {"aten::_linalg_svd", &unless_empty},
    {"aten::_to_sparse", &always},
    {"aten::cholesky", &unless_empty},
    {"aten::linalg_eig", &always},
    // linalg_matrix_exp(self): chooses the degree of its polynomials by the norms.
    {"aten::linalg_matrix_exp",
        [](const c10::IValue* arguments) {
          const at::Tensor& self = arguments[0].toTensor();
          return self.numel() > 0 && self.size(-1) > 1;
        }},
    // normal(mean, std): reads std.
    {"aten::normal", [](const c10::IValue* arguments) { return arguments[1].isTensor(); }},
    // repeat_interleave(repeats, *, output_size): sums the repeats.
    {"aten::repeat_interleave", [](const c10::IValue* arguments) { return arguments[1].isNone(); }},
};

constexpr int64_t kMaxOfBag = 2; // the mode of an embedding bag

// scatter(self, dim, index, src, reduce): returns early without an index.
bool scatter_of_tensor(const c10::IValue* arguments) {
  return arguments[2].toTensor().numel() > 0;
}

// scatter_reduce(self, dim, index, src, reduce)
bool scatter_product(const c10::IValue* arguments) {
  return arguments[4].toStringRef() == "prod" && arguments[2].toTensor().numel() > 0;
}

// Whether a call has no deterministic kernel. The backward of replication padding is left out: on CUDA, F.pad uses
// other operators if determinism is asked for.
const Rules kNondeterministic = {
    {"aten::_adaptive_avg_pool2d_backward", &always},
    {"aten::_adaptive_avg_pool3d_backward", &always},
    {"aten::_ctc_loss_backward", &always},
    {"aten::_upsample_bicubic2d_aa_backward", &always},
    {"aten::_upsample_bilinear2d_aa_backward", &always},
    {"aten::adaptive_max_pool2d_backward", &always},
    {"aten::avg_pool3d_backward", &always},
    {"aten::fractional_max_pool2d_backward", &always},
    {"aten::fractional_max_pool3d_backward", &always},
    {"aten::grid_sampler_2d_backward", &always},
    {"aten::grid_sampler_3d_backward", &always},
    {"aten::index_reduce", &always},
    {"aten::index_reduce_", &always},
    {"aten::max_pool3d_with_indices_backward", &always},
    {"aten::reflection_pad1d_backward", &always},
    {"aten::reflection_pad3d_backward", &always},
    {"aten::upsample_bicubic2d_backward", &always},
    {"aten::upsample_bilinear2d_backward", &always},
    {"aten::upsample_linear1d_backward", &always},
    {"aten::upsample_trilinear3d_backward", &always},
    // bincount(self, weights)
    {"aten::bincount",
        [](const c10::IValue* arguments) { return arguments[1].isTensor() && arguments[1].toTensor().defined(); }},
    // _embedding_bag_backward(grad, indices, offsets, offset2bag, bag_size, maximum_indices, num_weights, scale, mode,
    // sparse), which calls the dense one
    {"aten::_embedding_bag_backward",
        [](const c10::IValue* arguments) { return arguments[8].toInt() == kMaxOfBag && !arguments[9].toBool(); }},
    // _embedding_bag_dense_backward(grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale, mode)
    {"aten::_embedding_bag_dense_backward",
        [](const c10::IValue* arguments) { return arguments[7].toInt() == kMaxOfBag; }},
    // nll_loss2d_forward(self, target, weight, reduction)
    {"aten::nll_loss2d_forward",
        [](const c10::IValue* arguments) { return arguments[3].toInt() != at::Reduction::None; }},
    {"aten::median.dim", &always}, // which returns indices too
    {"aten::median.dim_values", &always},
    {"aten::nanmedian.dim", &always},
    {"aten::nanmedian.dim_values", &always},
    // put_(self, index, source, accumulate): the CPU's kernel refuses to put without accumulating.
    {"aten::put_", [](const c10::IValue* arguments) { return arguments[3].toBool(); }},
    {"aten::scatter.reduce", &scatter_of_tensor},
    {"aten::scatter.reduce_out", &scatter_of_tensor},
    {"aten::scatter_.reduce", &scatter_of_tensor},
    {"aten::scatter_reduce", &scatter_product},
    {"aten::scatter_reduce_", &scatter_product},
};

// A rule for all overloads, or for this one.
const CudaRule* find(const Rules& rules, const c10::OperatorHandle& op) {
  for (const std::string& name : {op.schema().name(), c10::toString(op.operator_name())})
    if (const auto known = rules.find(name); known != rules.end()) return &known->second;
  return nullptr;
}

} // namespace

CudaRule synchronizes_on_cuda(const c10::OperatorHandle& op) {
  if (const CudaRule* known = find(kSynchronizing, op)) return *known;
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ? &always : nullptr;
}

CudaRule nondeterministic_on_cuda(const c10::OperatorHandle& op) {
  const CudaRule* known = find(kNondeterministic, op);
  return known ? *known : nullptr;
}

void refuse_nondeterministic(const std::string& op) {
  if (at::globalContext().deterministicAlgorithms())
    at::globalContext().alertNotDeterministic(op + " on openreg, as on CUDA,");
}

} // namespace openreg
