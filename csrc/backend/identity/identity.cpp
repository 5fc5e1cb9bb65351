#include "backend/identity/identity.h"

#define FMT_HEADER_ONLY // Kineto's headers use fmt, which torch does not export
#define USE_KINETO
#define KINETO_NAMESPACE libkineto
#include <libkineto.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <string_view>

#include "runtime/device.h"

namespace openreg {

Identity choose_identity() noexcept {
  if (device_name() == std::string_view("cuda"))
    return {
        .type = c10::kCUDA,
        .backend = c10::BackendComponent::CUDABit,
        .dense = c10::DispatchKey::CUDA,
        .sparse = c10::DispatchKey::SparseCUDA,
        .sparse_csr = c10::DispatchKey::SparseCsrCUDA,
        .quantized = c10::DispatchKey::QuantizedCUDA,
        .nested = c10::DispatchKey::NestedTensorCUDA,
        .autograd = c10::DispatchKey::AutogradCUDA,
        .autocast = c10::DispatchKey::AutocastCUDA,
        .name = "cuda",
        .module = "cuda",
    };
  return {
      .type = c10::kPrivateUse1,
      .backend = c10::BackendComponent::PrivateUse1Bit,
      .dense = c10::DispatchKey::PrivateUse1,
      .sparse = c10::DispatchKey::SparsePrivateUse1,
      .sparse_csr = c10::DispatchKey::SparseCsrPrivateUse1,
      .quantized = c10::DispatchKey::QuantizedPrivateUse1,
      .nested = c10::DispatchKey::NestedTensorPrivateUse1,
      .autograd = c10::DispatchKey::AutogradPrivateUse1,
      .autocast = c10::DispatchKey::AutocastPrivateUse1,
      .name = "openreg",
      .module = "openreg",
  };
}

void register_profiler(torch::profiler::impl::ProfilerStubs* stubs) {
  is_cuda() ? torch::profiler::impl::registerCUDAMethods(stubs)
            : torch::profiler::impl::registerPrivateUse1Methods(stubs);
}

// PyTorch gives Kineto the plugin of PrivateUse1 only if a program has named that device.
void register_profiler_plugin(std::function<std::unique_ptr<libkineto::IActivityProfiler>()> make) {
  if (is_cuda()) libkineto::api().registerProfilerFactory(std::move(make));
  else torch::profiler::impl::PrivateUse1ProfilerRegistry::instance().registerFactory(std::move(make));
}

} // namespace openreg
