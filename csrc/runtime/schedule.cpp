#include "schedule.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "device.h"
#include "fork.h"
#include "graph.h"
#include "scheduler.h"
#include "stream.h"
#include "turn.h"
#include "wait.h"

namespace openreg {

std::atomic<bool> detail::schedule_on{false};

namespace {

using Clock = std::chrono::steady_clock;

// How long nothing may happen before the program counts as deadlocked: a thread that the schedule does not control may
// still do something.
constexpr std::chrono::milliseconds kStuck{200};
// How long a thread may block in what the schedule does not see before others go on without it: reading from a process.
constexpr std::chrono::seconds kOutside{1};
// How long threads may go on after the program has returned.
constexpr std::chrono::seconds kLeftBehind{10};

thread_local int my_thread = kUnknown;

// The schedule that is on, or the last one: threads may still look at it.
std::mutex which;
std::shared_ptr<Scheduler>& last_schedule() {
  static auto* schedule = new std::shared_ptr<Scheduler>;
  return *schedule;
}
// A thread that has outlived its order is one of the threads that no schedule controls.
thread_local std::shared_ptr<Scheduler> my_schedule;
std::shared_ptr<Scheduler> the_schedule() {
  std::lock_guard lock(which);
  if (my_schedule != last_schedule()) my_thread = kUnknown;
  return last_schedule();
}
LaunchMode mode_before = LaunchMode::kInline;

[[noreturn]] void stuck() {
  throw std::runtime_error(
      "openreg: this order of the program's work ends in a deadlock: every thread of the program waits, and no queued "
      "work can run. Look for a wait for an event or a thread that nothing releases.");
}

// Lets others go on until it is the calling thread's turn. False if that took longer than `most`.
bool turn_comes(Scheduler& s, std::chrono::nanoseconds most) {
  std::unique_lock lock(s.mutex);
  const int me = my_thread;
  const auto begun = Clock::now(), until = begun + std::min<std::chrono::nanoseconds>(most, std::chrono::hours(1));
  s.thread(me).outside = false;
  for (;;) {
    if (!s.on) return true;
    if (s.running != me) {
      const auto next = std::min(until, Clock::now() + kOutside);
      if (s.changed.wait_until(lock, next, [&] { return s.running == me || !s.on; })) {
        if (!s.on || std::exchange(s.thread(me).chosen, false)) return true;
      } else if (!s.runs_item && Clock::now() - s.moved > kOutside) {
        s.thread(s.running).outside = true;
        s.running = me;
      } else {
        if (Clock::now() > until) return false;
        continue;
      }
    }
    s.settle(lock);
    const auto choice = s.choose(me);
    if (choice) s.idle_since.reset();
    if (choice.thread == me) return true;
    if (choice.line) s.run(*choice.line, lock);
    else if (choice) {
      s.pass_to(choice.thread, /*chosen=*/true);
      continue;
    } else {
      int timed = kUnknown;
      bool outside = false;
      for (int i = 0; i < s.thread_count(); ++i) {
        const HostThread& each = s.thread(i);
        if (timed == kUnknown && each.alive && each.parked && each.times_out) timed = i;
        outside |= each.alive && each.outside;
      }
      if (!s.idle_since) s.idle_since = Clock::now();
      const bool idle = Clock::now() - *s.idle_since > kStuck;
      if (timed != kUnknown && (idle || !outside)) {
        s.idle_since.reset();
        if (timed == me) return true; // and was not woken
        s.pass_to(timed, /*chosen=*/true);
        continue;
      }
      if (idle && !outside) {
        if (me == 0) stuck();
        s.pass_to(0, /*chosen=*/false); // whose exception ends the program
        continue;
      }
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock.lock();
      if (Clock::now() > until) return false;
      continue;
    }
    if (Clock::now() > until) return false;
  }
}

// On a thread that the schedule does not control: runs what is needed.
bool help(Scheduler& s, const detail::Awaited& until) {
  std::unique_lock lock(s.mutex);
  while (s.on && !until.done()) {
    s.settle(lock);
    if (until.done()) break;
    if (auto* line = s.needed(until.stream)) s.run(*line, lock);
    else {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      return until.done();
    }
  }
  return true;
}

// A name from __PRETTY_FUNCTION__, "void openreg::ops::{anonymous}::custom_abs(const at::Tensor&)", without the rest.
std::string name_of(const openreg_site& site) {
  if (site.name) return site.name;
  std::string name = site.function ? site.function : "work";
  name = name.substr(0, name.find('('));
  return name.substr(name.find_last_of(" :") + 1);
}

bool controlled() {
  return my_thread != kUnknown && !detail::in_work();
}

// While it lives, the calling thread waits for a condition.
class Waiting {
 public:
  Waiting(Scheduler& s, const detail::Awaited* until) : s_(s) { set(until); }
  ~Waiting() { set(nullptr); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  void set(const detail::Awaited* until) {
    std::lock_guard lock(s_.mutex);
    s_.thread(my_thread).wait = until;
  }
  Scheduler& s_;
};

void give_way(Scheduler& s, const detail::Awaited* wait) {
  const Waiting waiting(s, wait);
  detail::wait_freely(detail::Interrupt::kThrows, [&](auto most) { return turn_comes(s, most); });
}

// The place in the program of a step, which may take Python's lock, so before ours.
void locate(Scheduler& s) {
  if (!s.located()) return;
  std::string where = where_is_caller();
  std::lock_guard lock(s.mutex);
  s.set_where(std::move(where));
}

} // namespace

void begin_schedule(const Order& order) {
  check_not_forked();
  if (detail::scheduled())
    throw std::logic_error("openreg: an order is being tried already; call schedules() outside of its program");
  if (detail::in_work())
    throw std::logic_error("openreg: work on a stream cannot try orders; call schedules() from the host");
  for (int device = 0; device < device_count(); ++device) {
    if (is_capturing(detail::thread_stream(device)))
      throw std::logic_error("openreg: the current stream is being captured; call schedules() outside of the capture");
    synchronize_device(device);
  }
  {
    std::lock_guard lock(which);
    my_schedule = last_schedule() = std::make_shared<Scheduler>(order);
  }
  my_thread = 0;
  mode_before = launch_mode();
  set_launch_mode(LaunchMode::kAsync);
  detail::schedule_on.store(true);
}

std::vector<Action> end_schedule() noexcept {
  const auto s = the_schedule();
  if (!s || !detail::scheduled()) return {};
  {
    std::lock_guard lock(s->mutex);
    // What runs from here on ran too late.
    s->log(Action::kWait, s->next_step(my_thread, /*poll=*/false), {0, -1}, "end");
  }
  const detail::Awaited rest{[&s, me = my_thread] { return s->quiet(me); }, {kAnyDevice, -1}};
  try {
    const auto until = Clock::now() + kLeftBehind;
    const Waiting waiting(*s, &rest);
    detail::wait_freely(
        detail::Interrupt::kThrows, [&](auto most) { return turn_comes(*s, most) || Clock::now() > until; });
  } catch (...) { // an interrupt, or a deadlock of the other threads: they are left behind
  }
  detail::abandon_schedule();
  std::lock_guard lock(s->mutex);
  return std::move(s->actions);
}

void detail::abandon_schedule() noexcept {
  if (!detail::scheduled()) return;
  const auto s = the_schedule();
  schedule_on.store(false);
  set_launch_mode(mode_before);
  my_thread = kUnknown;
  {
    std::lock_guard lock(s->mutex);
    s->on = false;
    s->changed.notify_all();
  }
  release_workers();
}

int this_thread() noexcept {
  if (!detail::scheduled()) return kUnknown;
  the_schedule();
  return my_thread;
}

NewThread add_thread() {
  const auto s = the_schedule();
  std::lock_guard lock(s->mutex);
  return {s, s->add_thread()};
}

bool enter_thread(const NewThread& made) {
  const auto& [s, thread] = made;
  my_schedule = s;
  my_thread = thread;
  detail::wait_freely(detail::Interrupt::kNever, [&](auto most) {
    std::unique_lock lock(s->mutex);
    return s->changed.wait_for(lock, most, [&] { return s->running == thread || !s->on; });
  });
  std::lock_guard lock(s->mutex);
  s->thread(thread).chosen = false;
  return s->on;
}

void leave_thread() noexcept {
  const auto s = std::exchange(my_schedule, nullptr);
  const int me = std::exchange(my_thread, kUnknown);
  if (!s || me == kUnknown) return;
  std::unique_lock lock(s->mutex);
  s->thread(me).alive = false;
  while (s->on && s->running == me) {
    s->settle(lock);
    const auto choice = s->choose(kUnknown);
    if (choice.line) {
      s->run(*choice.line, lock);
      continue;
    }
    s->pass_to(choice ? choice.thread : 0, bool(choice)); // thread 0 finds out that nothing can happen
  }
}

void pass_point(const char* name) {
  const auto s = the_schedule();
  if (!controlled()) return;
  locate(*s);
  {
    std::lock_guard lock(s->mutex);
    s->log(Action::kWait, s->next_step(my_thread, /*poll=*/false), {0, 0}, name);
  }
  give_way(*s, nullptr);
}

Parked park_thread(bool times_out) {
  const auto s = my_schedule;
  const int number = my_thread;
  {
    std::lock_guard lock(s->mutex);
    s->log(Action::kWait, s->next_step(my_thread, /*poll=*/false), {0, 0}, "lock");
  }
  const auto set = [&](bool parked) {
    std::lock_guard lock(s->mutex);
    HostThread& me = s->thread(number);
    me.parked = parked;
    me.times_out = parked && times_out;
    return !parked && std::exchange(me.woken, false);
  };
  set(true);
  try {
    detail::wait_freely(detail::Interrupt::kThrows, [&](auto most) { return turn_comes(*s, most); });
  } catch (...) {
    set(false);
    throw;
  }
  if (set(false)) return Parked::kWoken;
  std::lock_guard lock(s->mutex);
  return s->on ? Parked::kTimedOut : Parked::kOver;
}

void wake_thread(int thread) {
  const auto s = the_schedule();
  std::lock_guard lock(s->mutex);
  if (thread < s->thread_count()) s->thread(thread).woken = true; // else it waited in an earlier order
}

int live_threads() noexcept {
  const auto s = the_schedule();
  std::lock_guard lock(s->mutex);
  int live = 0;
  for (int i = 0; i < s->thread_count(); ++i) live += s->thread(i).alive;
  return live;
}

void detail::schedule_item(Stream stream, const openreg_site& site, bool kernel, Awaited after) {
  const auto s = the_schedule();
  const std::string name = name_of(site);
  const bool steps = kernel && !in_work();
  if (steps) locate(*s);
  {
    std::lock_guard lock(s->mutex);
    const Step step = kernel ? s->next_step(my_thread, /*poll=*/false) : s->this_step(my_thread);
    s->push(stream, {step, 0, name, kernel, std::move(after)});
    if (kernel) s->log(Action::kLaunch, step, stream, name);
  }
  if (kernel && controlled()) give_way(*s, nullptr);
}

void detail::schedule_wait(const char* name, const Awaited& until) {
  const auto s = the_schedule();
  if (!controlled()) {
    wait_freely(Interrupt::kThrows, [&](auto) { return help(*s, until); });
    return;
  }
  if (name) {
    locate(*s);
    std::lock_guard lock(s->mutex);
    s->log(Action::kWait, s->next_step(my_thread, /*poll=*/false), until.stream, name);
  }
  give_way(*s, &until);
}

void detail::schedule_query(const char* name, Stream stream) {
  const auto s = the_schedule();
  if (!controlled()) return;
  locate(*s);
  {
    std::lock_guard lock(s->mutex);
    s->log(Action::kQuery, s->next_step(my_thread, /*poll=*/true), stream, name);
  }
  give_way(*s, nullptr);
}

} // namespace openreg
