#include "runtime/process/fork.h"

#include <pthread.h>

#include <atomic>
#include <stdexcept>

#include "runtime/device.h"
#include "runtime/process/attention.h"
#include "runtime/process/exit.h"

namespace openreg {
namespace {

std::atomic<bool> device_used{false};

const bool noticed = [] {
  pthread_atfork(nullptr, nullptr, [] {
    if (device_used) detail::attention.store(detail::kForkBit | (detail::attention & detail::kIsolationBit));
  });
  return true;
}();

} // namespace

bool forked() noexcept {
  return detail::attention.load(std::memory_order_relaxed) & detail::kForkBit;
}

void check_not_forked() {
  detail::stay_at_exit(); // here, because every use of the device begins here
  if (!forked()) [[likely]]
    return;
  const std::string name = vendor_name();
  throw std::runtime_error("Cannot re-initialize " + name + " in forked subprocess. To use " + name +
      " with multiprocessing, you must use the 'spawn' start method");
}

bool initialized() noexcept {
  return device_used && !forked();
}

void initialize() {
  check_not_forked();
  device_used = true;
}

void note_use() noexcept {
  device_used = true;
}

} // namespace openreg
