// softmax and log_softmax of Half with a Float result (half_to_float), which CUDA supports and the CPU rejects, are
// computed in float32. So are their derivatives, for a Half input. Everything else is the CPU's kernel.
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_log_softmax_backward_data_cpu_dispatch.h>
#include <ATen/ops/_log_softmax_backward_data_native.h>
#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_cpu_dispatch.h>
#include <ATen/ops/_log_softmax_native.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_backward_data_cpu_dispatch.h>
#include <ATen/ops/_softmax_backward_data_native.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_cpu_dispatch.h>
#include <ATen/ops/_softmax_native.h>
#include <ATen/ops/_softmax_ops.h>
#include <torch/library.h>

#include "aten/direct.h"
#include "aten/traits/wider_dtypes.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

using torch::jit::Stack;

void check_half(const at::Tensor& self, int64_t dim) {
  at::maybe_wrap_dim(dim, self.dim()); // checked first, as on CUDA
  TORCH_CHECK(self.scalar_type() == at::kHalf, "conversion is supported for Half type only");
}

bool is_wider(const at::Tensor& grad, at::ScalarType input_dtype) {
  return input_dtype == at::kHalf && grad.scalar_type() == at::kFloat;
}

// The CPU's kernels copy what is not contiguous, and give a tensor without dimensions one.
bool is_dense(const at::Tensor& t) {
  return t.is_contiguous() && t.dim() > 0 && t.numel() > 0;
}
struct Softmax : Implementation {
  static bool accepts(const at::Tensor& self, int64_t, bool) { return is_dense(self); }
};
struct SoftmaxBackward : Implementation {
  static bool accepts(const at::Tensor& grad, const at::Tensor& output, int64_t, at::ScalarType input_dtype) {
    return is_dense(grad) && is_dense(output) && grad.sizes() == output.sizes() && input_dtype == grad.scalar_type();
  }
};

template <class Op, class Structured, typename Op::schema* kernel>
at::Tensor softmax(const at::Tensor& self, int64_t dim, bool half_to_float) {
  if (C10_LIKELY(!half_to_float)) return on_tensors<Op, Structured, Softmax, kernel>(self, dim, false);
  check_half(self, dim);
  return Op::call(self.to(at::kFloat), dim, false);
}

template <class Op, class Structured, typename Op::schema* kernel>
at::Tensor softmax_backward(const at::Tensor& grad, const at::Tensor& output, int64_t dim, at::ScalarType input_dtype) {
  if (C10_UNLIKELY(grad.sizes() != output.sizes())) // which raises: see Note [Unchecked arguments]
    return detail::call_boxed<Op>(grad, output, dim, input_dtype);
  if (C10_LIKELY(!is_wider(grad, input_dtype)))
    return on_tensors<Op, Structured, SoftmaxBackward, kernel>(grad, output, dim, input_dtype);
  return Op::call(grad, output, dim, at::kFloat).to(at::kHalf);
}

// (self, dim, half_to_float, out)
void softmax_out(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  auto arguments = torch::jit::last(*stack, 4);
  if (!arguments[2].toBool()) return boxed_kernel().callBoxed(op, keys, stack);
  c10::IValue& self = (*stack)[stack->size() - 4];
  check_half(self.toTensor(), arguments[1].toInt());
  self = self.toTensor().to(at::kFloat);
  (*stack)[stack->size() - 2] = false;
  op.callBoxed(stack);
}

// (grad, output, dim, input_dtype, out)
template <class Op, class Structured, typename Op::schema* kernel>
void softmax_backward_out(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 5);
  if (!is_wider(arguments[0].toTensor(), arguments[3].toScalarType())) return boxed_kernel().callBoxed(op, keys, stack);
  at::Tensor out = arguments[4].toTensor();
  TORCH_CHECK(out.scalar_type() == at::kHalf, op.schema().name(),
      ": expected out of Half, the dtype of the input, but got ", out.scalar_type());
  const at::Tensor result = softmax_backward<Op, Structured, kernel>(
      arguments[0].toTensor(), arguments[1].toTensor(), arguments[2].toInt(), arguments[3].toScalarType());
  write_out(op.schema().name().c_str(), result, out);
  torch::jit::drop(*stack, 5);
  stack->emplace_back(std::move(out));
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("_softmax", softmax<at::_ops::_softmax, at::native::structured_softmax_cpu_out, at::cpu::_softmax>);
  m.impl("_log_softmax",
      softmax<at::_ops::_log_softmax, at::native::structured_log_softmax_cpu_out, at::cpu::_log_softmax>);
  m.impl("_softmax_backward_data",
      softmax_backward<at::_ops::_softmax_backward_data, at::native::structured_softmax_backward_cpu_out,
          at::cpu::_softmax_backward_data>);
  m.impl("_log_softmax_backward_data",
      softmax_backward<at::_ops::_log_softmax_backward_data, at::native::structured_log_softmax_backward_cpu_out,
          at::cpu::_log_softmax_backward_data>);
  m.impl("_softmax.out", torch::CppFunction::makeFromBoxedFunction<&softmax_out>());
  m.impl("_log_softmax.out", torch::CppFunction::makeFromBoxedFunction<&softmax_out>());
  m.impl("_softmax_backward_data.out",
      torch::CppFunction::makeFromBoxedFunction<&softmax_backward_out<at::_ops::_softmax_backward_data,
          at::native::structured_softmax_backward_cpu_out, at::cpu::_softmax_backward_data>>());
  m.impl("_log_softmax_backward_data.out",
      torch::CppFunction::makeFromBoxedFunction<&softmax_backward_out<at::_ops::_log_softmax_backward_data,
          at::native::structured_log_softmax_backward_cpu_out, at::cpu::_log_softmax_backward_data>>());
}

} // namespace openreg
