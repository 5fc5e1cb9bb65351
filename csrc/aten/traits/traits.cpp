#include "aten/traits/traits.h"

#include <mutex>
#include <string>
#include <unordered_map>

#include "aten/traits/cuda_rules.h"
#include "aten/traits/host_scalars.h"
#include "aten/traits/missing_checks.h"
#include "aten/traits/wider_dtypes.h"
#include "compat.h"

namespace openreg {
namespace {

using namespace conditions;

// PyTorch 2.15's CUDA kernels take dtypes that earlier ones did not.
constexpr bool kSince215 = OPENREG_TORCH_AT_LEAST(2, 15);
constexpr std::uint64_t kTransforms = (kBFloat16Transforms ? kHalfs : bit(at::kHalf)) | kComplexHalf;

// A row is for every overload of its name and of the in-place operator, "aten::add" for "aten::add_" too, unless there
// is a row for the overload or for the in-place operator. Rows are not merged. Backward of replication padding has no
// row for determinism: on CUDA, F.pad uses other operators if determinism is asked for.
const std::unordered_map<std::string_view, Traits>& table() {
  static const auto* rows = new std::unordered_map<std::string_view, Traits>{
      {"aten::_adaptive_avg_pool2d_backward", {.nondeterministic = always, .check_shapes = check_planes}},
      {"aten::_adaptive_avg_pool3d_backward", {.nondeterministic = always, .check_shapes = check_planes}},
      {"aten::_batch_norm_no_update", {.check_shapes = check_batch_norm, .runs_on_aliases = true}},
      {"aten::_batch_norm_with_update", {.check_shapes = check_batch_norm}},
      {"aten::_cdist_backward", {.check_shapes = check_distances}},
      {"aten::_convert_indices_from_coo_to_csr",
          {.check_values = check_rows, .ignores_strides = true, .contiguous = {"self"}}},
      {"aten::_convert_indices_from_csr_to_coo", {.check_values = check_compressed, .ignores_strides = true}},
      {"aten::_ctc_loss",
          {.host_tensors = HostTensors::kAll,
              .captures_host_tensors = true,
              .check_values = check_ctc,
              .contiguous = {"targets"}}},
      {"aten::_ctc_loss_backward",
          {.captures_host_tensors = true,
              .synchronizes = always,
              .nondeterministic = always,
              .check_values = check_ctc,
              .contiguous = {"targets"}}},
      {"aten::_dyn_quant_matmul_4bit", {.contiguous = {"inp", "packed_weights"}}},
      {"aten::_efficientzerotensor", {.has_no_memory = true}},
      {"aten::_embedding_bag", {.check_values = check_offsets, .contiguous = {"indices", "offsets"}}},
      {"aten::_embedding_bag_backward",
          {.nondeterministic = embedding_bag_takes_max, .check_values = check_bags, .contiguous = {"bag_size"}}},
      {"aten::_embedding_bag_dense_backward",
          {.nondeterministic = dense_embedding_bag_takes_max, .check_values = check_bags, .contiguous = {"bag_size"}}},
      {"aten::_embedding_bag_forward_only", {.check_values = check_offsets, .contiguous = {"indices", "offsets"}}},
      {"aten::_embedding_bag_per_sample_weights_backward", {.check_values = check_bags}},
      {"aten::_fft_c2c", {.check_shapes = check_transform, .lacks = kTransforms, .computes = Computes::kTransforms}},
      {"aten::_fft_c2r", {.check_shapes = check_transform, .lacks = kTransforms, .computes = Computes::kTransforms}},
      {"aten::_fft_r2c", {.check_shapes = check_transform, .lacks = kTransforms, .computes = Computes::kTransforms}},
      {"aten::_fused_adagrad_", {.only_cpu_scalar = ""}},
      {"aten::_fused_adagrad_.tensor_lr", {.only_cpu_scalar = "lr"}},
      {"aten::_fused_adam_", {.only_cpu_scalar = ""}},
      {"aten::_fused_adam_.tensor_lr", {.only_cpu_scalar = "lr"}},
      {"aten::_fused_adamw_", {.only_cpu_scalar = ""}},
      {"aten::_fused_adamw_.tensor_lr", {.only_cpu_scalar = "lr"}},
      {"aten::_fused_sgd_", {.only_cpu_scalar = ""}},
      {"aten::_fused_sgd_.tensor_lr", {.only_cpu_scalar = "lr"}},
      {"aten::_index_put_impl_",
          {.host_tensors = HostTensors::kIndices, .cpu_scalars = CpuScalars::kAny, .synchronizes = index_put_waits}},
      {"aten::_linalg_eigh", {.synchronizes = is_not_empty}},
      {"aten::_linalg_svd", {.synchronizes = is_not_empty}},
      {"aten::_log_softmax", {.ignores_strides = true}},
      {"aten::_log_softmax_backward_data", {.check_shapes = check_softmax, .ignores_strides = true}},
      {"aten::_masked_softmax", {.contiguous = {"self", "mask"}}},
      {"aten::_masked_softmax_backward", {.check_shapes = check_softmax}},
      {"aten::_native_batch_norm_legit", {.check_shapes = check_batch_norm}},
      {"aten::_native_batch_norm_legit.no_stats_out", {.check_shapes = check_batch_norm, .contiguous = {"input"}}},
      {"aten::_native_batch_norm_legit.out", {.check_shapes = check_batch_norm, .contiguous = {"input"}}},
      {"aten::_nested_from_padded", {.host_tensors = HostTensors::kAll}},
      {"aten::_nested_tensor_from_mask", {.host_tensors = HostTensors::kAll}},
      {"aten::_nested_view_from_buffer", {.host_tensors = HostTensors::kAll}},
      {"aten::_pdist_backward", {.check_shapes = check_pairs}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
          {.check_shapes = check_attention,
              .contiguous = {"query", "key", "value"},
              .contiguous_rows = true,
              .never_draws = true}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
          {.check_shapes = check_attention, .contiguous = {"query", "key", "value", "out"}, .contiguous_rows = true}},
      {"aten::_segment_reduce_backward", {.check_values = check_segments}},
      {"aten::_slow_conv2d_backward", {.check_shapes = check_lists, .contiguous = {"self", "weight"}}},
      {"aten::_softmax", {.ignores_strides = true}},
      {"aten::_softmax_backward_data", {.ignores_strides = true}},
      {"aten::_sparse_mm_reduce_impl", {.asks_requires_grad = true}},
      {"aten::_sparse_mm_reduce_impl_backward", {.check_values = check_sparse_product}},
      {"aten::_to_sparse", {.synchronizes = always}},
      {"aten::_upsample_bicubic2d_aa", {.lacks = kHalfs}},
      {"aten::_upsample_bicubic2d_aa_backward", {.nondeterministic = always, .lacks = kHalfs}},
      {"aten::_upsample_bilinear2d_aa", {.lacks = kHalfs}},
      {"aten::_upsample_bilinear2d_aa_backward", {.nondeterministic = always, .lacks = kHalfs}},
      {"aten::_upsample_lanczos2d_aa", {.lacks = kHalfs}},
      {"aten::_upsample_lanczos2d_aa_backward", {.lacks = kHalfs}},
      {"aten::_weight_int4pack_mm_for_cpu", {.contiguous = {"qScaleAndZeros"}}},
      {"aten::_weight_int8pack_mm", {.contiguous = {"scales"}}},
      {"aten::_weight_norm_interface", {.check_shapes = check_weight_norm, .contiguous = {"v", "g"}}},
      {"aten::_weight_norm_interface_backward",
          {.check_shapes = check_weight_norm, .contiguous = {"grad_w", "saved_v", "saved_g", "saved_norms"}}},
      {"aten::acos", {.lacks = kComplexHalf}},
      {"aten::acosh", {.lacks = kComplexHalf}},
      {"aten::adaptive_max_pool2d_backward", {.nondeterministic = always, .check_values = check_pooling}},
      {"aten::adaptive_max_pool3d", {.ignores_strides = true}},
      {"aten::adaptive_max_pool3d_backward",
          {.check_values = check_pooling, .ignores_strides = true, .contiguous = {"indices"}}},
      {"aten::addcdiv", {.cpu_scalars = CpuScalars::kNone}},
      {"aten::addcmul", {.only_cpu_scalar = "tensor2"}},
      {"aten::angle", {.lacks = kComplexHalf}},
      {"aten::asin", {.lacks = kComplexHalf}},
      {"aten::asinh", {.lacks = kComplexHalf}},
      {"aten::atan", {.lacks = kComplexHalf}},
      {"aten::atanh", {.lacks = kComplexHalf}},
      {"aten::avg_pool2d_backward", {.check_shapes = check_planes}},
      {"aten::avg_pool3d", {.lacks = kHalfs, .ignores_strides = true}},
      {"aten::avg_pool3d_backward",
          {.nondeterministic = always, .check_shapes = check_planes, .lacks = kHalfs, .ignores_strides = true}},
      {"aten::batch_norm_backward",
          {.check_shapes = check_batch_norm,
              .contiguous = {"weight", "running_mean", "running_var", "save_mean", "save_var"}}},
      {"aten::batch_norm_update_stats", {.check_shapes = check_batch_norm}},
      {"aten::binary_cross_entropy", {.only_cpu_scalar = "weight"}},
      {"aten::bincount", {.nondeterministic = bincount_has_weights}},
      {"aten::cholesky", {.synchronizes = is_not_empty}},
      {"aten::conj_physical_", {.runs_on_aliases = true}},
      {"aten::cos", {.lacks = kComplexHalf}},
      {"aten::cosh", {.lacks = kComplexHalf}},
      {"aten::cumprod", {.lacks = kComplexHalf}},
      {"aten::div", {.lacks = kComplexHalf, .computes = Computes::kInPromoted}},
      {"aten::embedding_dense_backward",
          {.check_values = check_embedding, .checks_no_values_if = embedding_ignores_counts}},
      {"aten::empty_quantized", {.reads_no_data = true}},
      {"aten::equal", {.synchronizes = equal_compares_values, .lacks = kComplexHalf}},
      {"aten::exp", {.lacks = kComplexHalf}},
      {"aten::fill_", {.fills = true}},
      {"aten::fractional_max_pool2d", {.ignores_strides = true}},
      {"aten::fractional_max_pool2d_backward",
          {.nondeterministic = always,
              .check_shapes = check_fractional,
              .ignores_strides = true,
              .contiguous = {"indices"}}},
      {"aten::fractional_max_pool3d", {.ignores_strides = true}},
      {"aten::fractional_max_pool3d_backward",
          {.nondeterministic = always, .check_shapes = check_fractional, .contiguous = {"indices"}}},
      {"aten::gelu", {.ignores_strides = true}},
      {"aten::gelu_backward", {.ignores_strides = true}},
      {"aten::grid_sampler_2d_backward", {.nondeterministic = always, .check_shapes = check_grid}},
      {"aten::grid_sampler_3d_backward", {.nondeterministic = always, .check_shapes = check_grid}},
      {"aten::index",
          {.host_tensors = HostTensors::kAll,
              .cpu_scalars = CpuScalars::kAny,
              .wrong_device = "indices should be either on cpu or on the same device as the indexed tensor",
              .synchronizes = index_waits,
              .has_dynamic_shape = index_has_mask}},
      {"aten::index_fill_.int_Scalar", {.only_cpu_scalar = ""}},
      {"aten::index_fill_.int_Tensor", {.only_cpu_scalar = "value", .synchronizes = index_fill_reads_value}},
      {"aten::index_reduce", {.nondeterministic = always}},
      {"aten::isin", {.synchronizes = isin_sorts}},
      {"aten::ldexp", {.runs_on_aliases = true}},
      {"aten::lerp", {.cpu_scalars = CpuScalars::kNone, .lacks = kComplexHalf}},
      {"aten::lerp.Tensor", {.only_cpu_scalar = "weight", .lacks = kComplexHalf}},
      {"aten::lerp.Tensor_out", {.only_cpu_scalar = "weight", .lacks = kComplexHalf}},
      {"aten::linalg_eig", {.synchronizes = always}},
      {"aten::linalg_lu", {.ignores_strides = true}},
      {"aten::linalg_matrix_exp", {.synchronizes = matrix_exp_reads_norms}},
      {"aten::log", {.lacks = kComplexHalf}},
      {"aten::logaddexp", {.lacks = kComplexHalf, .computes = Computes::kInPromoted}},
      {"aten::lu_unpack", {.check_shapes = check_pivots, .ignores_strides = true}},
      {"aten::masked_fill_.Scalar", {.only_cpu_scalar = ""}},
      {"aten::masked_fill_.Tensor", {.only_cpu_scalar = "value", .synchronizes = masked_fill_reads_value}},
      {"aten::max_pool2d_with_indices_backward", {.check_values = check_pooling}},
      {"aten::max_pool3d_with_indices_backward", {.nondeterministic = always, .check_values = check_pooling}},
      {"aten::median.dim_values", {.nondeterministic = always}},
      {"aten::mode", {.synchronizes = mode_sorts, .runs_on_aliases = true}},
      {"aten::mse_loss", {.cpu_scalars = CpuScalars::kNone}},
      {"aten::multi_margin_loss", {.lacks = kHalfs}},
      {"aten::multi_margin_loss_backward", {.check_shapes = check_margins, .lacks = kHalfs}},
      {"aten::multilabel_margin_loss_backward", {.check_shapes = check_margins, .lacks = kHalfs}},
      {"aten::multilabel_margin_loss_forward", {.lacks = kHalfs}},
      {"aten::nanmedian.dim_values", {.nondeterministic = always}},
      {"aten::narrow_copy", {.ignores_strides = true}},
      {"aten::native_batch_norm", {.check_shapes = check_batch_norm}},
      {"aten::native_batch_norm.out", {.check_shapes = check_batch_norm, .contiguous = {"input"}}},
      {"aten::native_batch_norm_backward",
          {.check_shapes = check_batch_norm,
              .contiguous = {"weight", "running_mean", "running_var", "save_mean", "save_invstd"}}},
      {"aten::native_group_norm", {.contiguous = {"weight", "bias"}}},
      {"aten::native_group_norm_backward", {.contiguous = {"grad_out", "input", "mean", "rstd", "weight"}}},
      {"aten::native_layer_norm_backward", {.check_shapes = check_layer_norm, .contiguous = {"mean", "rstd"}}},
      {"aten::nll_loss2d_backward",
          {.check_values = check_classes, .checks_no_values_if = nll_loss_backward_reduces, .takes_indices = true}},
      {"aten::nll_loss2d_forward", {.nondeterministic = nll_loss2d_reduces, .takes_indices = true}},
      {"aten::nll_loss_backward",
          {.check_values = check_classes,
              .checks_no_values_if = nll_loss_backward_reduces,
              .queues_check = true,
              .takes_indices = true}},
      {"aten::nll_loss_forward", {.takes_indices = true}},
      {"aten::normal", {.synchronizes = normal_reads_std}},
      {"aten::pow", {.lacks = kComplexHalf, .computes = Computes::kInPromoted}},
      {"aten::prod", {.lacks = kComplexHalf}},
      {"aten::put_", {.nondeterministic = put_accumulates}},
      {"aten::quantized_gru", {.host_tensors = HostTensors::kAll}},
      {"aten::quantized_lstm", {.host_tensors = HostTensors::kAll}},
      {"aten::reflection_pad1d_backward", {.nondeterministic = always, .check_shapes = check_reflection}},
      {"aten::reflection_pad2d_backward", {.check_shapes = check_reflection}},
      {"aten::reflection_pad3d", {.ignores_strides = true}},
      {"aten::reflection_pad3d_backward", {.nondeterministic = always, .check_shapes = check_reflection}},
      {"aten::relu_", {.fills = true}},
      {"aten::repeat_interleave",
          {.synchronizes = repeat_interleave_sums, .has_dynamic_shape = repeat_interleave_sums}},
      {"aten::replication_pad1d_backward", {.check_shapes = check_planes}},
      {"aten::replication_pad2d", {.ignores_strides = true}},
      {"aten::replication_pad2d_backward", {.check_shapes = check_planes}},
      {"aten::replication_pad3d", {.ignores_strides = true}},
      {"aten::replication_pad3d_backward", {.check_shapes = check_planes}},
      {"aten::rrelu_with_noise", {.lacks = bit(at::kHalf)}},
      {"aten::rsqrt", {.lacks = kComplexHalf}},
      {"aten::scatter", {.lacks = kSince215 ? kFloat8s : 0}},
      {"aten::scatter.reduce", {.nondeterministic = scatter_has_index, .lacks = kSince215 ? kFloat8s : 0}},
      {"aten::scatter.reduce_out", {.nondeterministic = scatter_has_index, .lacks = kSince215 ? kFloat8s : 0}},
      {"aten::scatter_reduce", {.nondeterministic = scatter_multiplies}},
      {"aten::segment_reduce", {.synchronizes = segment_reduce_checks_lengths, .check_values = check_segments}},
      {"aten::sigmoid", {.lacks = kComplexHalf}},
      {"aten::sigmoid_backward", {.lacks = kComplexHalf}},
      {"aten::sin", {.lacks = kComplexHalf}},
      {"aten::sinh", {.lacks = kComplexHalf}},
      {"aten::slow_conv_transpose2d", {.ignores_strides = true}},
      {"aten::slow_conv_transpose2d.out", {.ignores_strides = true, .contiguous = {"self", "weight"}}},
      {"aten::smooth_l1_loss", {.cpu_scalars = CpuScalars::kNone}},
      {"aten::sparse_sampled_addmm", {.lacks = kSince215 ? kHalfs : 0}},
      {"aten::sqrt", {.lacks = kComplexHalf}},
      {"aten::sum", {.lacks = kComplexHalf}},
      {"aten::tan", {.lacks = kComplexHalf}},
      {"aten::tanh", {.lacks = kComplexHalf}},
      {"aten::tanh_backward", {.lacks = kComplexHalf}},
      {"aten::trace", {.lacks = kComplexHalf | bit(at::kBool)}},
      {"aten::tril", {.ignores_strides = true}},
      {"aten::triu", {.ignores_strides = true}},
      {"aten::upsample_bicubic2d_backward", {.nondeterministic = always}},
      {"aten::upsample_bilinear2d_backward", {.nondeterministic = always}},
      {"aten::upsample_linear1d_backward", {.nondeterministic = always}},
      {"aten::upsample_trilinear3d_backward", {.nondeterministic = always}},
      {"aten::where", {.cpu_scalars = CpuScalars::kAny, .synchronizes = where_moves_value}},
      {"aten::zero_", {.fills = true}},
      {"quantized::embedding_bag_2bit_rowwise_offsets",
          {.check_values = check_quantized_bags, .contiguous = {"per_sample_weights", "compressed_indices_mapping"}}},
      {"quantized::embedding_bag_2bit_unpack", {.contiguous = {"weight"}}},
      {"quantized::embedding_bag_4bit_rowwise_offsets",
          {.check_values = check_quantized_bags, .contiguous = {"per_sample_weights", "compressed_indices_mapping"}}},
      {"quantized::embedding_bag_4bit_unpack", {.contiguous = {"weight"}}},
      {"quantized::embedding_bag_byte_rowwise_offsets",
          {.check_values = check_quantized_bags, .contiguous = {"per_sample_weights", "compressed_indices_mapping"}}},
  };
  return *rows;
}

const Traits* find(std::string_view name, std::string_view overload) {
  if (!overload.empty())
    if (const auto row = table().find(std::string(name) + "." + std::string(overload)); row != table().end())
      return &row->second;
  const auto row = table().find(name);
  return row == table().end() ? nullptr : &row->second;
}

const Traits& row_of(std::string_view name, std::string_view overload) {
  static const Traits none;
  const Traits* row = find(name, overload);
  if (!row && name.ends_with('_')) row = find(name.substr(0, name.size() - 1), overload);
  return row ? *row : none;
}

Traits make_traits(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  Traits traits = row_of(name.name, name.overload_name);
  const bool dynamic = op.hasTag(at::Tag::dynamic_output_shape);
  if (!traits.synchronizes && (dynamic || op.hasTag(at::Tag::data_dependent_output))) traits.synchronizes = &always;
  if (!traits.has_dynamic_shape && dynamic) traits.has_dynamic_shape = &always;
  traits.inspects_results = name.name.find("linalg_") != std::string::npos;
  return traits;
}

} // namespace

const Traits& row_of(std::string_view name) {
  return row_of(name, "");
}

const Traits& traits_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* made = new std::unordered_map<c10::OperatorName, Traits>; // leaked, like everything that outlives main()
  std::lock_guard lock(mutex);
  auto it = made->find(op.operator_name());
  if (it == made->end()) it = made->emplace(op.operator_name(), make_traits(op)).first;
  return it->second;
}

} // namespace openreg
