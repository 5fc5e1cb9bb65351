// scaled_dot_product_attention: which algorithm runs is what the CPU would choose for the same
// tensors, either its flash kernel (shared like any other) or the mathematical decomposition.
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../native.h"
#include "../transforms.h"

namespace openreg {
namespace {

// A CPU tensor with the shape, strides and dtype of another, and no memory.
at::Tensor shape_of(const at::Tensor& t) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
      c10::DataPtr(nullptr, c10::Device(c10::kCPU)), /*allocator=*/nullptr, /*resizable=*/false);
  auto shape = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  shape.unsafeGetTensorImpl()->set_sizes_and_strides(t.sym_sizes(), t.sym_strides());
  return shape;
}

// scaled_dot_product_attention asks above the dispatcher, so an argument may be any wrapper: a fake tensor, another
// subclass, a tensor of torch.func. None of these has memory. The CPU's choice reads shapes (symbolic ones too),
// strides and dtypes only, and its stub takes no part in dispatch, so modes do not see this call.
int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal, std::optional<double> scale,
    bool enable_gqa) {
  constexpr auto math = static_cast<int64_t>(sdp::SDPBackend::math);
  const bool masked = mask && mask->defined();
  if (!query.is_privateuseone() || query.is_nested() || key.is_nested() || value.is_nested()) return math;
  // The flash kernel has no gradient for the mask.
  if (masked && unbatched(*mask).requires_grad()) return math;
  const auto m = masked ? std::optional(shape_of(*mask)) : std::nullopt;
  return at::native::_fused_sdp_choice_stub(
      at::kCPU, shape_of(query), shape_of(key), shape_of(value), m, dropout_p, is_causal, scale, enable_gqa);
}

// The operators that PyTorch offers backends with one fused attention of their own.
using Attention = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
    at::Tensor, at::Tensor>;

Attention fused_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& bias, double dropout_p, bool is_causal, bool /*return_debug_mask*/,
    std::optional<double> scale) {
  TORCH_CHECK(dropout_p == 0,
      "_scaled_dot_product_fused_attention_overrideable: the device's fused attention has no "
      "dropout, but got dropout_p=",
      dropout_p, "; call scaled_dot_product_attention, which decomposes it");
  auto [out, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, bias, scale);
  const auto none = at::empty({0}, query.options().dtype(at::kLong));
  return {out, logsumexp, none, none, query.sym_size(2), key.sym_size(2), none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fused_attention_backward(const at::Tensor& grad,
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
    std::array<bool, 4> mask, const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&,
    int64_t, int64_t, double dropout_p, bool is_causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  TORCH_CHECK(!mask[3],
      "_scaled_dot_product_fused_attention_overrideable_backward: the device's fused attention gives "
      "no gradient for attn_bias; call scaled_dot_product_attention, which decomposes it");
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, out, logsumexp,
      dropout_p, is_causal, bias.defined() ? std::optional(bias) : std::nullopt, scale);
  return {q, k, v, at::Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", choose);
  m.impl("_scaled_dot_product_fused_attention_overrideable", fused_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", fused_attention_backward);
}

} // namespace openreg

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &openreg::choose)
} // namespace at::native
