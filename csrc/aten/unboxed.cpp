// Operators whose small-tensor latency matters: the same CPU kernels as the boxed path calls, with
// no boxing (`python -m openreg_ops bench` measures what that is worth).
#include "native.h"

#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/argmax_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clamp_min_ops.h>
#include <ATen/ops/clamp_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/cumsum_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_dense_backward_ops.h>
#include <ATen/ops/eq_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/ge_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/gt_ops.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/le_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/log_ops.h>
#include <ATen/ops/lt_ops.h>
#include <ATen/ops/maximum_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/minimum_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/ne_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/nll_loss_backward_ops.h>
#include <ATen/ops/nll_loss_forward_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/reciprocal_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zero_ops.h>
#include <torch/library.h>

namespace openreg {

// Run-time function pointers rather than TORCH_FN, and no inlining: half the compile time.
// clang-format off: a table reads better
#define UNBOXED(schema, op) m.impl(schema, native<at::_ops::op>)
#define UNARY(name) UNBOXED(#name, name); UNBOXED(#name "_", name##_); UNBOXED(#name ".out", name##_out)
#define BINARY(name) UNBOXED(#name ".Tensor", name##_Tensor); UNBOXED(#name "_.Tensor", name##__Tensor); UNBOXED(#name ".out", name##_out)
#define COMPARE(name) UNBOXED(#name ".Tensor", name##_Tensor); UNBOXED(#name ".Scalar", name##_Scalar)

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  BINARY(add); BINARY(sub); BINARY(mul); BINARY(div);
  UNARY(neg); UNARY(exp); UNARY(log); UNARY(sqrt); UNARY(rsqrt); UNARY(reciprocal); UNARY(sin); UNARY(cos);
  UNARY(tanh); UNARY(sigmoid);
  COMPARE(eq); COMPARE(ne); COMPARE(lt); COMPARE(le); COMPARE(gt); COMPARE(ge);
  UNBOXED("relu", relu); UNBOXED("relu_", relu_); UNBOXED("threshold_backward", threshold_backward);
  UNBOXED("gelu", gelu); UNBOXED("gelu_backward", gelu_backward);
  UNBOXED("silu", silu); UNBOXED("silu_backward", silu_backward);
  UNBOXED("sigmoid_backward", sigmoid_backward); UNBOXED("tanh_backward", tanh_backward);
  UNBOXED("maximum", maximum); UNBOXED("minimum", minimum);
  UNBOXED("clamp", clamp); UNBOXED("clamp_min", clamp_min);
  UNBOXED("pow.Tensor_Scalar", pow_Tensor_Scalar); UNBOXED("pow.Tensor_Tensor", pow_Tensor_Tensor);
  UNBOXED("where.self", where_self); UNBOXED("lerp_.Scalar", lerp__Scalar);
  UNBOXED("addcmul_", addcmul_); UNBOXED("addcdiv_", addcdiv_);
  UNBOXED("fill_.Scalar", fill__Scalar); UNBOXED("fill_.Tensor", fill__Tensor); UNBOXED("zero_", zero_);
  UNBOXED("sum.dim_IntList", sum_dim_IntList); UNBOXED("mean.dim", mean_dim); UNBOXED("argmax", argmax);
  UNBOXED("cumsum", cumsum);
  UNBOXED("mm", mm); UNBOXED("mm.out", mm_out); UNBOXED("addmm", addmm); UNBOXED("addmm.out", addmm_out);
  UNBOXED("bmm", bmm); UNBOXED("baddbmm", baddbmm);
  UNBOXED("_softmax", _softmax); UNBOXED("_softmax_backward_data", _softmax_backward_data);
  UNBOXED("_log_softmax", _log_softmax); UNBOXED("_log_softmax_backward_data", _log_softmax_backward_data);
  UNBOXED("nll_loss_forward", nll_loss_forward); UNBOXED("nll_loss_backward", nll_loss_backward);
  UNBOXED("native_layer_norm", native_layer_norm); UNBOXED("native_layer_norm_backward", native_layer_norm_backward);
  UNBOXED("index_select", index_select); UNBOXED("embedding_dense_backward", embedding_dense_backward);
  UNBOXED("cat", cat);
}
// clang-format on

} // namespace openreg
