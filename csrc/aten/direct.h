// Direct operators: without boxing, for those whose small-tensor latency matters.
#pragma once

#include <ATen/TensorIterator.h>
#include <ATen/core/Generator.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "aten/boxed.h"
#include "aten/cpu_call.h"
#include "aten/deferred/deferred.h"
#include "backend/identity/identity.h"
#include "backend/new_tensor.h"

namespace openreg {

// Note [Direct operators]
// The device computes like the CPU, so a direct operator calls the CPU's kernel on aliases, as the boxed kernel does,
// but without boxing: on_aliases, see Note [CpuCall]. A call that may be deferred goes to the boxed kernel. For many
// operators aliases are not necessary: on_tensors. ATen's Meta function, the part of an operator that all devices
// share, checks the arguments and asks for the result, which is allocated here. What then computes reads and writes
// memory, whatever its device:
//  - For an elementwise operator, the Meta function also builds a TensorIterator over the arguments, and the CPU's
//    function behind the operator's stub computes what the iterator points to.
//  - For others, the CPU's implementation takes the tensors themselves, if it does not have to copy or convert one,
//    because that goes through the dispatcher. Each of them says which arguments it accepts as they are (accepts()).
// An iterator converts dtypes for CPU tensors only. So arguments of several dtypes, or of one that is promoted, still
// go through aliases, and so do arguments whose memory an alias prepares: lazy clones, and tensors without memory.

// What computes an operator: the CPU's function behind a stub, which takes no other argument or the last one, a number.
template <auto& stub>
struct Stub {
  template <class... A>
  static void compute(at::TensorIteratorBase& iter, const A&...) {
    stub(at::kCPU, iter);
  }
};
template <auto& stub>
struct StubOfNumber {
  template <class... A>
  static void compute(at::TensorIteratorBase& iter, const A&... arguments) {
    stub(at::kCPU, iter, std::get<sizeof...(A) - 1>(std::tie(arguments...)));
  }
};
// What computes an operator whose class has its Meta function and the CPU's implementation.
struct Implementation {
  template <class Structured, class... A>
  static void compute(Structured& op, const A&... arguments) {
    op.impl(arguments..., op.out);
  }
};

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
template <class... T>
std::tuple<T...> unmap(CpuCall& call, std::tuple<T...>&& values) {
  return std::apply([&](auto&... each) { return std::tuple<T...>(unmap(call, static_cast<T&&>(each))...); }, values);
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
// Returns true if they may promote to complex32, which few CPU kernels support: see Note [Wider dtypes].
inline bool complex_half(std::uint64_t dtypes) {
  const std::uint64_t complex =
      dtype_bits(at::kComplexHalf) | dtype_bits(at::kComplexFloat) | dtype_bits(at::kComplexDouble);
  return (dtypes & complex) && (dtypes & (dtype_bits(at::kComplexHalf) | dtype_bits(at::kHalf)));
}

// Returns true if the boxed kernel must decide where a call runs.
inline bool redirected() noexcept {
  return queueing() || detail::any_capture();
}

// Calls the boxed device kernel of an operator.
template <class Op, class... A>
decltype(auto) call_boxed(A&&... arguments) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  return c10::impl::BoxedKernelWrapper<typename Op::schema>::call(
      boxed_kernel(), op, c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<A>(arguments)...);
}

template <class Op, class Signature, Signature* kernel>
struct OnAliases;
template <class Op, class R, class... A, R (*kernel)(A...)>
struct OnAliases<Op, R(A...), kernel> {
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

// The operator with its Meta function, and its result: an argument, or new memory.
template <class Meta>
struct WithResult final : Meta {
  at::Tensor out;

  void set_output_raw_strided(
      int64_t index, at::IntArrayRef sizes, at::IntArrayRef strides, at::TensorOptions options) override {
    if (!out.defined()) {
      const auto device = options.device().index();
      const auto dtype = c10::typeMetaToScalarType(options.dtype());
      out = strides.empty() ? empty_on(device, sizes, dtype, options.memory_format_opt())
                            : empty_strided_on(device, sizes, strides, dtype);
    }
    if constexpr (std::is_base_of_v<at::TensorIteratorBase, Meta>)
      Meta::set_output_raw_strided(index, sizes, strides, options);
  }
  const at::Tensor& maybe_get_output(int64_t) override { return out; }
};

// Returns true if an operator can compute in the argument itself.
inline bool is_direct(const c10::TensorImpl* self, const at::Tensor& t, bool written) {
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (!impl->key_set().has_all(kDense) || impl->dtype() != self->dtype() || impl->device() != self->device() ||
      (written && impl->sizes() != self->sizes()))
    return false;
  const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return storage->data() && !storage->has_materializer();
}
inline bool is_direct(const c10::TensorImpl* self, const std::optional<at::Tensor>& t, bool written) {
  return !t || !t->defined() || is_direct(self, *t, written);
}
template <class T>
bool is_direct(const c10::TensorImpl*, const T&, bool) {
  return true;
}

// The dtypes that no operator here promotes.
inline bool is_floating(const c10::TensorImpl* self) {
  return c10::isFloatingType(c10::typeMetaToScalarType(self->dtype()));
}

template <class Op, class Meta, class Computes, class Signature, Signature* kernel>
struct OnTensors;
template <class Op, class Meta, class Computes, class R, class Self, class... A, R (*kernel)(Self, A...)>
struct OnTensors<Op, Meta, Computes, R(Self, A...), kernel> {
  static constexpr bool kInPlace = std::is_reference_v<R>;

  static bool accepts(const c10::TensorImpl* impl, const at::Tensor& self, const std::remove_cvref_t<A>&... arguments) {
    if (redirected() || !is_floating(impl) || !is_direct(impl, self, kInPlace) ||
        !(is_direct(impl, arguments, kInPlace) && ...))
      return false;
    if constexpr (requires { Computes::accepts(self, arguments...); }) return Computes::accepts(self, arguments...);
    else return true;
  }

  static R call(Self self, A... arguments) {
    const c10::TensorImpl* impl = self.unsafeGetTensorImpl();
    if (!accepts(impl, self, arguments...)) [[unlikely]]
      return OnAliases<Op, R(Self, A...), kernel>::call(self, std::forward<A>(arguments)...);
    WithResult<Meta> op;
    if constexpr (kInPlace) op.out = self;
    op.meta(self, arguments...);
    run_directly(
        thread_stream(impl->device().index()), [&] { Computes::compute(op, self, arguments...); }, Site(Op::name));
    if constexpr (kInPlace) return self;
    else return std::move(op.out);
  }
};

} // namespace detail

// The direct kernel of an operator, given the CPU's, such as on_aliases<at::_ops::add_Tensor, at::cpu::add>.
template <class Op, typename Op::schema* kernel>
constexpr auto* on_aliases = &detail::OnAliases<Op, typename Op::schema, kernel>::call;

// The direct kernel of an operator, given its Meta function, what computes it, and the CPU's kernel, which runs on
// aliases where the tensors cannot be used themselves.
template <class Op, class Meta, class Computes, typename Op::schema* kernel>
constexpr auto* on_tensors = &detail::OnTensors<Op, Meta, Computes, typename Op::schema, kernel>::call;

} // namespace openreg
