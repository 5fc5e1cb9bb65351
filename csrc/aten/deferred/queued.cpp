#include "aten/deferred/queued.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "aten/deferred/signature.h"
#include "aten/deferred/trial.h"
#include "aten/meta_kernels.h"
#include "aten/traits/host_scalars.h"
#include "aten/traits/traits.h"
#include "backend/allocator.h"
#include "backend/identity/identity.h"
#include "backend/map_tensors.h"

namespace openreg {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;

// Leaked, like everything that a thread may use after main().
auto& meta_kernels() {
  static auto* kernels = new std::unordered_map<std::string, c10::KernelFunction>;
  return *kernels;
}

// How one operator is queued.
struct Plan {
  bool possible = false;
  const Traits* traits = nullptr;
  const c10::KernelFunction* meta = nullptr; // or the one that the dispatcher has
  std::vector<bool> written;              // by argument
  std::vector<bool> number;               // likewise: of type Scalar or float
  std::optional<c10::OperatorHandle> out; // for an operator that returns new tensors: its out= form
};

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

bool is_number(const c10::Argument& argument) {
  const auto& type = argument.type();
  return type->isSubtypeOf(*c10::OptionalType::create(c10::NumberType::get())) &&
      !type->isSubtypeOf(*c10::OptionalType::create(c10::IntType::get()));
}

bool is_tensor(const c10::Argument& argument) {
  return argument.type()->kind() == c10::TypeKind::TensorType;
}

// The form of `schema` that takes, after its own arguments, one tensor to write to for each tensor it returns.
std::optional<c10::OperatorHandle> out_form(const c10::FunctionSchema& schema) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto& ours = schema.arguments();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name != schema.name()) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(DispatchKey::CPU)) continue;
    const auto& theirs = op->schema().arguments();
    if (theirs.size() != ours.size() + schema.returns().size()) continue;
    const bool same = std::equal(ours.begin(), ours.end(), theirs.begin(),
        [](const auto& a, const auto& b) { return a.name() == b.name() && *a.type() == *b.type(); });
    if (same && std::all_of(theirs.begin() + static_cast<std::ptrdiff_t>(ours.size()), theirs.end(), is_written))
      return op;
  }
  return std::nullopt;
}

Plan make_plan(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  Plan plan;
  plan.traits = &traits_of(op);
  bool writes = false;
  for (const auto& argument : schema.arguments()) {
    plan.written.push_back(is_written(argument));
    plan.number.push_back(is_number(argument));
    writes |= plan.written.back();
    const auto kind = argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())) ||
        argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::DeviceObjType::get()));
    if (kind) return plan;
  }
  const Traits& traits = *plan.traits;
  if (traits.inspects_results) return plan;
  if (traits.check_values && !traits.queues_check) return plan; // see Note [Unchecked arguments]
  for (const auto tag : {at::Tag::nondeterministic_seeded, at::Tag::data_dependent_output,
           at::Tag::dynamic_output_shape, at::Tag::inplace_view})
    if (op.hasTag(tag)) return plan;
  const auto& returns = schema.returns();
  if (returns.empty() || !std::all_of(returns.begin(), returns.end(), is_tensor)) return plan;
  if (const auto known = meta_kernels().find(c10::toString(op.operator_name())); known != meta_kernels().end()) {
    plan.meta = &known->second;
  } else if (!traits.fills && !has_cpp_meta_kernel(op)) {
    return plan;
  }
  if (writes) { // and returns what it writes to, all of it
    plan.possible = std::count(plan.written.begin(), plan.written.end(), true) == std::ssize(returns) &&
        std::all_of(returns.begin(), returns.end(), [](const auto& each) { return is_written(each); }) &&
        op.hasKernelForDispatchKey(DispatchKey::CPU);
  } else if (std::none_of(returns.begin(), returns.end(), [](const auto& each) { return each.alias_info(); })) {
    plan.out = out_form(schema);
    plan.possible = plan.out.has_value();
  }
  return plan;
}

const Plan& plan_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* plans = new std::unordered_map<c10::OperatorName, Plan>;
  std::lock_guard lock(mutex);
  auto it = plans->find(op.operator_name());
  if (it == plans->end()) it = plans->emplace(op.operator_name(), make_plan(op)).first;
  return it->second;
}

bool is_integral(const at::Tensor& x) {
  return c10::isIntegralType(x.scalar_type(), /*includeBool=*/true);
}

// One tensor argument, and its replacements in the Meta kernel and in the task.
struct Argument {
  at::Tensor real, meta, host;
  bool written = false;
};

at::Tensor over(const at::Tensor& real) {
  auto* storage = real.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  auto alias = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
      c10::DataPtr(storage->_mutable_data_ptr_no_checks().get(), c10::kCPU), nullptr, /*resizable=*/false);
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(alias)), DispatchKeySet(DispatchKey::CPU), real.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(real.sizes(), real.strides(), real.storage_offset());
  return host;
}

class Arguments {
 public:
  explicit Arguments(const void* op) : signature(op) {
    signature.add(at::globalContext().deterministicAlgorithms()); // some kernels then raise
  }
  Signature signature;
  int scalars = 0; // 0-dim CPU tensors among the arguments

  // Whether the tensor can take part in queued work.
  bool add(const at::Tensor& x, bool written) {
    if (!x.defined()) return signature.add(0), true;
    scalars += x.is_cpu();
    if (Argument* known = find(x)) {
      known->written |= written;
      signature.add(static_cast<uint64_t>(known - all_.data()) + 1);
      return true;
    }
    if (all_.size() == kMost) return false;
    Argument each{x, {}, {}, written};
    const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
    if (x.is_cpu()) { // a number: by value
      if (x.dim() != 0 || written || x.layout() != at::kStrided || !x.has_storage() || x.is_conj() || x.is_neg() ||
          x._is_zerotensor())
        return false;
      each.host = x.detach().clone();
      if (!add_number(x)) return false;
    } else {
      const auto refused =
          DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor, DispatchKey::Python});
      if (!impl->key_set().has(identity.dense) || impl->key_set().has_any(refused) || !x.has_storage()) return false;
      auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
      if (c10::impl::cow::is_cow_data_ptr(storage->data_ptr())) return false;
      if (!storage->data_ptr().get() && x.numel()) return false;
      if (device_ >= 0 && device_ != x.get_device()) return false;
      device_ = x.get_device();
      each.host = over(x);
    }
    each.meta = at::Tensor(at::detail::empty_strided_meta(x.sizes(), x.strides(), x.scalar_type()));
    signature.add_tensor(x, 2 * all_.size() + impl->is_wrapped_number());
    if (impl->is_wrapped_number()) {
      each.meta.unsafeGetTensorImpl()->set_wrapped_number(true);
      each.host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    all_.push_back(std::move(each));
    return true;
  }

  // Any argument of a boxed call; `number`: of type Scalar or float.
  bool add(const c10::IValue& value, bool written, bool number) {
    if (value.isTensor()) return add(value.toTensor(), written);
    if (value.isTensorList()) {
      const auto list = value.toTensorVector();
      signature.add(list.size());
      return std::all_of(list.begin(), list.end(), [&](const at::Tensor& x) { return add(x, written); });
    }
    if (value.isOptionalTensorList()) {
      const auto list = value.toOptionalTensorVector();
      signature.add(list.size());
      return std::all_of(list.begin(), list.end(),
          [&](const std::optional<at::Tensor>& x) { return add(x.value_or(at::Tensor()), written); });
    }
    if (!number || !(value.isInt() || value.isDouble())) return signature.add_value(value);
    signature.add(value.isInt());
    signature.add_number(value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble());
    return true;
  }

  // If a written tensor shares memory with another, the kernel's own overlap check must see both.
  bool apart() const {
    if (std::none_of(all_.begin(), all_.end(), [](const Argument& a) { return a.written; })) return true;
    for (const Argument& a : all_)
      for (const Argument& b : all_)
        if (a.written && &a != &b && a.real.is_alias_of(b.real)) return false;
    return true;
  }

  Argument* find(const at::Tensor& x) {
    for (Argument& each : all_)
      if (each.real.is_same(x)) return &each;
    return nullptr;
  }
  // The index in all() of one that was added.
  size_t place(const at::Tensor& x) const {
    return static_cast<size_t>(std::find_if(all_.begin(), all_.end(), [&](const Argument& each) {
      return each.real.is_same(x);
    }) - all_.begin());
  }
  const std::vector<Argument>& all() const { return all_; }
  int device() const { return device_; } // -1: no tensor is on one

 private:
  // The value of a 0-dim CPU tensor.
  bool add_number(const at::Tensor& x) {
    const auto type = x.scalar_type();
    if (type == at::kDouble) signature.add_number(*x.const_data_ptr<double>());
    else if (type == at::kLong) signature.add_number(static_cast<double>(*x.const_data_ptr<int64_t>()));
    else if (x.is_floating_point() || is_integral(x)) signature.add_number(x.item().toDouble());
    else if (x.is_complex()) return signature.add_value(x.item().toComplexDouble());
    else return false;
    return true;
  }

  static constexpr size_t kMost = 64; // looking up more takes longer than running the operator
  std::vector<Argument> all_;
  int device_ = -1;
};

// Whether the kernel may convert its arguments to another dtype. It would use the default dtype at the time it runs,
// and on the CPU the layout of a result then follows the layout of the converted arguments.
bool may_convert(
    const c10::FunctionSchema& schema, const Arguments& arguments, const Stack& stack, const Stack& results) {
  bool integral = false, other = false;
  std::optional<at::ScalarType> type;
  for (const Argument& each : arguments.all()) {
    const at::Tensor& x = each.real;
    (is_integral(x) ? integral : other) = true;
    if (x.dim() == 0) continue;
    if (type && *type != x.scalar_type()) return true;
    type = x.scalar_type();
  }
  for (size_t i = stack.size() - schema.arguments().size(); i < stack.size(); ++i)
    other |= stack[i].isDouble() || stack[i].isComplexDouble();
  for (const c10::IValue& y : results) other |= !is_integral(y.toTensor());
  return (type ? c10::isIntegralType(*type, /*includeBool=*/true) : integral) && other;
}

// Whether a fill writes a real number to each element once.
bool fits(const Arguments& arguments, const Stack& stack, bool zero) {
  const at::Tensor& self = arguments.all().front().real;
  if (zero) return true;
  return self.is_floating_point() && at::has_internal_overlap(self) == at::MemOverlap::No &&
      std::none_of(stack.begin(), stack.end(), [](const c10::IValue& value) { return value.isComplexDouble(); }) &&
      std::all_of(arguments.all().begin(), arguments.all().end(),
          [&](const Argument& each) { return each.written || (each.real.dim() == 0 && !each.real.is_complex()); });
}

// Calls `op` on scratch memory; `results` come from the Meta kernel, for an out= form. `tiny`: with two elements in
// each dimension, and results that the kernel resizes. Unknown: it is too large.
Verdict try_out(
    const c10::OperatorHandle& op, const Arguments& arguments, const Stack& real, const Stack& results, bool tiny) {
  LendDeviceMemory none(-1);
  Scratch scratch;
  std::vector<at::Tensor> stand_ins;
  for (const Argument& each : arguments.all()) {
    if (each.real.is_cpu()) stand_ins.push_back(each.host);
    else stand_ins.push_back(tiny ? scratch.tiny(each.real) : scratch.like(each.real));
    if (!stand_ins.back().defined()) return Verdict::kUnknown;
  }
  Stack stack;
  for (const c10::IValue& value : real)
    stack.push_back(
        map_tensors(value, [&](const at::Tensor& x) { return x.defined() ? stand_ins[arguments.place(x)] : x; }));
  for (const c10::IValue& value : results) {
    stack.emplace_back(tiny ? scratch.like(value.toTensor(), {0}, {1}) : scratch.like(value.toTensor()));
    if (!stack.back().toTensor().defined()) return Verdict::kUnknown;
  }
  return accepts([&] {
    if (Check* check = check_of_values(traits_of(op), stack, op.schema().arguments().size())) check(op, stack);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
  })
      ? Verdict::kAccepted
      : Verdict::kRefused;
}

// Runs `kernel` on the stream's worker, with the caller's number of threads: OpenMP keeps one number per thread.
template <class Kernel>
void queue_kernel(int device, const char* name, Site site, Kernel kernel) {
  auto work = [name, kernel = std::move(kernel), threads = at::get_num_threads()]() mutable {
    if (at::get_num_threads() != threads) omp_set_num_threads(threads);
    c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
    try {
      kernel();
    } catch (const std::exception& error) { // the launch site is here; only this says which operator
      const std::string_view what = error.what();
      throw std::runtime_error(std::string(what.substr(0, what.find("\nException raised from"))) + "\nIn " + name);
    }
  };
  launch(current_stream(device), std::move(work), site);
}

} // namespace

void set_meta_kernel(const std::string& name, c10::KernelFunction kernel) {
  meta_kernels().insert_or_assign(name, std::move(kernel));
}

std::optional<c10::OperatorHandle> structured_out(const c10::OperatorHandle& op) {
  const Plan& plan = plan_of(op);
  return plan.possible ? plan.out : std::nullopt;
}

bool queue_operator(const c10::OperatorHandle& op, Stack* stack) {
  const Plan& plan = plan_of(op);
  if (!plan.possible) return false;
  const Traits& traits = *plan.traits;
  const size_t count = plan.written.size(), first = stack->size() - count;
  Arguments arguments(&plan);
  for (size_t i = 0; i < count; ++i)
    if (!arguments.add((*stack)[first + i], plan.written[i], plan.number[i])) return false;
  if (arguments.device() < 0 || !arguments.apart()) return false;
  if (arguments.scalars) // operators that may raise are called immediately
    if (const auto accepted = cpu_scalars(op.operator_name().name);
        accepted != CpuScalars::kAny && (accepted != CpuScalars::kOne || arguments.scalars > 1))
      return false;

  if (traits.check_shapes) traits.check_shapes(op, *stack);
  c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
  Stack meta, host;
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = (*stack)[first + i];
    meta.push_back(map_tensors(value, [&](const at::Tensor& x) { return x.defined() ? arguments.find(x)->meta : x; }));
    host.push_back(map_tensors(value, [&](const at::Tensor& x) { return x.defined() ? arguments.find(x)->host : x; }));
  }
  KeptWarnings warnings; // if the call is not queued, its kernel warns
  const bool zero = op.operator_name().name == "aten::zero_";
  if (traits.fills) {
    if (!fits(arguments, host, zero)) return false;
  } else try {
      c10::WarningUtils::WarningHandlerGuard keep(&warnings);
      if (plan.meta) plan.meta->callBoxed(op, DispatchKeySet(DispatchKey::Meta), &meta);
      else op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &meta);
    } catch (const c10::Error& error) {
      if (error.msg().find("Meta") != std::string::npos) return false; // a message about the replacements
      throw;
    }

  if (!traits.fills && !traits.takes_indices && may_convert(op.schema(), arguments, *stack, meta)) return false;
  if (!plan.out)
    for (const Argument& each : arguments.all()) // an out= tensor that must be resized waits
      if (each.written && each.meta.sizes() != each.real.sizes()) return false;
  const c10::OperatorHandle& queued = plan.out ? *plan.out : op;
  const uint64_t signature = arguments.signature.value();
  Verdict verdict = verdict_of(signature);
  if (verdict == Verdict::kUnknown) [[unlikely]] {
    const Stack real(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    const Stack outs = plan.out ? meta : Stack();
    verdict = try_out(queued, arguments, real, outs, traits.fills);
    if (verdict == Verdict::kUnknown) verdict = try_out(queued, arguments, real, outs, /*tiny=*/true);
    remember(signature, verdict == Verdict::kAccepted);
  }
  if (verdict != Verdict::kAccepted) return false;

  Stack results;
  if (plan.out) {
    for (const c10::IValue& value : meta) {
      const at::Tensor& y = value.toTensor();
      results.emplace_back(at::empty_strided(y.sizes(), y.strides(),
          y.options().device(identity.type, static_cast<c10::DeviceIndex>(arguments.device()))));
      host.emplace_back(over(results.back().toTensor()));
    }
  } else {
    for (size_t i = 0; i < count; ++i)
      if (plan.written[i]) results.push_back((*stack)[first + i]);
  }
  const char* name = op.operator_name().name.c_str();
  Check* check = check_of_values(traits, host, queued.schema().arguments().size());
  queue_kernel(arguments.device(), name, Site(name), [op = queued, check, host = std::move(host)]() mutable {
    if (check) check(op, host);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &host);
    host.clear();
  });
  for (const c10::Warning& each : warnings.all) c10::warn(each);
  torch::jit::drop(*stack, count);
  std::move(results.begin(), results.end(), std::back_inserter(*stack));
  return true;
}

bool queue_copy(const at::Tensor& from, const at::Tensor& to, Site site) {
  static const char op = 0;
  Arguments arguments(&op);
  if (!on_device(from) || !on_device(to) || !arguments.add(from, false) || !arguments.add(to, true) ||
      !arguments.apart() || from.is_same(to) || !at::is_expandable_to(from.sizes(), to.sizes()) ||
      at::has_internal_overlap(to) == at::MemOverlap::Yes || (from.is_complex() && !to.is_complex()))
    return false;
  // The shapes are known to match, so only the dtypes can be rejected.
  Signature dtypes(&op);
  dtypes.add(static_cast<uint64_t>(from.scalar_type()) << 8 | static_cast<uint64_t>(to.scalar_type()));
  const uint64_t signature = dtypes.value();
  Verdict verdict = verdict_of(signature);
  if (verdict == Verdict::kUnknown) [[unlikely]] {
    LendDeviceMemory none(-1);
    Scratch scratch;
    const bool accepted = accepts([&] {
      for (const auto& strides : {std::array<int64_t, 2>{2, 1}, std::array<int64_t, 2>{1, 2}}) {
        at::Tensor written = scratch.like(to, {2, 2}, {2, 1});
        const at::Tensor read = scratch.like(from, {2, 2}, strides);
        at::_ops::copy_::redispatch(DispatchKeySet(DispatchKey::CPU), written, read, /*non_blocking=*/false);
      }
    });
    remember(signature, accepted);
    verdict = accepted ? Verdict::kAccepted : Verdict::kRefused;
  }
  if (verdict != Verdict::kAccepted) return false;
  queue_kernel(arguments.device(), "aten::copy_", site,
      [from = arguments.find(from)->host, to = arguments.find(to)->host]() mutable { to.copy_(from); });
  return true;
}

} // namespace openreg
