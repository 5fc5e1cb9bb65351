// Orders: a deterministic scheduler of streams, collectives and host threads, for openreg_ops/openreg/schedules.py.
#pragma once

#include <atomic>
#include <chrono>
#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "stream.h"
#include "work.h"

namespace openreg {

// Note [Schedules]
// In a schedule, every launch queues its work, as in async mode, and one thing happens at a time: a host thread goes on
// to its next step, or one queue runs its next item on its worker while everybody else waits. A step is a launch, a
// host's wait or a query. After each step the schedule chooses what happens next, so the order is a function of the
// program and of the Order: a seed, or a list of exceptions to the program's order. In the program's order an item runs
// as soon as it is launched, and another thread goes on only when the running one waits or ends. Records of events,
// waits for them and sleeps take no time: they run as soon as they can, and no choice is about them.
// Steps are counted for each thread, so an item has the same name in every order until a result changes what the
// program does. A query counts apart, because a loop of queries is as long as the work that it waits for.
struct Step {
  int thread; // kUnknown: of a thread that the schedule does not control, such as one of Gloo
  std::uint32_t number, poll;
  auto operator<=>(const Step&) const = default;
};

class Scheduler;

struct Order {
  // An item that runs late: after another step, in order of `rank` where several do; `needed`: only when the host waits
  // for it.
  struct Late {
    Step item, after;
    bool needed;
    std::uint64_t rank;
  };
  struct Switch {
    Step after;
    int to; // the thread that goes on
  };
  bool random = false; // from the seed; otherwise the program's order with these exceptions
  std::uint64_t seed = 0;
  std::uint64_t length = 1; // how many things happen in the program's order
  std::vector<Late> late;
  std::vector<Switch> switches;
  bool located = false; // whether actions say where in the program they are
};

// What happened, in order.
struct Action {
  enum What { kLaunch, kRun, kWait, kQuery };
  What what;
  Step step; // of an item that runs, the step that launched it
  Stream stream; // that it was launched on, or is waited for
  int place; // the stream's index in the order, by first launch; -1 if it has had no work
  std::string name, where;
};

// Makes the calling thread the schedule's thread 0. Throws if a schedule is on, or where the calling thread is captured
// or runs work.
void begin_schedule(const Order& order);
// Runs what is queued, and ends the schedule. Throws nothing of the work.
std::vector<Action> end_schedule() noexcept;

// The threads that take part. The thread that starts another calls add_thread() before; the new one calls
// enter_thread(), which returns when it may go on, or false when the schedule is over, and leave_thread() at its end.
struct NewThread {
  std::shared_ptr<Scheduler> schedule;
  int number;
};
NewThread add_thread();
bool enter_thread(const NewThread& thread);
void leave_thread() noexcept;
// A step at which others may go on.
void pass_point(const char* name);
// The calling thread's number, or kUnknown.
int this_thread() noexcept;
inline constexpr int kUnknown = -1;
// Lets others go on until wake_thread() is called for the calling thread; `times_out`: or until nothing else can
// happen; or until the schedule is over. Throws if nothing can happen.
enum class Parked { kTimedOut, kWoken, kOver };
Parked park_thread(bool times_out);
void wake_thread(int thread);
// How many threads have entered and not left.
int live_threads() noexcept;

inline constexpr int kAnyDevice = -1;

namespace detail {

extern std::atomic<bool> schedule_on;
inline bool scheduled() noexcept {
  return schedule_on.load(std::memory_order_relaxed);
}

// A condition that never becomes false again, and the stream whose work makes it true.
using Condition = std::function<bool()>;
struct Awaited {
  Condition done;
  Stream stream{}; // an id below 0: all of the device's, or of kAnyDevice
};

// Names an item that has just been queued on a stream; `kernel`: a choice is about it, and it is a step. `after`: it
// cannot run before.
void schedule_item(Stream stream, const openreg_site& site, bool kernel, Awaited after = {});
// The host waits, or asks once whether it would have to. Without a name, the wait is part of another step.
void schedule_wait(const char* name, const Awaited& until);
void schedule_query(const char* name, Stream stream);
// Where collectives of a device are queued: no program's stream.
inline Stream collectives_of(int device) noexcept {
  return {device, static_cast<std::int64_t>(kStreams)};
}
// Ends the schedule without running anything: what is queued runs on its streams' threads.
void abandon_schedule() noexcept;

} // namespace detail
} // namespace openreg
