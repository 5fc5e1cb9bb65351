// Errors of queued work, kept for the next call that waits for the device.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>

namespace openreg {

// What queued work threw, with where it was launched; in torch, an AcceleratorError.
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws the type that torch has for a device's errors; set by the backend, AsyncError until then.
using ThrowDeviceError = void (*)(const std::string& message);
void set_device_error(ThrowDeviceError thrower) noexcept;
[[noreturn]] void throw_device_error(const std::string& message);

// Throws the device's error that no one has been told of, if there is one; `keep` leaves it for the next call that
// waits.
void throw_kept_error(int device, bool keep = false);

namespace detail {
// Keeps an error for the next call that waits for the device, if it is the first.
void keep_error(int device, const std::source_location& where, const char* what);
} // namespace detail

} // namespace openreg
