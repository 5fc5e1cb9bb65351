// How a kernel begins: checks of its arguments, then memory for its results, a loop for their dtype, and a stream to
// run it.
//
// Checks raise the sentences of meta/op.py, word for word, which are the fakes' and the references'. Both stand: those
// are the example for operators without C++, these guard the pointers beside them. kit.check_error() holds them equal.
//
// A kernel hands raw pointers to launch(); it holds no tensor inside a launch, because a stream may run the work after
// the call has returned.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <openreg/launch.h>

#include <string_view>

namespace openreg::ops {

using at::Tensor;

// The name that Python gives a dtype: "float32".
inline std::string_view dtype_name(at::ScalarType type) {
  return c10::getDtypeNames(type).first;
}

inline void check_tensor(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK(x.defined(), op, ": expected ", name, " to be a tensor, but got None");
}

inline void check_floating(const char* op, const char* name, const Tensor& x) {
  check_tensor(op, name, x);
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16, op,
      ": expected ", name, " of float32, float64, float16 or bfloat16, but got ", dtype_name(type),
      "; convert it with .to()");
}

inline void check_integers(const char* op, const char* name, const Tensor& x) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kInt || type == at::kLong, op, ": expected ", name, " of int32 or int64, but got ",
      dtype_name(type), "; convert it with .to()");
}

// At least one dimension, of which the others make rows.
inline void check_rows(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK(x.dim() >= 1, op, ": expected ", name, " of at least one dimension, but got a scalar; use ", name,
      ".unsqueeze(0)");
}

inline void check_same_device(const char* op, const char* x_name, const Tensor& x, const char* name, const Tensor& y) {
  check_tensor(op, x_name, x);
  check_tensor(op, name, y);
  TORCH_CHECK(x.device() == y.device(), op, ": ", x_name, " is on ", x.device(), " but ", name, " is on ", y.device(),
      "; move one with .to()");
}

inline void check_dtype(const char* op, const char* name, const Tensor& x, at::ScalarType type, const char* of) {
  TORCH_CHECK(x.scalar_type() == type, op, ": expected ", name, " of ", dtype_name(type), ", the dtype of ", of,
      ", but got ", dtype_name(x.scalar_type()), "; convert one with .to()");
}

inline void check_shape(const char* op, const char* name, const Tensor& x, at::IntArrayRef shape, const char* of) {
  TORCH_CHECK(x.sizes() == shape, op, ": expected ", name, " of shape ", shape, ", ", of, ", but got ", x.sizes());
}

// Device and dtype are those of y.
inline void check_kind_like(const char* op, const char* name, const Tensor& x, const char* of, const Tensor& y) {
  check_same_device(op, of, y, name, x);
  check_dtype(op, name, x, y.scalar_type(), of);
}

// And the shape.
inline void check_like(const char* op, const char* name, const Tensor& x, const char* of, const Tensor& y) {
  check_kind_like(op, name, x, of, y);
  TORCH_CHECK(x.sizes() == y.sizes(), op, ": expected ", name, " of shape ", y.sizes(), ", that of ", of, ", but got ",
      x.sizes());
}

} // namespace openreg::ops
