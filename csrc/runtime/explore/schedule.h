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

#include "runtime/stream/stream.h"
#include "runtime/stream/task.h"

namespace openreg {

// Note [Schedules]
// In a schedule, every launch queues its work, as in async mode, and one thing happens at a time: a host thread
// continues to its next step, or one queue runs its next item on its worker while all others wait. A step is a launch,
// a wait of the host, or a query. After each step the schedule chooses what happens next, so the order depends only on
// the program and on the Order: a seed, or a list of exceptions to the program's order. In the program's order, an item
// runs as soon as it is launched, and another thread continues only when the running one waits or ends. Records of
// events, waits for them and sleeps take no time: they run as soon as they can, and the schedule does not choose among
// them. Steps are counted for each thread, so an item has the same name in every order until a result changes what the
// program does. Questions (a query, a sleep, an attempt to take a lock) are counted separately, because a loop of
// questions is as long as the work that it waits for. A thread that only asks lets all others continue first.
// The running thread has the turn. It gives the turn up and gets it back in turn_comes(), at its next step. A thread
// that blocks where the schedule cannot see it (a pipe, a lock from outside the program) takes no step. A watcher then
// takes the turn from it, and the others continue without it until it reaches turn_comes() again. The watcher does so
// only while all threads of the process sleep: a thread that waits for a processor may be about to wake the blocked
// one, and a busy machine would otherwise change the order. The watcher also has the turn while no thread can continue:
// it lets a wait with a timeout end, and finds deadlocks.
struct Step {
  int thread; // kUnknown: a thread that the schedule does not control, such as one of Gloo's
  std::uint32_t number, poll;
  auto operator<=>(const Step&) const = default;
};

class Scheduler;

struct Order {
  // An item that runs late: after another step, in order of `rank` if several do. `needed`: it runs only when the host
  // waits for it.
  struct Late {
    Step item, after;
    bool needed;
    std::uint64_t rank;
  };
  struct Switch {
    Step after;
    int to; // the thread that continues
  };
  bool random = false; // drawn from the seed; otherwise the program's order with these exceptions
  std::uint64_t seed = 0;
  std::uint64_t length = 1; // how many things happen in the program's order
  std::vector<Late> late;
  std::vector<Switch> switches;
  bool located = false; // whether actions record where they are in the program
  bool others = false; // whether the process has threads that do not take part and may wake those that do
  std::chrono::milliseconds patience{30'000}; // how long all threads may wait for something outside the schedule
};

// What happened, in order.
struct Action {
  enum What { kLaunch, kRun, kWait, kQuery };
  What what;
  Step step; // for an item that runs: the step that launched it
  Stream stream; // the stream that it was launched on, or that is waited for
  int place; // the stream's index in the order, by first launch; -1 if it has had no work
  std::string name, where;
};

// Makes the calling thread the schedule's thread 0. Throws if a schedule is active, or if the calling thread is
// captured or runs work.
void begin_schedule(const Order& order);
// Runs queued work and ends the schedule. Passes on what a signal handler raises, but not the errors of the work.
std::vector<Action> end_schedule();

// The threads that take part. A thread calls add_thread() before it starts another; the new thread calls
// enter_thread(), which returns when it may run, and leave_thread() at its end. drop_thread(): it could not be started.
struct ThreadOfOrder {
  std::shared_ptr<Scheduler> schedule;
  int number;
};
ThreadOfOrder add_thread();
void drop_thread(const ThreadOfOrder& thread) noexcept;
void enter_thread(const ThreadOfOrder& thread);
void leave_thread() noexcept;
// The calling thread, and its number; kUnknown if it does not take part.
ThreadOfOrder this_thread();
int number_in_order() noexcept;
inline constexpr int kUnknown = -1;
// A step at which another thread may continue.
void pass_point(const char* name);
// A question: a step after which other threads continue first if the thread has asked before and done nothing else
// since. Returns whether no other thread could continue.
enum class Question : std::uint32_t { kLock = 1, kAsks = 64 }; // how much they count
// `seconds`: how long it sleeps; this time is skipped.
bool ask(const char* name, Question what, double seconds = 0);
// The seconds that sleeps and timeouts would have taken until now; 0 for a thread that does not take part.
double skipped_seconds() noexcept;
// Lets other threads continue until wake_thread() is called for the calling thread or the schedule ends, even in a
// deadlock. With a timeout of 0 or more seconds, also until nothing else can happen. Throws if nothing can happen.
enum class Parked { kTimedOut, kWoken, kOver, kDeadlocked };
Parked park_thread(double timeout);
// False if its order is over.
bool wake_thread(const ThreadOfOrder& thread);
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
  Stream stream{}; // an id below 0: all streams of the device, or of all devices for kAnyDevice
  bool elsewhere = false; // another process may make it true
};

// Queues an item on a stream by calling `push`, so that several threads' items are in the same order in the queue and
// in the schedule. The argument of `push` says whether the schedule takes the item: it may have ended. `kernel`: the
// schedule chooses when the item runs, and it is a step. `after`: it cannot run before.
void schedule_item(
    Stream stream, const openreg_site& site, bool kernel, Awaited after, const std::function<Ticket(bool)>& push);
// The host waits, or asks once whether it would have to. Without a name, the wait is part of another step.
void schedule_wait(const char* name, const Awaited& until);
void schedule_query(const char* name, Stream stream);
// The queue for a device's collectives, which is not a stream of the program.
inline Stream collectives_of(int device) noexcept {
  return {device, static_cast<std::int64_t>(kStreams)};
}
// Ends the schedule without running anything: queued work runs on the threads of its streams.
void abandon_schedule() noexcept;

} // namespace detail
} // namespace openreg
