#include "runtime/stream/launch.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/process/attention.h"
#include "runtime/process/error.h"
#include "runtime/process/exit.h"
#include "runtime/process/fault.h"
#include "runtime/process/fork.h"
#include "runtime/process/isolation.h"
#include "runtime/stream/profile.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/turn.h"
#include "runtime/stream/utilization.h"

namespace openreg {
namespace {

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

// The parent's counters must be whole in a child, which may launch nothing but may count what it launched.
const bool counters_follow_forks = [] {
  pthread_atfork(
      [] {
        if (launch_count() != 0 || detail::any_queue()) note_use();
        counters_mutex.lock();
      },
      [] { counters_mutex.unlock(); }, [] { counters_mutex.unlock(); });
  return true;
}();

} // namespace

std::uint64_t launch_count() noexcept {
  std::lock_guard lock(counters_mutex);
  std::uint64_t sum = finished;
  for (const auto* counter : counters()) sum += counter->value;
  return sum;
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
  if (detail::captures(stream)) return detail::capture_watcher.add(stream, site, detail::Task(sleep));
  detail::queue_wait(stream, sleep, site);
  if (launch_mode() == LaunchMode::kSync) detail::finish_stream(stream);
}

// ---- injected faults ----

namespace {

void add_latency(Fault fault, Stream stream, bool here) {
  const std::int64_t nanoseconds = detail::latency(fault, stream.device);
  if (nanoseconds > 0 && here) std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
  else if (nanoseconds > 0) sleep_on(stream, nanoseconds);
}

} // namespace

bool detail::kernel_fails(Stream stream, const openreg_site& site, bool here) {
  check_not_lost(stream.device);
  add_latency(Fault::kKernelLatency, stream, here);
  if (loses_device(stream.device)) check_not_lost(stream.device);
  if (!strikes(Fault::kKernel, stream.device)) return false;
  const std::string message = error_prefix() + "an injected fault made a kernel fail on " + device_name(stream.device) +
      (site.name ? std::string(" in ") + site.name : "");
  if (launch_mode() == LaunchMode::kSync) throw_device_error(message);
  keep_error(stream.device, site, message.c_str());
  return true;
}

bool copy_corrupted(Stream stream, bool here) {
  if (!(detail::attention.load() & detail::kFaultBit)) return false;
  add_latency(Fault::kCopyLatency, stream, here);
  return detail::strikes(Fault::kCopy, stream.device);
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

void submit(Stream stream, detail::QueuedItem item, bool part = false, detail::Awaited after = {}) {
  if (!detail::scheduled()) return static_cast<void>(detail::push(stream, std::move(item)));
  const openreg_site site = item.site;
  const bool kernel = item.kernels && !part;
  detail::schedule_watcher.item(stream, site, kernel, std::move(after), [&](bool ordered) {
    item.ordered = ordered;
    return detail::push(stream, std::move(item));
  });
}

// `part`: a kernel that leaves a schedule no choice.
void push_kernel(Stream stream, detail::Task task, const openreg_site& site, bool part) {
  if (detail::held_turn())
    ++detail::held_turn()
          ->taken; // queued work may use memory that the running work allocated: see MemoryPool::give_back()
  submit(stream, {.work = detail::profiled(stream, site, std::move(task)), .site = site, .kernels = 1}, part);
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
  if ((attention & kCaptureBit) && capture_watcher.launch(stream, site, work, context)) [[unlikely]] {
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
    if ((attention & kCaptureBit) && capture_watcher.launch(stream, site, work, context)) {
      --launched.value;
      return;
    }
    if (launch_mode() == LaunchMode::kSync) finish_stream(stream);
    if (launch_mode() == LaunchMode::kAsync || !stream_idle(stream)) {
      make_room(stream);
      if (held_turn()) ++held_turn()->taken; // as in push_kernel()
      const auto kernels = std::clamp<std::size_t>(nodes, 1, kMostOfReplay);
      return submit(stream, {.work = Task(work, context), .site = site, .kernels = kernels});
    }
  }
  const Turn turn(turn_of(stream.device, stream.id));
  const Access access(attention & kIsolationBit);
  run_work(work, context);
}

void detail::enqueue(Stream stream, const openreg_site& site, const openreg_work& work, void* context) {
  const auto attention = begin_launch(stream);
  if ((attention & kCaptureBit) && capture_watcher.launch(stream, site, work, context)) {
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
    if (captures(stream))
      capture_watcher.refuse(stream, name, "the host needs its result now. Move it out of the capture.");
    if (attention & kCaptureBit)
      capture_watcher.launch(stream, site, work, context); // throws if the capture's mode forbids it
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
  make_room(stream);
  push_kernel(stream, std::move(task), site, /*part=*/false);
}

void detail::queue_part(Stream stream, Task task, const openreg_site& site) {
  push_kernel(stream, std::move(task), site, /*part=*/true);
}

void detail::queue_wait(Stream stream, Task task, const openreg_site& site, Awaited after) {
  submit(stream, {.work = profiled(stream, site, std::move(task)), .site = site}, /*part=*/false, std::move(after));
}

void detail::queue_signal(Stream stream, Task task, const openreg_site& site) {
  submit(stream, {.work = std::move(task), .site = site, .signal = true});
}

void detail::queue_wait(Stream stream, const Ticket& after, const openreg_site& site) {
  const auto wait = [after] { wait_for(after, Interrupt::kNever); };
  queue_wait(stream, wait, site, {[after] { return done(after); }, after.stream});
}

Ticket detail::queue_collective(Stream stream, Task task, const openreg_site& site) {
  const Stream own = collectives_of(stream.device);
  Ticket made{};
  schedule_watcher.item(
      own, site, /*kernel=*/true, {[before = ticket(stream)] { return done(before); }, stream}, [&](bool ordered) {
        return made = detail::push(own, {.work = std::move(task), .site = site, .ordered = ordered});
      });
  return made;
}

bool detail::read_if_idle(int device, void (*read)(void*), void* context) {
  if (attention.load(std::memory_order_acquire) != 0) return false;
  const Stream stream = thread_stream(device);
  const std::unique_lock lock(turn_of(device, stream.id).mutex, std::try_to_lock);
  if (lock) read(context);
  return lock.owns_lock();
}

} // namespace openreg
