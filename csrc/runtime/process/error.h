// Errors of queued work, kept for the next call that waits for the device.
#pragma once

#include <openreg/launch.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace openreg {

// An error from queued work, with its launch site; in torch, an AcceleratorError.
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An error of a graph's node that a replay throws as it is. The message is for queued replays.
struct NodeError : std::runtime_error {
  NodeError(const std::string& message, std::exception_ptr error)
      : std::runtime_error(message), error(std::move(error)) {}
  std::exception_ptr error;
};

// Throws torch's type for device errors; set by the backend, AsyncError until then.
using ThrowError = void (*)(const std::string& message);
using IsError = bool (*)(const std::exception& error);
void set_device_error(ThrowError thrower, IsError is_it) noexcept;
bool is_device_error(const std::exception& error) noexcept;
// "openreg error: ", or "CUDA error: ".
std::string error_prefix();
[[noreturn]] void throw_device_error(const std::string& message);

// Throws the device's unreported error, if there is one; `keep` leaves it for the next call that
// waits.
void throw_kept_error(int device, bool keep = false);

namespace detail {
// Keeps an error for the next call that waits for the device, unless one is already kept.
void keep_error(int device, const openreg_site& site, const char* what);
} // namespace detail

} // namespace openreg
