// The nodes of autograd's graph that run the derivatives of operators.
#include "ops/record.h"

#include <ATen/EmptyTensor.h>
#include <ATen/FuncTorchTLS.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cctype>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace openreg::ops {
namespace {

// See Note [Functions under torch.func].
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

// Every rule, by name. A node of the graph keeps the name, because compiled autograd can pass on a string.
struct Rules {
  std::mutex mutex;
  std::unordered_map<std::string, Rule> by_name;
};
Rules& rules() {
  static auto* all = new Rules; // backward may run while the process exits
  return *all;
}
constexpr const char* kRule = "rule"; // its place among saved data; values have numbers

template <bool traceable>
struct Unnamed {
  static constexpr bool is_traceable = traceable;

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grad) {
    const Rule& rule = [&]() -> const Rule& {
      std::lock_guard lock(rules().mutex);
      return rules().by_name.at(ctx->saved_data[kRule].toStringRef());
    }();
    AutogradContext context(ctx);
    Saved saved(ctx, rule.saves_tensors);
    variable_list out = rule.backward(&context, grad, saved);
    out.resize(out.size() + 2); // of forward's other arguments
    return out;
  }
};

template <bool traceable>
struct Derivative : torch::autograd::Function<Derivative<traceable>> {
  static variable_list forward(
      torch::autograd::AutogradContext* ctx, at::TensorList, const Rule& rule, Forwards forward) {
    AutogradContext context(ctx);
    Recorded out = forward(&context);
    ctx->saved_data[kRule] = rule.name;
    for (size_t i = 0; i < out.kept.values.size(); ++i)
      ctx->saved_data[std::to_string(i)] = std::move(out.kept.values[i]);
    ctx->save_for_backward(std::move(out.kept.tensors));
    ctx->set_materialize_grads(out.materialize);
    return std::move(out.results);
  }
};

} // namespace
} // namespace openreg::ops

// The node of either kind, named RmsNormBackward for example; typeid would give all nodes the same name.
template <bool traceable>
struct torch::autograd::CppNode<openreg::ops::Derivative<traceable>> : CppNode<openreg::ops::Unnamed<traceable>> {
  std::string name() const override {
    const auto found = this->ctx_.saved_data.find(openreg::ops::kRule);
    if (found == this->ctx_.saved_data.end()) return Node::name();
    std::string name = found->second.toStringRef(), out;
    name.erase(0, name.rfind(':') + 1);
    bool first = true;
    for (const char c : name) {
      if (c != '_') out += first ? static_cast<char>(std::toupper(c)) : c;
      first = c == '_';
    }
    return out + "Backward";
  }
};

namespace openreg::ops {

bool AutogradContext::needs_input_grad(size_t i) const {
  return context_ != nullptr && context_->needs_input_grad(i);
}

void AutogradContext::mark_non_differentiable(const variable_list& outputs) {
  if (context_ != nullptr) context_->mark_non_differentiable(outputs);
}

Saved::Saved(torch::autograd::AutogradContext* context, bool tensors)
    : context_(context), tensors_(tensors ? context->get_saved_variables() : variable_list()) {}

const c10::IValue& Saved::next() {
  return context_->saved_data[std::to_string(value_++)];
}

const Tensor& not_given() {
  static const Tensor place = at::detail::empty_cpu({0}, at::kFloat); // past the dispatcher and its modes
  return place;
}

const Rule& add_rule(Rule rule) {
  std::lock_guard lock(rules().mutex);
  const std::string name = rule.name.toStringRef();
  return rules().by_name.try_emplace(name, std::move(rule)).first->second;
}

bool restore_layers() {
  return HiddenLayers::innermost()->restore();
}

variable_list record(const Rule& rule, const variable_list& tensors, bool given, Forwards forward) {
  HiddenLayers hidden;
  // A view is recorded anyway: autograd rejects writes that its base or an outer transform would lose.
  const bool recorded =
      rule.view || (at::GradMode::is_enabled() && torch::autograd::any_variable_requires_grad(tensors));
  if (!recorded || !given) {
    AutogradContext nowhere(nullptr);
    Recorded out = forward(&nowhere);
    if (!recorded) return std::move(out.results);
  }
  const at::TensorList inputs = tensors;
  return rule.traceable ? Derivative<true>::apply(inputs, rule, forward)
                        : Derivative<false>::apply(inputs, rule, forward);
}

} // namespace openreg::ops
