// torch.fft of Half and BFloat16, which PyTorch supports only on CUDA and rejects elsewhere before it calls a kernel.
// Both are computed in float32; only Half results are rounded to half precision, as on CUDA. Everything else is
// PyTorch's own composite. Transforms of complex32 reach the kernels: see Note [Wider dtypes].
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string_view>

#include "aten/traits/wider_dtypes.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

using torch::jit::Stack;

constexpr auto kFront = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;

// The sizes that a transform of `self` with these arguments (n and dim, or s and dim) runs over.
std::vector<int64_t> signal_sizes(const at::Tensor& self, const c10::IValue* arguments, bool from_half) {
  std::vector<int64_t> given, dims, sizes;
  if (arguments[1].isInt()) given = {arguments[1].toInt()};
  if (arguments[1].isIntList()) given = arguments[1].toIntVector();
  if (arguments[2].isInt()) dims = {arguments[2].toInt()};
  if (arguments[2].isIntList()) dims = arguments[2].toIntVector();
  const auto rank = self.dim(), most = static_cast<int64_t>(given.empty() ? static_cast<size_t>(rank) : given.size());
  if (arguments[2].isNone())
    for (int64_t d = std::max<int64_t>(rank - most, 0); d < rank; ++d) dims.push_back(d);
  for (int64_t& d : dims) d = at::maybe_wrap_dim(d, rank, /*wrap_scalar=*/false); // or IndexError
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i < given.size() && given[i] != -1) sizes.push_back(given[i]);
    else sizes.push_back(from_half && i + 1 == dims.size() ? 2 * (self.size(dims[i]) - 1) : self.size(dims[i]));
  }
  return sizes;
}

bool is_widened(const at::Tensor& self) {
  return self.scalar_type() == at::kHalf || (kBFloat16Transforms && self.scalar_type() == at::kBFloat16);
}

void fft(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const size_t count = op.schema().arguments().size(), first = stack->size() - count;
  // At a CPU key, the kernel of a composite operator is the composite itself.
  const auto composite = [&](Stack* s) { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), s); };
  const at::Tensor self = (*stack)[first].toTensor();
  if (self.scalar_type() != at::kHalf) {
    if (is_widened(self)) (*stack)[first] = self.to(at::kFloat);
    return composite(stack);
  }

  const std::string_view name = op.schema().name();
  // These take one half of a symmetric spectrum.
  const bool from_half = name.starts_with("aten::fft_hfft") || name.starts_with("aten::fft_irfft");
  check_half_transform(op.schema().name().c_str(), signal_sizes(self, stack->data() + first, from_half));
  if (count > 4) {
    const at::Tensor& out = (*stack)[first + 4].toTensor();
    TORCH_CHECK(!at::GradMode::is_enabled() || !(self.requires_grad() || out.requires_grad()), name,
        ": functions with out=... arguments don't support automatic differentiation, but one of the arguments requires "
        "grad.");
    TORCH_CHECK(out.device() == self.device(), name, ": Expected all tensors to be on the same device, but out is on ",
        out.device(), " and self on ", self.device(), "; move one with .to()");
  }
  Stack wide;
  wide.emplace_back(self.to(at::kFloat));
  for (size_t i = 1; i < 4; ++i) wide.push_back((*stack)[first + i]);
  c10::Dispatcher::singleton().findSchemaOrThrow(op.schema().name().c_str(), "").callBoxed(&wide); // out= by a copy
  at::Tensor result = wide.back().toTensor();
  result = result.to(result.is_complex() ? at::kComplexHalf : at::kHalf);
  if (count > 4) {
    at::Tensor out = (*stack)[first + 4].toTensor();
    result = write_out(op.schema().name().c_str(), result, out);
  }
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(result));
}

// vmap decomposes a transform itself, so Half inputs become wider before functorch's layers see them. Everything else
// takes the kernel that all operators of the layer share.
void fft_transformed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const at::Tensor& self = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
  if (on_device(self) && is_widened(self)) return fft(op, keys, stack);
  static const auto* shared = new c10::SafeKernelFunction(
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::sin", "").getComputedKernelForDispatchKey(kFront));
  shared->callBoxed(op, keys, stack);
}

constexpr const char* kNames[] = {"fft_fft", "fft_fft2", "fft_fftn", "fft_hfft", "fft_hfft2", "fft_hfftn", "fft_ifft",
    "fft_ifft2", "fft_ifftn", "fft_ihfft", "fft_ihfft2", "fft_ihfftn", "fft_irfft", "fft_irfft2", "fft_irfftn",
    "fft_rfft", "fft_rfft2", "fft_rfftn"};

template <auto kernel>
void register_all(torch::Library& m) {
  for (const std::string name : kNames)
    for (const std::string& each : {name, name + ".out"})
      m.impl(each.c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
}

} // namespace

// A composite operator that a backend overrides loses its derivative along with its decomposition, so we register both
// keys.
OPENREG_LIBRARY_IMPL(aten, dense, m) {
  register_all<&fft>(m);
}
OPENREG_LIBRARY_IMPL(aten, autograd, m) {
  register_all<&fft>(m);
}
TORCH_LIBRARY_IMPL(aten, FuncTorchDynamicLayerFrontMode, m) {
  register_all<&fft_transformed>(m);
}

} // namespace openreg
