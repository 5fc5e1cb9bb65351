#include "runtime/process/error.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <string_view>

#include "runtime/device.h"
#include "runtime/process/attention.h"

namespace openreg {
namespace {

std::atomic<ThrowError> device_error{nullptr};
std::atomic<IsError> is_device{nullptr};

// The first unreported error of each device. Leaked: a worker may end after main().
std::mutex error_mutex;
auto& errors = *new std::array<std::string, kMaxDevices>;

} // namespace

void set_device_error(ThrowError thrower, IsError is_it) noexcept {
  is_device = is_it;
  device_error = thrower;
}

bool is_device_error(const std::exception& error) noexcept {
  const auto is_torchs = is_device.load();
  return (is_torchs && is_torchs(error)) || dynamic_cast<const AsyncError*>(&error);
}

std::string error_prefix() {
  return vendor_name() + std::string(" error: ");
}

void throw_device_error(const std::string& message) {
  if (const auto thrower = device_error.load()) thrower(message);
  throw AsyncError(message);
}

void throw_kept_error(int device, bool keep) {
  if (!(detail::attention.load() & detail::kErrorBit)) return;
  std::string message;
  {
    std::lock_guard lock(error_mutex);
    std::string& kept = errors[static_cast<std::size_t>(device)];
    message = kept;
    if (!keep) kept.clear();
    if (std::all_of(errors.begin(), errors.end(), [](const auto& each) { return each.empty(); }))
      detail::attention.fetch_and(~detail::kErrorBit);
  }
  if (!message.empty()) throw_device_error(message);
}

void detail::keep_error(int device, const openreg_site& site, const char* what) {
  std::lock_guard lock(error_mutex);
  auto& first = errors[static_cast<std::size_t>(device)];
  if (!first.empty()) return;
  // Without the C++ frames that torch's errors carry.
  const std::string_view text = what;
  first = std::string(text.substr(0, text.find("\nException raised from"))) +
      "\nThis was raised by work that had been queued on " + device_name(device) + ", launched at " + site.file + ":" +
      std::to_string(site.line) + ". Set OPENREG_LAUNCH_MODE=sync to have it raised at the line that caused it.";
  attention.fetch_or(kErrorBit);
}

} // namespace openreg
