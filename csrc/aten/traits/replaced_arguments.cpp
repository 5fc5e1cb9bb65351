#include "aten/traits/replaced_arguments.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <vector>

#include "backend/identity/identity.h"
#include "backend/map_tensors.h"

namespace openreg {
namespace {

struct Replaced {
  at::Tensor given, used;
  bool written;
};

// Copies a result to `given`, which takes its shape and strides if its own shape differs.
void write_back(const at::Tensor& given, const at::Tensor& computed) {
  if (given.sizes() != computed.sizes()) { // an out= tensor, which the kernel has resized
    given.resize_(computed.sizes());
    given.unsafeGetTensorImpl()->set_sizes_and_strides(computed.sizes(), computed.strides());
  }
  given.copy_(computed);
}

} // namespace

void call_with_replaced(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey key,
    c10::function_ref<at::Tensor(const at::Tensor&, bool)> replace,
    c10::function_ref<at::Tensor(const at::Tensor&)> finish) {
  c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
  const auto& schema = op.schema().arguments();
  const size_t count = schema.size(), first = stack->size() - count;
  std::vector<Replaced> tensors;
  torch::jit::Stack arguments;
  for (size_t i = 0; i < count; ++i) {
    const bool written = is_written(schema[i]);
    arguments.push_back(map_tensors((*stack)[first + i], [&](const at::Tensor& x) {
      if (!x.defined()) return x;
      auto known = std::ranges::find_if(tensors, [&](const Replaced& tensor) { return tensor.given.is_same(x); });
      if (known == tensors.end()) known = tensors.insert(known, {x, replace(x, written), false});
      known->written |= written;
      return known->used;
    }));
  }
  const auto is_written_back = [](const Replaced& tensor) {
    return tensor.written && !tensor.given.is_same(tensor.used);
  };
  for (const Replaced& to : tensors) {
    if (!is_written_back(to) || !to.given.has_storage()) continue;
    at::assert_no_internal_overlap(to.given);
    for (const Replaced& from : tensors)
      if (from.given.has_storage() && !from.given.is_same(to.given))
        at::assert_no_partial_overlap(to.given, from.given);
  }
  op.redispatchBoxed(c10::DispatchKeySet(key), &arguments);
  for (const Replaced& tensor : tensors)
    if (is_written_back(tensor)) write_back(tensor.given, tensor.used);
  torch::jit::drop(*stack, count);
  for (const c10::IValue& value : arguments)
    stack->push_back(map_tensors(value, [&](const at::Tensor& y) {
      if (!y.defined()) return y;
      const Replaced* argument = nullptr;
      for (const Replaced& tensor : tensors) // an input may have the memory of a result
        if (tensor.used.is_same(y) && (!argument || tensor.written)) argument = &tensor;
      return argument ? argument->given : finish(y);
    }));
}

} // namespace openreg
