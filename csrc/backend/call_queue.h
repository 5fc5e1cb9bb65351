// The collectives of one group, in order: each begins when all processes have called the same one.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace openreg {

// What a process asks of the group, for comparison with what the others ask.
struct Call {
  std::string rule; // equal on all processes, or the calls do not fit
  std::string text; // for messages
  // Of an exchange of unequal parts: the numbers of elements for and from each process. Empty otherwise.
  std::vector<int64_t> sent, received;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
};

// Note [Matching calls]
// Gloo matches the processes' collectives by their order, not by what they are. If one process calls another collective
// than the others, or one of another size, Gloo gives wrong numbers, waits until the timeout, or ends the process from
// a thread of its own. So before each collective the processes exchange what they call, which has the same size for
// every call, and all of them see whether the calls fit. If they do not, none begins, and each raises the same
// sentence. The exchange is on a thread of this queue, so that an asynchronous call does not wait for the other
// processes.
class CallQueue {
 public:
  using Engine = c10::intrusive_ptr<c10d::Backend>;
  using Begin = std::function<void()>;
  using Fail = std::function<void(std::exception_ptr)>;

  explicit CallQueue(Engine engine) : engine_(std::move(engine)) {}
  ~CallQueue(); // when all calls have begun or failed

  // `begin` is called when the calls fit, and `fail` with the error when they do not, or when a process does not come.
  void push(Call call, Begin begin, Fail fail);
  // Calls `task`, which is not compared, behind the calls before it, and waits for it. Throws what it throws.
  void run(const std::function<void()>& task);
  // Whether the calling thread is that of a queue.
  static bool on_this_thread() noexcept;

 private:
  struct Entry {
    Call call;
    bool compared;
    Begin begin;
    Fail fail;
  };
  void push(Entry&& entry);
  void work();
  void compare(const Call& call);

  const Engine engine_;
  uint64_t number_ = 0; // calls compared so far
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  bool ends_ = false;
  std::thread thread_; // begins with the first call
};

} // namespace openreg
