#include "runtime/explore/scheduler.h"

#include <algorithm>
#include <array>

namespace openreg {

namespace {

constexpr std::uint64_t kMostLate =
    1 << 12; // choices after which an item runs, as in a loop that launches until it has

} // namespace

Scheduler::Scheduler(Order order) : order_(std::move(order)), random_(order_.seed) {
  for (const auto& late : order_.late) late_[late.item] = late;
  if (order_.random) {
    static constexpr std::array kStyles{Style::kPriorities, Style::kLate, Style::kWalk, Style::kPriorities};
    style_ = kStyles[random_.below(kStyles.size())];
    host_share_ = std::uint64_t{2} << random_.below(4);
    late_share_ = 1 + random_.below(4);
    for (std::uint64_t i = random_.below(3); i; --i) changes_.push_back(1 + random_.below(order_.length));
  }
  const auto one = draw_priority(), other = draw_priority();
  host_priority_ = std::max(one, other); // most mistakes show when the host runs ahead
}

void Scheduler::settle(std::unique_lock<std::mutex>& lock) {
  const auto queued = launches_; // other threads may add records for ever
  const auto can = [=](const ScheduledItem& item) { return !item.kernel && item.number <= queued && item.ready(); };
  for (bool more = true; more;) {
    more = false;
    for (std::size_t i = 0; i < queues_.size(); ++i) { // run() may add queues
      const auto& items = queues_[i]->items;
      const auto count = std::find_if_not(items.begin(), items.end(), can) - items.begin();
      if (count) run(*queues_[i], lock, count);
      more = more || count;
    }
  }
}

void Scheduler::run(ScheduledQueue& queue, std::unique_lock<std::mutex>& lock, std::ptrdiff_t count) {
  const auto last = queue.items.begin() + count - 1;
  const ScheduledItem item = std::move(*last);
  queue.items.erase(queue.items.begin(), last + 1);
  if (item.kernel) log(Action::kRun, item.step, queue.stream, item.name);
  lock.unlock();
  detail::run_up_to(item.queued);
  lock.lock();
  queries_ = 0; // the host may get a different answer
}

void Scheduler::log(Action::What what, const Step& step, Stream stream, const std::string& name) {
  const bool here = what != Action::kRun && order_.located;
  const ScheduledQueue* known = find(stream);
  actions.push_back({what, step, stream, known ? known->place : -1, name, here ? where_ : ""});
}

void Scheduler::push(ScheduledItem item) {
  item.number = ++launches_;
  item.since = choices_;
  if (order_.random && style_ == Style::kLate && item.kernel && random_.one_in(late_share_)) {
    late_[item.step] = {item.step, item.step, random_.one_in(2), random_()};
    release_[item.step] = choices_ + 1 + random_.below(8);
  }
  queue_of(item.queued.stream).items.push_back(std::move(item));
}

Step Scheduler::next_step(int thread, bool query) {
  if (thread == kUnknown) return {kUnknown, ++unknown_steps_, 0};
  if (query) ++host_.poll, ++queries_;
  else host_ = {kHostThread, host_.number + 1, 0}, queries_ = 0;
  return host_;
}

ScheduledQueue* Scheduler::needed(Stream stream) {
  if (stream.id < 0) {
    for (const auto& queue : queues_)
      if ((stream.device == kAnyDevice || queue->stream.device == stream.device) && !queue->items.empty())
        if (ScheduledQueue* found = needed(queue->stream)) return found;
    return nullptr;
  }
  for (int hops = 0; hops < 1000; ++hops) {
    ScheduledQueue* queue = find(stream);
    if (!queue || queue->items.empty()) return nullptr;
    if (queue->items.front().ready()) return queue;
    stream = queue->items.front().after.stream;
  }
  return nullptr;
}

bool Scheduler::quiet() const {
  return std::all_of(queues_.begin(), queues_.end(), [](const auto& queue) { return queue->items.empty(); });
}

Scheduler::Choice Scheduler::choose(const detail::Awaited* waits) {
  Queues queues;
  for (const auto& queue : queues_)
    if (!queue->items.empty() && queue->items.front().kernel && queue->items.front().ready())
      queues.push_back(queue.get());
  bool host = !waits || waits->done();
  if (queues.empty()) return {nullptr, host};
  if (queries_ >= 2) host = false; // it only asks
  ++choices_;
  for (ScheduledQueue* queue : queues)
    if (choices_ - queue->items.front().since > kMostLate) return {queue};
  ScheduledQueue* const chosen = !order_.random || style_ == Style::kLate ? by_rule(queues, host, waits)
      : style_ == Style::kWalk                                            ? by_chance(queues, host)
                                                                          : by_priority(queues, host);
  return {chosen, !chosen};
}

ScheduledQueue* Scheduler::find(Stream stream) {
  for (const auto& queue : queues_)
    if (queue->stream == stream) return queue.get();
  return nullptr;
}

ScheduledQueue& Scheduler::queue_of(Stream stream) {
  if (ScheduledQueue* known = find(stream)) return *known;
  queues_.push_back(std::make_unique<ScheduledQueue>());
  ScheduledQueue& made = *queues_.back();
  made.stream = stream;
  made.place = static_cast<int>(queues_.size()) - 1;
  made.priority = draw_priority();
  return made;
}

ScheduledQueue* Scheduler::by_rule(const Queues& queues, bool host, const detail::Awaited* waits) {
  ScheduledQueue* best = nullptr;
  std::pair<std::uint64_t, std::uint64_t> first;
  for (ScheduledQueue* queue : queues) {
    const ScheduledItem& item = queue->items.front();
    const auto late = late_.find(item.step);
    if (late != late_.end() && !may_run(late->second)) continue;
    const auto at = late == late_.end() ? std::pair<std::uint64_t, std::uint64_t>(0, item.number)
                                        : std::pair<std::uint64_t, std::uint64_t>(1, late->second.rank);
    if (!best || at < first) best = queue, first = at;
  }
  if (best || host) return best;
  if (waits)
    if (ScheduledQueue* forced = needed(waits->stream)) return forced;
  return *std::min_element(queues.begin(), queues.end(), [](const ScheduledQueue* a, const ScheduledQueue* b) {
    return a->items.front().number < b->items.front().number;
  });
}

bool Scheduler::may_run(const Order::Late& late) const {
  if (late.needed) return false;
  if (const auto found = release_.find(late.item); found != release_.end()) return choices_ >= found->second;
  return last_step(late.after.thread) >= late.after;
}

ScheduledQueue* Scheduler::by_chance(const Queues& queues, bool host) {
  if (host && !random_.one_in(host_share_)) return nullptr;
  return queues[static_cast<std::size_t>(random_.below(queues.size()))];
}

ScheduledQueue* Scheduler::by_priority(const Queues& queues, bool host) {
  const auto highest = [&]() -> ScheduledQueue* {
    ScheduledQueue* best = nullptr;
    for (ScheduledQueue* queue : queues)
      if (!best || queue->priority > best->priority) best = queue;
    return host && host_priority_ > best->priority ? nullptr : best;
  };
  if (std::find(changes_.begin(), changes_.end(), choices_) != changes_.end()) {
    ScheduledQueue* const best = highest();
    (best ? best->priority : host_priority_) = --lowest_;
  }
  return highest();
}

} // namespace openreg
