// One call of a CPU kernel on device memory, without copies.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "backend/allocator.h"
#include "runtime/stream/launch.h"

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
// An alias has its own CPU-labeled StorageImpl, because views made inside the kernel take
// their device from it; two arguments on one storage share one, because kernels check for overlap.
// Aliases are pooled for each thread: making one costs about as much as a dispatcher hop.
class CpuCall {
 public:
  // kSame: all tensors must be on one device. kAny, for copies: they may be on different ones.
  enum Devices { kSame, kAny };

  // `name`, for error messages, must outlive the call.
  explicit CpuCall(const char* name, Devices devices = kSame);
  ~CpuCall();
  CpuCall(const CpuCall&) = delete;
  CpuCall& operator=(const CpuCall&) = delete;

  // The device of the call: the device of its first device tensor, unless set before.
  c10::DeviceIndex device();
  void set_device(c10::DeviceIndex device);

  // A CPU tensor over the same memory; set `write` if the kernel may change the tensor. Tensors without a device to
  // check (undefined, 0-dim CPU) pass through. Throws for a tensor on another device.
  const at::Tensor& alias(const at::Tensor& tensor, bool write = false);

  // The CPU generator behind `generator`, or behind the device's default generator.
  at::Generator generator(const std::optional<at::Generator>& generator);

  // CPU tensors that this operator takes by design (lengths, indices) may have any dimension.
  void allow_host_tensors(bool allow = true) { host_tensors_ = allow; }

  // The caller has checked which arguments are CPU scalars.
  void allow_scalars() { scalars_checked_ = true; }

  // Calls the kernel in the order of the device's current stream, then applies the changes to the real tensors.
  template <class Kernel>
  std::invoke_result_t<Kernel&> run(Kernel&& kernel) {
    return run(Site(name_), kernel);
  }
  template <class Kernel>
  std::invoke_result_t<Kernel&> run(Site site, Kernel&& kernel) {
    const Stream stream = detail::thread_stream(device());
    if constexpr (std::is_void_v<decltype(kernel())>) {
      detail::run_directly(stream, kernel, site);
      carry_back();
    } else {
      std::invoke_result_t<Kernel&> out = detail::run_directly(stream, kernel, site);
      carry_back();
      return out;
    }
  }

  // Calls a kernel that touches no memory, immediately, whatever the stream is doing.
  template <class Kernel>
  void run_on_host(Kernel&& kernel) {
    kernel();
    carry_back();
  }

  // The device tensor for a tensor that the kernel returned.
  at::Tensor result(at::Tensor tensor);
  // The tensor that was passed, given a reference to its alias.
  const at::Tensor& original(const at::Tensor& alias) const;
  // Returns true if the kernel returned one of its own arguments.
  bool passed(const at::Tensor& tensor) const;
  // Returns true if a returned tensor shares memory with an argument.
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
  bool host_tensors_ = false, scalars_checked_ = false;
  at::Tensor refused_; // a host tensor, until the device is known, which the error names
  LendDeviceMemory lend_;
  c10::impl::ExcludeDispatchKeyGuard below_autograd_;
  std::vector<c10::StorageImpl*> host_storages_; // of the CPU tensors that were passed
  // Slots by tensor and by storage, used once there are many (fused optimizers pass thousands).
  std::unique_ptr<std::unordered_map<const void*, Slot*>> index_;
};

} // namespace openreg
