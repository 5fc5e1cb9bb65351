// Operators whose small-tensor latency matters: the CPU kernels that the boxed path calls, without boxing (`make bench`
// measures the gain).
#include "aten/direct.h"

#include "aten/deferred/plan.h"
#include "aten/kernel_kind.h"
#include "aten/traits/missing_checks.h"
#include "backend/identity/identity.h"
#include "backend/sync_debug.h"
#include "runtime/stream/launch.h"

#include <ATen/CPUFunctions.h>
#include <ATen/MetaFunctions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/Operators.h>
#include <ATen/native/Activation.h>
#include <ATen/native/BinaryOps.h>
#include <ATen/native/Copy.h>
#include <ATen/native/PointwiseOps.h>
#include <ATen/native/ReduceOpsUtils.h>
#include <ATen/native/TensorCompare.h>
#include <ATen/native/UnaryOps.h>
#include <ATen/native/layer_norm.h>
#include <torch/library.h>

namespace openreg {
namespace {

template <class Op>
void set_meta(const char* name, typename Op::schema* kernel) {
  set_meta_kernel(name, c10::KernelFunction::makeFromUnboxedRuntimeFunction(kernel));
}

struct Difference {
  static void compute(at::TensorIteratorBase& iter, const at::Tensor&, const at::Tensor&, const at::Scalar& alpha) {
    at::native::add_stub(at::kCPU, iter, -alpha);
  }
};
struct ThresholdBackward {
  static void compute(at::TensorIteratorBase& iter, const at::Tensor&, const at::Tensor&, const at::Scalar& threshold) {
    at::native::threshold_stub(at::kCPU, iter, threshold, 0);
  }
};

// The CPU's relu is clamp_min, which it calls through the dispatcher.
struct Relu : at::meta::structured_clamp_min {
  void meta(const at::Tensor& self) { structured_clamp_min::meta(self, 0); }
  static void compute(at::TensorIteratorBase& iter, const at::Tensor&) {
    at::native::clamp_min_scalar_stub(at::kCPU, iter, 0);
  }
};
at::Tensor relu(const at::Tensor& self) {
  return self.scalar_type() == at::kBool ? at::cpu::relu(self) : at::cpu::clamp_min(self, 0); // relu raises for bool
}
at::Tensor& relu_(at::Tensor& self) {
  return self.scalar_type() == at::kBool ? at::cpu::relu_(self) : at::cpu::clamp_min_(self, 0);
}

// A result without the dimensions that were summed over would be computed through a view of it. One that keeps them is
// contiguous either way, so only its sizes differ.
at::Tensor sum(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim, std::optional<at::ScalarType> dtype) {
  at::Tensor out = at::cpu::sum(self, dim, /*keepdim=*/true, dtype);
  if (keepdim || self.dim() == 0) return out;
  const auto reduced = at::native::make_dim_mask(dim, self.dim());
  c10::DimVector sizes;
  for (size_t i = 0; i < self.sizes().size(); ++i)
    if (!reduced[i]) sizes.push_back(self.sizes()[i]);
  out.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return out;
}

// These call the boxed kernel where it checks values: see Note [Unchecked arguments].
at::Tensor embedding_dense_backward(const at::Tensor& grad, const at::Tensor& indices, c10::SymInt num_weights,
    c10::SymInt padding_idx, bool scale_grad_by_freq) {
  if (scale_grad_by_freq)
    return detail::call_boxed<at::_ops::embedding_dense_backward>(
        grad, indices, std::move(num_weights), std::move(padding_idx), true);
  return on_aliases<at::_ops::embedding_dense_backward, at::cpu::embedding_dense_backward_symint>(
      grad, indices, std::move(num_weights), std::move(padding_idx), false);
}

at::Tensor nll_loss_backward(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& target,
    const std::optional<at::Tensor>& weight, int64_t reduction, c10::SymInt ignore_index,
    const at::Tensor& total_weight) {
  if (reduction == at::Reduction::None)
    return detail::call_boxed<at::_ops::nll_loss_backward>(
        grad_output, self, target, weight, reduction, std::move(ignore_index), total_weight);
  return on_aliases<at::_ops::nll_loss_backward, at::cpu::nll_loss_backward_symint>(
      grad_output, self, target, weight, reduction, std::move(ignore_index), total_weight);
}

// The boxed kernel reports waits: see Note [Traits].
at::Tensor where_self(const at::Tensor& condition, const at::Tensor& self, const at::Tensor& other) {
  if (C10_UNLIKELY(watches_syncs())) return detail::call_boxed<at::_ops::where_self>(condition, self, other);
  return on_aliases<at::_ops::where_self, at::cpu::where>(condition, self, other);
}

// Returns true if BLAS reads a matrix as it is. The CPU's kernel copies any other.
bool is_matrix(const at::Tensor& t) {
  if (t.dim() != 2 || t.numel() == 0) return false;
  const auto sizes = t.sizes(), strides = t.strides();
  return (strides[1] == 1 && strides[0] >= sizes[1]) || (strides[0] == 1 && strides[1] >= sizes[0]);
}
struct Product : Implementation {
  // On other processors, the kernel may pass the tensors to oneDNN, which asks for their device.
#ifdef __x86_64__
  static bool accepts(const at::Tensor& a, const at::Tensor& b) { return is_matrix(a) && is_matrix(b); }
#else
  static bool accepts(const at::Tensor&, const at::Tensor&) { return false; }
#endif
};
struct SumAndProduct {
  static bool accepts(
      const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b, const at::Scalar&, const at::Scalar&) {
    return Product::accepts(a, b) && bias.dim() == 1 && bias.sizes()[0] == b.sizes()[1];
  }
  // The kernel copies the bias through the dispatcher, unless the result holds it already.
  template <class Structured>
  static void compute(Structured& op, const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b,
      const at::Scalar& beta, const at::Scalar& alpha) {
    if (beta.toComplexDouble() != 0.0) {
      at::TensorIterator iter = at::TensorIteratorConfig()
                                    .set_check_mem_overlap(false)
                                    .resize_outputs(false)
                                    .add_output(op.out)
                                    .add_const_input(bias)
                                    .build();
      at::native::copy_stub(at::kCPU, iter, false);
    }
    op.impl(op.out, a, b, beta, alpha, op.out);
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> native_layer_norm(const at::Tensor& input,
    c10::SymIntArrayRef normalized_shape, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps) {
  const c10::TensorImpl* impl = input.unsafeGetTensorImpl();
  const auto accepts = [&](const at::Tensor& t) { return detail::is_direct(impl, t, false) && t.is_contiguous(); };
  const auto accepts_optional = [&](const std::optional<at::Tensor>& t) { return !t || !t->defined() || accepts(*t); };
  if (detail::redirected() || !detail::is_floating(impl) || !accepts(input) || input.numel() == 0 ||
      !accepts_optional(weight) || !accepts_optional(bias)) [[unlikely]]
    return on_aliases<at::_ops::native_layer_norm, at::cpu::native_layer_norm_symint>(
        input, normalized_shape, weight, bias, eps);
  const at::Tensor none, &gamma = weight ? *weight : none, &beta = bias ? *bias : none;
  const auto shape = C10_AS_INTARRAYREF_SLOW(normalized_shape);
  const auto [rows, columns] = at::native::_check_layer_norm_inputs(input, shape, gamma, beta);
  c10::DimVector of_rows(input.sizes());
  std::fill(of_rows.end() - static_cast<ptrdiff_t>(shape.size()), of_rows.end(), 1);
  const auto device = impl->device().index();
  at::Tensor out = empty_on(device, input.sizes(), input.scalar_type(), std::nullopt);
  at::Tensor mean = empty_on(device, of_rows, input.scalar_type(), std::nullopt);
  at::Tensor rstd = empty_on(device, of_rows, input.scalar_type(), std::nullopt);
  detail::run_directly(
      detail::thread_stream(device),
      [&] { at::native::LayerNormKernel(at::kCPU, input, gamma, beta, rows, columns, eps, &out, &mean, &rstd); },
      Site(at::_ops::native_layer_norm::name));
  return {std::move(out), std::move(mean), std::move(rstd)};
}

// The CPU's kernel reads mean and rstd as if they were contiguous, and grad_out as if it had the shape of the input:
// see Note [Unchecked arguments].
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_layer_norm_backward(const at::Tensor& grad_out,
    const at::Tensor& input, c10::SymIntArrayRef normalized_shape, const at::Tensor& mean, const at::Tensor& rstd,
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, std::array<bool, 3> output_mask) {
  expect_layer_norm(grad_out, input, normalized_shape.size(), mean, rstd);
  return at::cpu::native_layer_norm_backward_symint(
      grad_out, input, normalized_shape, mean.contiguous(), rstd.contiguous(), weight, bias, output_mask);
}

} // namespace

// Run-time function pointers instead of TORCH_FN, and no inlining: half the compile time.
// clang-format off: easier to read as a table
#define UNBOXED(schema, op, name) m.impl(schema, (on_aliases<at::_ops::op, at::cpu::name>))
// A structured operator, with its Meta kernel: see Note [Deferred operators].
#define META(name) set_meta<at::_ops::name>("aten::" #name, at::meta::name)
#define STRUCTURED(schema, op, name) UNBOXED(schema, op, name); set_meta<at::_ops::op>("aten::" schema, at::meta::name)
#define DIRECT_AS(text, op, name, ...) m.impl(text, (on_tensors<at::_ops::op, __VA_ARGS__, at::cpu::name>)); set_meta<at::_ops::op>("aten::" text, at::meta::name)
#define DIRECT(text, op, name, structured, ...) DIRECT_AS(text, op, name, at::meta::structured, __VA_ARGS__)
#define OF_STUB(name) DIRECT(#name, name, name, structured_##name, Stub<at::native::name##_stub>)
#define UNARY(name) OF_STUB(name); DIRECT(#name "_", name##_, name##_, structured_##name, Stub<at::native::name##_stub>); STRUCTURED(#name ".out", name##_out, name##_outf)
#define BINARY(name, ...) DIRECT(#name ".Tensor", name##_Tensor, name, structured_##name##_Tensor, __VA_ARGS__); DIRECT(#name "_.Tensor", name##__Tensor, name##_, structured_##name##_Tensor, __VA_ARGS__); STRUCTURED(#name ".out", name##_out, name##_outf)
#define COMPARE(name) DIRECT(#name ".Tensor", name##_Tensor, name, structured_##name##_Tensor, Stub<at::native::name##_stub>); STRUCTURED(#name ".Scalar", name##_Scalar, name)

OPENREG_LIBRARY_IMPL(aten, dense, library) {
  DirectKernels m{library};
  BINARY(add, StubOfNumber<at::native::add_stub>); BINARY(sub, Difference); BINARY(mul, Stub<at::native::mul_stub>); BINARY(div, Stub<at::native::div_true_stub>);
  UNARY(neg); UNARY(exp); UNARY(log); UNARY(sqrt); UNARY(rsqrt); UNARY(reciprocal); UNARY(sin); UNARY(cos);
  UNARY(tanh); UNARY(sigmoid);
  COMPARE(eq); COMPARE(ne); COMPARE(lt); COMPARE(le); COMPARE(gt); COMPARE(ge);
  m.impl("relu", (on_tensors<at::_ops::relu, Relu, Relu, relu>)); m.impl("relu_", (on_tensors<at::_ops::relu_, Relu, Relu, relu_>)); DIRECT("threshold_backward", threshold_backward, threshold_backward, structured_threshold_backward, ThresholdBackward);
  STRUCTURED("gelu", gelu, gelu); STRUCTURED("gelu_backward", gelu_backward, gelu_backward);
  OF_STUB(silu); OF_STUB(silu_backward);
  OF_STUB(sigmoid_backward); OF_STUB(tanh_backward);
  OF_STUB(maximum); OF_STUB(minimum);
  STRUCTURED("clamp", clamp, clamp); STRUCTURED("clamp_min", clamp_min, clamp_min);
  STRUCTURED("pow.Tensor_Scalar", pow_Tensor_Scalar, pow); STRUCTURED("pow.Tensor_Tensor", pow_Tensor_Tensor, pow);
  m.impl("where.self", where_self); STRUCTURED("lerp_.Scalar", lerp__Scalar, lerp_);
  DIRECT("addcmul_", addcmul_, addcmul_, structured_addcmul, StubOfNumber<at::native::addcmul_stub>); DIRECT("addcdiv_", addcdiv_, addcdiv_, structured_addcdiv, StubOfNumber<at::native::addcdiv_stub>);
  UNBOXED("fill_.Scalar", fill__Scalar, fill_); UNBOXED("zero_", zero_, zero_);
  m.impl("sum.dim_IntList", (on_aliases<at::_ops::sum_dim_IntList, sum>)); set_meta<at::_ops::sum_dim_IntList>("aten::sum.dim_IntList", at::meta::sum); STRUCTURED("mean.dim", mean_dim, mean); STRUCTURED("argmax", argmax, argmax);
  STRUCTURED("cumsum", cumsum, cumsum);
  DIRECT_AS("mm", mm, mm, at::native::structured_mm_out_cpu, Product); STRUCTURED("mm.out", mm_out, mm_outf); DIRECT_AS("addmm", addmm, addmm, at::native::structured_addmm_out_cpu, SumAndProduct); STRUCTURED("addmm.out", addmm_out, addmm_outf);
  STRUCTURED("bmm", bmm, bmm); STRUCTURED("baddbmm", baddbmm, baddbmm);
  // The kernels of softmax are in overrides/softmax.cpp.
  META(_softmax); META(_log_softmax); META(_softmax_backward_data); META(_log_softmax_backward_data);
  STRUCTURED("nll_loss_forward", nll_loss_forward, nll_loss_forward_symint); m.impl("nll_loss_backward", nll_loss_backward); set_meta<at::_ops::nll_loss_backward>("aten::nll_loss_backward", at::meta::nll_loss_backward_symint);
  m.impl("native_layer_norm", native_layer_norm); m.impl("native_layer_norm_backward", (on_aliases<at::_ops::native_layer_norm_backward, native_layer_norm_backward>));
  UNBOXED("index_select", index_select, index_select); m.impl("embedding_dense_backward", embedding_dense_backward);
  STRUCTURED("cat", cat, cat);
}
// clang-format on

} // namespace openreg
