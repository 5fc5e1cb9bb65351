// What an operator registers beside its kernel: its derivative, and its policy for autocast.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

namespace openreg::ops {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
//     returns the gradients of the arguments that are tensors: a Tensor, or a tuple of them and, for lists of
//     tensors, of lists as long. It may leave out the last ones, if they are not lists; an undefined tensor means that
//     there is no gradient.
// Where an operator has several results, the gradient of one that nobody used is undefined.
// m.impl("rms_norm", autograd<RmsNorm, rms_norm>("openreg::rms_norm")) registers it. It does the rest: arguments that
// are not tensors, forward mode, torch.func.
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

// Saves values for backward: tensors with autograd, all else, and the lengths of lists, by their number.
template <class... T>
void save(AutogradContext* ctx, const std::tuple<T...>& values) {
  variable_list tensors;
  int number = 0;
  const auto one = [&]<class V>(const V& value) {
    const std::string key = std::to_string(number++);
    if constexpr (std::is_same_v<V, Tensor>) tensors.push_back(value);
    else if constexpr (is_tensor<V>) tensors.push_back(value.value_or(Tensor()));
    else if constexpr (is_list<V>) {
      const at::TensorList list = value;
      tensors.insert(tensors.end(), list.begin(), list.end());
      ctx->saved_data[key] = static_cast<int64_t>(list.size());
    } else ctx->saved_data[key] = value;
  };
  std::apply([&](const auto&... value) { (one(value), ...); }, values);
  ctx->save_for_backward(std::move(tensors));
}

inline std::optional<Tensor> if_defined(const Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

// What save() saved, one after the other. Where that is no tensor, a graph may run backward twice: the context, which
// refuses that, is not asked.
class Saved {
 public:
  Saved(AutogradContext* ctx, bool tensors)
      : data_(ctx->saved_data), tensors_(tensors ? ctx->get_saved_variables() : variable_list()) {}
  template <class T>
  auto take() {
    const std::string key = std::to_string(number_++);
    if constexpr (std::is_same_v<T, Tensor>) return std::move(tensors_[tensor_++]);
    else if constexpr (is_tensor<T>) return if_defined(tensors_[tensor_++]);
    else if constexpr (is_list<T>) {
      const auto first = tensors_.begin() + tensor_, last = first + data_[key].toInt();
      tensor_ = last - tensors_.begin();
      return variable_list(first, last);
    } else if constexpr (std::is_same_v<T, std::string_view>) return data_[key].toStringView();
    else return data_[key].template to<T>();
  }

 private:
  ska::flat_hash_map<std::string, c10::IValue>& data_;
  variable_list tensors_;
  int64_t tensor_ = 0;
  int number_ = 0;
};

template <class T>
using Taken = decltype(std::declval<Saved>().take<T>());

// Gradients of the arguments that are tensors, in the places of all arguments.
template <class... Args, class... Gradients>
variable_list for_arguments(const std::tuple<Gradients...>& gradients) {
  constexpr std::array<bool, sizeof...(Args)> have{(is_tensor<std::decay_t<Args>> || is_list<std::decay_t<Args>>)...};
  static_assert(sizeof...(Gradients) <= std::count(have.begin(), have.end(), true),
      "expected backward to return a gradient for each argument that is a tensor or a list of tensors, and no other");
  using Lists = std::array<at::TensorList, sizeof...(Gradients)>;
  const Lists lists = std::apply([](const auto&... each) { return Lists{at::TensorList(each)...}; }, gradients);
  variable_list out;
  size_t next = 0;
  for (const bool has : have) {
    if (has && next < lists.size()) out.insert(out.end(), lists[next].begin(), lists[next].end()), ++next;
    else out.emplace_back();
  }
  return out;
}
template <class... Args>
variable_list for_arguments(const Tensor& gradient) {
  return for_arguments<Args...>(std::tuple(gradient));
}

// Note [Functions under torch.func]
// Function::apply refuses to run inside grad, vjp and jvp transforms, since a forward may do things that lose
// a derivative there. Ours save arguments and call one operator below autograd, as ATen's generated
// kernels do, and those work. So apply() takes the transforms' layers out of the check's sight, and
// BelowAutograd, with which FunctionOf opens every forward, puts them back before the operator is called. It also
// undoes the no_grad under which Function runs a forward: the operator goes on to the next outer transform, which has a
// derivative of its own to record.
class HiddenLayers {
 public:
  HiddenLayers() : layers_(std::move(at::functorch::functorchTLSAccessor())), outer_(std::exchange(innermost_, this)) {}
  HiddenLayers(const HiddenLayers&) = delete;
  HiddenLayers& operator=(const HiddenLayers&) = delete;
  ~HiddenLayers() {
    restore();
    innermost_ = outer_;
  }
  // Puts the layers back; returns whether gradients were being recorded.
  bool restore() {
    if (layers_) at::functorch::functorchTLSAccessor() = std::move(layers_);
    return grad_mode_;
  }
  static HiddenLayers* innermost() { return innermost_; }

 private:
  static inline thread_local HiddenLayers* innermost_ = nullptr;
  std::unique_ptr<at::functorch::FuncTorchTLSBase> layers_;
  HiddenLayers* outer_;
  bool grad_mode_ = at::GradMode::is_enabled();
};

// While it lives, operators run below autograd: their kernels, or the next outer transform. For forwards of apply().
class BelowAutograd {
  at::AutoGradMode grad_mode_{HiddenLayers::innermost()->restore()};
  at::AutoDispatchBelowADInplaceOrView guard_;
};

// The autograd function of a derivative.
template <class F>
struct FunctionOf : torch::autograd::Function<FunctionOf<F>> {
  static constexpr bool is_traceable = !requires { F::kOpaque; }; // compiled autograd puts its backward into a graph

  template <class... Args>
  static auto forward(AutogradContext* ctx, Args&&... args) {
    BelowAutograd below_autograd;
    auto out = F::forward(ctx, std::forward<Args>(args)...);
    save(ctx, out.saved);
    if constexpr (requires { std::tuple_size<decltype(out.results)>::value; }) {
      ctx->set_materialize_grads(false);
      return std::apply([](const auto&... y) { return variable_list{y...}; }, out.results);
    } else return out.results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad) {
    return backward(ctx, grad, &F::forward);
  }

 private:
  template <class Results, class... T, class... Args>
  static variable_list backward(
      AutogradContext* ctx, const variable_list& grad, Saving<Results, T...> (*)(AutogradContext*, Args...)) {
    Saved saved(ctx, ((is_tensor<T> || is_list<T>) || ...));
    const std::tuple<Taken<T>...> values{saved.take<T>()...};
    return for_arguments<Args...>(
        std::apply([&](const auto&... value) { return F::backward(ctx, grad, value...); }, values));
  }
};

template <class Arg>
bool is_given(const Arg& arg) {
  if constexpr (std::is_same_v<Arg, Tensor>) return arg.defined();
  else return true;
}

// Function::apply, also under torch.func. Where it got None for a tensor, the operator's kernel says so: apply would
// not.
template <class Function, class... Args>
auto apply(Args&&... args) {
  HiddenLayers hidden;
  if (!(is_given(args) && ...)) [[unlikely]] {
    AutogradContext unused;
    Function::forward(&unused, args...);
  }
  return Function::apply(std::forward<Args>(args)...);
}

// Note [Forward mode]
// C++ autograd functions have no forward-mode derivative. Where an argument carries a tangent, an operator
// is replaced by its reference in meta/, whose own operators know theirs. The reference is the kernel
// of the Autograd alias key, and so of AutogradCPU.
template <class Arg>
bool has_tangent(const Arg& arg) {
  if constexpr (std::is_same_v<Arg, Tensor>) return arg.defined() && arg._fw_grad(/*level=*/0).defined();
  else if constexpr (is_tensor<Arg>) return arg && has_tangent(*arg);
  else if constexpr (is_list<Arg>) {
    const at::TensorList list = arg;
    return std::any_of(list.begin(), list.end(), has_tangent<Tensor>);
  } else return false;
}
template <class Return, class... Args>
Return decompose(const c10::TypedOperatorHandle<Return(Args...)>& op, std::type_identity_t<Args>... args) {
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), std::forward<Args>(args)...);
}

template <class F, auto kernel, class Return, class... Args>
Return autograd_kernel(Args... args) {
  if ((has_tangent(args) || ...)) return decompose(op<kernel>(), std::forward<Args>(args)...);
  auto out = apply<FunctionOf<F>>(args...);
  if constexpr (std::is_convertible_v<decltype(out), Return>) return out;
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

// The autograd kernel of operator `name`, of which F is the derivative.
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
// scale_gradient and the custom_autograd_fn_* give their argument back with a gradient that is, on purpose, not
// the derivative. Outside of torch.func their autograd kernels never call the operator again: what they do is made of
// ATen's views, which compilers, functionalization and ADInplaceOrView know, so that writes through the
// output stay right. The operator's own kernel runs where autograd is off altogether (inference mode), and as
// the Functionalize kernel keeps the operator, whose output aliases its input, out of functionalized
// graphs. No kernel touches memory, so these are the kernels of every device.
// Inside a transform of torch.func the operator is called on, because each transform further out has a
// gradient of its own to change. No reference stands for them in forward mode: the kernel runs on the
// argument without its tangent, and the output gets the tangent that is the transpose of the gradient.

template <class F, auto kernel, class... Args>
struct ViewOf : torch::autograd::Function<ViewOf<F, kernel, Args...>> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, Args... args) {
    save(ctx, std::tuple(args...));
    if (!c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode)) return F::view(x);
    at::AutoGradMode grad_mode(HiddenLayers::innermost()->restore());
    const auto in_outer_transforms = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return op<kernel>().call(x, args...);
    };
    return at::alias(in_outer_transforms()); // a view, so that autograd refuses writes which would lose this gradient
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad) {
    Saved saved(ctx, /*tensors=*/false);
    std::tuple<Args...> args{saved.take<Args>()...};
    return for_arguments<Tensor, Args...>(
        std::apply([&](const Args&... args) { return F::gradient(grad[0], args...); }, args));
  }
};

template <class F, auto kernel, class... Args>
Tensor view_kernel(const Tensor& x, Args... args) {
  const bool forward_mode = has_tangent(x);
  const Tensor y = apply<ViewOf<F, kernel, Args...>>(forward_mode ? x._fw_primal(/*level=*/0) : x, args...);
  return forward_mode ? at::_make_dual(y, F::gradient(x._fw_grad(/*level=*/0), args...), /*level=*/0) : y;
}

// The autograd kernel of operator `name`, an identity: F::view(x) makes its result, F::gradient(grad, args...) the
// gradient of x from that of the result and the arguments after x.
template <class F, auto kernel>
auto autograd_of_view(const char* name) {
  name_of<kernel> = name;
  return []<class... Args>(Tensor (*)(const Tensor&, Args...)) { return &view_kernel<F, kernel, Args...>; }(kernel);
}

// The autograd kernel of a backward operator, for double backward: runs the operator's own kernel, and
// differentiates its reference in meta/, any number of times, when a derivative is asked for.
torch::CppFunction differentiate_by_reference();

// Note [Operators that change their arguments]
// Torch's fallbacks for operators without a derivative look at what an operator returns. One that only writes to
// its arguments would run on, its gradient lost in silence, and leave their version counters as they were, so that
// a backward which saved them would not notice. Hence, for those that return nothing and have no derivative:
// at Autograd, refuses arguments that require a gradient or carry a tangent;
torch::CppFunction refuse_gradients();
// at ADInplaceOrView, counts the change of every argument that the schema says is written to.
torch::CppFunction count_changes();

// What autocast does with an operator's floating-point arguments.
enum class Cast {
  kFloat32, // half types to float32
  kPromote, // all to the widest among them
  kLower,   // float32 and half types to autocast's dtype
};
// Registers the policy, or a kernel of one's own, for openreg, cpu and cuda.
void autocast(torch::Library& m, const char* name, Cast policy);
template <class F>
void autocast(torch::Library& m, const char* name, F* kernel) {
  using c10::DispatchKey;
  for (const auto key : {DispatchKey::AutocastPrivateUse1, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA})
    m.impl(name, torch::dispatch(key, kernel));
}

} // namespace openreg::ops
