// What an operator registers besides its kernel: its derivative and its autocast policy.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "backend/identity/identity.h"
#include "ops/record.h"

namespace openreg::ops {

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
// Each could be its own torch::autograd::Function. A single Function, in record.cpp, runs them all, because compiling
// one takes seven seconds.

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
  for (const auto key : std::set{identity.autocast, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA})
    m.impl(name, torch::dispatch(key, kernel));
}

} // namespace openreg::ops
