#include "aten/traits/results_in_own_memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aten/meta_kernels.h"
#include "aten/traits/replaced_arguments.h"
#include "aten/traits/traits.h"
#include "backend/identity/identity.h"
#include "backend/map_tensors.h"

// Note [Results in their own memory]
// Some CPU kernels step through an out= tensor as if it were contiguous: they write the wrong elements of a permuted or
// sliced one and past its end. Others resize a result of one element to the size of their input while they compute, and
// so write over its neighbors. For these the device computes into contiguous memory and copies.
// Some read an input this way; the device passes them a copy. Some do so only in their out= form: a batch norm with its
// input, and a transposed convolution, which writes to out= in the memory format of its inputs. Any kernel that PyTorch
// does not generate from a structured definition may step through its results this way. Structured kernels get strides
// that they can write to, except for those whose row in traits.cpp says that they ignore them. The check "layouts" of
// `python -m openreg_ops conformance` finds those that are missing there.
namespace openreg {
namespace {

using c10::DispatchKey;

bool is_result(const c10::Argument& argument) {
  return argument.kwarg_only() && is_written(argument) && argument.type()->kind() == c10::TypeKind::TensorType;
}

bool honors_strides(const c10::OperatorHandle& op) {
  // Random numbers are drawn in memory order, and the CPU's results depend on it.
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return true;
  static std::mutex mutex;
  static auto* known = new std::unordered_map<c10::OperatorName, bool>; // leaked, like everything that outlives main()
  std::lock_guard lock(mutex);
  auto it = known->find(op.operator_name());
  if (it == known->end())
    it = known->emplace(op.operator_name(), !traits_of(op).ignores_strides && is_structured_out(op)).first;
  return it->second;
}

// Returns true if the memory of `x` differs from a new tensor's in a way that such a kernel may handle wrongly.
bool lies_apart(const at::Tensor& x) {
  if (!x.defined() || !x.unsafeGetTensorImpl()->key_set().has(identity.dense) || !x.has_storage()) return false;
  return !x.is_contiguous() || (x.numel() == 1 && x.storage().nbytes() > x.nbytes());
}

bool same_geometry(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_alias_of(b) && a.storage_offset() == b.storage_offset() &&
      a.sizes() == b.sizes() && a.strides() == b.strides();
}

} // namespace

std::vector<size_t> read_as_contiguous(const c10::OperatorHandle& op) {
  std::vector<size_t> found;
  for (const char* name : traits_of(op).contiguous)
    if (const auto i = op.schema().argumentIndexWithName(name)) found.push_back(static_cast<size_t>(*i));
  return found;
}

void make_contiguous(const std::vector<size_t>& which, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
  const bool rows = traits_of(op).contiguous_rows;
  for (const size_t i : which) {
    c10::IValue& value = (*stack)[stack->size() - op.schema().arguments().size() + i];
    if (!value.isTensor()) continue;
    const at::Tensor& x = value.toTensor();
    if (rows && x.defined() && x.dim() && (x.size(-1) <= 1 || x.stride(-1) == 1)) continue;
    if (on_device(x) && x.layout() == at::kStrided && !x.is_nested() && !x.is_contiguous()) value = x.contiguous();
  }
}

bool takes_results(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), is_result);
}

bool call_with_own_memory(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t count = arguments.size(), first = stack->size() - count;
  std::vector<std::pair<at::Tensor, at::Tensor>> results; // given, and what the kernel writes to instead
  for (size_t i = 0; i < count; ++i)
    if (is_result(arguments[i]))
      if (const at::Tensor& x = (*stack)[first + i].toTensor(); lies_apart(x) &&
          std::ranges::none_of(results, [&](const auto& known) { return same_geometry(x, known.first); }))
        results.emplace_back(x, at::Tensor());
  if (results.empty() || honors_strides(op)) return false;

  for (auto& [given, own] : results) {
    c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
    own = given.clone(at::MemoryFormat::Contiguous);
  }
  const auto own_of = [&](const at::Tensor& x, bool) {
    for (const auto& [given, own] : results) // an input that is also the result stays that way
      if (x.layout() == at::kStrided && x.has_storage() && same_geometry(x, given)) return own;
    return x;
  };
  call_with_replaced(op, stack, identity.dense, own_of, [](const at::Tensor& y) { return y; });
  return true;
}

namespace {

// Operators that PyTorch composes of others, on CUDA as well: soft_margin_loss and fft_fftfreq resize views of their
// result on the way, and stack leaves a strided one-element result unwritten.
void composite(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  if (!call_with_own_memory(op, stack)) op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("fft_fftfreq.out", torch::CppFunction::makeFromBoxedFunction<&composite>());
  m.impl("soft_margin_loss.out", torch::CppFunction::makeFromBoxedFunction<&composite>());
  m.impl("stack.out", torch::CppFunction::makeFromBoxedFunction<&composite>());
}

} // namespace openreg
