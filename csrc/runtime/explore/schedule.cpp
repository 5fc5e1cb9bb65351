#include "runtime/explore/schedule.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "runtime/device.h"
#include "runtime/explore/scheduler.h"
#include "runtime/graph/graph.h"
#include "runtime/memory/memory.h"
#include "runtime/process/fork.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/turn.h"

namespace openreg {

namespace {

using Clock = std::chrono::steady_clock;

// How long queued work may run after the program has returned.
constexpr std::chrono::seconds kLeftBehind{10};

// The active schedule, or the last one, which threads may still read.
std::mutex which;
std::shared_ptr<Scheduler>& last_schedule() {
  static auto* schedule = new std::shared_ptr<Scheduler>;
  return *schedule;
}
thread_local std::shared_ptr<Scheduler> hosted; // the schedule whose host the calling thread is
std::shared_ptr<Scheduler> the_schedule() {
  std::lock_guard lock(which);
  return last_schedule();
}
LaunchMode mode_before = LaunchMode::kInline;

int this_thread(const std::shared_ptr<Scheduler>& s) {
  return hosted == s ? kHostThread : kUnknown;
}
bool is_host(const std::shared_ptr<Scheduler>& s) {
  return hosted == s && !detail::in_work();
}

// Runs work until the condition is true, for at most `most`. Returns true if it is. Without a condition, one choice of
// the host is enough.
bool run_others(Scheduler& s, const detail::Awaited* waits, bool host, std::chrono::nanoseconds most) {
  const auto until = Clock::now() + std::min<std::chrono::nanoseconds>(most, std::chrono::hours(1));
  std::unique_lock lock(s.mutex);
  for (s.settle(lock); s.on; s.settle(lock)) {
    Scheduler::Choice choice;
    if (host) choice = s.choose(waits);
    else choice = {s.needed(waits->stream), waits->done()};
    if (choice.host) return true;
    if (choice.queue) s.run(*choice.queue, lock);
    else { // another thread or process makes the condition true
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      lock.lock();
    }
    if (Clock::now() > until) return false;
  }
  return true;
}

void give_way(Scheduler& s, const detail::Awaited* waits, bool host = true) {
  detail::wait_freely(detail::Interrupt::kThrows, [&](auto most) { return run_others(s, waits, host, most); });
}

// A name from __PRETTY_FUNCTION__, "void openreg::ops::{anonymous}::custom_abs(const at::Tensor&)", without the rest.
std::string name_of(const openreg_site& site) {
  if (site.name) return site.name;
  std::string name = site.function ? site.function : "work";
  name = name.substr(0, name.find('('));
  return name.substr(name.find_last_of(" :") + 1);
}

// The program's line at a step. Call it before taking our lock, because it may take Python's lock.
void locate(Scheduler& s) {
  if (!s.located()) return;
  std::string where = where_is_caller();
  std::lock_guard lock(s.mutex);
  s.set_where(std::move(where));
}

// Logs a step of the host.
void step(Scheduler& s, Action::What what, Stream stream, const char* name) {
  locate(s);
  std::lock_guard lock(s.mutex);
  s.log(what, s.next_step(kHostThread, what == Action::kQuery), stream, name);
}

// Ends the schedule without running anything: queued work runs on the threads of its streams.
void abandon() noexcept {
  const auto s = the_schedule();
  detail::schedule_on.store(false);
  set_launch_mode(mode_before);
  {
    std::lock_guard lock(s->mutex);
    s->on = false;
  }
  detail::release_workers();
}

} // namespace

void begin_schedule(const Order& order) {
  check_not_forked();
  if (detail::scheduled())
    throw std::logic_error("openreg: an order is already being tried; call schedules() outside its program");
  if (detail::in_work())
    throw std::logic_error("openreg: work on a stream cannot try orders; call schedules() from the host");
  for (int device = 0; device < device_count(); ++device) {
    if (is_capturing(detail::thread_stream(device)))
      throw std::logic_error("openreg: the current stream is being captured; call schedules() outside the capture");
    synchronize_device(device);
    settle_memory(device);
  }
  {
    std::lock_guard lock(which);
    hosted = last_schedule() = std::make_shared<Scheduler>(order);
  }
  mode_before = launch_mode();
  set_launch_mode(LaunchMode::kAsync);
  detail::schedule_on.store(true);
}

std::vector<Action> end_schedule() {
  const auto s = the_schedule();
  if (!s || !detail::scheduled()) return {};
  step(*s, Action::kWait, {0, -1}, "end"); // work that runs from here on is too late for the result
  const detail::Awaited rest{
      [&s, until = Clock::now() + kLeftBehind] { return s->quiet() || Clock::now() > until; }, {kAnyDevice, -1}};
  std::exception_ptr interrupt;
  try {
    give_way(*s, &rest);
  } catch (...) {
    interrupt = std::current_exception();
  }
  if (detail::scheduled()) abandon();
  if (interrupt) std::rethrow_exception(interrupt);
  std::lock_guard lock(s->mutex);
  return std::move(s->actions);
}

void pass_point(const char* name) {
  const auto s = the_schedule();
  if (!detail::scheduled() || !is_host(s)) return;
  step(*s, Action::kWait, {0, 0}, name);
  give_way(*s, nullptr);
}

void detail::schedule_wait(const char* name, const Awaited& until) {
  const auto s = the_schedule();
  const bool host = is_host(s);
  if (host && name) step(*s, Action::kWait, until.stream, name);
  give_way(*s, &until, host);
}

void detail::schedule_query(const char* name, Stream stream) {
  const auto s = the_schedule();
  if (is_host(s)) {
    step(*s, Action::kQuery, stream, name);
    give_way(*s, nullptr);
  } else if (!in_work()) { // another thread's loop of queries ends although the host may be waiting for that thread
    std::unique_lock lock(s->mutex);
    s->settle(lock);
    if (auto* queue = s->on ? s->needed(stream) : nullptr) s->run(*queue, lock);
  }
}

namespace {

void schedule_item(Stream stream, const openreg_site& site, bool kernel, detail::Awaited after,
    const std::function<Ticket(bool)>& push) {
  const auto s = the_schedule();
  const std::string name = name_of(site);
  const int thread = this_thread(s);
  if (kernel && !detail::in_work()) locate(*s);
  {
    std::lock_guard lock(s->mutex);
    const Ticket queued = push(s->on);
    if (!s->on) return;
    const Step step = kernel ? s->next_step(thread) : s->last_step(thread);
    s->push({step, queued, 0, 0, name, kernel, std::move(after)});
    if (kernel) s->log(Action::kLaunch, step, stream, name);
  }
  if (kernel && is_host(s)) give_way(*s, nullptr);
}

const bool watches_schedules = [] {
  detail::schedule_watcher = {
      .item = &schedule_item, .wait = &detail::schedule_wait, .query = &detail::schedule_query, .abandon = &abandon};
  // A child created by fork() has no other thread that could continue.
  pthread_atfork(nullptr, nullptr, [] { detail::schedule_on.store(false); });
  return true;
}();

} // namespace
} // namespace openreg
