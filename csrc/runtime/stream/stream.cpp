#include "runtime/stream/stream.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/device.h"
#include "runtime/explore/schedule.h"
#include "runtime/graph/graph.h"
#include "runtime/memory/isolation.h"
#include "runtime/process/error.h"
#include "runtime/process/exit.h"
#include "runtime/process/fault.h"
#include "runtime/process/fork.h"
#include "runtime/process/profile.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/turn.h"
#include "runtime/stream/utilization.h"

namespace openreg {

std::atomic<std::uint32_t> detail::attention{0};

namespace {

constinit thread_local std::array<std::int64_t, kMaxDevices> current_ids{};
std::array<std::array<std::atomic<std::uint32_t>, 2>, kMaxDevices> next{};

// One counter per thread, summed by launch_count(); a shared counter would cost an atomic operation per launch.
struct LaunchCounter {
  LaunchCounter();
  ~LaunchCounter();
  std::uint64_t value = 0;
};
thread_local LaunchCounter launched;

std::mutex counters_mutex;
std::vector<LaunchCounter*>& counters() {
  static auto* all = new std::vector<LaunchCounter*>;
  return *all;
}
std::uint64_t finished = 0; // of threads that have ended

LaunchCounter::LaunchCounter() {
  std::lock_guard lock(counters_mutex);
  counters().push_back(this);
}

LaunchCounter::~LaunchCounter() {
  std::lock_guard lock(counters_mutex);
  finished += value;
  std::erase(counters(), this);
}

std::atomic<LaunchMode> current_mode{LaunchMode::kInline};
const bool launch_mode_from_environment = [] {
  const char* text = std::getenv("OPENREG_LAUNCH_MODE");
  if (!text || !*text || !std::strcmp(text, "inline")) return true;
  if (!std::strcmp(text, "async")) set_launch_mode(LaunchMode::kAsync);
  else if (!std::strcmp(text, "sync")) set_launch_mode(LaunchMode::kSync);
  else std::fprintf(stderr, "openreg: OPENREG_LAUNCH_MODE=\"%s\" is not inline, async or sync; using inline\n", text);
  return true;
}();

} // namespace

Stream detail::thread_stream(int device) noexcept {
  return {device, current_ids[static_cast<std::size_t>(device)]};
}

detail::TurnState* detail::try_turn(int device) noexcept {
  if (attention.load(std::memory_order_acquire) != 0) return nullptr;
  TurnState& turn = turn_of(device, current_ids[static_cast<std::size_t>(device)]);
  return turn.mutex.try_lock() ? &turn : nullptr;
}

std::vector<std::uint32_t> next_streams() {
  std::vector<std::uint32_t> all;
  for (const auto& device : next) all.insert(all.end(), device.begin(), device.end());
  return all;
}

void set_next_streams(const std::vector<std::uint32_t>& all) {
  for (std::size_t i = 0; i < all.size(); ++i) next[i / 2][i % 2] = all[i];
}

Stream exchange_stream(Stream stream) noexcept {
  return {stream.device, std::exchange(current_ids[static_cast<std::size_t>(stream.device)], stream.id)};
}

Stream new_stream(int device, int priority) noexcept {
  const bool high = priority < 0;
  const auto n = next[static_cast<std::size_t>(device)][high ? 1 : 0]++;
  return {device, 1 + (high ? kPool : 0) + static_cast<std::int64_t>(n % kPool)};
}

int stream_priority(Stream stream) noexcept {
  return stream.id > kPool ? -1 : 0;
}

bool is_stream(Stream stream) noexcept {
  return stream.device >= 0 && stream.device < device_count() && stream.id >= 0 &&
      stream.id < static_cast<std::int64_t>(kStreams);
}

void check_stream(Stream stream) {
  if (!is_stream(stream)) [[unlikely]]
    throw std::invalid_argument("openreg: there is no stream " + std::to_string(stream.id) + " on device " +
        std::to_string(stream.device) + ": this process has " + std::to_string(device_count()) +
        " devices (OPENREG_DEVICE_COUNT), each with streams 0 to " + std::to_string(kStreams - 1));
}

LaunchMode launch_mode() noexcept {
  return current_mode.load(std::memory_order_relaxed);
}

void set_launch_mode(LaunchMode to) noexcept {
  const auto from = current_mode.exchange(to);
  if ((from == LaunchMode::kInline) == (to == LaunchMode::kInline)) return;
  if (to == LaunchMode::kInline) detail::attention.fetch_and(~detail::kModeBit);
  else detail::attention.fetch_or(detail::kModeBit);
}

bool stream_idle(Stream stream) noexcept {
  const Queue* queue = find_queue(stream);
  return !queue || queue->idle();
}

bool query_stream(Stream stream) {
  detail::check_host_call("a stream's query", stream);
  if (detail::scheduled()) detail::schedule_query("Stream.query", stream);
  Queue* queue = find_queue(stream);
  return !queue || queue->query();
}

void synchronize_stream(Stream stream) {
  detail::check_host_call("a stream's synchronize", stream);
  detail::finish_stream(stream);
}

void detail::finish_stream(Stream stream, const char* name) {
  const HostCall call("openregStreamSynchronize");
  check_usable(stream.device);
  if (scheduled()) schedule_wait(name, {[all = ticket(stream)] { return done(all); }, stream});
  detail::wait_for_queued(stream);
  throw_kept_error(stream.device);
}

namespace {
bool device_idle(int device) noexcept {
  for (std::int64_t id = 0; id < static_cast<std::int64_t>(kStreams); ++id)
    if (!stream_idle({device, id})) return false;
  return true;
}
} // namespace

void synchronize_device(int device) {
  const HostCall call("openregDeviceSynchronize");
  check_usable(device);
  detail::check_host_call("synchronize", device);
  if (detail::scheduled())
    detail::schedule_wait("synchronize", {[device] { return device_idle(device); }, {device, -1}});
  for (std::int64_t id = 0; id < static_cast<std::int64_t>(kStreams); ++id) detail::wait_for_queued({device, id});
  throw_kept_error(device);
}

bool detail::any_queue() noexcept {
  return std::any_of(queues.begin(), queues.end(), [](auto& each) { return each.load(); });
}

void detail::refuse_own_stream(Stream stream) {
  if (!worked_on || worked_on != find_queue(stream)) return;
  throw std::logic_error("openreg: work on stream " + std::to_string(stream.id) + " of device " +
      std::to_string(stream.device) +
      " waits for that stream, and so for itself; wait after launch() has returned, or use another stream in the work");
}

void detail::wait_for(const Ticket& ticket) {
  if (Queue* queue = find_queue(ticket.stream)) queue->wait(ticket.number);
}

void detail::wait_for_queued(Stream stream) {
  if (Queue* queue = find_queue(stream)) queue->wait(queue->submitted());
}

void detail::wait_for_queued(Interrupt interrupt) {
  for (auto& each : queues)
    if (Queue* queue = each.load(std::memory_order_acquire)) queue->wait(queue->submitted(), interrupt);
}

Ticket ticket(Stream stream) noexcept {
  const Queue* queue = find_queue(stream);
  return {stream, queue ? queue->submitted() : 0};
}

bool done(const Ticket& ticket) noexcept {
  const Queue* queue = find_queue(ticket.stream);
  return !queue || queue->done(ticket.number);
}

void sleep_on(Stream stream, std::int64_t cycles) {
  check_usable(stream.device);
  const auto sleep = [cycles, device = stream.device] {
    using std::chrono::nanoseconds, std::chrono::steady_clock;
    if (detail::scheduled()) return; // there is no time
    const detail::Sleeping busy(device);
    const auto begin = steady_clock::now();
    for (nanoseconds left(cycles); left.count() > 0 && !detail::dropping();
        left = nanoseconds(cycles) - (steady_clock::now() - begin))
      std::this_thread::sleep_for(std::min<nanoseconds>(left, detail::kSlice));
  };
  const Site site("sleep");
  if (detail::captures(stream)) return detail::capture(stream, site, detail::Task(sleep), {});
  detail::queue_wait(stream, detail::profiled(stream, site, sleep), site);
  if (launch_mode() == LaunchMode::kSync) detail::finish_stream(stream);
}

void stop_workers() noexcept {
  if (forked()) return;
  detail::abandon_schedule();
  for (auto& each : queues)
    if (Queue* queue = each.load(std::memory_order_acquire)) queue->stop();
}

bool detail::dropping() noexcept {
  return drops.load(std::memory_order_relaxed);
}

void detail::drop_queued() noexcept {
  drops = true;
  stop_workers();
  drops = false;
}

// ---- launching ----

namespace {

enum class Place { kHere, kQueue, kNowhere };

// Handles work that cannot simply run here; in sync mode, waits first.
Place place(Stream stream, const openreg_site& site) {
  check_not_forked();
  if ((detail::attention.load() & detail::kFaultBit) && detail::kernel_fails(stream, site)) return Place::kNowhere;
  if (launch_mode() == LaunchMode::kAsync) return Place::kQueue;
  if (launch_mode() == LaunchMode::kSync) detail::finish_stream(stream);
  return stream_idle(stream) ? Place::kHere : Place::kQueue;
}

struct Kind {
  std::size_t kernels = 0; // as Queue::push() says
  bool signal = false;     // likewise
  bool part = false;       // a kernel that leaves a schedule no choice
};

void push(Stream stream, detail::Task task, const openreg_site& site, Kind kind, detail::Awaited after = {}) {
  const auto enqueue = [&](bool ordered) {
    return queue_of(stream).push(std::move(task), site, ordered, kind.kernels, kind.signal);
  };
  if (detail::scheduled()) detail::schedule_item(stream, site, kind.kernels && !kind.part, std::move(after), enqueue);
  else enqueue(/*ordered=*/false);
}

void push_kernels(Stream stream, detail::Task task, const openreg_site& site, Kind kind) {
  if (detail::held_turn())
    ++detail::held_turn()->taken; // queued work may use memory that the running work allocated: see Pool::give_back()
  push(stream, std::move(task), site, kind);
}

// Counts a launch; returns the attention bits that it must handle.
std::uint32_t begin_launch(Stream stream) {
  check_stream(stream);
  ++launched.value;
  return detail::attention.load(std::memory_order_acquire);
}

bool is_plain(std::uint32_t attention) {
  return (attention & ~detail::kNoWait) == 0;
}

// Runs work on its caller's thread, in its stream's turn, with access to device memory, and logs it in a profile.
void run_here(
    Stream stream, const openreg_site& site, std::uint32_t attention, const openreg_work& work, void* context) {
  {
    const detail::Turn turn(detail::turn_of(stream.device, stream.id));
    const detail::Access access(attention & detail::kIsolationBit);
    const detail::Profiled profiled(attention & detail::kProfileBit, stream, site);
    detail::run_work(work, context);
  }
  detail::stay_at_exit();
}

} // namespace

void detail::launch(Stream stream, const openreg_site& site, const openreg_work& work, void* context) {
  const auto attention = begin_launch(stream);
  if ((attention & kCaptureBit) && capture(stream, site, work, context)) [[unlikely]] {
    --launched.value;
    return;
  }
  switch (is_plain(attention) ? Place::kHere : place(stream, site)) {
    case Place::kHere:
      return run_here(stream, site, attention, work, context);
    case Place::kQueue:
      return queue(stream, Task(work, context), site);
    case Place::kNowhere:
      return;
  }
}

void detail::launch_graph(
    Stream stream, const openreg_site& site, const openreg_work& work, void* context, std::size_t nodes) {
  const auto attention = begin_launch(stream);
  if (!is_plain(attention)) {
    check_not_forked();
    if ((attention & kCaptureBit) && capture(stream, site, work, context)) {
      --launched.value;
      return;
    }
    if (launch_mode() == LaunchMode::kSync) finish_stream(stream);
    if (launch_mode() == LaunchMode::kAsync || !stream_idle(stream)) {
      queue_of(stream).make_room();
      const auto kernels = std::clamp<std::size_t>(nodes, 1, kMostOfReplay);
      return push_kernels(stream, Task(work, context), site, {.kernels = kernels});
    }
  }
  const Turn turn(turn_of(stream.device, stream.id));
  const Access access(attention & kIsolationBit);
  run_work(work, context);
}

void detail::enqueue(Stream stream, const openreg_site& site, const openreg_work& work, void* context) {
  const auto attention = begin_launch(stream);
  if ((attention & kCaptureBit) && capture(stream, site, work, context)) {
    --launched.value;
    return;
  }
  const auto where = is_plain(attention) ? Place::kQueue : place(stream, site);
  if (where == Place::kNowhere) return;
  if (launch_mode() == LaunchMode::kSync) run_here(stream, site, attention, work, context);
  else queue(stream, Task(work, context), site);
}

void detail::run(Stream stream, const openreg_site& site, const openreg_work& work, void* context) {
  const auto attention = begin_launch(stream);
  if (!is_plain(attention)) [[unlikely]] {
    const char* name = site.name ? site.name : site.function ? site.function : "work";
    if (captures(stream)) refuse_capture(stream, name, "the host needs its result now. Move it out of the capture.");
    if (attention & kCaptureBit) capture(stream, site, work, context); // throws if the capture's mode forbids it
    finish_stream(stream, name);
    // The work still runs, because its caller needs a result; the error says not to use it.
    if (detail::attention.load() & kFaultBit) {
      kernel_fails(stream, site);
      wait_for_queued(stream); // an injected latency
    }
  }
  run_here(stream, site, attention, work, context);
}

void detail::queue(Stream stream, Task task, const openreg_site& site) {
  queue_of(stream).make_room();
  if (profiling()) task = profiled(stream, site, std::move(task));
  push_kernels(stream, std::move(task), site, {.kernels = 1});
}

void detail::queue_part(Stream stream, Task task, const openreg_site& site) {
  push_kernels(stream, profiling() ? profiled(stream, site, std::move(task)) : std::move(task), site,
      {.kernels = 1, .part = true});
}

void detail::queue_wait(Stream stream, Task task, const openreg_site& site) {
  queue_wait(stream, std::move(task), site, {});
}

void detail::queue_wait(Stream stream, Task task, const openreg_site& site, Awaited after) {
  push(stream, std::move(task), site, {}, std::move(after));
}

void detail::queue_signal(Stream stream, Task task, const openreg_site& site) {
  push(stream, std::move(task), site, {.signal = true});
}

void detail::queue_wait(Stream stream, const Ticket& after, const openreg_site& site) {
  auto wait = [after] {
    if (Queue* queue = find_queue(after.stream)) queue->wait(after.number, Interrupt::kNever);
  };
  if (!scheduled()) return queue_wait(stream, profiled(stream, site, wait), site);
  queue_wait(stream, profiled(stream, site, wait), site, {[after] { return done(after); }, after.stream});
}

Ticket detail::queue_collective(Stream stream, Task task, const openreg_site& site) {
  const Stream own = collectives_of(stream.device);
  Ticket made{};
  schedule_item(own, site, /*kernel=*/true, {[before = ticket(stream)] { return done(before); }, stream},
      [&](bool ordered) { return made = queue_of(own).push(std::move(task), site, ordered); });
  return made;
}

void detail::run_up_to(const Ticket& item) {
  queue_of(item.stream).run_up_to(item.number);
}

void detail::release_workers() noexcept {
  for (auto& each : queues)
    if (Queue* queue = each.load(std::memory_order_acquire)) queue->release();
}

void detail::hold_launch_counters(bool hold) noexcept {
  if (hold) counters_mutex.lock();
  else counters_mutex.unlock();
}

std::uint64_t launch_count() noexcept {
  std::lock_guard lock(counters_mutex);
  std::uint64_t sum = finished;
  for (const auto* counter : counters()) sum += counter->value;
  return sum;
}

} // namespace openreg
