#include "backend/device_index.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

#include "backend/identity/identity.h"
#include "runtime/device.h"

namespace openreg {

c10::DeviceIndex checked_index(int64_t index) {
  if (index == -1) index = current_device();
  const int count = device_count();
  TORCH_CHECK(index >= 0 && index < count, is_cuda() ? "CUDA error" : "openreg", ": invalid device ordinal ", index,
      "; there ",
      count == 0       ? std::string("are no devices")
          : count == 1 ? "is 1 device, " + device_name(0)
                       : c10::str("are ", count, " devices, ", device_name(0), " to ", device_name(count - 1)),
      is_cuda() && std::getenv("CUDA_VISIBLE_DEVICES")
          ? ". CUDA_VISIBLE_DEVICES lists those, by number; it is read when torch is imported."
          : ". Set OPENREG_DEVICE_COUNT before starting Python to have more.");
  return static_cast<c10::DeviceIndex>(index);
}

c10::DeviceIndex checked_index(std::optional<c10::Device> device) {
  if (!device) return checked_index(-1);
  TORCH_CHECK(on_device(*device), "openreg: expected a device of type ", identity.name, ", but got ", *device);
  return checked_index(device->index());
}

} // namespace openreg
