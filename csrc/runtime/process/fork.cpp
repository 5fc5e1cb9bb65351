#include "runtime/process/fork.h"

#include <pthread.h>

#include <atomic>
#include <stdexcept>

#include "runtime/explore/schedule.h"
#include "runtime/process/exit.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

std::atomic<bool> initialized{false};
bool used_at_fork = false;

const bool noticed = [] {
  pthread_atfork(
      [] {
        used_at_fork = initialized || launch_count() != 0 || detail::any_queue();
        detail::hold_launch_counters(true); // which a thread of the child may need
      },
      [] { detail::hold_launch_counters(false); },
      [] {
        detail::hold_launch_counters(false);
        detail::schedule_on.store(false); // the child has no other thread that could continue
        if (used_at_fork) detail::attention.store(detail::kForkBit | (detail::attention & detail::kIsolationBit));
      });
  return true;
}();

} // namespace

bool forked() noexcept {
  return detail::attention.load(std::memory_order_relaxed) & detail::kForkBit;
}

void check_not_forked() {
  detail::stay_at_exit(); // here, because every use of the device begins here
  if (forked()) [[unlikely]]
    throw std::runtime_error(
        "Cannot re-initialize openreg in forked subprocess. To use openreg with multiprocessing, you must use the "
        "'spawn' start method");
}

void initialize() {
  check_not_forked();
  initialized = true;
}

} // namespace openreg
