// How the result of an operator is recorded in autograd's graph, with a derivative whose types the graph does not see.
// autograd() of ops/autograd.h does this for an operator.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/FunctionRef.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace torch::autograd {
struct AutogradContext;
}

namespace openreg::ops {

using at::Tensor;
using variable_list = std::vector<Tensor>;

// The part of torch::autograd::AutogradContext that derivatives need. Compiling its header takes ten seconds.
class AutogradContext {
 public:
  // `context` is null in a forward that is not recorded.
  explicit AutogradContext(torch::autograd::AutogradContext* context) : context_(context) {}
  // Returns true if the i-th tensor argument needs a gradient. Each tensor in a list counts as one argument, and so
  // does a tensor that is not given.
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
    std::apply([&](const auto&... value) { (keep(value), ...); }, all);
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
  std::apply([&](const auto&... gradient) { (add(gradient), ...); }, gradients);
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
  bool materialize = true; // the gradient of an unused result is zeros, not undefined
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

} // namespace openreg::ops
