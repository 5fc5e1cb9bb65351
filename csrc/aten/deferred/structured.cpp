#include "aten/deferred/structured.h"

#include <ATen/NativeFunctions.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/memory/memory.h"

namespace openreg {
namespace {

using torch::jit::Stack;

// ---- arguments, from how they are kept to how the object takes them ----

template <class T>
struct Kept {
  T value;
  explicit Kept(const c10::IValue& from) : value(from.to<T>()) {}
  const T& get() const { return value; }
};
template <>
struct Kept<at::OptionalTensorRef> {
  std::optional<at::Tensor> value;
  explicit Kept(const c10::IValue& from) : value(from.toOptional<at::Tensor>()) {}
  at::OptionalTensorRef get() const {
    return value && value->defined() ? at::OptionalTensorRef(*value) : at::OptionalTensorRef();
  }
};
template <>
struct Kept<at::OptionalScalarRef> {
  std::optional<at::Scalar> value;
  explicit Kept(const c10::IValue& from) : value(from.toOptional<at::Scalar>()) {}
  at::OptionalScalarRef get() const { return value ? at::OptionalScalarRef(*value) : at::OptionalScalarRef(); }
};
template <>
struct Kept<at::OptionalIntArrayRef> {
  std::optional<std::vector<int64_t>> value;
  explicit Kept(const c10::IValue& from) {
    if (!from.isNone()) value = from.toIntVector();
  }
  at::OptionalIntArrayRef get() const { return value ? at::OptionalIntArrayRef(*value) : std::nullopt; }
};
template <>
struct Kept<std::string_view> {
  std::string value;
  explicit Kept(const c10::IValue& from) : value(from.toStringView()) {}
  std::string_view get() const { return value; }
};
template <>
struct Kept<at::ScalarType> {
  at::ScalarType value;
  explicit Kept(const c10::IValue& from) : value(from.toScalarType()) {}
  at::ScalarType get() const { return value; }
};
template <>
struct Kept<std::optional<at::ScalarType>> {
  std::optional<at::ScalarType> value;
  explicit Kept(const c10::IValue& from) : value(from.toOptional<at::ScalarType>()) {}
  std::optional<at::ScalarType> get() const { return value; }
};

// ---- objects ----

struct Object {
  virtual ~Object() = default;
  virtual void run() = 0;
  virtual bool usable() const = 0;
};

template <class S, class Meta>
class Made;
// S: PyTorch's structured kernel. meta(A...) checks the arguments and makes the iterator; impl(A..., outputs...)
// computes.
template <class S, class M, class... A>
class Made<S, void (M::*)(A...)> final : public S, public Object {
  static constexpr bool kIterates = std::is_base_of_v<at::TensorIteratorBase, S>;

 public:
  Made(const Stack& stack, std::vector<at::Tensor> outputs)
      : Made(stack, std::move(outputs), std::index_sequence_for<A...>()) {}

  void run() override { call(outputs_count()); }

  // Returns true if the object always computes on the call's own tensors. A meta function or an iterator that converts
  // an argument keeps a copy of its values, which is valid only for a constant. Some kernels for narrow floats remove a
  // scalar from the iterator.
  bool usable() const override {
    if (!fits_) return false;
    if constexpr (kIterates) {
      bool scalar = false;
      for (int i = 0; i < this->ntensors(); ++i) {
        const auto& operand = this->operands_[static_cast<size_t>(i)];
        const auto& original = operand.original_tensor_base();
        const at::TensorBase& given = original.defined() ? original : operand.tensor_base();
        const bool output = i < this->noutputs();
        if (original.defined() && (output || device_of(original.const_data_ptr()) >= 0)) return false;
        if (!is_own(given) && (output || !given.unsafeGetTensorImpl()->is_wrapped_number())) return false;
        scalar |= !output && operand.tensor_base().numel() == 1;
      }
      if (scalar && at::isReducedFloatingType(this->common_dtype())) return false;
    }
    return true;
  }

  void set_output_strided(
      int64_t i, at::IntArrayRef sizes, at::IntArrayRef strides, at::TensorOptions options) override {
    fits_ &= strides.empty() || outputs_[static_cast<size_t>(i)].strides() == strides;
    set_output_raw_strided(i, sizes, strides, options);
  }
  void set_output_raw_strided(
      int64_t i, at::IntArrayRef sizes, at::IntArrayRef strides, at::TensorOptions options) override {
    const at::Tensor& output = outputs_[static_cast<size_t>(i)];
    fits_ &= output.sizes() == sizes && output.scalar_type() == c10::typeMetaToScalarType(options.dtype());
    if constexpr (kIterates) S::set_output_raw_strided(i, sizes, strides, options);
  }
  const at::Tensor& maybe_get_output(int64_t i) override { return outputs_[static_cast<size_t>(i)]; }

 private:
  template <size_t... i>
  Made(const Stack& stack, std::vector<at::Tensor> outputs, std::index_sequence<i...>)
      : kept_(Kept<std::decay_t<A>>(stack[i])...), outputs_(std::move(outputs)) {
    S::meta(std::get<i>(kept_).get()...);
  }

  // Returns true if a tensor is, or views, an argument or an output of the call.
  bool is_own(const at::TensorBase& x) const {
    const auto same = [&](const at::Tensor& each) { return each.defined() && each.is_alias_of(x); };
    const auto kept = [&](const auto& each) {
      using Value = std::decay_t<decltype(each.value)>;
      if constexpr (std::is_same_v<Value, at::Tensor>) return same(each.value);
      else if constexpr (std::is_same_v<Value, std::optional<at::Tensor>>) return each.value && same(*each.value);
      else return false;
    };
    return std::any_of(outputs_.begin(), outputs_.end(), same) ||
        std::apply([&](const auto&... each) { return (kept(each) || ...); }, kept_);
  }

  template <class... I>
  static constexpr size_t arity(void (S::*)(I...)) {
    return sizeof...(I);
  }
  static constexpr auto outputs_count() { return std::make_index_sequence<arity(&S::impl) - sizeof...(A)>(); }
  template <size_t... o>
  void call(std::index_sequence<o...>) {
    std::apply([&](const auto&... each) { S::impl(each.get()..., outputs_[o]...); }, kept_);
  }

  std::tuple<Kept<std::decay_t<A>>...> kept_;
  std::vector<at::Tensor> outputs_;
  bool fits_ = true;
};

using Make = std::unique_ptr<Object> (*)(const Stack& stack, std::vector<at::Tensor> outputs);
template <class S>
std::unique_ptr<Object> make(const Stack& stack, std::vector<at::Tensor> outputs) {
  return std::make_unique<Made<S, decltype(&S::meta)>>(stack, std::move(outputs));
}

// clang-format off: easier to read as a table
#define OUT(op, S) {"aten::" op, &make<at::native::S>}
#define UNARY(name) OUT(#name ".out", structured_##name##_out), OUT(#name "_", structured_##name##_out)
#define BINARY(name) OUT(#name ".out", structured_##name##_out), OUT(#name "_.Tensor", structured_##name##_out)
#define COMPARE(name) OUT(#name ".Tensor_out", structured_##name##_Tensor_out), OUT(#name ".Scalar_out", structured_##name##_Scalar_out)
const std::unordered_map<std::string, Make>& table() {
  static const auto* all = new std::unordered_map<std::string, Make>{
      OUT("add.out", structured_ufunc_add_CPU), OUT("add_.Tensor", structured_ufunc_add_CPU), BINARY(sub), BINARY(mul), BINARY(div),
      UNARY(neg), UNARY(exp), UNARY(log), UNARY(sqrt), UNARY(rsqrt), UNARY(reciprocal), UNARY(sin), UNARY(cos), UNARY(tanh), UNARY(sigmoid),
      COMPARE(eq), COMPARE(ne), COMPARE(lt), COMPARE(le), COMPARE(gt), COMPARE(ge),
      OUT("maximum.out", structured_maximum_out), OUT("minimum.out", structured_minimum_out),
      OUT("clamp.out", structured_clamp_out), OUT("clamp_", structured_clamp_out),
      OUT("clamp_min.out", structured_clamp_min_out), OUT("clamp_min_", structured_clamp_min_out),
      OUT("pow.Tensor_Scalar_out", structured_pow_Tensor_Scalar_out), OUT("pow.Tensor_Tensor_out", structured_pow_Tensor_Tensor_out),
      OUT("pow.Scalar_out", structured_pow_Scalar_out),
      OUT("lerp.Scalar_out", structured_lerp_Scalar), OUT("lerp_.Scalar", structured_lerp_Scalar),
      OUT("lerp.Tensor_out", structured_lerp_Tensor), OUT("lerp_.Tensor", structured_lerp_Tensor),
      OUT("addcmul.out", structured_addcmul_out), OUT("addcmul_", structured_addcmul_out),
      OUT("addcdiv.out", structured_addcdiv_out), OUT("addcdiv_", structured_addcdiv_out),
      OUT("threshold_backward.grad_input", structured_threshold_backward_out),
      OUT("silu.out", structured_silu_out), OUT("silu_backward.grad_input", structured_silu_backward_out),
      OUT("gelu.out", structured_gelu_out_cpu), OUT("gelu_backward.grad_input", structured_gelu_backward_out_cpu),
      OUT("sigmoid_backward.grad_input", structured_sigmoid_backward_out), OUT("tanh_backward.grad_input", structured_tanh_backward_out),
      OUT("mm.out", structured_mm_out_cpu), OUT("addmm.out", structured_addmm_out_cpu),
      OUT("bmm.out", structured_bmm_out_cpu), // baddbmm copies to its result before it computes
      OUT("sum.IntList_out", structured_sum_out), OUT("mean.out", structured_mean_out), OUT("argmax.out", structured_argmax_out),
      OUT("_softmax.out", structured_softmax_cpu_out), OUT("_softmax_backward_data.out", structured_softmax_backward_cpu_out),
      OUT("_log_softmax.out", structured_log_softmax_cpu_out), OUT("_log_softmax_backward_data.out", structured_log_softmax_backward_cpu_out),
      OUT("nll_loss_forward.output", structured_nll_loss_forward_out_cpu), OUT("nll_loss_backward.grad_input", structured_nll_loss_backward_out_cpu),
  };
  return *all;
}
// clang-format on

// Writes one value to every element of a tensor without holes.
std::optional<detail::Task> fill_bytes(const at::Tensor& x, const at::Scalar& value) {
  if (!x.is_non_overlapping_and_dense() || x.is_conj() || x.is_neg()) return std::nullopt;
  void* to = x.mutable_data_ptr();
  const size_t bytes = x.nbytes();
  const auto is_zero = [](double part) { return part == 0 && !std::signbit(part); }; // -0 has other bytes
  const bool zero = value.isComplex()
      ? is_zero(value.toComplexDouble().real()) && is_zero(value.toComplexDouble().imag())
      : is_zero(value.toDouble());
  if (zero) return detail::Task([to, bytes] { std::memset(to, 0, bytes); });
  return std::nullopt;
}

} // namespace

std::optional<detail::Task> structured_task(
    const c10::OperatorHandle& op, const Stack& arguments, std::vector<at::Tensor> outputs) {
  const std::string name = toString(op.operator_name());
  if (outputs.empty()) return std::nullopt;
  if (name == "aten::zero_") return fill_bytes(outputs[0], 0);
  if (name == "aten::fill_.Scalar") return fill_bytes(outputs[0], arguments[1].toScalar());
  Stack given = arguments;
  auto found = table().find(name);
  if (name == "aten::relu" || name == "aten::relu_") { // the CPU computes it this way
    found = table().find("aten::clamp_min.out");
    given.emplace_back(at::Scalar(0));
  }
  if (found == table().end()) return std::nullopt;
  auto object = found->second(given, std::move(outputs));
  if (!object->usable()) return std::nullopt;
  return detail::Task([object = std::move(object)] { object->run(); });
}

} // namespace openreg
