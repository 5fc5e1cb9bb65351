// The first steps of a kernel: check its arguments, then get memory for its results, a loop for their dtype, and a
// stream to run it.
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
#include "backend/tensor_checks.h"

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

inline bool is_floating(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
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

// Checks a row-wise norm's x and weight: one weight for each element of a row.
inline void check_norm(const char* op, const char* name, const Tensor& x, const Tensor& weight) {
  check_floating(op, name, x);
  check_rows(op, name, x);
  check_kind_like(op, "weight", weight, name, x);
  const auto last = x.sym_sizes().slice(x.dim() - 1);
  TORCH_CHECK(same(weight.sym_sizes(), last), op, ": expected weight of shape ", last, ", the last dimension of ", name,
      ", but got ", weight.sym_sizes());
}

// Checks the options of a cross entropy.
inline void check_loss_options(const char* op, double label_smoothing, std::string_view reduction) {
  TORCH_CHECK(label_smoothing >= 0 && label_smoothing <= 1, op, ": expected label_smoothing in [0, 1], but got ",
      label_smoothing);
  TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none", op,
      ": expected reduction \"mean\", \"sum\" or \"none\", but got \"", reduction, "\"");
}

// Checks that target has a class for each row of x.
inline void check_target(const char* op, const char* x_name, const Tensor& x, const Tensor& target) {
  check_same_device(op, x_name, x, "target", target);
  const auto type = target.scalar_type();
  TORCH_CHECK(type == at::kLong || type == at::kInt, op, ": expected target of int64 or int32, but got ",
      dtype_name(type), "; convert it with .to()");
  TORCH_CHECK(same(target.sym_sizes(), rows_of(x)), op, ": expected target of shape ", rows_of(x), ", the same as ",
      x_name, " without its last dimension, but got ", target.sym_sizes());
}

// ---- memory for results ----

// Uninitialized memory with the sizes and strides of x, which is dense. Made without the dispatcher, it takes half the
// time of at::empty_like, which matters only for operators that take nanoseconds.
inline Tensor new_like(const Tensor& x, at::ScalarType type) {
  return empty_strided_on(x.get_device(), x.sizes(), x.strides(), type);
}

} // namespace openreg::ops
