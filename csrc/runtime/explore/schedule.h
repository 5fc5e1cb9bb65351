// Schedules: a deterministic scheduler of streams and collectives, for openreg_ops/schedules.
#pragma once

#include <vector>

#include "runtime/explore/order.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/watchers.h"

namespace openreg {

// Note [Schedules]
// In a schedule, every launch queues its work, as in async mode, and one thing happens at a time: the host, which is
// the thread that began the schedule, continues to its next step, or one queue runs its next item on its worker. A step
// is a launch, a wait, or a query. After each step of the host, the schedule chooses what happens next, so the order
// depends only on the program and on the Order: a seed, or a list of exceptions to the program's order. In the
// program's order, an item runs as soon as it is launched. Records of events, waits for them and sleeps take no time:
// they run as soon as they can, and the schedule does not choose among them. An item has the same name in every order
// until a result changes what the program does, because steps are counted. Queries are counted separately, because a
// loop of queries is as long as the work that it waits for. If the host asks again and again, queued work runs first.
// Other threads run freely. The schedule orders what they launch, and runs what they wait for.

// Makes the calling thread the host of a schedule. Throws if a schedule is active, or if the calling thread is captured
// or runs work.
void begin_schedule(const Order& order);
// Runs queued work and ends the schedule. Passes on what a signal handler raises, but not the errors of the work.
std::vector<Action> end_schedule();
// A step of the host at which queued work may run.
void pass_point(const char* name);

namespace detail {

// Waits as a step of the schedule until the condition is true. Without a name, the wait is part of another step.
void schedule_wait(const char* name, const Awaited& until);
// Counts a program's query of a stream as a step.
void schedule_query(const char* name, Stream stream);

} // namespace detail
} // namespace openreg
