// The callbacks of torch.openreg._gpu_trace, which PyTorch calls for every device once torch._C._activate_gpu_trace()
// ran.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/GPUTrace.h>

#include <cstdint>

#include "allocator.h"

namespace openreg {

inline bool gpu_tracing() noexcept {
  return c10::impl::GPUTrace::get_trace() != nullptr;
}

// Calls one of PyInterpreterVTable's functions, such as trace_gpu_event_record(), with addresses and streams' handles.
// Takes Python's lock, so no lock of the runtime may be held. A callback's CPU tensors take the host's memory.
template <class... A, class... V>
void trace_gpu(void (c10::impl::PyInterpreterVTable::*callback)(c10::DeviceType, A...) const, V... values) {
  if (const auto* trace = c10::impl::GPUTrace::get_trace()) [[unlikely]] {
    const LendDeviceMemory host(-1);
    const AdoptHostMemory none(-1);
    ((**trace).*callback)(c10::kPrivateUse1, values...);
  }
}

inline std::uintptr_t trace_address(const void* pointer) noexcept {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

} // namespace openreg
