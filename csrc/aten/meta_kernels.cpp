#include "aten/meta_kernels.h"

#include <unordered_set>

namespace openreg {
namespace {

using c10::DispatchKey;

bool is_aten(const c10::OperatorName& name) {
  return name.name.starts_with("aten::");
}

// Leaked, like everything that a thread may use after main().
auto& in_python() {
  static auto* ops = new std::unordered_set<std::string>;
  return *ops;
}

// The names of the operators for which PyTorch generates the other forms from the out= form.
const std::unordered_set<std::string>& structured() {
  static const auto* names = [] {
    auto* found = new std::unordered_set<std::string>;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames())
      if (const auto op = dispatcher.findSchema(name);
          op && is_aten(name) && op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional))
        found->insert(name.name);
    return found;
  }();
  return *names;
}

} // namespace

void set_python_meta_kernels(const std::vector<std::string>& ops) {
  in_python() = {ops.begin(), ops.end()};
}

bool has_cpp_meta_kernel(const c10::OperatorHandle& op) {
  return is_aten(op.operator_name()) && op.hasKernelForDispatchKey(DispatchKey::Meta) &&
      !in_python().count(c10::toString(op.operator_name()));
}

bool is_structured_out(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::CPU) && op.hasKernelForDispatchKey(DispatchKey::Meta) &&
      structured().count(op.operator_name().name);
}

} // namespace openreg
