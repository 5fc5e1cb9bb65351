// Work with its own context, which can be queued, and tickets, by which others know when it is done.
#pragma once

#include <openreg/launch.h>

#include <cstdint>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace openreg {

// How much work a stream had been given at some point; done() says if all of it has run.
struct Ticket {
  Stream stream;
  std::uint64_t number;
};

namespace detail {

// True if the work, and not the runtime, has thrown the exception that the calling thread handles: the same type says
// something else then. The C interface resets it before each call.
inline thread_local bool work_threw = false;

// Calls a function of the program's work.
template <class Call>
auto call_work(Call&& call) {
  try {
    return call();
  } catch (...) {
    work_threw = true;
    throw;
  }
}

// Runs work and throws its error.
inline void run_work(const openreg_work& work, void* context) {
  call_work([&] {
    if (const char* wrong = work.run(context)) [[unlikely]]
      throw std::runtime_error(wrong);
  });
}

class Task {
 public:
  Task() = default;
  // Copies the work, for a caller that continues.
  Task(const openreg_work& work, void* context)
      : work_(work), context_(work.keep ? call_work([&] { return work.keep(context); }) : context) {}
  template <class Work, class = std::enable_if_t<!std::is_same_v<std::decay_t<Work>, Task>>>
  Task(Work&& work) : work_(impl::WorkOf<Work>::table), context_(impl::WorkOf<Work>::keep(impl::context_of(work))) {}
  Task(Task&& other) noexcept : work_(std::exchange(other.work_, {})), context_(other.context_) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(work_, other.work_);
    std::swap(context_, other.context_);
    return *this;
  }
  ~Task() {
    if (work_.drop) work_.drop(context_);
  }
  void operator()() { run_work(work_, context_); }

 private:
  openreg_work work_{};
  void* context_ = nullptr;
};

} // namespace detail
} // namespace openreg
