// The tensors among the values of a boxed call.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>

namespace openreg {

// Calls `f` with every tensor in a value, including those in lists and undefined ones.
template <class F>
void visit_tensors(const c10::IValue& value, const F& f) {
  if (value.isTensor()) f(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& x : value.toTensorVector()) f(x);
  else if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& x : value.toOptionalTensorVector()) f(x.value_or(at::Tensor()));
}

// A value with every tensor in it, including those in lists, replaced by the result of `f`.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& x : value.toTensorVector()) list.push_back(f(x));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& x : value.toOptionalTensorVector()) list.push_back(x ? std::optional(f(*x)) : std::nullopt);
    return list;
  }
  return value;
}

} // namespace openreg
