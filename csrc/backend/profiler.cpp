// The device in torch's profiler: a Kineto plugin that turns the runtime's log into activities on the device's
// streams, each linked to the operator that launched it; events for the profiler without Kineto; memory.

#include "backend/profiler.h"

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/ApproximateClock.h>

#define FMT_HEADER_ONLY // Kineto's headers use fmt, which torch does not export
#define USE_KINETO
#define KINETO_NAMESPACE libkineto
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "backend/device_index.h"
#include "backend/identity/identity.h"
#include "runtime/device.h"
#include "runtime/memory/contents.h"
#include "runtime/memory/memory.h"
#include "runtime/memory/stats.h"
#include "runtime/stream/event.h"
#include "runtime/stream/profile.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

using libkineto::ActivityType;

// ---- Kineto ----

// Torch's activities and ours share one number space, and torch counts from 1.
constexpr std::int32_t kFirstLaunch = 1 << 30;

// Devices are the trace's "processes", sorted below the host's, whose sort numbers are at most 2^22.
constexpr std::int64_t kBelowHost = 5'000'000;

class Session final : public libkineto::IActivityProfilerSession {
 public:
  // `devices`: device activities are requested. Otherwise the session only says that a profile runs, for memory.
  Session(std::set<ActivityType> types, bool devices) : types_(std::move(types)), devices_(devices) {}
  ~Session() override { end(); }

  void start() override {
    started_ = true;
    ++detail::profiles;
    if (devices_) start_profile();
  }
  void stop() override {
    end();
    if (devices_) log_ = stop_profile();
  }
  std::vector<std::string> errors() override { return {}; }
  // Returns the first device; processTrace() reports the others.
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    return streams_.empty() ? nullptr : std::make_unique<libkineto::DeviceInfo>(info(streams_.begin()->first));
  }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    std::vector<libkineto::ResourceInfo> all;
    for (const auto& [device, stream] : streams_)
      all.push_back({stream, stream, device, stream ? "stream " + std::to_string(stream) : "default stream"});
    return all;
  }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }

  void pushCorrelationId(std::uint64_t id) override { push_operator(id); }
  void popCorrelationId() override { pop_operator(); }
  void pushUserCorrelationId(std::uint64_t id) override { push_range({id, nullptr}); }
  void popUserCorrelationId() override { pop_range(); }

  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](std::int32_t) { return nullptr; }, 0, 0);
  }
  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, std::int64_t start,
      std::int64_t end) override {
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span = libkineto::TraceSpan(start, end, "openreg");
    buffer_->gpuOpCount = 0;
    linked_ = std::move(linked);
    for (const Activity& activity : log_)
      activity.on == Activity::kHost         ? add_call(activity)
          : activity.on == Activity::kStream ? add_work(activity)
                                             : add_open_range(activity);
    add_ranges();
    std::set<int> devices;
    for (const auto& [device, stream] : streams_) devices.insert(device);
    if (!devices.empty()) devices.erase(devices.begin());
    for (const int device : devices) logger.handleDeviceInfo(info(device), start);
    for (const auto& activity : buffer_->activities) activity->log(logger);
    log_.clear();
  }

 private:
  void end() {
    if (std::exchange(started_, false)) --detail::profiles;
  }

  static libkineto::DeviceInfo info(int device) {
    return {device, kBelowHost + device, device_name(device), device_name()};
  }

  // Returns an id for an activity that nothing is correlated with.
  std::int32_t next_id() { return std::numeric_limits<std::int32_t>::max() - others_++; }

  libkineto::GenericTraceActivity* add(
      ActivityType type, const std::string& name, std::int64_t begin, std::int64_t end) {
    if (!types_.count(type)) return nullptr;
    buffer_->emplace_activity(buffer_->span, type, name);
    auto* activity = buffer_->activities.back().get();
    activity->startTime = begin;
    activity->endTime = end;
    return activity;
  }

  void place(libkineto::GenericTraceActivity& activity, const Stream& stream) {
    activity.device = stream.device;
    activity.resource = static_cast<std::int32_t>(stream.id);
    streams_.emplace(stream.device, stream.id);
    activity.addMetadata("device", stream.device);
    activity.addMetadata("stream", stream.id);
  }

  // Gives the host's call and the work one id, which correlates them and draws an arrow from one to the other.
  void correlate(libkineto::GenericTraceActivity& activity, const Activity& logged, bool start) {
    if (logged.operation && activity.activityType != ActivityType::GPU_USER_ANNOTATION)
      activity.linked = linked_(static_cast<std::int32_t>(logged.operation));
    if (!logged.launch) {
      activity.id = next_id();
      return;
    }
    activity.id = kFirstLaunch + static_cast<std::int32_t>(logged.launch % kFirstLaunch);
    activity.flow.id = static_cast<std::uint32_t>(activity.id);
    activity.flow.type = libkineto::kLinkAsyncCpuGpu;
    activity.flow.start = start;
    activity.addMetadata("correlation", activity.id);
  }

  void add_call(const Activity& call) {
    auto* activity = add(ActivityType::PRIVATEUSE1_RUNTIME, call.name, call.begin, call.end);
    if (!activity) return;
    activity->device = libkineto::processId();
    activity->resource = activity->threadId = call.thread;
    correlate(*activity, call, /*start=*/true);
  }

  void add_work(const Activity& work) {
    // A wait is not work: as an annotation it is visible but not part of the sums.
    const auto type = work.kind == Site::kCopy ? ActivityType::GPU_MEMCPY
        : work.kind == Site::kWait             ? ActivityType::GPU_USER_ANNOTATION
                                               : ActivityType::CONCURRENT_KERNEL;
    if (auto* activity = add(type, work.name, work.begin, work.end)) {
      place(*activity, work.stream);
      correlate(*activity, work, /*start=*/false);
      if (work.kind == Site::kCopy) {
        activity->addMetadata("bytes", work.bytes);
        if (work.end > work.begin)
          activity->addMetadata(
              "memory bandwidth (GB/s)", static_cast<double>(work.bytes) / static_cast<double>(work.end - work.begin));
      }
    }
    for (const Range& range : work.ranges) widen({work.stream.device, work.stream.id, range.id, range.name}, work);
  }

  using RangeKey = std::tuple<int, std::int64_t, std::uint64_t, std::shared_ptr<const std::string>>;
  void widen(const RangeKey& key, const Activity& work) {
    auto& span = ranges_[key];
    span.first = span.first ? std::min(span.first, work.begin) : work.begin;
    span.second = std::max(span.second, work.end);
  }

  // Adds a range from range_start(): as a call on its thread, because torch treats host annotations as its own, and as
  // a range on each stream for as long as the work launched in it.
  void add_open_range(const Activity& range) {
    const std::int64_t begin = std::max(range.begin, buffer_->span.startTime);
    if (auto* activity = add(ActivityType::PRIVATEUSE1_RUNTIME, range.name, begin, range.end)) {
      activity->device = libkineto::processId();
      activity->resource = activity->threadId = range.thread;
      activity->id = next_id();
    }
    std::set<std::uint32_t> launches;
    for (const Activity& call : log_)
      if (call.on == Activity::kHost && call.launch && call.begin >= begin && call.begin <= range.end)
        launches.insert(call.launch);
    const auto name =
        std::make_shared<const std::string>(range.name); // not shared: two ranges with one name stay separate
    for (const Activity& work : log_)
      if (work.on == Activity::kStream && launches.count(work.launch))
        widen({work.stream.device, work.stream.id, 0, name}, work);
  }

  // Adds each host range to the streams, for as long as the work launched in it.
  void add_ranges() {
    for (const auto& [key, span] : ranges_) {
      const auto& [device, stream, id, name] = key;
      const auto* host = id ? linked_(static_cast<std::int32_t>(id)) : nullptr;
      if (!host && !name) continue;
      auto* activity = add(ActivityType::GPU_USER_ANNOTATION, name ? *name : host->name(), span.first, span.second);
      if (!activity) continue;
      place(*activity, {device, stream});
      activity->id = id ? static_cast<std::int32_t>(id) : next_id();
    }
  }

  const std::set<ActivityType> types_;
  const bool devices_;
  bool started_ = false;
  std::vector<Activity> log_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
  libkineto::getLinkedActivityCallback linked_;
  std::set<std::pair<int, std::int64_t>> streams_; // that the trace shows
  std::map<RangeKey, std::pair<std::int64_t, std::int64_t>> ranges_;
  std::int32_t others_ = 0;
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override { return name_; }
  const std::set<ActivityType>& availableActivities() const override { return types_; }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& types, const libkineto::Config&) override {
    // Every profile requests the host's calls and ranges, even a CPU-only one.
    const auto wanted = [&](ActivityType type) {
      return type != ActivityType::PRIVATEUSE1_RUNTIME && types.count(type);
    };
    return std::make_unique<Session>(types, std::any_of(types_.begin(), types_.end(), wanted));
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      std::int64_t, std::int64_t, const std::set<ActivityType>& types, const libkineto::Config& config) override {
    return configure(types, config);
  }

 private:
  const std::string name_ = "openreg";
  const std::set<ActivityType> types_ = {ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY,
      ActivityType::GPU_USER_ANNOTATION, ActivityType::PRIVATEUSE1_RUNTIME};
};

[[maybe_unused]] const bool plugin_registered = [] {
  register_profiler_plugin([] { return std::make_unique<Profiler>(); });
  return true;
}();

// ---- the profiler without Kineto: torch.autograd.profiler.profile(use_device="openreg") ----

struct Methods final : torch::profiler::impl::ProfilerStubs {
  using Pointer = torch::profiler::impl::ProfilerVoidEventStub;
  void record(c10::DeviceIndex* device, Pointer* event, std::int64_t* cpu_ns) const override {
    const auto index = static_cast<c10::DeviceIndex>(current_device());
    auto made = std::make_shared<Event>(index, /*timed=*/true);
    if (device) *device = index;
    if (cpu_ns) *cpu_ns = c10::getTime();
    made->record(current_stream(index));
    *event = std::move(made);
  }
  // Returns microseconds.
  float elapsed(const Pointer* begin, const Pointer* end) const override {
    const auto time = [](const Pointer* event) { return std::static_pointer_cast<Event>(*event)->time(); };
    return std::chrono::duration<float, std::micro>(time(end) - time(begin)).count();
  }
  // An observer of all operators calls these, which must not open a range that it would observe.
  void mark(const char* name) const override {
    rangePush(name);
    rangePop();
  }
  void rangePush(const char* name) const override { push_range({0, std::make_shared<const std::string>(name)}); }
  void rangePop() const override { pop_range(); }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> call) const override {
    for (int device = 0; device < device_count(); ++device) {
      const c10::DeviceGuard guard(device_at(device));
      call(device);
    }
  }
  void synchronize() const override { synchronize_device(current_device()); }
};

const bool profiler_registered = [] {
  static Methods methods;
  register_profiler(&methods);
  return true;
}();

// ---- ranges ----

thread_local std::vector<std::unique_ptr<at::RecordFunction>> open_ranges;

struct StartedRange {
  std::string name;
  std::int64_t begin;
  int thread;
};
std::mutex started_mutex;
std::map<std::uint64_t, StartedRange> started_ranges;
std::uint64_t last_range = 0;

struct Pushed final : at::ObserverContext {};

std::mutex emit_mutex;
at::CallbackHandle emitting = at::INVALID_CALLBACK_HANDLE;

// Returns "aten::add, seq = 5, op_id = 12, sizes = [[2, 3], [], []]", as emit_nvtx does.
std::string operator_range(const at::RecordFunction& call, bool shapes) {
  std::string name = call.name();
  if (call.seqNr() >= 0) name += ", seq = " + std::to_string(call.seqNr());
  if (call.handle() > 0) name += ", op_id = " + std::to_string(call.handle());
  if (!shapes) return name;
  name += ", sizes = [";
  bool first = true;
  for (const auto& input : call.inputs()) {
    if (!std::exchange(first, false)) name += ", ";
    name += input.isTensor() && input.toTensor().defined() ? c10::str(input.toTensor().sizes()) : "[]";
  }
  return name + "]";
}

template <bool shapes>
std::unique_ptr<at::ObserverContext> push_call(const at::RecordFunction& call) {
  if (!detail::profiling()) return nullptr;
  push_range({0, std::make_shared<const std::string>(operator_range(call, shapes))});
  return std::make_unique<Pushed>();
}

void pop_call(const at::RecordFunction&, at::ObserverContext* pushed) {
  if (pushed) pop_range();
}

} // namespace

int range_push(const char* name) {
  auto range = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  range->before(std::string(name));
  open_ranges.push_back(std::move(range));
  return static_cast<int>(open_ranges.size()) - 1;
}

int range_pop() {
  TORCH_CHECK(!open_ranges.empty(), "range_pop: this thread has no open range; call range_push(name) first");
  open_ranges.pop_back();
  return static_cast<int>(open_ranges.size());
}

std::uint64_t range_start(const std::string& name) {
  std::lock_guard lock(started_mutex);
  started_ranges.emplace(++last_range, StartedRange{name, range_clock(), thread_number()});
  return last_range;
}

void range_end(std::uint64_t range) {
  StartedRange ended;
  {
    std::lock_guard lock(started_mutex);
    const auto found = started_ranges.find(range);
    TORCH_CHECK(found != started_ranges.end(), "range_end: no range ", range,
        " is open; pass what range_start(name) returned, once");
    ended = std::move(found->second);
    started_ranges.erase(found);
  }
  keep_range(ended.name, ended.begin, ended.thread);
}

void emit_ranges(bool on, bool record_shapes) {
  std::lock_guard lock(emit_mutex);
  if (emitting != at::INVALID_CALLBACK_HANDLE) at::removeCallback(std::exchange(emitting, at::INVALID_CALLBACK_HANDLE));
  if (!on) return;
  emitting =
      at::addGlobalCallback(at::RecordFunctionCallback(record_shapes ? &push_call<true> : &push_call<false>, &pop_call)
              .needsInputs(record_shapes)
              .needsIds(true)
              .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

// ---- memory ----

void detail::report(void* pointer, bool freed) {
  if (!c10::memoryProfilingEnabled()) return;
  MemoryOwner owner;
  do owner = find_owner(pointer);
  while (owner.busy);
  const auto now = memory_stats(owner.device);
  const auto size = static_cast<std::int64_t>(owner.block.size);
  const auto current = now.bytes[MemoryStats::kAll].current - (freed ? owner.block.size : 0); // which it still is in
  c10::reportMemoryUsageToProfiler(
      pointer, freed ? -size : size, current, now.reserved[MemoryStats::kAll].current, device_at(owner.device));
}

void report_out_of_memory(c10::DeviceIndex device, std::size_t bytes) {
  const auto now = memory_stats(device);
  c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(bytes), now.bytes[MemoryStats::kAll].current,
      now.reserved[MemoryStats::kAll].current, device_at(device));
}

} // namespace openreg
