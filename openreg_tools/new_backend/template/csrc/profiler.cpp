// The device in torch.profiler, as a plugin of Kineto. Rung 9.
//
// Documents: none of the four describes profiling. torch/csrc/profiler/standalone/privateuse1_profiler.h in PyTorch's
// headers does.
#define FMT_HEADER_ONLY // Kineto's headers use fmt, which PyTorch does not export
#define USE_KINETO
#define KINETO_NAMESPACE libkineto
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "common.h"

namespace acme {
namespace {

using libkineto::ActivityType;

struct Activity : acme_activity {
  std::string copied_name;
  uint64_t op = 0; // the operator that launched it, as Kineto numbers them
};
std::mutex mutex;
std::vector<Activity> activities;
thread_local std::vector<uint64_t> open_ops; // of the calling thread

void collect(const acme_activity* activity) {
  std::lock_guard lock(mutex);
  activities.push_back({*activity, activity->name, activity->finished || open_ops.empty() ? 0 : open_ops.back()});
}

struct Session final : libkineto::IActivityProfilerSession {
  explicit Session(std::set<ActivityType> types) : types(std::move(types)) {}
  void start() override {
    std::lock_guard lock(mutex);
    activities.clear();
    acme_profile(&collect);
  }
  void stop() override {
    acme_profile(nullptr);
    std::lock_guard lock(mutex);
    found = std::exchange(activities, {});
  }
  void pushCorrelationId(uint64_t id) override { open_ops.push_back(id); }
  void popCorrelationId() override {
    if (!open_ops.empty()) open_ops.pop_back();
  }
  std::vector<std::string> errors() override { return {}; }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    return std::make_unique<libkineto::DeviceInfo>(libkineto::DeviceInfo{0, 5'000'000, "acme", "acme"});
  }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer); }
  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, 0);
  }

  // A launch becomes a call on the host, and work on the device that belongs to the operator which launched it.
  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, int64_t begin,
      int64_t end) override {
    buffer = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer->span = libkineto::TraceSpan(begin, end, "acme");
    std::map<uint64_t, uint64_t> ops; // by launch
    for (const Activity& activity : found) {
      if (!activity.finished) ops[activity.launch] = activity.op;
      const auto type = !activity.finished ? ActivityType::PRIVATEUSE1_RUNTIME
          : activity.bytes                 ? ActivityType::GPU_MEMCPY
                                           : ActivityType::CONCURRENT_KERNEL;
      if (!types.count(type)) continue;
      buffer->emplace_activity(buffer->span, type, activity.copied_name);
      auto& event = *buffer->activities.back();
      event.startTime = activity.begin;
      event.endTime = activity.end;
      event.id = static_cast<int32_t>((1 << 30) + activity.launch); // Kineto counts operators from 1
      event.device = activity.finished ? activity.device : libkineto::processId();
      event.resource = activity.finished ? activity.stream : libkineto::systemThreadId();
      event.flow.id = static_cast<uint32_t>(event.id);
      event.flow.type = libkineto::kLinkAsyncCpuGpu;
      event.flow.start = !activity.finished;
      event.linked = linked(static_cast<int32_t>(ops[activity.launch]));
      if (activity.bytes) event.addMetadata("bytes", activity.bytes);
      event.log(logger);
    }
  }

  const std::set<ActivityType> types;
  std::vector<Activity> found;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer;
};

struct Profiler final : libkineto::IActivityProfiler {
  const std::string& name() const override { return called; }
  const std::set<ActivityType>& availableActivities() const override { return types; }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& wanted, const libkineto::Config&) override {
    return std::make_unique<Session>(wanted);
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<ActivityType>& wanted, const libkineto::Config& config) override {
    return configure(wanted, config);
  }
  const std::string called = "acme";
  const std::set<ActivityType> types = {
      ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY, ActivityType::PRIVATEUSE1_RUNTIME};
};
REGISTER_PRIVATEUSE1_PROFILER(Profiler);

} // namespace
} // namespace acme
