#include "aten/kernel_kind.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <unordered_map>

namespace openreg {
namespace {

std::unordered_map<c10::DispatchKey, std::unordered_map<c10::OperatorName, KernelKind>>& recorded() {
  static auto* all = new std::unordered_map<c10::DispatchKey, std::unordered_map<c10::OperatorName, KernelKind>>;
  return *all;
}

} // namespace

void record_kernel(const c10::OperatorName& op, c10::DispatchKey key, KernelKind kind) {
  recorded()[key].insert_or_assign(op, kind);
}

std::string kernel_kind(const std::string& name, const std::string& key_name) {
  const auto dot = name.find('.');
  const c10::OperatorName op{name.substr(0, dot), dot == name.npos ? "" : name.substr(dot + 1)};
  const auto key = c10::parseDispatchKey(key_name);
  const auto& of_key = recorded()[key];
  if (const auto found = of_key.find(op); found != of_key.end())
    return found->second == KernelKind::kBoxed ? "boxed" : "direct";
  const auto known = c10::Dispatcher::singleton().findOp(op);
  return known && known->hasKernelForDispatchKey(key) ? "own" : "";
}

} // namespace openreg
