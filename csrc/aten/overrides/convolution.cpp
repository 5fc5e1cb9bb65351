// Convolution and its backward. ATen sends every unknown device to convolution_overrideable; there the CPU's own choice
// (oneDNN, THNN, depthwise, …) runs on aliases.
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include "aten/direct.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

at::Tensor convolution_overrideable(const at::Tensor& input, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
    bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  if (C10_UNLIKELY(capturing(input.device().index()))) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
    using Kernel = c10::impl::BoxedKernelWrapper<decltype(convolution_overrideable)>;
    return Kernel::call(boxed_kernel(), op, c10::DispatchKeySet(c10::DispatchKey::CPU), input, weight, bias, stride,
        padding, dilation, transposed, output_padding, groups);
  }
  CpuCall call("aten::convolution");
  const at::Tensor &x = call.alias(input), &w = call.alias(weight);
  const auto b = detail::map(call, bias);
  return call.result(call.run(
      [&] { return at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups); }));
}

// The CPU's kernels check the gradient's shape only in part, and crash if it is empty. Other wrong arguments are left
// to ATen.
void check_gradient(at::IntArrayRef grad, at::IntArrayRef input, at::IntArrayRef weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  const auto fits = [&](at::IntArrayRef each) { return each.size() + 2 == input.size(); };
  const auto is_positive = [](int64_t step) { return step > 0; };
  if (input.size() < 3 || weight.size() != input.size() || !fits(stride) || !fits(padding) || !fits(dilation) ||
      (transposed && !fits(output_padding)) || !std::ranges::all_of(stride, is_positive))
    return;
  const std::vector<int64_t> expected = transposed
      ? at::native::conv_input_size(input, weight, padding, output_padding, stride, dilation, groups)
      : at::native::conv_output_size(input, weight, padding, stride, dilation);
  TORCH_CHECK(grad == expected, "convolution_backward: expected a gradient of shape ", at::IntArrayRef(expected),
      ", the shape of the output, but got ", grad);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward_overrideable(const at::Tensor& grad,
    const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  check_gradient(
      grad.sizes(), input.sizes(), weight.sizes(), stride, padding, dilation, transposed, output_padding, groups);
  CpuCall call("aten::convolution_backward");
  const at::Tensor &g = call.alias(grad), &x = call.alias(input), &w = call.alias(weight);
  // The bias has one element per output channel, whatever its gradient is used for.
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  if (C10_UNLIKELY(capturing(input.device().index()))) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
    using Kernel = c10::impl::BoxedKernelWrapper<decltype(at::convolution_backward)>;
    return Kernel::call(boxed_kernel(), op, c10::DispatchKeySet(c10::DispatchKey::CPU), grad, input, weight,
        mask[2] ? at::OptionalIntArrayRef(channels) : std::nullopt, stride, padding, dilation, transposed,
        output_padding, groups, mask);
  }
  return detail::unmap(call, call.run([&] {
    return at::convolution_backward(g, x, w, mask[2] ? at::OptionalIntArrayRef(channels) : std::nullopt, stride,
        padding, dilation, transposed, output_padding, groups, mask);
  }));
}

// Checks what PyTorch checks before it chooses an algorithm.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  const auto check = [&](const char* name, const at::Tensor& parameter) {
    TORCH_CHECK(input.options().type_equal(parameter.options()), "Input type (", input.toString(), ") and ", name,
        " type (", parameter.toString(), ") should be the same");
  };
  check("weight", weight);
  if (bias && bias->defined()) check("bias", *bias);
  return convolution_overrideable(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& input,
    const at::Tensor& weight, at::OptionalIntArrayRef, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  return convolution_backward_overrideable(
      grad, input, weight, stride, padding, dilation, transposed, output_padding, groups, mask);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("convolution_overrideable", convolution_overrideable);
  m.impl("convolution_backward_overrideable", convolution_backward_overrideable);
  if (!is_cuda()) return;
  // For CUDA, PyTorch chooses among the algorithms of CUDA's libraries, and never the overrideable one.
  m.impl("convolution", convolution);
  m.impl("convolution_backward", convolution_backward);
}

} // namespace openreg
