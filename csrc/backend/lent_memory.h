// Scopes in which host memory and device memory change places on the calling thread.
#pragma once

#include <c10/core/Device.h>

#include "runtime/per_thread.h"

namespace openreg {

// Makes the CPU allocator hand out memory of `device` on this thread, labeled CPU, so a CPU kernel's results need no
// copy: see Note [Lent memory]. Device -1 lends none.
class LendDeviceMemory {
 public:
  explicit LendDeviceMemory(c10::DeviceIndex device) : slot_(Lent::get()), previous_(slot_) { slot_ = device; }
  ~LendDeviceMemory() { slot_ = previous_; }
  LendDeviceMemory(const LendDeviceMemory&) = delete;
  LendDeviceMemory& operator=(const LendDeviceMemory&) = delete;
  static c10::DeviceIndex lent() { return Lent::get(); }
  void to(c10::DeviceIndex device) { slot_ = device; }

 private:
  using Lent = PerThread<c10::DeviceIndex, LendDeviceMemory, -1>;
  c10::DeviceIndex& slot_;
  const c10::DeviceIndex previous_;
};

// Makes host memory count as memory of `device` on this thread when a tensor is created from an address. Device -1
// adopts none.
class AdoptHostMemory {
 public:
  explicit AdoptHostMemory(c10::DeviceIndex device) : previous_(adopted_) { adopted_ = device; }
  ~AdoptHostMemory() { adopted_ = previous_; }
  AdoptHostMemory(const AdoptHostMemory&) = delete;
  AdoptHostMemory& operator=(const AdoptHostMemory&) = delete;
  static c10::DeviceIndex device() { return adopted_; }

 private:
  static inline thread_local c10::DeviceIndex adopted_ = -1;
  c10::DeviceIndex previous_;
};

} // namespace openreg
