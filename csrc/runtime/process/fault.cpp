#include "runtime/process/fault.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "runtime/device.h"
#include "runtime/process/attention.h"
#include "runtime/process/error.h"
#include "runtime/process/fork.h"

namespace openreg {
namespace {

struct Armed {
  Injection injection;
  std::uint64_t seen = 0, struck = 0;
};

std::mutex fault_mutex;
std::map<int, Armed>& armed() {
  static auto* all = new std::map<int, Armed>;
  return *all;
}
int next_number = 0;
thread_local bool spared = false;
std::array<bool, kMaxDevices> lost_devices{};

void update_attention() {
  const bool on = !armed().empty() || std::find(lost_devices.begin(), lost_devices.end(), true) != lost_devices.end();
  if (on) detail::attention.fetch_or(detail::kFaultBit);
  else detail::attention.fetch_and(~detail::kFaultBit);
}

// Counts one event of this kind; returns the injection that strikes it, if any.
const Injection* strike(Fault fault, int device) {
  if (spared) return nullptr;
  const Injection* found = nullptr;
  for (auto& [number, each] : armed()) {
    const Injection& injection = each.injection;
    if (injection.fault != fault || (injection.device >= 0 && injection.device != device)) continue;
    const auto index = each.seen++;
    if (index < injection.after || (injection.times && index >= injection.after + injection.times)) continue;
    ++each.struck;
    found = &injection;
  }
  return found;
}

} // namespace

int arm(const Injection& injection) {
  std::lock_guard lock(fault_mutex);
  armed()[++next_number] = {injection};
  update_attention();
  return next_number;
}

std::uint64_t disarm(int number) {
  std::lock_guard lock(fault_mutex);
  const auto found = armed().find(number);
  const std::uint64_t struck = found == armed().end() ? 0 : found->second.struck;
  armed().erase(number);
  update_attention();
  return struck;
}

bool spare(bool on) {
  return std::exchange(spared, on);
}

void reset_device(int device) {
  std::lock_guard lock(fault_mutex);
  lost_devices[static_cast<std::size_t>(device)] = false;
  update_attention();
}

bool lost(int device) noexcept {
  std::lock_guard lock(fault_mutex);
  return lost_devices[static_cast<std::size_t>(device)];
}

void check_usable(int device) {
  check_not_forked();
  if (detail::attention.load() & detail::kFaultBit) detail::check_not_lost(device);
}

bool detail::allocation_fails(int device) {
  check_not_lost(device);
  return strikes(Fault::kAllocation, device);
}

void detail::check_not_lost(int device) {
  if (lost(device))
    throw_device_error(error_prefix() + device_name(device) +
        " is lost, and work that is launched on it fails. Call torch.openreg.reset_device(" + std::to_string(device) +
        ") to continue.");
}

bool detail::strikes(Fault fault, int device) {
  std::lock_guard lock(fault_mutex);
  return strike(fault, device) != nullptr;
}

std::int64_t detail::latency(Fault fault, int device) {
  std::lock_guard lock(fault_mutex);
  const Injection* injection = strike(fault, device);
  return injection ? injection->nanoseconds : 0;
}

bool detail::loses_device(int device) {
  std::lock_guard lock(fault_mutex);
  if (!strike(Fault::kLost, device)) return false;
  return lost_devices[static_cast<std::size_t>(device)] = true;
}

} // namespace openreg
