// The collectives of one group, in order: each begins once all processes have called the same one.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace openreg {

// What the processes compare of a call.
struct CallDescription {
  std::string rule; // must be equal on all processes
  std::string text; // for messages
  // The numbers of elements for and from each process, in an exchange of unequal parts. Empty otherwise.
  std::vector<int64_t> sent, received;
  at::Tensor summed; // a tensor that travels with the description and gets the sum. Undefined for other calls.
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
};

// Note [Matching calls]
// Gloo matches the processes' collectives only by their order. If one process calls a different collective,
// or one of a different size, Gloo returns wrong numbers, waits until the timeout, or ends the process from its own
// thread. So before each collective, the processes exchange descriptions of their calls, which all have the same size,
// and each process checks whether the calls match. If they do not, none begins, and every process raises the same
// error. The exchange runs on this queue's thread, so an asynchronous call does not wait for the other processes.
// A small tensor that is summed travels with its description: each process adds up what it has received, in the order
// of the ranks, and the engine has nothing left to do. It is read when the engine has completed the earlier calls,
// which may write to it.
class CallQueue {
 public:
  using Engine = c10::intrusive_ptr<c10d::Backend>;
  // Returns the call in the engine, or null if it is complete.
  using Begin = std::function<c10::intrusive_ptr<c10d::Work>()>;
  using Fail = std::function<void(std::exception_ptr)>;

  explicit CallQueue(Engine engine) : engine_(std::move(engine)) {}
  ~CallQueue(); // when all calls have begun or failed

  // Calls `begin` if the calls match, after the sum of a small tensor. Calls `fail` with the error if they do not
  // match, or if a process never makes its call.
  void push(CallDescription call, Begin begin, Fail fail);
  // Calls `task` after the earlier calls, without comparing it, and waits for it. Throws what it throws.
  void run(const std::function<void()>& task);

 private:
  struct Entry {
    std::optional<CallDescription> call; // compared, if there is one
    Begin begin;
    Fail fail;
  };
  void push(Entry&& entry);
  void work();
  void compare(const CallDescription& call);

  const Engine engine_;
  uint64_t number_ = 0; // calls compared so far
  std::optional<c10::weak_intrusive_ptr<c10d::Work>> last_; // in the engine, which keeps it until it is complete
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  bool ends_ = false;
  std::thread thread_; // begins with the first call
};

// Returns true if a tensor is so small, and of such a dtype, that its sum can travel with the description.
bool travels(const at::Tensor& host);

} // namespace openreg
