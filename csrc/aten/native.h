// Runs ATen's CPU kernels on device memory, without copies. See Note [CpuCall].
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../backend/allocator.h"
#include "../backend/generator.h"
#include "../runtime/stream.h"
#include "queued.h"

namespace openreg {

// Note [CpuCall]
// The device's memory is host-addressable, so a CPU kernel can compute in it. A CpuCall is one such
// call. alias() gives, for a device tensor, a CPU tensor over the same memory; run() calls the
// kernel while the CPU allocator lends device memory; result() turns what came out into device
// tensors: an alias becomes the tensor that it stood for, a view of one becomes a view of that
// tensor's storage, and fresh memory, which is the device's already, only changes its label.
// What an alias went through (resize, new storage) is carried back to the real tensor when
// the kernel has succeeded.
//
// An alias has a CPU-labelled StorageImpl of its own, because views made inside the kernel take
// their device from it; two arguments on one storage share one, because kernels check for overlap.
// Aliases are pooled for each thread: making one costs about as much as a dispatcher hop.
class CpuCall {
 public:
  // Whether tensors of different devices may meet (copies) or not (all else).
  enum Devices { kSame, kAny };

  // `name`, for error messages, must outlive the call.
  explicit CpuCall(const char* name, Devices devices = kSame);
  ~CpuCall();
  CpuCall(const CpuCall&) = delete;
  CpuCall& operator=(const CpuCall&) = delete;

  // The device of the call: of its first device tensor, unless set before.
  c10::DeviceIndex device();
  void set_device(c10::DeviceIndex device);

  // A CPU tensor over the same memory; `write` where the kernel may change the tensor. Tensors of
  // no elements' worth of device (undefined, 0-dim CPU) pass. Throws for a tensor elsewhere.
  const at::Tensor& alias(const at::Tensor& tensor, bool write = false);

  // The CPU generator behind `generator`, or behind the device's default one.
  at::Generator generator(const std::optional<at::Generator>& generator);

  // CPU tensors that this operator takes by design (lengths, indices) need not be 0-dim.
  void allow_host_tensors(bool allow = true) { host_tensors_ = allow; }

  // Calls the kernel in the order of the device's current stream, then carries changes back.
  template <class Kernel>
  decltype(auto) run(Kernel&& kernel) {
    return run(Site(name_), kernel);
  }
  template <class Kernel>
  decltype(auto) run(Site site, Kernel&& kernel) {
    const Stream stream = current_stream(device());
    if constexpr (std::is_void_v<decltype(kernel())>) {
      openreg::run(stream, kernel, site);
      carry_back();
    } else {
      decltype(auto) out = openreg::run(stream, kernel, site);
      carry_back();
      return static_cast<decltype(kernel())>(out);
    }
  }

  // A device tensor for what the kernel returned.
  at::Tensor result(at::Tensor tensor);
  // The tensor that was passed, for a reference to its alias.
  const at::Tensor& original(const at::Tensor& alias) const;
  // Whether the kernel returned one of its own arguments.
  bool passed(const at::Tensor& tensor) const;
  // Whether what it returned shares memory with one.
  bool views_argument(const at::Tensor& tensor) const;

 private:
  struct Slot;
  struct Slots;
  static Slots& slots();
  Slot& take(c10::TensorImpl* real, const at::Tensor* original, bool write);
  Slot* find(const c10::TensorImpl* real);
  Slot* find(const c10::StorageImpl* real);
  void index(Slot& slot);
  const at::Tensor& host(const at::Tensor& tensor, bool write);
  [[noreturn]] void refuse(const at::Tensor& tensor) const; // it is on another device
  void alias_dense(Slot& slot);
  void alias_special(Slot& slot);
  void carry_back();
  void carry_back_special(Slot& slot);
  void relabel(c10::TensorImpl* impl);

  Slots& slots_;
  size_t base_;
  Devices devices_;
  const char* name_;
  c10::DeviceIndex device_ = -1;
  bool host_tensors_ = false;
  LendDeviceMemory lend_;
  c10::impl::ExcludeDispatchKeyGuard below_autograd_;
  std::vector<c10::StorageImpl*> host_storages_; // of the CPU tensors that were passed
  // Slots by tensor and by storage, once there are many (fused optimizers pass thousands).
  std::unique_ptr<std::unordered_map<const void*, Slot*>> index_;
};

// Grows or shrinks a device storage, keeping what fits.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

// Registers the boxed kernel at `device`'s key for one operator; it runs the kernel at `cpu`'s.
c10::RegistrationHandleRAII register_native_kernel(
    const c10::OperatorHandle& op, c10::DispatchKey cpu, c10::DispatchKey device);

// The boxed kernel for any operator, which queues it if it can.
const c10::BoxedKernel& native_kernel();

// Registers the boxed kernel for every operator of the installed torch that has a CPU kernel and no
// device kernel yet, once for each layout; returns how many.
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
// Whether they may promote to complex32, in which the CPU's kernels rarely compute: see Note [Wider dtypes].
inline bool complex_half(std::uint64_t dtypes) {
  const std::uint64_t complex =
      dtype_bits(at::kComplexHalf) | dtype_bits(at::kComplexFloat) | dtype_bits(at::kComplexDouble);
  return (dtypes & complex) && (dtypes & (dtype_bits(at::kComplexHalf) | dtype_bits(at::kHalf)));
}

template <class... T>
std::tuple<T...> unmap(CpuCall& call, std::tuple<T...>&& values) {
  return std::apply([&](auto&... each) { return std::tuple<T...>(unmap(call, static_cast<T&&>(each))...); }, values);
}

template <class Op, class Signature>
struct Native;
template <class Op, class R, class... A>
struct Native<Op, R(A...)> {
  static R call(A... arguments) {
    if (queueing() || complex_half((dtype_bits(arguments) | ... | 0))) [[unlikely]] {
      static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
      return c10::impl::BoxedKernelWrapper<R(A...)>::call(
          native_kernel(), op, c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<A>(arguments)...);
    }
    CpuCall call(Op::name);
    // Braces: left to right, so that a tensor has set the device before a Generator asks for it.
    std::tuple<decltype(map(call, std::forward<A>(arguments)))...> mapped{map(call, std::forward<A>(arguments))...};
    return unmap(call, call.run([&]() -> R {
      return std::apply(
          [](auto&&... each) -> R {
            return Op::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<decltype(each)>(each)...);
          },
          std::move(mapped));
    }));
  }
};

} // namespace detail

// The unboxed device kernel of an ATen operator, such as native<at::_ops::add_Tensor>.
template <class Op>
constexpr auto* native = &detail::Native<Op, typename Op::schema>::call;

} // namespace openreg
