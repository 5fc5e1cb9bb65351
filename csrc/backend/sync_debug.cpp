#include "backend/sync_debug.h"

namespace openreg {
namespace {

std::atomic<ReportSync> sync_reporter{nullptr};

} // namespace

void set_report_sync(ReportSync to) noexcept {
  sync_reporter = to;
}

void set_sync_debug_mode(SyncDebugMode mode) noexcept {
  detail::sync_debug = mode;
}

SyncDebugMode sync_debug_mode() noexcept {
  return detail::sync_debug;
}

void detail::report_sync(const char* operation) {
  const auto report = sync_reporter.load();
  if (report && sync_debug_mode() != SyncDebugMode::kDefault) report(operation);
}

} // namespace openreg
