#include "runtime/stream/profile.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

#include "runtime/device.h"
#include "runtime/process/fork.h"
#include "runtime/process/interrupts.h"
#include "runtime/stream/queue.h"

namespace openreg {

int thread_number() noexcept {
  static thread_local const int number = static_cast<int>(syscall(SYS_gettid));
  return number;
}

namespace {

// Leaked: a worker may end after main().
std::mutex profile_mutex;
auto& log = *new std::vector<Activity>;
std::atomic<std::uint64_t> session{0}; // counts profiles, so that no record of one gets into the next
std::atomic<std::uint32_t> launches{0};

// The operator and ranges that a thread is in.
struct Scopes {
  std::uint64_t session = 0;
  std::vector<std::uint64_t> operators;
  std::vector<Range> ranges;
  std::uint64_t operation() const { return operators.empty() ? 0 : operators.back(); }
};
thread_local Scopes thread_scopes;
thread_local bool working = false;

Scopes& scopes() {
  const auto now = session.load();
  if (thread_scopes.session != now) thread_scopes = {now, {}, {}};
  return thread_scopes;
}

std::int64_t now() noexcept {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

// "at::Tensor openreg::{anonymous}::rms_norm(const at::Tensor&)::<lambda(auto)>": rms_norm.
std::string_view function_name(std::string_view pretty) {
  pretty = pretty.substr(0, pretty.find('('));
  const auto last = pretty.find_last_of(": ");
  return last == std::string_view::npos ? pretty : pretty.substr(last + 1);
}

std::string work_name(const openreg_site& site) {
  if (site.kind != Site::kKernel && site.name) return site.name;
  const std::string_view function = site.function ? site.function : "";
  const std::string ours = function.find("openreg::") == std::string_view::npos ? "" : "openreg::";
  return (site.name ? site.name : ours + std::string(function_name(function))) + " kernel";
}

void keep(std::uint64_t of, Activity activity) {
  std::lock_guard lock(profile_mutex);
  if (of == session.load() && detail::profiling()) log.push_back(std::move(activity));
}

} // namespace

// Work whose end has not been logged yet.
struct detail::Running {
  std::uint64_t session;
  std::int64_t called; // when the host started the launch
  Activity work;
};

namespace {

// Null if it is part of other work. A profiler that is out of memory loses a record, not the work.
detail::Running* describe(Stream stream, const openreg_site& site) noexcept try {
  if (working) return nullptr;
  const Scopes& in = scopes();
  return new detail::Running{in.session, now(),
      {Activity::kStream, site.kind, work_name(site), stream, 0, 0, ++launches, in.operation(), in.ranges, site.bytes,
          thread_number()}};
} catch (const std::bad_alloc&) {
  return nullptr;
}

// "openregLaunchKernel", which is "cudaLaunchKernel" under that name.
std::string call_name(const char* name) {
  return device_name() + std::string(name).substr(std::strlen("openreg"));
}

// The host's part of a launch is done.
void keep_call(const detail::Running& running) {
  Activity call = running.work;
  call.name = call_name(call.kind == Site::kCopy ? "openregMemcpyAsync" : "openregLaunchKernel");
  call.on = Activity::kHost;
  call.begin = running.called;
  call.end = now();
  keep(running.session, std::move(call));
}

} // namespace

detail::Running* detail::begin_work(Stream stream, const openreg_site& site) noexcept {
  Running* running = describe(stream, site);
  if (!running) return nullptr;
  working = true;
  running->work.begin = now();
  return running;
}

void detail::end_work(Running* running) noexcept try {
  const std::unique_ptr<Running> owner(running);
  running->work.end = now();
  working = false;
  keep_call(*running);
  keep(running->session, std::move(running->work));
} catch (const std::bad_alloc&) {
}

detail::Task detail::profiled(Stream stream, const openreg_site& site, Task task) {
  if (!profiling()) return task;
  std::shared_ptr<Running> running(describe(stream, site));
  if (!running) return task;
  if (running->work.kind != Site::kWait) keep_call(*running); // openregStreamWaitEvent has already been logged
  return [running, task = std::move(task)]() mutable {
    struct Scope {
      Running& running;
      explicit Scope(Running& running) : running(running) {
        working = true;
        running.work.begin = now();
      }
      ~Scope() {
        running.work.end = now();
        working = false;
        keep(running.session, running.work);
      }
    } scope(*running);
    task();
  };
}

std::int64_t detail::begin_call() noexcept {
  return working ? 0 : now();
}

void detail::end_call(const char* name, std::int64_t begin) noexcept try {
  const Scopes& in = scopes();
  keep(in.session,
      {Activity::kHost, Site::kWait, call_name(name), {}, begin, now(), 0, in.operation(), in.ranges, 0,
          thread_number()});
} catch (const std::bad_alloc&) {
}

void start_profile() {
  std::lock_guard lock(profile_mutex);
  log.clear();
  ++session;
  detail::attention.fetch_or(detail::kProfileBit);
}

std::vector<Activity> stop_profile() {
  if (!forked()) detail::wait_for_queued(detail::Interrupt::kNever);
  std::lock_guard lock(profile_mutex);
  detail::attention.fetch_and(~detail::kProfileBit);
  return std::exchange(log, {});
}

std::int64_t range_clock() noexcept {
  return now();
}

void keep_range(const std::string& name, std::int64_t begin, int thread) {
  if (detail::profiling())
    keep(session.load(), {Activity::kRange, Site::kWait, name, {}, begin, now(), 0, 0, {}, 0, thread});
}

void push_operator(std::uint64_t id) {
  if (detail::profiling()) scopes().operators.push_back(id);
}

void pop_operator() {
  if (auto& all = scopes().operators; detail::profiling() && !all.empty()) all.pop_back();
}

void push_range(Range range) {
  if (detail::profiling()) scopes().ranges.push_back(std::move(range));
}

void pop_range() {
  if (auto& all = scopes().ranges; detail::profiling() && !all.empty()) all.pop_back();
}

} // namespace openreg
