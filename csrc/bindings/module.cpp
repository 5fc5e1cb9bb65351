// Python bindings: the C++ that openreg_ops needs and PyTorch does not already offer.
#include <Python.h>

#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include <pthread.h>

#include "backend/allocator.h"
#include "backend/identity/identity.h"
#include "runtime/process/interrupts.h"

namespace openreg {

void bind_device(py::module_& m);
void bind_memory(py::module_& m);
void bind_operators(py::module_& m);
void bind_graphs(py::module_& m);
void bind_compiled_graphs(py::module_& m);
void bind_schedules(py::module_& m);
void bind_distributed(py::module_& m);
void bind_exit(py::module_& m);

namespace {

// A thread must not hold Python's lock while another thread's work has the turn, because that work may need the lock.
void wait_without_python(void (*wait)(void*), void* argument) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release others_go_on;
    wait(argument);
  } else wait(argument);
}

unsigned long signal_thread = 0; // Python's own, which handles signals

// A handler belongs to the program, not to the waiting operator: its operators use the usual keys, and its CPU tensors
// host memory.
bool check_signals() {
  if (!Py_IsInitialized() || PyThread_get_thread_ident() != signal_thread) return false;
  const c10::impl::ForceDispatchKeyGuard usual_keys(c10::default_included_set, c10::default_excluded_set);
  const LendDeviceMemory host(-1);
  const AdoptHostMemory none(-1);
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals()) throw py::error_already_set();
  return true;
}

} // namespace
} // namespace openreg

PYBIND11_MODULE(_C, m) {
  using namespace openreg;
  set_around_wait(&wait_without_python);
  signal_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  set_check_signals(&check_signals);
  // Torch calls torch.openreg._lazy_init() once per process, and must call it again in a child; see Note [Fork].
  pthread_atfork(nullptr, nullptr, [] { torch::utils::set_requires_device_init(identity.type, true); });
  bind_device(m);
  bind_memory(m);
  bind_operators(m);
  bind_graphs(m);
  bind_compiled_graphs(m);
  bind_schedules(m);
  bind_distributed(m);
  bind_exit(m);
}
