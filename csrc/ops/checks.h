// The first steps of a kernel: check its arguments, then get memory for its results, a loop for their dtype, and a
// stream to
// run it.
// An operator's check is one function, called by its kernel, its fake kernel and its reference in meta/. So it reads
// sym_sizes(), and turns conditions on sizes that are not known yet into assertions of the traced program.
//
// A kernel hands raw pointers to launch(); it holds no tensor inside a launch, because a stream may run the work after
// the call has returned.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/ops/empty.h>

#include <openreg/launch.h>

#include <algorithm>
#include <concepts>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/allocator.h"
#include "backend/new_tensor.h"

namespace openreg::ops {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

// ---- registration ----

// A type-erased check, for Python.
struct Check {
  std::vector<c10::TypePtr> types; // its arguments after the operator's name
  std::function<void(std::vector<c10::IValue>& arguments)> run;
};
__attribute__((visibility("default"))) void add_check(const char* op, Check check);

// Makes the fake kernel and the reference of `op` call its check, as its kernel does. The check takes the operator's
// name and arguments, and may omit trailing arguments.
template <class... Args>
void checked_by(const char* op, void (*check)(const char* op, Args...)) {
  const auto unboxed = []<class Arg>(c10::IValue& value, Arg*) -> decltype(auto) {
    if constexpr (std::is_same_v<Arg, const c10::IValue>) return value;
    else return c10::impl::ivalue_to_arg<typename c10::impl::decay_if_not_tensor<Arg&>::type, false>::call(value);
  };
  const auto run = [op, check, unboxed](std::vector<c10::IValue>& arguments) {
    [&]<size_t... i>(std::index_sequence<i...>) {
      check(op, unboxed(arguments[i], static_cast<std::remove_reference_t<Args>*>(nullptr))...);
    }(std::index_sequence_for<Args...>());
  };
  add_check(op, {{c10::getTypePtr<std::decay_t<Args>>()...}, run});
}

// ---- sizes ----

inline bool expect(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}

inline bool same(SymIntArrayRef a, SymIntArrayRef b) {
  const auto equal = [](const SymInt& a, const SymInt& b) { return expect(a.sym_eq(b)); };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), equal);
}

inline bool broadcasts(SymIntArrayRef sizes, SymIntArrayRef to) {
  const auto fits = [](const SymInt& a, const SymInt& b) { return expect(a.sym_eq(b).sym_or(a.sym_eq(1))); };
  return sizes.size() <= to.size() && std::equal(sizes.begin(), sizes.end(), to.end() - sizes.size(), fits);
}

// The sizes of all dimensions but the last; there must be at least one dimension.
inline SymIntArrayRef rows_of(const Tensor& x) {
  return x.sym_sizes().slice(0, x.dim() - 1);
}

// x.contiguous(), or undefined if there is no x.
inline Tensor contiguous(const std::optional<Tensor>& x) {
  return x ? x->contiguous() : Tensor();
}

// ---- checks that operators share ----

// The name that Python gives a dtype: "float32".
inline std::string_view dtype_name(at::ScalarType type) {
  return c10::getDtypeNames(type).first;
}

inline bool is_floating(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

inline void check_tensor(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK(x.defined(), op, ": expected ", name, " to be a tensor, but got None");
  TORCH_CHECK(!x.is_nested() || x.layout() == at::kJagged, op, ": expected ", name,
      " to be one tensor, but got nested ones; call it for each of ", name, ".unbind()");
}

inline void check_floating(const char* op, const char* name, const Tensor& x) {
  check_tensor(op, name, x);
  TORCH_CHECK(is_floating(x.scalar_type()), op, ": expected ", name,
      " of float32, float64, float16 or bfloat16, but got ", dtype_name(x.scalar_type()), "; convert it with .to()");
}

inline void check_integers(const char* op, const char* name, const Tensor& x) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kInt || type == at::kLong, op, ": expected ", name, " of int32 or int64, but got ",
      dtype_name(type), "; convert it with .to()");
}

// At least one dimension; the dimensions before the last form rows.
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

inline void check_shape(const char* op, const char* name, const Tensor& x, SymIntArrayRef shape, const char* of) {
  TORCH_CHECK(
      same(x.sym_sizes(), shape), op, ": expected ", name, " of shape ", shape, ", ", of, ", but got ", x.sym_sizes());
}
template <std::convertible_to<at::IntArrayRef> Sizes = std::initializer_list<int64_t>>
void check_shape(const char* op, const char* name, const Tensor& x, const Sizes& shape, const char* of) {
  check_shape(op, name, x, c10::fromIntArrayRefKnownNonNegative(shape), of);
}

// Checks that x has the device and dtype of y.
inline void check_kind_like(const char* op, const char* name, const Tensor& x, const char* of, const Tensor& y) {
  check_same_device(op, of, y, name, x);
  check_dtype(op, name, x, y.scalar_type(), of);
}

// Checks that x also has the shape of y.
inline void check_like(const char* op, const char* name, const Tensor& x, const char* of, const Tensor& y) {
  check_kind_like(op, name, x, of, y);
  TORCH_CHECK(same(x.sym_sizes(), y.sym_sizes()), op, ": expected ", name, " of shape ", y.sym_sizes(),
      ", the same as ", of, ", but got ", x.sym_sizes());
}

// ---- memory for results ----

// Uninitialized memory with the sizes and strides of x, which is dense. Made without the dispatcher, it takes half the
// time of at::empty_like, which matters only for operators that take nanoseconds.
inline Tensor new_like(const Tensor& x, at::ScalarType type) {
  return empty_strided_on(x.get_device(), x.sizes(), x.strides(), type);
}

} // namespace openreg::ops
