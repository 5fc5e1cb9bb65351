#include "stream.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <vector>

namespace openreg {
namespace {

constexpr int kMaxDevices = 64;
// As in CUDA, streams come from a pool of 32 a priority and are reused round robin.
constexpr std::int64_t kPool = 32;

thread_local std::array<std::int64_t, kMaxDevices> current{};
std::array<std::array<std::atomic<std::uint32_t>, 2>, kMaxDevices> next{};

std::mutex counters_mutex;
std::vector<detail::LaunchCounter*>& counters() {
  static auto* all = new std::vector<detail::LaunchCounter*>;
  return *all;
}
std::uint64_t finished = 0; // of threads that have ended

} // namespace

Stream current_stream(int device) noexcept {
  return {device, current[static_cast<std::size_t>(device)]};
}

Stream exchange_stream(Stream stream) noexcept {
  return {stream.device, std::exchange(current[static_cast<std::size_t>(stream.device)], stream.id)};
}

Stream new_stream(int device, int priority) noexcept {
  const bool high = priority < 0;
  const auto n = next[static_cast<std::size_t>(device)][high ? 1 : 0]++;
  return {device, 1 + (high ? kPool : 0) + static_cast<std::int64_t>(n % kPool)};
}

int stream_priority(Stream stream) noexcept {
  return stream.id > kPool ? -1 : 0;
}

detail::LaunchCounter::LaunchCounter() {
  std::lock_guard lock(counters_mutex);
  counters().push_back(this);
}

detail::LaunchCounter::~LaunchCounter() {
  std::lock_guard lock(counters_mutex);
  finished += value;
  std::erase(counters(), this);
}

std::uint64_t launch_count() noexcept {
  std::lock_guard lock(counters_mutex);
  std::uint64_t sum = finished;
  for (const auto* counter : counters()) sum += counter->value;
  return sum;
}

} // namespace openreg
