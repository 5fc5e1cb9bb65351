// Who goes on next in a schedule: see Note [Schedules]. Used only by schedule.cpp.
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

#include "schedule.h"

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
  std::uint64_t number; // in the order of launches
  std::string name;
  bool kernel;
  detail::Awaited after;
  bool ready() const { return !after.done || after.done(); }
};

// Somebody who can go on: a queue or a host thread.
struct Actor {
  std::int64_t priority = 0;
};
struct ScheduledQueue : Actor {
  Stream stream{};
  int place = 0; // among the order's streams
  std::deque<ScheduledItem> items;
};
struct HostThread : Actor {
  std::uint32_t steps = 0, polls = 0;
  bool alive = true, parked = false, times_out = false, woken = false;
  bool yields = false; // it asks again and again
  bool chosen = false;  // it may go on
  bool outside = false; // others go on without it
  const detail::Awaited* wait = nullptr;
  Step step(int thread) const { return {thread, steps, polls}; }
  bool ready() const { return alive && !outside && (parked ? woken : !wait || wait->done()); }
};

class Scheduler {
 public:
  explicit Scheduler(Order order);

  // Everything below is called with the lock, which run() gives up meanwhile.
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Action> actions;
  bool on = true;
  int running = 0; // the thread that goes on
  std::optional<std::chrono::steady_clock::time_point> idle_since; // while nobody can go on

  HostThread& thread(int number) { return threads_[static_cast<std::size_t>(number)]; }
  int thread_count() const { return static_cast<int>(threads_.size()); }
  std::chrono::steady_clock::time_point moved; // when something last happened
  bool runs_item = false;
  void pass_to(int number, bool chosen) {
    running = number;
    moved = std::chrono::steady_clock::now();
    thread(number).chosen = chosen;
    changed.notify_all();
  }
  int add_thread() {
    threads_.push_back(host());
    return thread_count() - 1;
  }

  Step next_step(int thread, bool poll);
  Step this_step(int number) {
    return number == kUnknown ? Step{kUnknown, unknown_steps_, 0} : thread(number).step(number);
  }

  void log(Action::What what, const Step& step, Stream stream, const std::string& name);
  bool located() const { return order_.located; }
  void set_where(std::string where) { where_ = std::move(where); }

  void push(Stream stream, ScheduledItem item);

  // Runs records of events and the like, which take no time.
  void settle(std::unique_lock<std::mutex>& lock);

  void run(ScheduledQueue& line, std::unique_lock<std::mutex>& lock);

  // Whether nothing is queued and no other thread can go on.
  bool quiet(int me);

  // The queue that has to run next so that a stream's work gets done.
  ScheduledQueue* needed(Stream stream);

  struct Choice {
    ScheduledQueue* line = nullptr;
    int thread = kUnknown;
    explicit operator bool() const { return line || thread != kUnknown; }
  };

  // What happens next, where `me` is the thread that has gone on until now; nothing if nothing can.
  Choice choose(int me);

 private:
  enum class Style { kPriorities, kWalk, kLate }; // of random orders

  HostThread host();
  std::int64_t draw_priority(bool host);

  ScheduledQueue* find(Stream stream);
  ScheduledQueue& line(Stream stream);

  // The program's order, and its exceptions.
  Choice by_rule(int me, const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready);
  bool may_run(const Order::Late& late) const;

  Choice by_chance(int me, const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready);

  // Burckhardt et al. 2010, "A randomized scheduler with probabilistic guarantees of finding bugs": the highest
  // priority goes on, and at a few random points whoever would go on gets the lowest.
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
  std::uint64_t picks_ = 0, launches_ = 0;
  std::uint32_t unknown_steps_ = 0;
  std::string where_;
};

} // namespace openreg
