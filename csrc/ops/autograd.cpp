// Boxed kernels that operators register: autocast policies, second derivatives by reference, and replacements for
// autograd if an operator has no derivative.
#include "ops/autograd.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <set>

#include "backend/functorch.h"
#include "backend/map_tensors.h"

namespace openreg::ops {
namespace {

using Values = torch::jit::Stack;

template <class F>
void replace_tensors(Values& values, const F& f) {
  for (auto& value : values) value = map_tensors(value, [&](const Tensor& x) { return x.defined() ? f(x) : x; });
}

variable_list tensors_of(Values values) {
  variable_list out;
  replace_tensors(values, [&](const Tensor& x) { return out.emplace_back(x); });
  return out;
}

// `values` with its tensors replaced by `tensors`, in order.
Values with_tensors(Values values, const variable_list& tensors) {
  auto next = tensors.begin();
  replace_tensors(values, [&](const Tensor&) { return *next++; });
  return values;
}

// ---- autocast ----

class Autocast : public c10::OperatorKernel {
 public:
  Autocast(Cast policy, c10::DeviceType device) : policy_(policy), device_(device) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
    Values arguments = torch::jit::pop(*stack, op.schema().arguments().size());
    at::ScalarType type = policy_ == Cast::kLower ? at::autocast::get_autocast_dtype(device_) : at::kFloat;
    if (policy_ == Cast::kPromote) {
      std::optional<at::ScalarType> widest;
      for (const Tensor& x : tensors_of(arguments))
        if (x.is_floating_point()) widest = c10::promoteTypes(widest.value_or(x.scalar_type()), x.scalar_type());
      type = widest.value_or(type);
    }
    replace_tensors(arguments, [&](const Tensor& x) {
      if (!x.is_floating_point() || x.scalar_type() == at::kDouble) return x; // autocast leaves float64 alone
      return at::autocast::cached_cast(type, x, device_);
    });
    op.callBoxed(&arguments);
    std::move(arguments.begin(), arguments.end(), std::back_inserter(*stack));
  }

 private:
  Cast policy_;
  c10::DeviceType device_;
};

// ---- second derivatives ----

struct ByReference {
  static constexpr bool kOpaque = true; // its backward runs graphs that it creates itself

  static auto forward(AutogradContext*, at::TensorList tensors, const c10::OperatorHandle& op, const Values& arguments,
      Values* results) {
    // Saved variables hold the tensors; this keeps their positions.
    c10::List<c10::IValue> rest(c10::AnyType::get());
    for (auto& value : with_tensors(arguments, variable_list(tensors.size(), not_given())))
      rest.push_back(std::move(value));
    *results = arguments;
    op.callBoxed(results);
    return saving(tensors_of(*results), tensors, op.schema().name(), std::move(rest));
  }

  static std::tuple<variable_list> backward(AutogradContext*, const variable_list& grad, variable_list tensors,
      const std::string& name, const c10::List<c10::IValue>& rest) {
    const bool again = at::GradMode::is_enabled();
    at::AutoGradMode differentiate(true);
    // Aliases, because a tensor that is passed as two arguments has a derivative as each of them. A tensor of a
    // torch.func transform that has since ended counts as the wrapped tensor, which is a leaf here.
    variable_list inputs, outputs, output_grads;
    std::vector<bool> wanted;
    bool recorded = false; // whether anything that the gradients depend on requires one
    for (const Tensor& dy : grad) recorded |= dy.defined() && is_recorded(dy);
    for (Tensor& x : tensors) {
      recorded |= is_recorded(x);
      wanted.push_back(x.requires_grad());
      if (!wanted.back()) continue;
      x = x.view_as(x);
      if (!x.requires_grad()) x = x.detach().set_requires_grad(true);
      inputs.push_back(x);
    }
    Values stack = with_tensors(Values(rest.begin(), rest.end()), tensors);
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), &stack);
    auto of_output = grad.begin();
    for (const Tensor& y : tensors_of(stack)) {
      if (const Tensor& dy = *of_output++; dy.defined() && y.requires_grad()) {
        outputs.push_back(y);
        output_grads.push_back(dy);
      }
    }
    variable_list found(inputs.size());
    if (!outputs.empty())
      found = torch::autograd::grad(outputs, inputs, output_grads, std::nullopt, again, /*allow_unused=*/true);
    if (!recorded)
      for (Tensor& x : found) x = x.defined() ? x.detach() : x; // with respect to the leaves created here
    variable_list out(tensors.size());
    auto next = found.begin();
    for (size_t i = 0; i < tensors.size(); ++i)
      if (wanted[i]) out[i] = *next++;
    return out;
  }
};

void by_reference_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Values arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const variable_list tensors = tensors_of(arguments);
  Values results = arguments;
  if (has_tangent(tensors)) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), &results);
  } else {
    const variable_list out = record<ByReference>("by_reference", at::TensorList(tensors), op, arguments, &results);
    results = with_tensors(std::move(results), out);
  }
  std::move(results.begin(), results.end(), std::back_inserter(*stack));
}

// ---- see Note [Operators that change their arguments] ----

void refuse_gradients_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const variable_list tensors = tensors_of({values[i]});
    for (size_t k = 0; k < tensors.size(); ++k) {
      const Tensor& x = tensors[k];
      const bool gradient = at::GradMode::is_enabled() && x.requires_grad();
      if (!gradient && !has_tangent(x)) continue;
      const std::string name = arguments[i].name() + (values[i].isTensor() ? "" : "[" + std::to_string(k) + "]");
      TORCH_CHECK(!gradient, schema.name().substr(schema.name().rfind(':') + 1), ": expected no gradient, but ", name,
          " requires one and there is no derivative; call it under torch.no_grad()");
      TORCH_CHECK(false, schema.name().substr(schema.name().rfind(':') + 1), ": expected no tangent, but ", name,
          " carries one and there is no derivative; take its primal with torch.autograd.forward_ad.unpack_dual()");
    }
  }
  at::AutoDispatchBelowAutograd below_autograd;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

void count_changes_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  Values written;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (const auto* alias = arguments[i].alias_info(); alias && alias->isWrite())
      written.push_back(torch::jit::peek(*stack, i, arguments.size()));
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const Tensor& x : tensors_of(std::move(written))) torch::autograd::increment_version(x);
}

} // namespace

torch::CppFunction refuse_gradients() {
  return torch::CppFunction::makeFromBoxedFunction<&refuse_gradients_kernel>();
}

torch::CppFunction count_changes() {
  return torch::CppFunction::makeFromBoxedFunction<&count_changes_kernel>();
}

torch::CppFunction autocast(Cast policy, c10::DeviceType device) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Autocast>(policy, device));
}

void autocast(torch::Library& m, const char* name, Cast policy) {
  for (const auto device : std::set{identity.type, at::kCPU, at::kCUDA})
    m.impl(name,
        torch::dispatch(at::autocast::get_autocast_dispatch_key_from_device_type(device), autocast(policy, device)));
}

torch::CppFunction differentiate_by_reference() {
  return torch::CppFunction::makeFromBoxedFunction<&by_reference_kernel>();
}

} // namespace openreg::ops
