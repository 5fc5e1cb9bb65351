// The device's kernels for ATen's operators: the CPU's, boxed for all and unboxed for some. See Note [CpuCall].
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "aten/cpu_call.h"
#include "aten/deferred/captured.h"
#include "aten/deferred/queued.h"
#include "runtime/process/attention.h"

namespace at {
struct TensorIteratorBase;
}

namespace openreg {

// Registers the boxed kernel for one operator at the key `device`; it runs the kernel at the key `cpu`.
c10::RegistrationHandleRAII register_native_kernel(
    const c10::OperatorHandle& op, c10::DispatchKey cpu, c10::DispatchKey device);

// The boxed kernel for any operator; it queues the operator if it can.
const c10::BoxedKernel& native_kernel();

// Registers the boxed kernel for every operator of the installed torch that has a CPU kernel but no device kernel yet,
// once per layout; returns how many.
int64_t register_native_kernels();

// ---- unboxed calls, for the operators whose small-tensor latency matters ----

namespace detail {

inline const at::Tensor& map(CpuCall& call, const at::Tensor& t) {
  return call.alias(t);
}
inline at::Tensor& map(CpuCall& call, at::Tensor& t) {
  return const_cast<at::Tensor&>(call.alias(t, true));
}
inline std::optional<at::Tensor> map(CpuCall& call, const std::optional<at::Tensor>& t) {
  return t ? std::optional(call.alias(*t)) : std::nullopt;
}
inline std::vector<at::Tensor> map(CpuCall& call, at::TensorList list) {
  std::vector<at::Tensor> out;
  out.reserve(list.size());
  for (const auto& t : list) out.push_back(call.alias(t));
  return out;
}
inline std::vector<at::Tensor> map(CpuCall& call, const at::ITensorListRef& list) {
  std::vector<at::Tensor> out;
  out.reserve(list.size());
  for (const auto& t : list) out.push_back(call.alias(t));
  return out;
}
inline std::optional<at::Generator> map(CpuCall& call, const std::optional<at::Generator>& g) {
  return call.generator(g);
}
template <class T>
T&& map(CpuCall&, T&& value) {
  return std::forward<T>(value);
}

inline at::Tensor unmap(CpuCall& call, at::Tensor&& t) {
  return call.result(std::move(t));
}
inline at::Tensor& unmap(CpuCall& call, at::Tensor& t) {
  return const_cast<at::Tensor&>(call.original(t));
}
inline const at::Tensor& unmap(CpuCall& call, const at::Tensor& t) {
  return call.original(t);
}
// The dtypes among the arguments, one bit for each.
inline std::uint64_t dtype_bits(c10::ScalarType type) {
  return std::uint64_t{1} << static_cast<unsigned>(type);
}
inline std::uint64_t dtype_bits(const at::Tensor& t) {
  return dtype_bits(t.scalar_type());
}
inline std::uint64_t dtype_bits(const at::Scalar& number) {
  return number.isComplex() ? dtype_bits(at::kComplexDouble) : 0;
}
template <class T>
std::uint64_t dtype_bits(const std::optional<T>& value) {
  return value ? dtype_bits(*value) : 0;
}
template <class T>
std::uint64_t dtype_bits(const T&) {
  return 0;
}
// Whether they may promote to complex32, which few CPU kernels support: see Note [Wider dtypes].
inline bool complex_half(std::uint64_t dtypes) {
  const std::uint64_t complex =
      dtype_bits(at::kComplexHalf) | dtype_bits(at::kComplexFloat) | dtype_bits(at::kComplexDouble);
  return (dtypes & complex) && (dtypes & (dtype_bits(at::kComplexHalf) | dtype_bits(at::kHalf)));
}

template <class... T>
std::tuple<T...> unmap(CpuCall& call, std::tuple<T...>&& values) {
  return std::apply([&](auto&... each) { return std::tuple<T...>(unmap(call, static_cast<T&&>(each))...); }, values);
}

// Whether the boxed kernel must decide where a call runs.
inline bool redirected() noexcept {
  return (detail::attention.load(std::memory_order_relaxed) & (detail::kModeBit | detail::kCaptureBit)) &&
      (queueing() || (detail::attention.load(std::memory_order_relaxed) & detail::kCaptureBit));
}

// Calls the boxed device kernel of an operator.
template <class Op, class... A>
decltype(auto) call_boxed(A&&... arguments) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  return c10::impl::BoxedKernelWrapper<typename Op::schema>::call(
      native_kernel(), op, c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<A>(arguments)...);
}

template <class Op, class Signature, Signature* kernel>
struct Native;
template <class Op, class R, class... A, R (*kernel)(A...)>
struct Native<Op, R(A...), kernel> {
  static R call(A... arguments) {
    if (redirected() || complex_half((dtype_bits(arguments) | ... | 0))) [[unlikely]]
      return call_boxed<Op>(std::forward<A>(arguments)...);
    CpuCall call(Op::name);
    // Braces evaluate left to right, so a tensor sets the device before a Generator needs it.
    std::tuple<decltype(map(call, std::forward<A>(arguments)))...> mapped{map(call, std::forward<A>(arguments))...};
    return unmap(call, call.run([&]() -> R {
      return std::apply(
          [](auto&&... each) -> R { return kernel(std::forward<decltype(each)>(each)...); }, std::move(mapped));
    }));
  }
};

} // namespace detail

// The unboxed device kernel of an ATen operator, given the CPU's, such as native<at::_ops::add_Tensor, at::cpu::add>.
template <class Op, typename Op::schema* kernel>
constexpr auto* native = &detail::Native<Op, typename Op::schema, kernel>::call;

// Captures a kernel of one input and one output as a node that does not keep their memory.
void capture_unary(
    Stream stream, const char* name, at::TensorIteratorBase& iter, std::function<void(at::TensorIteratorBase&)> kernel);

} // namespace openreg
