// What the openreg:: operators share: torch's headers, checks, arithmetic types and loops.
//
// An operator's file reads downward: formula, kernel, autograd, autocast, registration card. A kernel
// checks its arguments, allocates its results and hands raw pointers to launch(); it holds no tensor
// inside a launch, because a stream may run the work after the call has returned.
#pragma once

#include <ATen/cpu/vec/functional.h>

#include <ATen/Dispatch.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "../runtime/stream.h"

namespace openreg::ops {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Note [Operator calls]
// An autograd kernel reaches its operator, and the operator's backward, through the dispatcher, so that
// compilers and functional transforms see both. `call` has the signature of the kernel it names.
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Note [Functions under torch.func]
// Function::apply refuses to run inside grad, vjp and jvp transforms, since a forward may do things that lose
// a derivative there. Ours save arguments and call one operator below autograd, as ATen's generated
// kernels do, and those work. So apply() takes the transforms' layers out of the check's sight, and
// BelowAutograd, which opens every forward, puts them back before the operator is called. It also undoes
// the no_grad under which Function runs a forward: the operator goes on to the next outer transform,
// which has a derivative of its own to record.
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

template <class Arg>
bool is_given(const Arg& arg) {
  if constexpr (std::is_same_v<Arg, Tensor>) return arg.defined();
  else return true;
}

// F::apply, also under torch.func. Where it got None for a tensor, the operator's kernel says so: apply would not.
template <class F, class... Args>
auto apply(Args&&... args) {
  HiddenLayers hidden;
  if (!(is_given(args) && ...)) [[unlikely]] {
    AutogradContext unused;
    F::forward(&unused, args...);
  }
  return F::apply(std::forward<Args>(args)...);
}

// Note [Forward mode]
// C++ autograd functions have no forward-mode derivative. Where an argument carries a tangent, an operator
// is replaced by its reference in meta/, whose own operators know theirs. The reference is the kernel
// of the Autograd alias key, and so of AutogradCPU.
inline bool has_tangent(const Tensor& x) {
  return x.defined() && x._fw_grad(/*level=*/0).defined();
}
inline bool has_tangent(const std::optional<Tensor>& x) {
  return x && has_tangent(*x);
}
inline bool has_tangent(at::TensorList list) {
  return std::any_of(list.begin(), list.end(), [](const Tensor& x) { return has_tangent(x); });
}
template <class... Args>
bool any_tangent(const Args&... args) {
  return (has_tangent(args) || ...);
}
template <class Return, class... Args>
Return decompose(const c10::TypedOperatorHandle<Return(Args...)>& op, std::type_identity_t<Args>... args) {
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), std::forward<Args>(args)...);
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

// Inside a transform of torch.func, a view of what the operator gives in those further out, a view so that autograd
// refuses writes which would lose this gradient. Outside of them nothing. For forwards of apply().
template <class... Args>
std::optional<Tensor> in_outer_transforms(const c10::TypedOperatorHandle<Tensor(const Tensor&, Args...)>& op,
    const Tensor& x, std::type_identity_t<Args>... args) {
  if (!c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode)) return std::nullopt;
  at::AutoGradMode grad_mode(HiddenLayers::innermost()->restore());
  const auto below_autograd = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(x, args...);
  };
  return at::alias(below_autograd());
}
inline Tensor without_tangent(const Tensor& x) {
  return has_tangent(x) ? x._fw_primal(/*level=*/0) : x;
}
inline Tensor tangent(const Tensor& x) {
  return x._fw_grad(/*level=*/0);
}
inline Tensor with_tangent(const Tensor& y, const Tensor& tangent) {
  return at::_make_dual(y, tangent, /*level=*/0);
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
// Registers the policy for openreg, cpu and cuda.
void autocast(torch::Library& m, const char* name, Cast policy);

// Two numbers from `generator`, by default that of x's device, which a random operator makes all of its own from:
// the key of a counter-based generator and where its counter begins. The CPU's generator does not move.
std::array<uint64_t, 2> draw(const char* op, const Tensor& x, const std::optional<at::Generator>& generator);

// ---- checks: the sentences are those of meta/op.py, word for word ----

// The name that Python gives a dtype: "float32".
inline std::string_view dtype_name(at::ScalarType type) {
  return c10::getDtypeNames(type).first;
}

inline void check_tensor(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK(x.defined(), op, ": expected ", name, " to be a tensor, but got None");
}

inline void check_floating(const char* op, const char* name, const Tensor& x) {
  check_tensor(op, name, x);
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16, op,
      ": expected ", name, " of float32, float64, float16 or bfloat16, but got ", dtype_name(type),
      "; convert it with .to()");
}

inline void check_same_device(const char* op, const char* x_name, const Tensor& x, const char* name, const Tensor& y) {
  check_tensor(op, x_name, x);
  check_tensor(op, name, y);
  TORCH_CHECK(x.device() == y.device(), op, ": ", x_name, " is on ", x.device(), " but ", name, " is on ", y.device(),
      "; move one with .to()");
}

inline void check_dtype(const char* op, const char* name, const Tensor& x, at::ScalarType type, const char* of) {
  TORCH_CHECK(x.scalar_type() == type, op, ": expected ", name, " of ", dtype_name(type), ", the dtype of ", of,
      ", but got ", dtype_name(x.scalar_type()), "; convert one with .to()");
}

inline void check_shape(const char* op, const char* name, const Tensor& x, at::IntArrayRef shape, const char* of) {
  TORCH_CHECK(x.sizes() == shape, op, ": expected ", name, " of shape ", shape, ", ", of, ", but got ", x.sizes());
}

// ---- loops over contiguous memory ----

// Elements of elementwise work that are worth another thread, as ATen has it.
constexpr int64_t kGrain = 32768;
// exp takes some ten times as long as an addition, for which torch's grain is made.
constexpr int64_t kExpGrain = kGrain / 8;

// float for the half types, else T: what a kernel computes and accumulates in.
template <class T>
using Acc = at::opmath_type<T>;
template <class T>
using Vec = at::vec::Vectorized<Acc<T>>;

template <class T>
constexpr int64_t kLanes = Vec<T>::size();

// kLanes elements of T.
template <class T>
Vec<T> read(const T* p) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return Vec<T>::loadu(p);
  } else {
    Vec<T> out;
    at::vec::load_to_float<T>(p, out);
    return out;
  }
}

// The first `count` lanes from p, the rest 0.
template <class T>
Vec<T> read(const T* p, int64_t count) {
  T lanes[kLanes<T>] = {};
  std::copy_n(p, count, lanes);
  return read(lanes);
}

// Elements of T that fill a register: what write() stores from one Vec, or two where T is a half type.
template <class T>
constexpr int64_t kChunk = at::vec::Vectorized<T>::size();

template <class T>
void write(const Vec<T>* values, T* p) {
  if constexpr (std::is_same_v<T, Acc<T>>) values->store(p);
  else at::vec::convert_from_float<T>(values[0], values[1]).store(p);
}

// Sum of f(a[i], b[i], …) over i < n. Vectors within a block, double between blocks: the error does
// not grow with n.
template <class T, class F, class... P>
double sum(int64_t n, F f, const P*... a) {
  constexpr int64_t lanes = kLanes<T>, block = 512 * lanes;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = std::min(n, begin + block);
    Vec<T> part[4] = {Vec<T>(0), Vec<T>(0), Vec<T>(0), Vec<T>(0)}; // four, because an addition takes four cycles
    int64_t i = begin;
    for (; i + 4 * lanes <= end; i += 4 * lanes)
      for (int64_t k = 0; k < 4; ++k) part[k] = part[k] + f(read(a + i + k * lanes)...);
    for (; i + lanes <= end; i += lanes) part[0] = part[0] + f(read(a + i)...);
    if (i < end) part[1] = part[1] + Vec<T>::set(Vec<T>(0), f(read(a + i, end - i)...), end - i);
    Acc<T> out[lanes];
    ((part[0] + part[1]) + (part[2] + part[3])).store(out);
    for (const Acc<T> lane : out) total += lane;
  }
  return total;
}

// The largest of n elements, -inf of none; NaN if any is.
template <class T>
Acc<T> max_of(const T* x, int64_t n) {
  using V = Vec<T>;
  constexpr int64_t lanes = kLanes<T>;
  const V least(-std::numeric_limits<Acc<T>>::infinity());
  V part[4] = {least, least, least, least};
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes)
    for (int64_t k = 0; k < 4; ++k) part[k] = at::vec::maximum(part[k], read(x + i + k * lanes));
  for (; i + lanes <= n; i += lanes) part[0] = at::vec::maximum(part[0], read(x + i));
  if (i < n) part[1] = at::vec::maximum(part[1], V::set(least, read(x + i, n - i), n - i));
  return at::vec::vec_reduce_all<Acc<T>>([](V a, V b) { return at::vec::maximum(a, b); },
      at::vec::maximum(at::vec::maximum(part[0], part[1]), at::vec::maximum(part[2], part[3])));
}

} // namespace openreg::ops
