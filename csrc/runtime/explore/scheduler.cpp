#include "runtime/explore/scheduler.h"

#include <algorithm>
#include <array>
#include <ctime>

namespace openreg {

namespace {

using Clock = std::chrono::steady_clock;

// How long nothing may happen before the program counts as deadlocked, because a C++ thread may still act. If another
// Python thread or a process may act, Order::patience applies instead.
constexpr std::chrono::milliseconds kStuck{200};
constexpr std::chrono::seconds kOthers{2}; // after which a timeout passes, although another thread might act first
constexpr std::uint32_t kPatience = 1 << 12; // for how many choices one may be passed over
constexpr std::uint32_t kRounds = 1000;      // in which all threads ask in vain, before that counts as a deadlock

std::chrono::nanoseconds computed() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

} // namespace

Scheduler::Scheduler(Order order) : order_(std::move(order)), random_(order_.seed) {
  for (const auto& each : order_.late) late_[each.item] = each;
  for (const auto& each : order_.switches) switches_[each.after] = each.to;
  if (order_.random) {
    static constexpr std::array kStyles{Style::kPriorities, Style::kLate, Style::kWalk, Style::kPriorities};
    style_ = kStyles[random_.below(kStyles.size())];
    host_share_ = std::uint64_t{2} << random_.below(4);
    late_share_ = 1 + random_.below(4);
    for (std::uint64_t i = random_.below(3); i; --i) changes_.push_back(1 + random_.below(order_.length));
  }
  threads_.push_back(host());
}

void Scheduler::settle(std::unique_lock<std::mutex>& lock) {
  const auto queued = launches_; // threads that are not the program's may add records for ever
  const auto can = [=](const ScheduledItem& item) { return !item.kernel && item.number <= queued && item.ready(); };
  for (bool more = true; more;) {
    more = false;
    for (std::size_t i = 0; i < lines_.size(); ++i) { // run() may add lines
      const auto& items = lines_[i]->items;
      const auto count = std::find_if_not(items.begin(), items.end(), can) - items.begin();
      if (count) run(*lines_[i], lock, count);
      more = more || count;
    }
  }
}

void Scheduler::run(ScheduledQueue& line, std::unique_lock<std::mutex>& lock, std::ptrdiff_t count) {
  const auto last = line.items.begin() + count - 1;
  const ScheduledItem item = std::move(*last);
  line.items.erase(line.items.begin(), last + 1);
  if (item.kernel) log(Action::kRun, item.step, line.stream, item.name);
  ++runs_items;
  lock.unlock();
  detail::run_up_to(item.queued);
  lock.lock();
  --runs_items;
  moved = Clock::now();
  progress();
}

void Scheduler::progress() {
  for (HostThread& each : threads_)
    if (each.yields()) each.asking = Asking::kNot;
  rounds_ = 0;
  idle_since_.reset();
}

void Scheduler::log(Action::What what, const Step& step, Stream stream, const std::string& name) {
  const bool here = what != Action::kRun && order_.located;
  const ScheduledQueue* known = find(stream);
  actions.push_back({what, step, stream, known ? known->place : -1, name, here ? where_ : ""});
}

void Scheduler::push(ScheduledItem item) {
  item.number = ++launches_;
  if (order_.random && style_ == Style::kLate && item.kernel && random_.one_in(late_share_))
    late_[item.step] = {item.step, item.step, random_.one_in(2), random_()},
    release_[item.step] = picks_ + 1 + random_.below(8);
  line(item.queued.stream).items.push_back(std::move(item));
}

Step Scheduler::next_step(int number, std::uint32_t asked) {
  moved = Clock::now();
  if (number == kUnknown) return {kUnknown, ++unknown_steps_, 0};
  HostThread& me = thread(number);
  if (asked) ++me.polls;
  else ++me.steps, me.polls = 0, idle_since_.reset();
  me.asked = asked ? std::min(me.asked + asked, 1u << 30) : 0;
  me.asking = me.asked >= 2 * static_cast<std::uint32_t>(Question::kAsks) ? Asking::kOften : Asking::kNot;
  return me.step(number);
}

void Scheduler::park(int number, double timeout) {
  HostThread& me = thread(number);
  me.parked_in = all_rounds_;
  me.timeout.reset();
  me.times_out_at = me.now + timeout;
  if (timeout >= 0)
    me.timeout = Clock::now() +
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(timeout, 1e9)));
}

ScheduledQueue* Scheduler::needed(Stream stream) {
  if (stream.id < 0) {
    for (const auto& each : lines_)
      if ((stream.device == kAnyDevice || each->stream.device == stream.device) && !each->items.empty())
        if (ScheduledQueue* found = needed(each->stream)) return found;
    return nullptr;
  }
  for (int hops = 0; hops < 1000; ++hops) {
    ScheduledQueue* line = find(stream);
    if (!line || line->items.empty()) return nullptr;
    if (line->items.front().ready()) return line;
    stream = line->items.front().after.stream;
  }
  return nullptr;
}

bool Scheduler::quiet(int me) {
  for (const auto& each : lines_)
    if (!each->items.empty()) return false;
  for (int i = 0; i < thread_count(); ++i)
    if (i != me && thread(i).ready() && !thread(i).yields()) return false;
  return true;
}

bool Scheduler::acts_outside() {
  for (const auto& each : lines_)
    if (!each->items.empty() && each->items.front().after.elsewhere) return true;
  return std::any_of(threads_.begin(), threads_.end(),
      [](const HostThread& each) { return each.state == HostState::kOutside || (each.wait && each.wait->elsewhere); });
}

bool Scheduler::stuck() {
  if (acts_outside()) return false;
  const auto now = Clock::now();
  const auto idle = now - idle_since_.value_or(now);
  if (idle < (order_.others ? order_.patience : kStuck)) return false;
  if (computed() - computed_ < idle / 10) return true;
  idle_since_.reset(); // another thread computes
  return false;
}

int Scheduler::times_out(const std::vector<int>& asking) {
  const auto now = Clock::now();
  const bool outside = acts_outside();
  const bool passes = !outside && (!order_.others || now - *idle_since_ > kOthers);
  std::optional<double> wakes; // the first one that sleeps
  for (const int each : asking)
    if (thread(each).sleeps()) wakes = std::min(wakes.value_or(thread(each).wakes_at), thread(each).wakes_at);
  int found = kUnknown;
  for (int i = 0; i < thread_count(); ++i) {
    const HostThread& each = thread(i);
    if (each.state != HostState::kParked || !each.timeout) continue;
    const bool first = asking.empty() || (wakes ? each.times_out_at <= *wakes : all_rounds_ - each.parked_in > kRounds);
    if ((passes ? first : now >= *each.timeout) &&
        (found == kUnknown || each.times_out_at < thread(found).times_out_at))
      found = i;
  }
  return found;
}

std::vector<int> Scheduler::next_in_time(std::vector<int> asking) {
  const auto later = [&](int one, int other) { // only a sleeper can be later
    return thread(one).sleeps() && thread(other).sleeps() && thread(other).wakes_at < thread(one).wakes_at;
  };
  std::erase_if(asking, [&, all = asking](int one) {
    return std::any_of(all.begin(), all.end(), [&](int other) { return later(one, other); });
  });
  return asking;
}

Scheduler::Choice Scheduler::choose(int me) {
  std::vector<ScheduledQueue*> lines;
  for (const auto& each : lines_)
    if (!each->items.empty() && each->items.front().kernel && each->items.front().ready()) lines.push_back(each.get());
  std::vector<int> ready, asking;
  for (int i = 0; i < thread_count(); ++i)
    if (thread(i).ready()) (thread(i).yields() ? asking : ready).push_back(i);
  if (lines.empty() && ready.empty()) {
    if (!idle_since_) idle_since_ = Clock::now(), computed_ = computed();
    if (!rounds_) first_round_ = Clock::now();
    const bool livelock = rounds_ > kRounds && Clock::now() - first_round_ > order_.patience && !acts_outside();
    const int timed = livelock ? kUnknown : times_out(asking);
    if (timed == kUnknown && (livelock || asking.empty())) return {};
    ++rounds_, ++all_rounds_;
    if (timed != kUnknown) {
      ++picks_;
      return {nullptr, timed};
    }
    ready = next_in_time(std::move(asking));
    for (const int each : ready) thread(each).asking = Asking::kAlone;
  }
  ++picks_; // not above: while nothing can continue, the watcher asks as often as the machine allows
  return overdue(by_style(me, lines, ready), lines, ready);
}

Scheduler::Choice Scheduler::by_style(
    int me, const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready) {
  if (!order_.random || style_ == Style::kLate) return by_rule(me, lines, ready);
  return style_ == Style::kWalk ? by_chance(me, lines, ready) : by_priority(lines, ready);
}

Scheduler::Choice Scheduler::overdue(
    Choice choice, const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready) {
  const Choice chosen = choice;
  const auto look = [&](const Choice& other) {
    if (++actor(other).passed_over > kPatience && &actor(choice) == &actor(chosen)) choice = other;
  };
  actor(chosen).passed_over = 0;
  for (ScheduledQueue* each : lines)
    if (each != chosen.line) look({each});
  for (const int each : ready)
    if (chosen.line || each != chosen.thread) look({nullptr, each});
  if (&actor(choice) != &actor(chosen)) actor(chosen).priority = --lowest_;
  actor(choice).passed_over = 0;
  return choice;
}

HostThread Scheduler::host() {
  HostThread made;
  made.priority = draw_priority(/*host=*/true);
  return made;
}

std::int64_t Scheduler::draw_priority(bool host) {
  const auto draw = [&] { return static_cast<std::int64_t>(random_() >> 2); };
  const auto one = draw(), other = draw();
  return host ? std::max(one, other) : one; // most mistakes show when the host runs ahead
}

ScheduledQueue* Scheduler::find(Stream stream) {
  for (const auto& each : lines_)
    if (each->stream == stream) return each.get();
  return nullptr;
}

ScheduledQueue& Scheduler::line(Stream stream) {
  if (ScheduledQueue* known = find(stream)) return *known;
  lines_.push_back(std::make_unique<ScheduledQueue>());
  ScheduledQueue& made = *lines_.back();
  made.stream = stream;
  made.place = static_cast<int>(lines_.size()) - 1;
  made.priority = draw_priority(/*host=*/false);
  return made;
}

Scheduler::Choice Scheduler::by_rule(int me, const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready) {
  ScheduledQueue* best = nullptr;
  std::pair<std::uint64_t, std::uint64_t> first;
  for (ScheduledQueue* each : lines) {
    const ScheduledItem& item = each->items.front();
    const auto late = late_.find(item.step);
    if (late != late_.end() && !may_run(late->second)) continue;
    const auto at = late == late_.end() ? std::pair<std::uint64_t, std::uint64_t>(0, item.number)
                                        : std::pair<std::uint64_t, std::uint64_t>(1, late->second.rank);
    if (!best || at < first) best = each, first = at;
  }
  if (best) return {best};
  const auto can = [&](int which) { return std::find(ready.begin(), ready.end(), which) != ready.end(); };
  if (me != kUnknown) {
    const HostThread& host = thread(me);
    if (const auto found = switches_.find(host.step(me)); found != switches_.end()) {
      const int to = found->second;
      switches_.erase(found);
      if (can(to)) return {nullptr, to};
    }
    if (order_.random && ready.size() > 1 && random_.one_in(4))
      return {nullptr, ready[static_cast<std::size_t>(random_.below(ready.size()))]};
    if (can(me)) return {nullptr, me};
    if (host.wait)
      if (ScheduledQueue* forced = needed(host.wait->stream)) return {forced};
  }
  if (!ready.empty()) return {nullptr, ready.front()};
  return {*std::min_element(lines.begin(), lines.end(), [](const ScheduledQueue* a, const ScheduledQueue* b) {
    return a->items.front().number < b->items.front().number;
  })};
}

bool Scheduler::may_run(const Order::Late& late) const {
  if (late.needed) return false;
  if (const auto found = release_.find(late.item); found != release_.end()) return picks_ >= found->second;
  const Step& after = late.after;
  if (after.thread == kUnknown) return unknown_steps_ >= after.number;
  if (after.thread >= thread_count()) return false;
  const HostThread& host = threads_[static_cast<std::size_t>(after.thread)];
  return host.step(after.thread) >= after || !host.alive();
}

Scheduler::Choice Scheduler::by_chance(
    int me, const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready) {
  const bool host = lines.empty() || (!ready.empty() && !random_.one_in(host_share_));
  if (!host) return {lines[static_cast<std::size_t>(random_.below(lines.size()))]};
  if (ready.size() > 1 && random_.one_in(4))
    return {nullptr, ready[static_cast<std::size_t>(random_.below(ready.size()))]};
  return {nullptr, std::find(ready.begin(), ready.end(), me) != ready.end() ? me : ready.front()};
}

Scheduler::Choice Scheduler::by_priority(const std::vector<ScheduledQueue*>& lines, const std::vector<int>& ready) {
  const auto highest = [&] {
    Choice best;
    std::int64_t priority = 0;
    for (ScheduledQueue* each : lines)
      if (!best || each->priority > priority) best = {each}, priority = each->priority;
    for (const int each : ready)
      if (!best || thread(each).priority > priority) best = {nullptr, each}, priority = thread(each).priority;
    return best;
  };
  if (std::find(changes_.begin(), changes_.end(), picks_) != changes_.end()) {
    const Choice best = highest();
    (best.line ? best.line->priority : thread(best.thread).priority) = --lowest_;
  }
  return highest();
}

} // namespace openreg
