// Checks of a tensor argument that kernels of built-in and of custom operators share. An error names the operator, the
// rule, what arrived, and the remedy. Sizes may be symbolic: a condition on one that is not known yet becomes an
// assertion of the traced program.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <concepts>
#include <initializer_list>
#include <string_view>

namespace openreg {

inline bool expect(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}

inline bool same(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  const auto equal = [](const c10::SymInt& a, const c10::SymInt& b) { return expect(a.sym_eq(b)); };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), equal);
}

// The name that Python gives a dtype: "float32".
inline std::string_view dtype_name(at::ScalarType type) {
  return c10::getDtypeNames(type).first;
}

inline void check_tensor(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK(x.defined(), op, ": expected ", name, " to be a tensor, but got None");
  TORCH_CHECK(!x.is_nested() || x.layout() == at::kJagged, op, ": expected ", name,
      " to be one tensor, but got nested ones; call it for each of ", name, ".unbind()");
}

inline void check_same_device(
    const char* op, const char* x_name, const at::Tensor& x, const char* name, const at::Tensor& y) {
  check_tensor(op, x_name, x);
  check_tensor(op, name, y);
  TORCH_CHECK(x.device() == y.device(), op, ": ", x_name, " is on ", x.device(), " but ", name, " is on ", y.device(),
      "; move one with .to()");
}

inline void check_dtype(const char* op, const char* name, const at::Tensor& x, at::ScalarType type, const char* of) {
  TORCH_CHECK(x.scalar_type() == type, op, ": expected ", name, " of ", dtype_name(type), ", the dtype of ", of,
      ", but got ", dtype_name(x.scalar_type()), "; convert one with .to()");
}

inline void check_shape(
    const char* op, const char* name, const at::Tensor& x, c10::SymIntArrayRef shape, const char* of) {
  TORCH_CHECK(
      same(x.sym_sizes(), shape), op, ": expected ", name, " of shape ", shape, ", ", of, ", but got ", x.sym_sizes());
}
template <std::convertible_to<at::IntArrayRef> Sizes = std::initializer_list<int64_t>>
void check_shape(const char* op, const char* name, const at::Tensor& x, const Sizes& shape, const char* of) {
  check_shape(op, name, x, c10::fromIntArrayRefKnownNonNegative(shape), of);
}

} // namespace openreg
