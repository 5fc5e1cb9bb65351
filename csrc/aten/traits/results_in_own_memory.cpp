#include "aten/traits/results_in_own_memory.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "aten/deferred/queued.h"
#include "backend/identity/identity.h"
#include "backend/map_tensors.h"

// Note [Results in their own memory]
// Some CPU kernels step through an out= tensor as if it were contiguous: they write the wrong elements of a permuted or
// sliced one and past its end. Others resize a result of one element to the size of their input while they compute, and
// so write over its neighbors. For these the device computes into contiguous memory and copies.
// Some read an input this way. The device passes them a copy; see kReadAsContiguous.
// Any kernel that PyTorch does not generate from a structured definition may be one of these. Structured kernels get
// strides that they can write to, except for those named below. The check "layouts" of
// `python -m openreg_ops conformance` finds those that are missing there.
namespace openreg {
namespace {

using c10::DispatchKey;

const std::unordered_set<std::string> kIgnoresStrides = {"aten::_convert_indices_from_coo_to_csr",
    "aten::_convert_indices_from_csr_to_coo", "aten::_log_softmax", "aten::_log_softmax_backward_data",
    "aten::_softmax", "aten::_softmax_backward_data", "aten::adaptive_max_pool3d", "aten::adaptive_max_pool3d_backward",
    "aten::avg_pool3d", "aten::avg_pool3d_backward", "aten::fractional_max_pool2d",
    "aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d", "aten::gelu", "aten::gelu_backward",
    "aten::linalg_lu", "aten::lu_unpack", "aten::reflection_pad3d", "aten::replication_pad2d",
    "aten::replication_pad3d", "aten::tril", "aten::slow_conv_transpose2d", "aten::triu"};

// Inputs that a CPU kernel reads as if they were contiguous, by operator and argument: the device copies them if they
// are not. Of attention, only the last dimension must be. Some do so only in their out= form: a batch norm with its
// input, and a transposed convolution, which writes to out= in the memory format of its inputs.
const std::unordered_map<std::string, std::unordered_set<std::string>> kReadAsContiguous = {
    {"aten::_convert_indices_from_coo_to_csr", {"self"}},
    {"aten::_ctc_loss", {"targets"}},
    {"aten::_ctc_loss_backward", {"targets"}},
    {"aten::_dyn_quant_matmul_4bit", {"inp", "packed_weights"}},
    {"aten::_embedding_bag", {"indices", "offsets"}},
    {"aten::_embedding_bag_backward", {"bag_size"}},
    {"aten::_embedding_bag_dense_backward", {"bag_size"}},
    {"aten::_embedding_bag_forward_only", {"indices", "offsets"}},
    {"aten::_masked_softmax", {"self", "mask"}},
    {"aten::_native_batch_norm_legit.no_stats_out", {"input"}},
    {"aten::_native_batch_norm_legit.out", {"input"}},
    {"aten::_scaled_dot_product_flash_attention_for_cpu", {"query", "key", "value"}},
    {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", {"query", "key", "value", "out"}},
    {"aten::_slow_conv2d_backward", {"self", "weight"}},
    {"aten::_weight_int4pack_mm_for_cpu", {"qScaleAndZeros"}},
    {"aten::_weight_int8pack_mm", {"scales"}},
    {"aten::_weight_norm_interface", {"v", "g"}},
    {"aten::_weight_norm_interface_backward", {"grad_w", "saved_v", "saved_g", "saved_norms"}},
    {"aten::adaptive_max_pool3d_backward", {"indices"}},
    {"aten::batch_norm_backward", {"weight", "running_mean", "running_var", "save_mean", "save_var"}},
    {"aten::fractional_max_pool2d_backward", {"indices"}},
    {"aten::fractional_max_pool3d_backward", {"indices"}},
    {"aten::native_batch_norm.out", {"input"}},
    {"aten::native_group_norm", {"weight", "bias"}},
    {"aten::native_group_norm_backward", {"grad_out", "input", "mean", "rstd", "weight"}},
    {"aten::native_layer_norm_backward", {"mean", "rstd"}},
    {"aten::native_batch_norm_backward", {"weight", "running_mean", "running_var", "save_mean", "save_invstd"}},
    {"aten::slow_conv_transpose2d.out", {"self", "weight"}},
    {"quantized::embedding_bag_2bit_rowwise_offsets", {"per_sample_weights", "compressed_indices_mapping"}},
    {"quantized::embedding_bag_2bit_unpack", {"weight"}},
    {"quantized::embedding_bag_4bit_rowwise_offsets", {"per_sample_weights", "compressed_indices_mapping"}},
    {"quantized::embedding_bag_4bit_unpack", {"weight"}},
    {"quantized::embedding_bag_byte_rowwise_offsets", {"per_sample_weights", "compressed_indices_mapping"}},
};

bool is_result(const c10::Argument& argument) {
  return argument.kwarg_only() && argument.alias_info() && argument.alias_info()->isWrite() &&
      argument.type()->kind() == c10::TypeKind::TensorType;
}

bool honors_strides(const c10::OperatorHandle& op) {
  // Random numbers are drawn in memory order, and the CPU's results depend on it.
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return true;
  static std::mutex mutex;
  static auto* known = new std::unordered_map<c10::OperatorName, bool>; // leaked, like everything that outlives main()
  std::lock_guard lock(mutex);
  auto it = known->find(op.operator_name());
  if (it == known->end())
    it = known
             ->emplace(op.operator_name(),
                 !kIgnoresStrides.count(op.operator_name().name) && has_generated_meta(op, /*called=*/false))
             .first;
  return it->second;
}

// Whether the memory of `x` may differ from a new tensor's in a way that such a kernel handles wrongly.
bool lies_apart(const at::Tensor& x) {
  if (!x.defined() || !x.unsafeGetTensorImpl()->key_set().has(identity.dense) || !x.has_storage()) return false;
  return !x.is_contiguous() || (x.numel() == 1 && x.storage().nbytes() > x.nbytes());
}

bool same_geometry(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_alias_of(b) && a.storage_offset() == b.storage_offset() &&
      a.sizes() == b.sizes() && a.strides() == b.strides();
}

// A result of the call, and what the kernel writes to instead.
struct Result {
  at::Tensor real, own;
};

} // namespace

std::vector<size_t> read_as_contiguous(const c10::OperatorHandle& op) {
  std::vector<size_t> found;
  for (const std::string& name : {op.operator_name().name, toString(op.operator_name())})
    if (const auto it = kReadAsContiguous.find(name); it != kReadAsContiguous.end())
      for (size_t i = 0; i < op.schema().arguments().size(); ++i)
        if (it->second.count(op.schema().arguments()[i].name())) found.push_back(i);
  return found;
}

void make_contiguous(const std::vector<size_t>& which, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
  const bool rows = op.schema().name().starts_with("aten::_scaled_dot_product_flash_attention_for_cpu");
  for (const size_t i : which) {
    c10::IValue& value = (*stack)[stack->size() - op.schema().arguments().size() + i];
    if (!value.isTensor()) continue;
    const at::Tensor& x = value.toTensor();
    if (rows && x.defined() && x.dim() && (x.size(-1) <= 1 || x.stride(-1) == 1)) continue;
    if (on_device(x) && x.layout() == at::kStrided && !x.is_nested() && !x.is_contiguous()) value = x.contiguous();
  }
}

void write_back(const at::Tensor& given, const at::Tensor& computed) {
  if (given.sizes() != computed.sizes()) { // an out= tensor, which the kernel has resized
    given.resize_(computed.sizes());
    given.unsafeGetTensorImpl()->set_sizes_and_strides(computed.sizes(), computed.strides());
  }
  given.copy_(computed);
}

bool takes_results(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), is_result);
}

bool call_with_own_memory(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t count = arguments.size(), first = stack->size() - count;
  std::vector<Result> results;
  for (size_t i = 0; i < count; ++i)
    if (is_result(arguments[i]))
      if (const at::Tensor& x = (*stack)[first + i].toTensor(); lies_apart(x) &&
          std::none_of(results.begin(), results.end(), [&](const Result& r) { return same_geometry(x, r.real); }))
        results.push_back({x, {}});
  if (results.empty() || honors_strides(op)) return false;

  c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
  for (const Result& result : results) { // like the kernel's own checks, which do not see this result
    at::assert_no_internal_overlap(result.real);
    for (size_t i = 0; i < count; ++i)
      if (!is_result(arguments[i]))
        map_tensors((*stack)[first + i], [&](const at::Tensor& x) {
          if (x.defined() && x.has_storage()) at::assert_no_partial_overlap(result.real, x);
          return x;
        });
  }
  for (Result& result : results) result.own = result.real.clone(at::MemoryFormat::Contiguous);
  const auto replaced = [&](const at::Tensor& x) {
    for (const Result& result : results) // an input that is also the result stays that way
      if (x.defined() && x.layout() == at::kStrided && x.has_storage() && same_geometry(x, result.real))
        return result.own;
    return x;
  };
  for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = map_tensors((*stack)[i], replaced);
  op.redispatchBoxed(c10::DispatchKeySet(identity.dense), stack);
  for (const Result& result : results) write_back(result.real, result.own);
  const size_t returns = op.schema().returns().size();
  for (size_t i = stack->size() - returns; i < stack->size(); ++i)
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& x) {
      for (const Result& result : results)
        if (x.is_same(result.own)) return result.real;
      return x;
    });
  return true;
}

namespace {

// Operators that PyTorch composes of others, on CUDA as well: soft_margin_loss and fft_fftfreq resize views of their
// result on the way, and stack leaves a strided one-element result unwritten.
void composite(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  if (!call_with_own_memory(op, stack)) op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("fft_fftfreq.out", torch::CppFunction::makeFromBoxedFunction<&composite>());
  m.impl("soft_margin_loss.out", torch::CppFunction::makeFromBoxedFunction<&composite>());
  m.impl("stack.out", torch::CppFunction::makeFromBoxedFunction<&composite>());
}

} // namespace openreg
