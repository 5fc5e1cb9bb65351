// Schedules: a deterministic scheduler of streams, collectives and host threads, for openreg_ops/schedules/explore.py.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/explore/order.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/watchers.h"

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
class Scheduler;

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
// A step at which another thread may continue.
void pass_point(const char* name);
// A question: a step after which other threads continue first if the thread has asked before and done nothing else
// since. Returns whether no other thread could continue.
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

namespace detail {

// Waits as a step of the schedule until the condition is true. Without a name, the wait is part of another step.
void schedule_wait(const char* name, const Awaited& until);
// Counts a program's query of a stream as a step.
void schedule_query(const char* name, Stream stream);

} // namespace detail
} // namespace openreg
