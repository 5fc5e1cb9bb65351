// Operators on device tensors themselves, for those whose small-tensor latency matters.
#pragma once

#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <type_traits>

#include "aten/boxed.h"
#include "backend/identity/identity.h"
#include "backend/new_tensor.h"

namespace openreg {

// Note [Direct operators]
// The device computes like the CPU, so most operators call the CPU's kernel on aliases: see Note [CpuCall]. For many
// that is not necessary. ATen's Meta function, the part of an operator that all devices share, checks the arguments and
// asks for the result, which is allocated here. What then computes reads and writes memory, whatever its device:
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

// The operator with its Meta function, and its result: an argument, or new memory.
template <class Meta>
struct OnDevice final : Meta {
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

// Whether an operator can compute in the argument itself.
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
struct Direct;
template <class Op, class Meta, class Computes, class R, class Self, class... A, R (*kernel)(Self, A...)>
struct Direct<Op, Meta, Computes, R(Self, A...), kernel> {
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
      return Native<Op, R(Self, A...), kernel>::call(self, std::forward<A>(arguments)...);
    OnDevice<Meta> op;
    if constexpr (kInPlace) op.out = self;
    op.meta(self, arguments...);
    run_directly(
        thread_stream(impl->device().index()), [&] { Computes::compute(op, self, arguments...); }, Site(Op::name));
    if constexpr (kInPlace) return self;
    else return std::move(op.out);
  }
};

} // namespace detail

// The device kernel of an operator, given its Meta function, what computes it, and the CPU's kernel, which runs on
// aliases where the tensors cannot be used themselves.
template <class Op, class Meta, class Computes, typename Op::schema* kernel>
constexpr auto* direct = &detail::Direct<Op, Meta, Computes, typename Op::schema, kernel>::call;

} // namespace openreg
