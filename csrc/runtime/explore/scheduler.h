// Chooses what continues next in a schedule: see Note [Schedules]. Used only by schedule.cpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/explore/order.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/watchers.h"

namespace openreg {

// SplitMix64: the same numbers on every machine.
class OrderRandom {
 public:
  explicit OrderRandom(std::uint64_t seed) : state_(seed) {}
  std::uint64_t operator()() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t n) { return (*this)() % n; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }

 private:
  std::uint64_t state_;
};

struct ScheduledItem {
  Step step;
  Ticket queued;
  std::uint64_t number; // in the order of launches
  std::string name;
  bool kernel;
  detail::Awaited after;
  bool ready() const { return !after.done || after.done(); }
};

// What the schedule chooses among: a queue or a host thread.
struct Actor {
  std::int64_t priority = 0;
  std::uint32_t passed_over = 0; // how often others were chosen instead
};
struct ScheduledQueue : Actor {
  Stream stream{};
  int place = 0; // among the order's streams
  std::deque<ScheduledItem> items;
};
// Where a host thread is.
//   kWaits, kParked -> kChosen: the schedule gives it the turn (pass_to()).
//   kChosen -> kRuns: it continues (turn_comes()).
//   kRuns, kOutside -> kWaits or kParked: it reaches its next step (turn_comes()).
//   kRuns, kChosen -> kOutside: the watcher takes the turn from it, or an exception of a signal handler ends its wait.
//   any -> kEnded: leave_thread(), drop_thread().
enum class HostState {
  kWaits,   // for the turn, at a step, at its beginning, or until `wait` is done
  kParked,  // for the turn, until it is woken or times out
  kChosen,  // it has the turn and has not continued yet
  kRuns,    // it has the turn
  kOutside, // it does something that the schedule does not see, and others continue without it
  kEnded
};

// What a thread's questions have led to since its last step. This is not part of HostState, because an answer must
// survive that the thread is chosen, or that the watcher takes the turn from it.
enum class Asking {
  kOften, // it only asks, and nothing has happened since, so the others continue first
  kAlone, // it asks, and no other thread could continue
  kNot    // neither
};

struct HostThread : Actor {
  HostState state = HostState::kWaits;
  Asking asking = Asking::kNot;
  bool woken = false; // wake_thread() was called, perhaps before it parked
  std::uint32_t steps = 0, polls = 0;
  std::uint32_t asked = 0; // since its last step: see Question
  std::optional<std::chrono::steady_clock::time_point> timeout; // of a parked one
  double times_out_at = 0;     // the same, in the seconds of `now`
  double now = 0;              // the seconds that it has skipped, in sleeps and timeouts and until it was woken
  double wakes_at = 0;         // from its sleep
  std::uint64_t parked_in = 0; // which round
  int native = 0;              // its number in the operating system
  const detail::Awaited* wait = nullptr;
  Step step(int thread) const { return {thread, steps, polls}; }
  bool alive() const { return state != HostState::kEnded; }
  bool ready() const {
    if (state == HostState::kParked) return woken;
    return alive() && state != HostState::kOutside && (!wait || wait->done());
  }
  bool yields() const { return asking == Asking::kOften; }
  bool sleeps() const { return wakes_at > now; }
  void come_to(double time) { now = std::max(now, time); }
};

class Scheduler {
 public:
  explicit Scheduler(Order order);

  // Everything below is called with the lock held; run() releases it while the item runs.
  std::mutex mutex;
  std::condition_variable changed, free; // `free`: for the watcher, when no thread has the turn
  std::vector<Action> actions;
  bool on = true, deadlocked = false;
  bool raises = false; // thread 0, whose exception ends the program
  int running = 0; // the thread that has the turn; kUnknown: none
  int runs_items = 0;
  std::chrono::steady_clock::time_point moved; // when something last happened

  HostThread& thread(int number) { return threads_[static_cast<std::size_t>(number)]; }
  int thread_count() const { return static_cast<int>(threads_.size()); }
  void pass_to(int number) {
    running = number;
    moved = std::chrono::steady_clock::now();
    if (number == kUnknown) return free.notify_one();
    thread(number).state = HostState::kChosen;
    changed.notify_all();
  }
  int add_thread(int by) {
    threads_.push_back(host());
    if (by != kUnknown) threads_.back().now = thread(by).now;
    return thread_count() - 1;
  }

  void park(int number, double timeout);

  // A thread's next step, and its last one. A question counts as much as `asked` says.
  Step next_step(int thread, std::uint32_t asked = 0);
  Step this_step(int number) {
    return number == kUnknown ? Step{kUnknown, unknown_steps_, 0} : thread(number).step(number);
  }
  // Something has happened, so a thread that asks may get a different answer.
  void progress();

  void log(Action::What what, const Step& step, Stream stream, const std::string& name);
  bool located() const { return order_.located; }
  std::uint64_t choices() const { return picks_; }
  void set_where(std::string where) { where_ = std::move(where); }

  void push(ScheduledItem item);

  // Runs records of events and the like, which take no time, that are queued when it is called.
  void settle(std::unique_lock<std::mutex>& lock);

  // Runs the first item of a queue, or the first `count` if none of them is a kernel.
  void run(ScheduledQueue& line, std::unique_lock<std::mutex>& lock, std::ptrdiff_t count = 1);

  // Returns true if nothing is queued and no other thread can do more than ask.
  bool quiet(int me);

  // Returns true if something that the schedule does not see may act: a thread that blocks outside it, or another
  // process.
  bool acts_outside();

  // Returns true if it is a deadlock that nothing can continue.
  bool stuck();

  // The queue that must run next for a stream's work to get done.
  ScheduledQueue* needed(Stream stream);

  struct Choice {
    ScheduledQueue* line = nullptr;
    int thread = kUnknown;
    explicit operator bool() const { return line || thread != kUnknown; }
  };

  // What happens next; `me` is the thread that ran until now. Empty if nothing can happen.
  Choice choose(int me);

 private:
  enum class Style { kPriorities, kWalk, kLate }; // of random orders

  HostThread host();
  std::int64_t draw_priority(bool host);

  Choice by_style(int me, const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready);

  // Replaces the choice with one that has been passed over for too long, as in a loop that launches until another
  // thread has run.
  Choice overdue(Choice choice, const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready);
  Actor& actor(const Choice& choice) {
    return choice.line ? static_cast<Actor&>(*choice.line) : static_cast<Actor&>(thread(choice.thread));
  }

  // When nothing can continue except threads that ask: the threads whose time comes next. Sleeps and timeouts pass in
  // order, in all threads at once; a thread that asks without a sleep always continues, and a timeout passes after many
  // rounds of that.
  std::vector<int> next_in_time(std::vector<int> asking);
  int times_out(const std::vector<int>& asking);

  ScheduledQueue* find(Stream stream);
  ScheduledQueue& line(Stream stream);

  // The program's order, and its exceptions.
  Choice by_rule(int me, const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready);
  bool may_run(const Order::Late& late) const;

  Choice by_chance(int me, const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready);

  // Burckhardt et al. 2010, "A randomized scheduler with probabilistic guarantees of finding bugs": the highest
  // priority continues, and at a few random points the one that would continue gets the lowest priority.
  Choice by_priority(const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready);

  const Order order_;
  OrderRandom random_;
  Style style_ = Style::kLate;
  std::uint64_t host_share_ = 2, late_share_ = 2;
  std::vector<std::uint64_t> changes_; // of priorities, at these choices
  std::int64_t lowest_ = 0;
  std::map<Step, Order::Late> late_;
  std::map<Step, std::uint64_t> release_; // of a random order's late items, by choices
  std::map<Step, int> switches_;
  std::deque<HostThread> threads_; // which never move
  std::vector<std::unique_ptr<ScheduledQueue>> lines_; // which never move
  std::uint64_t picks_ = 0, launches_ = 0, all_rounds_ = 0;
  std::uint32_t rounds_ = 0; // in which all threads only asked, or waited in vain, without progress
  std::chrono::steady_clock::time_point first_round_;
  std::optional<std::chrono::steady_clock::time_point> idle_since_; // no thread has done more than ask
  std::chrono::nanoseconds computed_{};                             // by the process, until then
  std::uint32_t unknown_steps_ = 0;
  std::string where_;
};

} // namespace openreg
