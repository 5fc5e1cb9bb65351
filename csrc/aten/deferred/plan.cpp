#include "aten/deferred/plan.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "aten/meta_kernels.h"
#include "backend/map_tensors.h"

namespace openreg {
namespace {

using c10::DispatchKey;

// Leaked, like everything that a thread may use after main().
auto& meta_kernels() {
  static auto* kernels = new std::unordered_map<std::string, c10::KernelFunction>;
  return *kernels;
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

} // namespace

const Plan& plan_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* plans = new std::unordered_map<c10::OperatorName, Plan>;
  std::lock_guard lock(mutex);
  auto it = plans->find(op.operator_name());
  if (it == plans->end()) it = plans->emplace(op.operator_name(), make_plan(op)).first;
  return it->second;
}

void set_meta_kernel(const std::string& name, c10::KernelFunction kernel) {
  meta_kernels().insert_or_assign(name, std::move(kernel));
}

} // namespace openreg
