// Python bindings for the end of the process.
#include <c10/util/thread_name.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "runtime/process/exit.h"
#include "runtime/process/fork.h"
#include "runtime/stream/launch.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/turn.h"

namespace openreg {
namespace {

using Clock = std::chrono::steady_clock;

// Note [Exit]
// A thread that takes Python's lock while the interpreter ends is canceled. Its stack is then unwound through PyTorch
// functions that are noexcept, so the process aborts ("terminate called without an active exception").
// Python's atexit therefore takes three steps, before the interpreter ends:
// First, the program's other threads, which are daemons, stay away. Their calls to the device, including those in
// progress, do not return. (In Python 3.14 such a thread stops when it takes the lock.) They continue if the
// interpreter is still running kAway after the third step, because an atexit handler may wait for them. A thread in a
// CPU operator still aborts the process, as it does without the device. Second, autograd's threads end; PyTorch ends
// them only after the interpreter has ended. Third, queued work finishes.
// Engine::stop() returns when autograd's threads have finished their last task. Each of them then takes Python's lock
// once more, to delete its thread state, and PyTorch has no function that tells when it has done that. So the second
// step waits until the process has no thread with the name that PyTorch gives them.

constexpr std::chrono::milliseconds kQuiet{20}; // without a launch: all threads have noticed
constexpr std::chrono::seconds kNotice{2};      // the longest wait for that
constexpr std::chrono::seconds kAway{2};

const char* const kAutograd = "pt_autograd";
unsigned long ends_process = 0; // the thread, in Python's numbers
std::atomic<std::uint64_t> away{0};
std::atomic<bool> ended{false}; // the device has ended: only the interpreter is left

// On a Python thread that runs no work, other than the one that ends the process: waits until the interpreter ends, and
// then forever.
void stay() {
  if (detail::in_work()) return;
  if (Py_IsInitialized() && !PyGILState_GetThisThreadState()) return;
  if (PyThread_get_thread_ident() == ends_process) return;
  if (c10::getThreadName().starts_with(kAutograd)) return;
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

// Returns true if the process has threads of autograd's engine.
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
  const auto deadline = Clock::now() + std::chrono::seconds(10); // for a busy machine; stop() waits as long
  torch::autograd::Engine::get_default_engine().stop();
  while (has_autograd_threads() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

// Waits for queued work until a signal arrives, unless the work is dropped because nobody can see it anymore.
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
