// What an operator registers besides its kernel: its derivative and its autocast policy.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/alias.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/identity/identity.h"

namespace torch::autograd {
struct AutogradContext;
}

namespace openreg::ops {

using at::Tensor;
using variable_list = std::vector<Tensor>;

// Note [Operator calls]
// An autograd kernel reaches its operator, and the operator's backward, through the dispatcher, so that
// compilers and functional transforms see both. `call` has the signature of the operator's kernel.
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}
// The name under which autograd() registers the derivative of a kernel's operator.
template <auto kernel>
inline const char* name_of = nullptr;
// The operator of a kernel, looked up once: op<rms_norm>("openreg::rms_norm").call(x, weight, eps).
template <auto kernel>
const auto& op(const char* name = name_of<kernel>) {
  static const auto found = [name] {
    TORCH_INTERNAL_ASSERT(name != nullptr, "pass the operator's name: autograd() has registered none for this kernel");
    return find<std::remove_pointer_t<decltype(kernel)>>(name);
  }();
  return found;
}

// Note [Derivatives]
// The derivative of a kernel is a struct with two functions:
//   static auto forward(AutogradContext* ctx, the kernel's arguments...)
//     calls the operator, and returns saving(its results, what backward needs...), of any types;
//   static auto backward(AutogradContext* ctx, const variable_list& grad, what was saved...)
// returns the gradients of the tensor arguments: a Tensor, or a tuple of Tensors and, for lists of tensors, of lists of
// the same length. It may leave out trailing gradients that are not lists; an undefined tensor means no gradient.
// If an operator has several results, the gradient of an unused result is undefined.
// m.impl("rms_norm", autograd<RmsNorm, rms_norm>("openreg::rms_norm")) registers it. It also handles arguments that are
// not tensors, forward mode and torch.func.
// Each could be its own torch::autograd::Function. A single Function, in autograd.cpp, runs them all, because compiling
// one takes seven seconds.

// The part of torch::autograd::AutogradContext that derivatives need. Compiling its header takes ten seconds.
class AutogradContext {
 public:
  // Default: for a forward that is not recorded.
  explicit AutogradContext(torch::autograd::AutogradContext* context) : context_(context) {}
  // Whether the i-th tensor argument needs a gradient. Each tensor in a list counts as one argument, and so does a
  // tensor that is not given.
  bool needs_input_grad(size_t i) const;
  void mark_non_differentiable(const variable_list& outputs);

 private:
  torch::autograd::AutogradContext* context_;
};

template <class Results, class... Saved>
struct Saving {
  Results results;
  std::tuple<Saved...> saved;
};
template <class Results, class... Saved>
Saving<Results, Saved...> saving(Results results, Saved... saved) {
  return {std::move(results), std::tuple<Saved...>(std::move(saved)...)};
}

template <class T>
constexpr bool is_tensor = std::is_same_v<T, Tensor> || std::is_same_v<T, std::optional<Tensor>>;
template <class T>
constexpr bool is_list = !is_tensor<T> && std::is_convertible_v<const T&, at::TensorList>;

// The tensors of an argument; an undefined one if it is not given.
template <class T>
at::TensorList tensors_in(const T& value) {
  if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    static const Tensor undefined;
    return value ? *value : undefined;
  } else if constexpr (is_tensor<T> || is_list<T>) return value;
  else return {};
}

// The arguments of backward: the tensors, including those in lists, and everything else with the lengths of the lists.
struct Kept {
  template <class... T>
  explicit Kept(const std::tuple<T...>& all) {
    std::apply([&](const auto&... each) { (keep(each), ...); }, all);
  }
  variable_list tensors;
  std::vector<c10::IValue> values;

 private:
  template <class T>
  void keep(const T& value) {
    const at::TensorList list = tensors_in(value);
    tensors.insert(tensors.end(), list.begin(), list.end());
    if constexpr (is_list<T>) values.emplace_back(static_cast<int64_t>(list.size()));
    else if constexpr (!is_tensor<T>) values.emplace_back(value);
  }
};

inline std::optional<Tensor> if_defined(const Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

// The saved values, one after the other.
class Saved {
 public:
  // If no tensor was saved, a graph may run backward twice, so we skip the context, which rejects that.
  Saved(torch::autograd::AutogradContext* context, bool tensors);
  template <class T>
  auto take() {
    if constexpr (std::is_same_v<T, Tensor>) return std::move(tensors_[tensor_++]);
    else if constexpr (is_tensor<T>) return if_defined(tensors_[tensor_++]);
    else if constexpr (is_list<T>) {
      const auto first = tensors_.begin() + tensor_, last = first + next().toInt();
      tensor_ = last - tensors_.begin();
      return variable_list(first, last);
    } else if constexpr (std::is_same_v<T, std::string_view>) return next().toStringView();
    else return next().template to<T>();
  }

 private:
  const c10::IValue& next();
  torch::autograd::AutogradContext* context_;
  variable_list tensors_;
  int64_t tensor_ = 0;
  size_t value_ = 0;
};

template <class T>
using Taken = decltype(std::declval<Saved>().take<T>());

// The tensors among the arguments. A missing tensor is replaced by one that needs no gradient.
const Tensor& not_given();
template <class... Args>
variable_list tensors_among(const Args&... args) {
  variable_list out;
  const auto add = [&](at::TensorList list) {
    for (const Tensor& x : list) out.push_back(x.defined() ? x : not_given());
  };
  (add(tensors_in(args)), ...);
  return out;
}

// Gradients in the order of tensors_among(args...).
template <class... Args, class... Gradients>
variable_list for_arguments(const std::tuple<Gradients...>& gradients) {
  constexpr size_t have = (size_t(is_tensor<std::decay_t<Args>> || is_list<std::decay_t<Args>>) + ... + 0);
  static_assert(sizeof...(Gradients) <= have,
      "expected backward to return a gradient for each argument that is a tensor or a list of tensors, and no other");
  variable_list out;
  const auto add = [&](at::TensorList list) { out.insert(out.end(), list.begin(), list.end()); };
  std::apply([&](const auto&... each) { (add(each), ...); }, gradients);
  out.resize(out.size() + have - sizeof...(Gradients));
  return out;
}
template <class... Args>
variable_list for_arguments(const Tensor& gradient) {
  return for_arguments<Args...>(std::tuple(gradient));
}

// A derivative's backward without its types.
struct Rule {
  c10::IValue name;
  variable_list (*backward)(AutogradContext*, const variable_list& grad, Saved&);
  bool saves_tensors;
  bool traceable; // compiled autograd puts its backward into a graph
  bool view = false;
};
// Registers a rule under its name for the nodes of the graph.
const Rule& add_rule(Rule rule);

// The result of a derivative's forward, without its types.
struct Recorded {
  variable_list results;
  Kept kept;
  bool materialize = true; // whether the gradient of an unused result is zeros
};
// Note [Functions under torch.func]
// Function::apply refuses to run inside grad, vjp and jvp transforms, because a forward may do things that lose a
// derivative there. Our forwards save arguments and call one operator below autograd, like ATen's generated kernels,
// which work. So record() hides the transforms' layers from the check, and BelowAutograd, with which the forward of
// every derivative begins, restores them before the operator is called. It also undoes the no_grad under which Function
// runs a forward: the operator continues to the next outer transform, which has its own derivative to record.

using Forwards = c10::function_ref<Recorded(AutogradContext*)>;

// Runs a forward, records its results if a gradient of `tensors` is needed, and returns them. If a tensor is None (not
// `given`), Function::apply would not say what is wrong; the operator's kernel does.
variable_list record(const Rule& rule, const variable_list& tensors, bool given, Forwards forward);

// In a forward: restores the layers; returns whether gradients were being recorded.
bool restore_layers();

// While it lives, operators run below autograd: their kernels, or the next outer transform.
class BelowAutograd {
  at::AutoGradMode grad_mode_{restore_layers()};
  at::AutoDispatchBelowADInplaceOrView guard_;
};

template <class Arg>
bool is_given(const Arg& arg) {
  if constexpr (std::is_same_v<Arg, Tensor>) return arg.defined();
  else return true;
}

template <class F, class Results, class... T, class... Args>
Rule rule_of(const char* name, Saving<Results, T...> (*)(AutogradContext*, Args...)) {
  const auto backward = [](AutogradContext* ctx, const variable_list& grad, Saved& saved) {
    const std::tuple<Taken<T>...> values{saved.take<T>()...};
    return for_arguments<Args...>(
        std::apply([&](const auto&... value) { return F::backward(ctx, grad, value...); }, values));
  };
  return {name, backward, ((is_tensor<T> || is_list<T>) || ...), !requires { F::kOpaque; }};
}

// Records the results of the derivative F. Its name must be unique.
template <class F, class... Args>
variable_list record(const char* name, const Args&... args) {
  static const Rule& rule = add_rule(rule_of<F>(name, &F::forward));
  return record(rule, tensors_among(args...), (is_given(args) && ...), [&](AutogradContext* ctx) -> Recorded {
    BelowAutograd below_autograd;
    const auto out = F::forward(ctx, args...);
    if constexpr (requires { std::tuple_size<decltype(out.results)>::value; })
      return {std::apply([](const auto&... y) { return variable_list{y...}; }, out.results), Kept(out.saved), false};
    else return {tensors_among(out.results), Kept(out.saved)};
  });
}

// Note [Forward mode]
// C++ autograd functions have no forward-mode derivative. If an argument carries a tangent, an operator is replaced by
// its reference in meta/, whose operators have forward-mode derivatives. The reference is the kernel of the Autograd
// alias key, and therefore of AutogradCPU.
template <class Arg>
bool has_tangent(const Arg& arg) {
  return std::ranges::any_of(
      tensors_in(arg), [](const Tensor& x) { return x.defined() && x._fw_grad(/*level=*/0).defined(); });
}
template <class Return, class... Args>
Return decompose(const c10::TypedOperatorHandle<Return(Args...)>& op, std::type_identity_t<Args>... args) {
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), std::forward<Args>(args)...);
}

template <class F, auto kernel, class Return, class... Args>
Return autograd_kernel(Args... args) {
  if ((has_tangent(args) || ...)) return decompose(op<kernel>(), std::forward<Args>(args)...);
  variable_list out = record<F>(name_of<kernel>, args...);
  if constexpr (std::is_same_v<Return, Tensor>) return std::move(out[0]);
  else
    return [&]<size_t... i>(std::index_sequence<i...>) { return Return(std::move(out[i])...); }(
               std::make_index_sequence<std::tuple_size_v<Return>>());
}

template <class Return, class... Args, class... T>
constexpr bool is_forward_of(Return (*)(Args...), Saving<Return, T...> (*)(AutogradContext*, Args...)) {
  return true;
}
constexpr bool is_forward_of(...) {
  return false;
}
template <class F, class Results, class... T, class... Args>
constexpr bool takes_saved(Saving<Results, T...> (*)(AutogradContext*, Args...)) {
  return requires(
      AutogradContext* ctx, const variable_list& grad, const Taken<T>&... saved) { F::backward(ctx, grad, saved...); };
}

// The autograd kernel of operator `name`, whose derivative is F.
template <class F, auto kernel>
auto autograd(const char* name) {
  constexpr bool has_forward = requires { &F::forward; };
  static_assert(has_forward, "expected a struct with static functions forward and backward: see Note [Derivatives]");
  if constexpr (has_forward) {
    constexpr bool fits = is_forward_of(kernel, &F::forward);
    static_assert(fits,
        "expected forward(AutogradContext*, the kernel's arguments...) to return saving(the kernel's results, what "
        "backward needs...)");
    if constexpr (fits) {
      static_assert(takes_saved<F>(&F::forward),
          "expected a static backward(AutogradContext*, const variable_list& grad, what forward saves...)");
      name_of<kernel> = name;
      return []<class Return, class... Args>(
                 Return (*)(Args...)) { return &autograd_kernel<F, kernel, Return, Args...>; }(kernel);
    }
  }
}

// Note [Identity operators]
// scale_gradient and the custom_autograd_fn_* return their argument with a gradient that is, on purpose, not the
// derivative. Outside of torch.func, their autograd kernels never call the operator again. They consist of ATen's
// views, which compilers, functionalization and ADInplaceOrView know, so writes through the output are handled
// correctly. The operator's own kernel runs if autograd is completely off (inference mode). As the Functionalize
// kernel, it keeps the operator, whose output aliases its input, out of functionalized graphs. No kernel touches
// memory, so these are the kernels of every device.
// Inside a torch.func transform the operator is called again, because each outer transform has its own gradient to
// change. In forward mode they have no reference: the kernel runs on the argument without its tangent, and the output
// gets the tangent that is the transpose of the gradient.

template <class F, auto kernel, class... Args>
Tensor view_kernel(const Tensor& x, Args... args) {
  static const Rule& rule = add_rule({name_of<kernel>,
      [](AutogradContext*, const variable_list& grad, Saved& saved) {
        const std::tuple<Args...> args{saved.take<Args>()...};
        return variable_list{
            std::apply([&](const Args&... args) -> Tensor { return F::gradient(grad[0], args...); }, args)};
      },
      /*saves_tensors=*/false, /*traceable=*/true, /*view=*/true});
  const auto view = [&](const Tensor& x) {
    if (!c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode)) return F::view(x);
    at::AutoGradMode grad_mode(restore_layers());
    const auto in_outer_transforms = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return op<kernel>().call(x, args...);
    };
    return at::alias(in_outer_transforms()); // a view, so that autograd rejects writes that would lose this gradient
  };
  const bool forward_mode = has_tangent(x);
  const Tensor primal = forward_mode ? x._fw_primal(/*level=*/0) : x;
  const Tensor y = record(rule, {primal}, x.defined(),
      [&](AutogradContext*) -> Recorded { return {{view(primal)}, Kept(std::tuple(args...))}; })[0];
  return forward_mode ? at::_make_dual(y, F::gradient(x._fw_grad(/*level=*/0), args...), /*level=*/0) : y;
}

// The autograd kernel of operator `name`, an identity: F::view(x) creates its result, and F::gradient(grad, args...)
// computes the gradient of x from the gradient of the result and the arguments after x.
template <class F, auto kernel>
auto autograd_of_view(const char* name) {
  name_of<kernel> = name;
  return []<class... Args>(Tensor (*)(const Tensor&, Args...)) { return &view_kernel<F, kernel, Args...>; }(kernel);
}

// The autograd kernel of a backward operator, for double backward: runs the operator's own kernel, and
// differentiates its reference in meta/, any number of times, when a derivative is asked for.
torch::CppFunction differentiate_by_reference();

// Note [Operators without a derivative]
// autogradNotImplementedFallback(), the kernel of the Autograd alias key, makes backward through an operator an error.
// It inspects the schema on every call, which takes as long as a kernel of 64 elements. So an operator that writes to
// none of its arguments can register this for AutogradPrivateUse1. It leaves the call to the fallback, the kernel of
// AutogradOther, only if there is something to record or reject.
template <class Arg>
bool requires_gradient(const Arg& arg) {
  return std::ranges::any_of(tensors_in(arg), [](const Tensor& x) { return x.defined() && x.requires_grad(); });
}
template <auto kernel, class Return, class... Args>
Return kernel_without_derivative(c10::DispatchKeySet keys, Args... args) {
  const bool recorded = at::GradMode::is_enabled() && (requires_gradient(args) || ...);
  if (recorded || (has_tangent(args) || ...)) [[unlikely]] {
    const auto fallback = (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradOther);
    return op<kernel>().redispatch(fallback, std::forward<Args>(args)...);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return op<kernel>().redispatch(keys & c10::after_ADInplaceOrView_keyset, std::forward<Args>(args)...);
}
// The kernel of operator `name` for AutogradPrivateUse1.
template <auto kernel>
auto without_derivative(const char* name) {
  name_of<kernel> = name;
  return []<class Return, class... Args>(
             Return (*)(Args...)) { return &kernel_without_derivative<kernel, Return, Args...>; }(kernel);
}

// Note [Operators that change their arguments]
// Torch's fallbacks for operators without a derivative check what an operator returns. An operator that only writes to
// its arguments would run, silently lose its gradient, and leave their version counters unchanged, so a backward that
// saved them would not notice. So, for operators that return nothing and have no derivative: at Autograd, reject
// arguments that require a gradient or carry a tangent;
torch::CppFunction refuse_gradients();
// at ADInplaceOrView, bump the version of every argument that the schema says is written to.
torch::CppFunction count_changes();

// How autocast casts an operator's floating-point arguments.
enum class Cast {
  kFloat32, // half types to float32
  kPromote, // all to the widest among them
  kLower,   // float32 and half types to autocast's dtype
};
// The kernel of a policy for one device.
torch::CppFunction autocast(Cast policy, c10::DeviceType device);
// Registers the policy, or a custom kernel, for openreg, cpu and cuda.
void autocast(torch::Library& m, const char* name, Cast policy);
template <class F>
void autocast(torch::Library& m, const char* name, F* kernel) {
  using c10::DispatchKey;
  for (const auto key : {identity.autocast, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA})
    m.impl(name, torch::dispatch(key, kernel));
}

} // namespace openreg::ops
