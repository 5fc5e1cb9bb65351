// Device indices from the user.
#pragma once

#include <c10/core/Device.h>

#include <optional>

namespace openreg {

// Returns the index of a device that exists; -1 names the current device. Throws if there is no such device.
c10::DeviceIndex checked_index(int64_t index);
// Returns the index of a device, or of the current device if there is none. Throws if it is not one of ours.
c10::DeviceIndex checked_index(std::optional<c10::Device> device);

} // namespace openreg
