#include "exit_bindings.h"

#include <torch/csrc/autograd/engine.h>

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "runtime/exit.h"
#include "runtime/fork.h"
#include "runtime/stream.h"

namespace openreg {
namespace {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

// Note [Exit]
// A thread that takes Python's lock while the interpreter ends is canceled, and the unwinding of its stack meets
// functions of PyTorch that let no exception pass: the process aborts ("terminate called without an active exception").
// So, at Python's atexit, before the interpreter ends:
// First the program's other threads, which are daemons, stay away. A call of the device that one makes, or has not
// returned from, does not return, as in Python 3.14, where such a thread stops when it takes the lock. They go on if
// the interpreter has not ended kAway after all of this, because an atexit handler may wait for them. A thread in an
// operator of the CPU still aborts the process, as it does without the device. Then autograd's threads end, which
// PyTorch asks for only after the interpreter has ended. Then queued work is done.

constexpr std::chrono::milliseconds kQuiet{20}; // without a launch: all threads have noticed
constexpr std::chrono::seconds kNotice{2};      // most time that they get for that
constexpr std::chrono::seconds kAway{2};

const char* const kAutograd = "pt_autograd";
unsigned long ends_process = 0; // the thread, in Python's numbers
std::atomic<std::uint64_t> away{0};
std::atomic<bool> ended{false}; // the device: only the interpreter is left

// On a thread of Python, other than the one that ends the process: waits until the interpreter ends, and for ever then.
void stay() {
  if (Py_IsInitialized() && !PyGILState_GetThisThreadState()) return;
  if (PyThread_get_thread_ident() == ends_process) return;
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof(name));
  if (std::string(name).starts_with(kAutograd)) return;
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release others_go_on;
    return stay();
  }
  ++away;
  for (auto seen = Clock::now(); Py_IsInitialized() && Clock::now() < seen + kAway;) {
    if (!ended) seen = Clock::now();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  while (!Py_IsInitialized()) pause();
  keep_threads_away(false);
}

void end_threads() {
  ends_process = PyThread_get_thread_ident();
  const py::gil_scoped_release they_need_it;
  keep_threads_away(true);
  const auto until = Clock::now() + kNotice;
  for (std::uint64_t before = 0, now = 1; before != now && Clock::now() < until; now = away + launch_count()) {
    before = now;
    std::this_thread::sleep_for(kQuiet);
  }
}

// Whether the process has autograd engine threads, recognized by name.
bool has_autograd_threads() {
  std::error_code ignored;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name.starts_with(kAutograd)) return true;
  }
  return false;
}

void end_autograd_threads() {
  if (!has_autograd_threads()) return;
  const py::gil_scoped_release threads_need_it;
  const auto deadline = Clock::now() + std::chrono::seconds(10); // of a busy machine; stop() waits as long itself
  torch::autograd::Engine::get_default_engine().stop();
  while (has_autograd_threads() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

// Waits for queued work until a signal arrives, unless it is dropped: nobody can see it any more.
void end_workers(bool drop) {
  const py::gil_scoped_release may_wait;
  try {
    if (!drop && !forked()) detail::wait_for_queued(detail::Interrupt::kThrows);
  } catch (...) {
    detail::drop_queued();
    ended = true;
    throw;
  }
  drop ? detail::drop_queued() : stop_workers();
  ended = true;
}

} // namespace

void bind_exit(py::module_& m) {
  set_stay_away(&stay);
  m.def("end_threads", &end_threads);
  m.def("end_autograd_threads", &end_autograd_threads);
  m.def("end_workers", &end_workers);
}

} // namespace openreg
