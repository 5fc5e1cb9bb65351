#include "runtime/stream/utilization.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "runtime/process/fork.h"
#include "runtime/stream/turn.h"

namespace openreg {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kEverySample{1}, kFirstPeriod{167};
constexpr std::chrono::seconds kUnasked{10};
constexpr std::size_t kSamples = 1000;

enum Sample : std::uint8_t { kIdle, kSleeps, kWorks };

Sample look_at(int device) {
  for (std::int64_t id = 0; id < static_cast<std::int64_t>(kStreams); ++id)
    if (detail::turn_of(device, id).busy.load(std::memory_order_relaxed)) return kWorks;
  return detail::sleeping[static_cast<std::size_t>(device)].load(std::memory_order_relaxed) ? kSleeps : kIdle;
}

class Sampler {
 public:
  Utilization ask(int device) {
    {
      std::lock_guard lock(mutex_);
      asked_ = steady_clock::now();
      if (!running_) {
        taken_ = 0;
        std::thread([this] { run(); }).detach();
        running_ = true;
        began_ = asked_;
      }
    }
    detail::wait_freely(detail::Interrupt::kThrows, [&](auto most) {
      std::unique_lock lock(mutex_);
      return sampled_.wait_for(lock, most, [&] { return taken_ && steady_clock::now() - began_ >= kFirstPeriod; });
    });
    std::lock_guard lock(mutex_);
    const std::size_t count = std::min(taken_, kSamples);
    std::size_t works = 0, sleeps = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const Sample sample = samples_[static_cast<std::size_t>(device)][i];
      works += sample == kWorks;
      sleeps += sample == kSleeps;
    }
    const auto percent = [count](std::size_t part) { return static_cast<int>((100 * part + count / 2) / count); };
    return {percent(works + sleeps), percent(works)};
  }

 private:
  void run() {
    pthread_setname_np(pthread_self(), "openreg_usage");
    std::unique_lock lock(mutex_);
    while (steady_clock::now() - asked_ < kUnasked) {
      for (int device = 0; device < device_count(); ++device)
        samples_[static_cast<std::size_t>(device)][taken_ % kSamples] = look_at(device);
      ++taken_;
      sampled_.notify_all();
      lock.unlock();
      std::this_thread::sleep_for(kEverySample);
      lock.lock();
    }
    running_ = false;
  }

  std::mutex mutex_;
  std::condition_variable sampled_;
  bool running_ = false;
  steady_clock::time_point asked_, began_;
  std::size_t taken_ = 0; // samples of each device; the latest kSamples are kept
  std::array<std::array<Sample, kSamples>, kMaxDevices> samples_{};
};

} // namespace

Utilization utilization(int device) {
  check_not_forked();
  static auto* sampler = new Sampler; // leaked: its thread may run after main()
  return sampler->ask(device);
}

} // namespace openreg
