// scaled_dot_product_attention runs the algorithm that the CPU would choose for the same tensors: its flash kernel
// (shared like any other) or the mathematical decomposition.
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_attention_math_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "backend/functorch.h"
#include "backend/identity/identity.h"
#include "backend/tensor_checks.h"
#include "kernels/attention.h"

namespace openreg {
namespace {

// A CPU tensor with the shape, strides and dtype of another, and no memory. Its storage claims to hold any view.
at::Tensor shape_of(const at::Tensor& t) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
      std::numeric_limits<int64_t>::max(), c10::DataPtr(nullptr, c10::Device(c10::kCPU)), /*allocator=*/nullptr,
      /*resizable=*/false);
  auto shape = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  shape.unsafeGetTensorImpl()->set_sizes_and_strides(t.sym_sizes(), t.sym_strides());
  return shape;
}

// Returns true if CUDA's memory-efficient kernel takes these tensors.
bool takes_efficient(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, bool is_causal) {
  const auto type = query.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) return false;
  const int64_t aligned = type == at::kFloat ? 4 : 8;
  for (const at::Tensor* x : {&query, &key, &value})
    if (x->dim() != 4 || x->scalar_type() != type || x->sym_size(3) % aligned != 0) return false;
  return query.sym_size(0) == key.sym_size(0) && key.sym_size(0) == value.sym_size(0) &&
      query.sym_size(1) == key.sym_size(1) && key.sym_size(1) == value.sym_size(1) &&
      query.sym_size(3) == key.sym_size(3) && key.sym_size(2) == value.sym_size(2) &&
      !(is_causal && mask && mask->defined());
}

// scaled_dot_product_attention makes this choice above the dispatcher, so an argument may be any wrapper: a fake
// tensor, another subclass, a torch.func tensor. None of these has memory. The CPU's choice reads only shapes (symbolic
// ones too), strides and dtypes, and its stub is not dispatched, so modes do not see this call.
int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal, std::optional<double> scale,
    bool enable_gqa) {
  constexpr auto math = static_cast<int64_t>(sdp::SDPBackend::math);
  const bool masked = mask && mask->defined();
  if (!on_device(query) || query.is_nested() || key.is_nested() || value.is_nested()) return math;
  const auto& context = at::globalContext();
  if (!context.userEnabledFlashSDP() && context.userEnabledMemEfficientSDP() &&
      takes_efficient(query, key, value, mask, is_causal)) // as CUDA chooses without its flash kernel
    return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  // The flash kernel has no gradient for the mask.
  if (masked && unbatched(*mask).requires_grad()) return math;
  const auto m = masked ? std::optional(shape_of(*mask)) : std::nullopt;
  const auto choice = at::native::_fused_sdp_choice_stub(
      at::kCPU, shape_of(query), shape_of(key), shape_of(value), m, dropout_p, is_causal, scale, enable_gqa);
  // By this choice PyTorch calls the CPU's flash kernel, for CUDA one that takes only half types.
  const bool flash = choice == static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  return flash && is_cuda() ? static_cast<int64_t>(sdp::SDPBackend::overrideable) : choice;
}

// The operators that PyTorch provides for backends with their own fused attention.
using Attention = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
    at::Tensor, at::Tensor>;

// ATen's kernel reads all of them with the shapes of query and key.
void check_inputs(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& bias) {
  for (const auto& [name, x] : {std::pair{"query", &query}, {"key", &key}, {"value", &value}}) {
    check_same_device(op, "query", query, name, *x);
    check_dtype(op, name, *x, query.scalar_type(), "query");
    TORCH_CHECK(
        x->dim() == 4, op, ": expected ", name, " of shape [batch, heads, length, width], but got ", x->sizes());
  }
  check_shape(
      op, "key", key, {query.size(0), key.size(1), key.size(2), query.size(3)}, "with the batch and width of query");
  check_shape(op, "value", value, {query.size(0), key.size(1), key.size(2), value.size(3)},
      "with the batch, heads and length of key");
  TORCH_CHECK(key.size(1) == 0 ? query.size(1) == 0 : query.size(1) % key.size(1) == 0, op,
      ": expected the number of heads of query to be a multiple of ", key.size(1), ", the heads of key, but got ",
      query.size(1));
  if (!bias || !bias->defined()) return;
  check_same_device(op, "query", query, "attn_bias", *bias);
  const auto shape = kernels::scores_shape(query, key);
  bool broadcasts = bias->dim() == 2 || bias->dim() == 4;
  for (int64_t i = 1; broadcasts && i <= bias->dim(); ++i)
    broadcasts = bias->size(-i) == 1 || bias->size(-i) == shape[4 - static_cast<size_t>(i)];
  TORCH_CHECK(broadcasts, op, ": expected attn_bias of 2 or 4 dimensions, broadcastable to ", at::IntArrayRef(shape),
      ", but got ", bias->sizes());
}

// Returns true if there are no scores: the kernel would divide by zero.
bool has_no_scores(const at::Tensor& query, const at::Tensor& key) {
  return !query.size(0) || !query.size(1) || !query.size(2) || !key.size(2);
}

// The results without scores: a softmax over no keys is 0, and its logsumexp is -inf.
std::tuple<at::Tensor, at::Tensor> without_scores(const at::Tensor& query, const at::Tensor& value) {
  const auto batch = query.size(0), heads = query.size(1), length = query.size(2);
  return {at::zeros({batch, heads, length, value.size(3)}, query.options()),
      at::full({batch, heads, length}, -std::numeric_limits<double>::infinity(),
          query.options().dtype(at::toOpMathType(query.scalar_type())))};
}

Attention fused_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& bias, double dropout_p, bool is_causal, bool /*return_debug_mask*/,
    std::optional<double> scale) {
  TORCH_CHECK(dropout_p == 0,
      "_scaled_dot_product_fused_attention_overrideable: the device's fused attention has no "
      "dropout, but got dropout_p=",
      dropout_p, "; call scaled_dot_product_attention, which decomposes it");
  check_inputs("_scaled_dot_product_fused_attention_overrideable", query, key, value, bias);
  auto [out, logsumexp] = has_no_scores(query, key)
      ? without_scores(query, value)
      : at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, bias, scale);
  const auto none = at::empty({0}, query.options().dtype(at::kLong));
  return {out, logsumexp, none, none, query.sym_size(2), key.sym_size(2), none, none, none};
}

// The gradient of the bias, which ATen's flash kernel does not compute; the loop is openreg::attention's.
at::Tensor bias_gradient(const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& bias, const at::Tensor& out, const at::Tensor& logsumexp_, bool causal,
    std::optional<double> scale_) {
  constexpr const char* op = "_scaled_dot_product_fused_attention_overrideable_backward";
  TORCH_CHECK(bias.defined() && bias.is_floating_point(), op,
      ": expected a floating-point attn_bias, whose gradient is asked for, but got ",
      bias.defined() ? dtype_name(bias.scalar_type()) : "None");
  const auto type = query.scalar_type(), wide = at::toOpMathType(type);
  const auto shape = kernels::scores_shape(query, key);
  const at::Tensor added = kernels::expand_bias(bias.to(type), shape), logsumexp = logsumexp_.to(wide).contiguous();
  at::Tensor grad_bias = at::zeros(bias.sizes(), query.options().dtype(wide));
  const at::Tensor expanded = kernels::expand_bias(grad_bias, shape);
  std::array<int64_t, 4> own{1, 1, 1, 1};
  std::copy(bias.sizes().rbegin(), bias.sizes().rend(), own.rbegin());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, op, [&] {
    using T = scalar_t;
    using A = kernels::Acc<T>;
    kernels::Gradients<T> g{
        kernels::Heads<const T>::of(grad), kernels::Heads<const T>::of(out), kernels::Rows<const A>::of(logsumexp)};
    g.bias = kernels::Heads<A>::of(expanded);
    launch(
        current_stream(query.get_device()),
        [s = kernels::scores_of<T>(query, key, value, added, causal, kernels::scale_of(query, scale_)), g, own] {
          kernels::bias_loop(s, g, own);
        },
        Site(op));
  });
  return grad_bias.to(bias.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fused_attention_backward(const at::Tensor& grad,
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
    std::array<bool, 4> mask, const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&,
    int64_t, int64_t, double dropout_p, bool is_causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  constexpr const char* op = "_scaled_dot_product_fused_attention_overrideable_backward";
  check_inputs(op, query, key, value, bias);
  const std::array<int64_t, 4> out_shape{query.size(0), query.size(1), query.size(2), value.size(3)};
  for (const auto& [name, x] : {std::pair{"grad_out", &grad}, {"out", &out}}) {
    check_same_device(op, "query", query, name, *x);
    check_dtype(op, name, *x, query.scalar_type(), "query");
    check_shape(op, name, *x, out_shape, "the same as forward's output");
  }
  check_same_device(op, "query", query, "logsumexp", logsumexp);
  check_shape(op, "logsumexp", logsumexp, query.sizes().slice(0, 3), "the same as forward's output");
  if (has_no_scores(query, key))
    return {at::zeros_like(query), at::zeros_like(key), at::zeros_like(value),
        mask[3] ? at::zeros_like(bias) : at::Tensor()};
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, out, logsumexp,
      dropout_p, is_causal, bias.defined() ? std::optional(bias) : std::nullopt, scale);
  return {
      q, k, v, mask[3] ? bias_gradient(grad, query, key, value, bias, out, logsumexp, is_causal, scale) : at::Tensor()};
}

// ATen makes the causal mask as a plain tensor, which a DTensor rejects; a mask made of its arguments is a DTensor.
// Fake tensors, whose storage is on the meta device, take ATen's.
std::tuple<at::Tensor, at::Tensor> mathematical(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal,
    const std::optional<at::Tensor>& dropout_mask, std::optional<double> scale, bool enable_gqa) {
  const bool wrapped = query.unsafeGetTensorImpl()->is_python_dispatch() && !query.is_nested() &&
      !(query.has_storage() && query.storage().device().is_meta());
  if (!is_causal || !wrapped || (mask && mask->defined()))
    return at::native::_scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, dropout_mask, scale, enable_gqa);
  const auto ones = [](const at::Tensor& x) { // as many as x is long
    std::vector<int64_t> others{-1};
    for (int64_t dim = 0; dim < x.dim() - 2; ++dim) others.push_back(dim);
    return at::ones_like(x).amax(others);
  };
  const at::Tensor causal = ones(query).unsqueeze(1).mul(ones(key)).tril().log(); // 0 and -inf, which ATen adds
  return at::native::_scaled_dot_product_attention_math(
      query, key, value, causal, dropout_p, /*is_causal=*/false, dropout_mask, scale, enable_gqa);
}

[[maybe_unused]] const bool fused_sdp_choice_registered = register_stub(at::native::_fused_sdp_choice_stub, &choose);

} // namespace

OPENREG_LIBRARY_IMPL(aten, autograd, m) {
  m.impl("_scaled_dot_product_attention_math", mathematical);
}

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("_fused_sdp_choice", choose);
  m.impl("_scaled_dot_product_fused_attention_overrideable", fused_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", fused_attention_backward);
}

} // namespace openreg
