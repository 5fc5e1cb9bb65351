// The names by which PyTorch knows the device. Other files have them only in the names of PyTorch's own macros.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include <functional>
#include <memory>

namespace torch::profiler::impl {
struct ProfilerStubs;
}
namespace libkineto {
class IActivityProfiler;
}

namespace openreg {

// Note [Identity]
// PyTorch knows a backend by a device type, a backend component, and a dispatch key for each layout and for each layer
// above the kernels. choose_identity() decides on them when the library is loaded, before anything is registered. So
// registrations name a key by its role: OPENREG_LIBRARY_IMPL(aten, dense, m), or (aten, autograd, m).
struct Identity {
  c10::DeviceType type;
  c10::BackendComponent backend;
  c10::DispatchKey dense, sparse, sparse_csr, quantized, nested; // a key for each layout
  c10::DispatchKey autograd, autocast;
  const char* name;   // as in torch.device(name)
  const char* module; // as in torch.module.synchronize()
};

// Each library has a copy, so that reading a member takes one instruction.
__attribute__((visibility("default"))) Identity choose_identity() noexcept;
inline const Identity identity = choose_identity();

// Sets that are made once, because computing one from a key takes as long as a few checks of a kernel. kAutocast has
// the keys of autocast, and kAboveBackend those of all layers above the backend, which have already run when a kernel
// of the backend runs.
inline const auto kDense = c10::DispatchKeySet(identity.dense);
inline const auto kBackend = c10::DispatchKeySet(identity.backend);
inline const c10::DispatchKeySet kAutocast =
    c10::DispatchKeySet(identity.autocast) | c10::DispatchKeySet(c10::DispatchKey::AutocastCPU);
inline const c10::DispatchKeySet kAboveBackend = c10::autograd_dispatch_keyset_with_ADInplaceOrView | kAutocast;

// Returns true if the device is at CUDA's keys, where PyTorch has kernels of its own for autocast.
inline bool is_cuda() {
  return identity.type == c10::kCUDA;
}

// Makes `kernel` what a kernel of ATen calls for the device, through one of ATen's stubs.
template <typename Stub>
bool register_stub(Stub& stub, typename Stub::FnPtr kernel) {
  is_cuda() ? stub.set_cuda_dispatch_ptr(kernel) : stub.set_privateuse1_dispatch_ptr(kernel);
  return true;
}

// Sets the functions that torch.autograd.profiler calls for the device.
void register_profiler(torch::profiler::impl::ProfilerStubs* stubs);
// Gives Kineto a plugin, which is created when a program first profiles.
void register_profiler_plugin(std::function<std::unique_ptr<libkineto::IActivityProfiler>()> make);

inline c10::Device device_at(int index) {
  return {identity.type, static_cast<c10::DeviceIndex>(index)};
}

inline bool on_device(c10::Device device) {
  return device.type() == identity.type;
}
// Returns true for a tensor on the device, and false for an undefined one.
inline bool on_device(const at::TensorBase& x) {
  return x.defined() && on_device(x.device());
}

} // namespace openreg

// Works like TORCH_LIBRARY_IMPL() for a key of the device, such as dense or autograd.
#define OPENREG_LIBRARY_IMPL(ns, key, m) OPENREG_LIBRARY_IMPL_(ns, key, m, C10_UID)
#define OPENREG_LIBRARY_IMPL_(ns, key, m, uid)                                                                       \
  static void C10_CONCATENATE(openreg_library_impl_##ns##_##key##_, uid)(torch::Library&);                           \
  static const torch::detail::TorchLibraryInit C10_CONCATENATE(openreg_library_##ns##_##key##_, uid)(                \
      torch::Library::IMPL, &C10_CONCATENATE(openreg_library_impl_##ns##_##key##_, uid), #ns, openreg::identity.key, \
      __FILE__, __LINE__);                                                                                           \
  void C10_CONCATENATE(openreg_library_impl_##ns##_##key##_, uid)(torch::Library & m)
