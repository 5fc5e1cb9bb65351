#include "runtime/stream/stream.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/device.h"
#include "runtime/process/attention.h"
#include "runtime/process/error.h"
#include "runtime/process/fault.h"
#include "runtime/stream/profile.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/watchers.h"

namespace openreg {
namespace {

constinit thread_local std::array<std::int64_t, kMaxDevices> current_ids{};
std::array<std::array<std::atomic<std::uint32_t>, 2>, kMaxDevices> next{};

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
  return detail::queue_idle(stream);
}

bool query_stream(Stream stream) {
  detail::check_host_call("a stream's query", stream);
  if (detail::scheduled()) detail::schedule_watcher.query("Stream.query", stream);
  return detail::query_queue(stream);
}

void synchronize_stream(Stream stream) {
  detail::check_host_call("a stream's synchronize", stream);
  detail::finish_stream(stream);
}

void detail::finish_stream(Stream stream, const char* name) {
  const HostCall call("openregStreamSynchronize");
  check_usable(stream.device);
  if (scheduled()) schedule_watcher.wait(name, {[all = ticket(stream)] { return done(all); }, stream});
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
  detail::check_host_call("synchronize", {device, -1});
  if (detail::scheduled())
    detail::schedule_watcher.wait("synchronize", {[device] { return device_idle(device); }, {device, -1}});
  for (std::int64_t id = 0; id < static_cast<std::int64_t>(kStreams); ++id) detail::wait_for_queued({device, id});
  throw_kept_error(device);
}

} // namespace openreg
