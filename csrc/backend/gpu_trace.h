// The callbacks of torch.openreg._gpu_trace, which PyTorch calls for every device once torch._C._activate_gpu_trace()
// ran.
#pragma once

#include <Python.h>

#include <c10/core/Device.h>
#include <c10/core/impl/GPUTrace.h>

#include <cstdint>

#include "backend/lent_memory.h"
#include "backend/identity/identity.h"

namespace openreg {

// Returns true if the callbacks are active.
inline bool gpu_tracing() noexcept {
  return c10::impl::GPUTrace::get_trace() != nullptr;
}

// Takes Python's lock, and keeps the pending exception while a callback runs: a tensor may be freed during exception
// handling, even where PyTorch has released the lock.
class KeepPythonError {
 public:
  KeepPythonError() noexcept : held_(Py_IsInitialized()) {
    if (!held_) return;
    lock_ = PyGILState_Ensure();
    PyErr_Fetch(&type_, &value_, &traceback_);
  }
  ~KeepPythonError() {
    if (!held_) return;
    PyErr_Restore(type_, value_, traceback_);
    PyGILState_Release(lock_);
  }
  KeepPythonError(const KeepPythonError&) = delete;
  KeepPythonError& operator=(const KeepPythonError&) = delete;

 private:
  const bool held_;
  PyGILState_STATE lock_{};
  PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

// Calls one of PyInterpreterVTable's functions, such as trace_gpu_event_record(), with addresses and stream handles.
// Takes Python's lock, so the caller must hold no lock of the runtime. A callback's CPU tensors use host memory.
template <class... A, class... V>
void trace_gpu(void (c10::impl::PyInterpreterVTable::*callback)(c10::DeviceType, A...) const, V... values) {
  if (const auto* trace = c10::impl::GPUTrace::get_trace()) [[unlikely]] {
    const LendDeviceMemory host(-1);
    const AdoptHostMemory none(-1);
    const KeepPythonError error;
    ((**trace).*callback)(identity.type, values...);
  }
}

inline std::uintptr_t trace_address(const void* pointer) noexcept {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

} // namespace openreg
