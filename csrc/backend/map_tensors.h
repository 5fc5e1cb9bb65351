// The tensors among the values of a boxed call, and the arguments that it writes to.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <optional>

namespace openreg {

// Returns true if the schema says that an operator writes to the argument.
inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Returns true for a tensor, a list of tensors or a list of optional tensors.
inline bool holds_tensors(const c10::IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
}

// Calls `f` with every tensor in a value, including those in lists and undefined ones.
template <class F>
void visit_tensors(const c10::IValue& value, const F& f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& x : value.toListRef())
      if (x.isTensor()) f(x.toTensor());
      else f(at::Tensor());
  }
}

// Returns a value with every tensor in it, including those in lists, replaced by the result of `f`.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    const auto from = value.toListRef();
    c10::List<at::Tensor> list;
    list.reserve(from.size());
    for (const c10::IValue& x : from) list.push_back(f(x.toTensor()));
    return list;
  }
  if (value.isOptionalTensorList()) {
    const auto from = value.toListRef();
    c10::List<std::optional<at::Tensor>> list;
    list.reserve(from.size());
    for (const c10::IValue& x : from)
      list.push_back(x.isTensor() ? std::optional<at::Tensor>(f(x.toTensor())) : std::nullopt);
    return list;
  }
  return value;
}

} // namespace openreg
