#include "runtime/explore/schedule.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>
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

// How often the watcher looks. It takes the turn from a thread that slept from one look to the next kLooks times in a
// row, or at kPolls looks in all. It also does so if a thread computes for long, because the thread with the turn may
// be waiting for memory to change. On a busy machine, the thread that would wake the sleeper may wait for a processor,
// and then does not sleep. So a look at which any thread of the process does not sleep does not count, and computing is
// measured in processor time.
constexpr std::chrono::milliseconds kLook{10};
constexpr int kLooks = 5, kPolls = 200;
constexpr std::chrono::seconds kComputes{2};
// How long, and for how many choices, threads may continue after the program has returned.
constexpr std::chrono::seconds kLeftBehind{10};
constexpr std::uint64_t kChoicesBehind = 1 << 12;

thread_local int my_thread = kUnknown;

// The active schedule, or the last one, which threads may still read.
std::mutex which;
std::shared_ptr<Scheduler>& last_schedule() {
  static auto* schedule = new std::shared_ptr<Scheduler>;
  return *schedule;
}
// A thread that has outlived its order is no longer controlled by a schedule.
thread_local std::shared_ptr<Scheduler> my_schedule;
std::shared_ptr<Scheduler> the_schedule() {
  std::lock_guard lock(which);
  if (my_schedule != last_schedule()) my_thread = kUnknown;
  return last_schedule();
}
LaunchMode mode_before = LaunchMode::kInline;

int native_number() {
  return static_cast<int>(syscall(SYS_gettid));
}

struct Deadlock : std::runtime_error {
  Deadlock()
      : std::runtime_error(
            "openreg: this order of the program's work ends in a deadlock: every thread of the program waits, and no "
            "queued work can run. Look for a wait for an event or a thread that nothing releases.") {}
};

// The holder of the turn (`me`, or none) lets the schedule choose until a thread continues or none can. False if that
// takes longer than `until`.
bool choose(Scheduler& s, std::unique_lock<std::mutex>& lock, int me, Clock::time_point until) {
  for (s.settle(lock); s.on; s.settle(lock)) {
    const auto choice = s.choose(me);
    if (!choice.line) {
      s.pass_to(choice.thread);
      return true;
    }
    s.run(*choice.line, lock);
    if (Clock::now() > until) return false;
  }
  return true;
}

// A thread gives up the turn if it has it, and waits to get it back: as kWaits, until `wait` is done unless it is null,
// or as kParked. Returns false if that took longer than `most`.
bool turn_comes(Scheduler& s, HostState as, const detail::Awaited* wait, std::chrono::nanoseconds most) {
  std::unique_lock lock(s.mutex);
  const int me = my_thread;
  HostThread& host = s.thread(me);
  const auto until = Clock::now() + std::min<std::chrono::nanoseconds>(most, std::chrono::hours(1));
  if (host.state != HostState::kChosen) {
    host.state = as;
    host.wait = wait;
    if (s.running == me && !choose(s, lock, me, until)) return false;
  }
  if (!s.changed.wait_until(lock, until, [&] { return !s.on || host.state == HostState::kChosen; })) return false;
  host.state = HostState::kRuns;
  host.wait = nullptr;
  if (me == 0 && std::exchange(s.raises, false)) throw Deadlock();
  return true;
}

// How often the operating system has put a thread to sleep, as text.
std::string sleeps_of(int native) {
  std::ifstream status("/proc/self/task/" + std::to_string(native) + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("voluntary_ctxt_switches")) return line;
  return "";
}

// The process's threads, except the calling one, that run or wait for a processor or a disk, with the processor time
// that each has used.
std::map<int, std::chrono::milliseconds> awake_threads() {
  static const long ticks = sysconf(_SC_CLK_TCK);
  std::map<int, std::chrono::milliseconds> found;
  std::error_code ignored;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
    const int native = std::stoi(task.path().filename());
    std::string line;
    std::getline(std::ifstream(task.path() / "stat"), line);
    const auto name_ends = line.rfind(')');
    if (native == native_number() || name_ends == std::string::npos) continue;
    char state = 0;
    long number = 0, user = 0, system = 0;
    std::istringstream fields(line.substr(name_ends + 1));
    fields >> state;
    for (int field = 4; field < 14; ++field) fields >> number;
    fields >> user >> system;
    if (std::string_view("SZX").find(state) == std::string_view::npos)
      found.emplace(native, (user + system) * 1000 / ticks);
  }
  return found;
}

// What the watcher has seen of a thread since its last step.
class Looks {
 public:
  // Looks once more. Returns whether the turn must be taken from the thread.
  bool give_up(int native) {
    const auto awake = awake_threads();
    const bool computes = std::any_of(awake.begin(), awake.end(),
        [&](const auto& each) { return each.second - computed_.insert(each).first->second >= kComputes; });
    const std::string sleeps = sleeps_of(native);
    asleep_ = awake.empty() && sleeps == slept_ ? asleep_ + 1 : 0;
    in_all_ += awake.empty();
    slept_ = sleeps;
    return computes || asleep_ >= kLooks || in_all_ >= kPolls;
  }

 private:
  int asleep_ = 0, in_all_ = 0;
  std::string slept_; // as sleeps_of()
  std::map<int, std::chrono::milliseconds> computed_; // when each thread was first seen awake
};

// The watcher's thread: see Note [Schedules].
void watch(const std::shared_ptr<Scheduler>& schedule) {
  pthread_setname_np(pthread_self(), "openreg_order");
  Scheduler& s = *schedule;
  Looks looks;
  Clock::time_point seen;
  std::unique_lock lock(s.mutex);
  while (s.on) {
    if (s.running == kUnknown) {
      const bool stuck = s.stuck(); // first, because what a thread waits for may come at any time
      choose(s, lock, kUnknown, Clock::time_point::max());
      if (s.running != kUnknown) continue;
      if (stuck && !s.runs_items && awake_threads().empty()) {
        s.deadlocked = s.raises = true;
        s.pass_to(0);
      } else s.free.wait_for(lock, std::chrono::milliseconds(1));
      continue;
    }
    s.free.wait_for(lock, kLook, [&] { return !s.on || s.running == kUnknown; });
    const int holder = s.running;
    const auto moved = s.moved;
    if (holder == kUnknown || s.runs_items || Clock::now() - moved < kLook) continue;
    const int native = s.thread(holder).native;
    if (!native) continue; // it is starting
    if (std::exchange(seen, moved) != moved) looks = {};
    lock.unlock();
    const bool give_up = looks.give_up(native);
    lock.lock();
    if (!give_up || s.running != holder || s.moved != moved || s.runs_items) continue;
    s.thread(holder).state = HostState::kOutside;
    s.pass_to(kUnknown);
  }
}

// On a thread that the schedule does not control: runs the work that is needed.
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

void give_way(Scheduler& s, const detail::Awaited* wait, HostState as = HostState::kWaits) {
  try {
    detail::wait_freely(detail::Interrupt::kThrows, [&](auto most) { return turn_comes(s, as, wait, most); });
  } catch (...) { // the thread continues, whichever thread has the turn
    std::lock_guard lock(s.mutex);
    HostThread& me = s.thread(my_thread);
    me.state = s.running == my_thread ? HostState::kRuns : HostState::kOutside;
    me.wait = nullptr;
    throw;
  }
}

// The program's line at a step. Call it before taking our lock, because it may take Python's lock.
void locate(Scheduler& s) {
  if (!s.located()) return;
  std::string where = where_is_caller();
  std::lock_guard lock(s.mutex);
  s.set_where(std::move(where));
}

// Ends the schedule without running anything: queued work runs on the threads of its streams.
void abandon() noexcept {
  const auto s = the_schedule();
  detail::schedule_on.store(false);
  set_launch_mode(mode_before);
  my_thread = kUnknown;
  {
    std::lock_guard lock(s->mutex);
    s->on = false;
    s->changed.notify_all();
    s->free.notify_all();
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
    my_schedule = last_schedule() = std::make_shared<Scheduler>(order);
  }
  my_thread = 0;
  my_schedule->thread(0).state = HostState::kRuns;
  my_schedule->thread(0).native = native_number();
  my_schedule->moved = Clock::now();
  mode_before = launch_mode();
  set_launch_mode(LaunchMode::kAsync);
  detail::schedule_on.store(true);
  std::thread([s = my_schedule] { watch(s); }).detach();
}

std::vector<Action> end_schedule() {
  const auto s = the_schedule();
  if (!s || !detail::scheduled()) return {};
  const auto until = Clock::now() + kLeftBehind;
  std::uint64_t last = kChoicesBehind;
  {
    std::lock_guard lock(s->mutex);
    last += s->choices();
    // Work that runs from here on is too late for the result.
    s->log(Action::kWait, s->next_step(my_thread), {0, -1}, "end");
  }
  const detail::Awaited rest{
      [&s, until, last, me = my_thread] { return s->quiet(me) || s->choices() > last || Clock::now() > until; },
      {kAnyDevice, -1}};
  std::exception_ptr interrupt;
  try {
    give_way(*s, &rest);
  } catch (const Deadlock&) { // among the other threads, which are abandoned
  } catch (...) {
    interrupt = std::current_exception();
  }
  if (detail::scheduled()) abandon();
  if (interrupt) std::rethrow_exception(interrupt);
  std::lock_guard lock(s->mutex);
  return std::move(s->actions);
}

int number_in_order() noexcept {
  if (!detail::scheduled()) return kUnknown;
  the_schedule();
  return my_thread;
}

ThreadOfOrder this_thread() {
  the_schedule();
  return {my_schedule, my_thread};
}

ThreadOfOrder add_thread() {
  const auto s = the_schedule();
  std::lock_guard lock(s->mutex);
  return {s, s->add_thread(my_thread)};
}

void drop_thread(const ThreadOfOrder& made) noexcept {
  std::lock_guard lock(made.schedule->mutex);
  made.schedule->thread(made.number).state = HostState::kEnded;
}

void enter_thread(const ThreadOfOrder& made) {
  my_schedule = made.schedule;
  my_thread = made.number;
  {
    std::lock_guard lock(my_schedule->mutex);
    my_schedule->thread(my_thread).native = native_number();
  }
  give_way(*made.schedule, nullptr);
}

void leave_thread() noexcept {
  const auto s = std::exchange(my_schedule, nullptr);
  const int me = std::exchange(my_thread, kUnknown);
  if (!s || me == kUnknown) return;
  std::lock_guard lock(s->mutex);
  s->thread(me).state = HostState::kEnded;
  s->progress();
  if (s->on && s->running == me) s->pass_to(kUnknown);
}

void pass_point(const char* name) {
  const auto s = the_schedule();
  if (!controlled()) return;
  locate(*s);
  {
    std::lock_guard lock(s->mutex);
    s->log(Action::kWait, s->next_step(my_thread), {0, 0}, name);
  }
  give_way(*s, nullptr);
}

namespace {

constexpr std::uint32_t kLogged = 1000; // questions in a row

bool ask_about(const char* name, Stream stream, Question what, double seconds = 0) {
  const auto s = the_schedule();
  if (!controlled()) return false;
  locate(*s);
  {
    std::lock_guard lock(s->mutex);
    const Step step = s->next_step(my_thread, static_cast<std::uint32_t>(what));
    if (step.poll < kLogged) s->log(Action::kQuery, step, stream, name);
    HostThread& me = s->thread(my_thread);
    me.wakes_at = me.now + seconds;
  }
  give_way(*s, nullptr);
  std::lock_guard lock(s->mutex);
  HostThread& me = s->thread(my_thread);
  me.come_to(me.wakes_at);
  return std::exchange(me.asking, Asking::kNot) == Asking::kAlone;
}

} // namespace

bool ask(const char* name, Question what, double seconds) {
  return ask_about(name, {0, 0}, what, seconds);
}

double skipped_seconds() noexcept {
  const auto s = the_schedule();
  if (!s || my_thread == kUnknown) return 0;
  std::lock_guard lock(s->mutex);
  return s->thread(my_thread).now;
}

Parked park_thread(double timeout) {
  const auto s = the_schedule();
  if (my_thread == kUnknown) return Parked::kOver;
  HostThread& me = s->thread(my_thread);
  {
    std::lock_guard lock(s->mutex);
    s->log(Action::kWait, s->next_step(my_thread), {0, 0}, "lock");
    s->park(my_thread, timeout);
  }
  const auto unpark = [&] {
    std::lock_guard lock(s->mutex);
    return std::exchange(me.woken, false);
  };
  try {
    give_way(*s, nullptr, HostState::kParked);
  } catch (...) {
    unpark();
    throw;
  }
  if (unpark()) return Parked::kWoken;
  std::lock_guard lock(s->mutex);
  if (!s->on) return s->deadlocked ? Parked::kDeadlocked : Parked::kOver;
  me.come_to(me.times_out_at);
  return Parked::kTimedOut;
}

bool wake_thread(const ThreadOfOrder& thread) {
  if (thread.number == kUnknown || !detail::scheduled()) return false;
  std::lock_guard lock(thread.schedule->mutex);
  HostThread& woken = thread.schedule->thread(thread.number);
  woken.woken = true;
  if (my_schedule == thread.schedule && my_thread != kUnknown) woken.come_to(thread.schedule->thread(my_thread).now);
  return thread.schedule->on;
}

int live_threads() noexcept {
  const auto s = the_schedule();
  std::lock_guard lock(s->mutex);
  int live = 0;
  for (int i = 0; i < s->thread_count(); ++i) live += s->thread(i).alive();
  return live;
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
    s->log(Action::kWait, s->next_step(my_thread), until.stream, name);
  }
  give_way(*s, &until);
}

void detail::schedule_query(const char* name, Stream stream) {
  ask_about(name, stream, Question::kAsks);
}

namespace {

void schedule_item(Stream stream, const openreg_site& site, bool kernel, detail::Awaited after,
    const std::function<Ticket(bool)>& push) {
  const auto s = the_schedule();
  const std::string name = name_of(site);
  const bool steps = kernel && !detail::in_work();
  if (steps) locate(*s);
  {
    std::lock_guard lock(s->mutex);
    const Ticket queued = push(s->on);
    if (!s->on) return;
    const Step step = kernel ? s->next_step(my_thread) : s->this_step(my_thread);
    s->push({step, queued, 0, name, kernel, std::move(after)});
    if (kernel) s->log(Action::kLaunch, step, stream, name);
  }
  if (kernel && controlled()) give_way(*s, nullptr);
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
