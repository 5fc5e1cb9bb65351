#include "backend/identity/identity.h"

#include <torch/csrc/profiler/stubs/base.h>

namespace openreg {

Identity choose_identity() noexcept {
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
  torch::profiler::impl::registerPrivateUse1Methods(stubs);
}

} // namespace openreg
