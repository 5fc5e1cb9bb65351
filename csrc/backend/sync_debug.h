// torch.openreg.set_sync_debug_mode: warns or raises when an operator waits for the device on CUDA.
#pragma once

#include <atomic>

namespace openreg {

enum class SyncDebugMode { kDefault, kWarn, kError };

// Sets the function that reports one synchronizing operation, and may throw. Called once, by the bindings.
using ReportSync = void (*)(const char* operation);
void set_report_sync(ReportSync report) noexcept;

void set_sync_debug_mode(SyncDebugMode mode) noexcept;
SyncDebugMode sync_debug_mode() noexcept;

namespace detail {
inline std::atomic<SyncDebugMode> sync_debug{SyncDebugMode::kDefault};
void report_sync(const char* operation);
} // namespace detail

// Returns true if synchronizing operations are reported.
inline bool watches_syncs() noexcept {
  return detail::sync_debug.load(std::memory_order_relaxed) != SyncDebugMode::kDefault;
}

// Reports an operator or method that is about to wait.
inline void synchronizes(const char* operation) {
  if (watches_syncs()) [[unlikely]]
    detail::report_sync(operation);
}

} // namespace openreg
