// Chooses what continues next in a schedule: see Note [Schedules]. Used only by schedule.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
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
  std::uint64_t since;  // how many choices had been made when it was launched
  std::string name;
  bool kernel;
  detail::Awaited after;
  bool ready() const { return !after.done || after.done(); }
};

struct ScheduledQueue {
  Stream stream{};
  int place = 0; // among the order's streams
  std::int64_t priority = 0;
  std::deque<ScheduledItem> items;
};

class Scheduler {
 public:
  explicit Scheduler(Order order);

  // Everything below is called with the lock held; run() releases it while the item runs.
  std::mutex mutex;
  std::vector<Action> actions;
  bool on = true;

  // The thread's next step, and its last one.
  Step next_step(int thread, bool query = false);
  Step last_step(int thread) const { return thread == kUnknown ? Step{kUnknown, unknown_steps_, 0} : host_; }

  void log(Action::What what, const Step& step, Stream stream, const std::string& name);
  bool located() const { return order_.located; }
  void set_where(std::string where) { where_ = std::move(where); }

  void push(ScheduledItem item);

  // Runs records of events and the like, which take no time, that are queued when it is called.
  void settle(std::unique_lock<std::mutex>& lock);

  // Runs the first item of a queue, or the first `count` if none of them is a kernel.
  void run(ScheduledQueue& queue, std::unique_lock<std::mutex>& lock, std::ptrdiff_t count = 1);

  // Returns true if nothing is queued.
  bool quiet() const;

  // The queue that must run next for a stream's work to get done.
  ScheduledQueue* needed(Stream stream);

  // What happens next: the queue that runs, or null for the host. `waits`: what the host waits for, or null.
  struct Choice {
    ScheduledQueue* queue = nullptr;
    bool host = false;
  };
  // Both are empty if nothing can happen.
  Choice choose(const detail::Awaited* waits);

 private:
  using Queues = std::vector<ScheduledQueue*>;
  enum class Style { kPriorities, kWalk, kLate }; // of random orders

  std::int64_t draw_priority() { return static_cast<std::int64_t>(random_() >> 2); }
  ScheduledQueue* find(Stream stream);
  ScheduledQueue& queue_of(Stream stream);
  bool may_run(const Order::Late& late) const;

  // Each returns null for the host, which can continue if `host` is true. Otherwise `queues` is not empty.
  // The program's order, and its exceptions.
  ScheduledQueue* by_rule(const Queues& queues, bool host, const detail::Awaited* waits);
  ScheduledQueue* by_chance(const Queues& queues, bool host);
  // Burckhardt et al. 2010, "A randomized scheduler with probabilistic guarantees of finding bugs": the highest
  // priority continues, and at a few random points the one that would continue gets the lowest priority.
  ScheduledQueue* by_priority(const Queues& queues, bool host);

  const Order order_;
  OrderRandom random_;
  Style style_ = Style::kLate;
  std::uint64_t host_share_ = 2, late_share_ = 2;
  std::vector<std::uint64_t> changes_; // of priorities, at these choices
  std::int64_t host_priority_ = 0, lowest_ = 0;
  std::map<Step, Order::Late> late_;
  std::map<Step, std::uint64_t> release_; // of a random order's late items, by choices
  Step host_{kHostThread, 0, 0};
  std::uint32_t unknown_steps_ = 0;
  std::uint32_t queries_ = 0; // of the host, since anything else happened
  std::vector<std::unique_ptr<ScheduledQueue>> queues_; // which never move
  std::uint64_t choices_ = 0, launches_ = 0;
  std::string where_;
};

} // namespace openreg
