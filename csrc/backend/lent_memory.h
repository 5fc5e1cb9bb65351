// Scopes in which host memory and device memory change places on the calling thread.
#pragma once

#include <c10/core/Device.h>

namespace openreg {

// Makes the CPU allocator hand out memory of `device` on this thread, labeled CPU, so a CPU kernel's results need no
// copy: see Note [Lent memory]. Device -1 lends none.
class LendDeviceMemory {
 public:
  explicit LendDeviceMemory(c10::DeviceIndex device) : previous_(lent_) { lent_ = device; }
  ~LendDeviceMemory() { lent_ = previous_; }
  LendDeviceMemory(const LendDeviceMemory&) = delete;
  LendDeviceMemory& operator=(const LendDeviceMemory&) = delete;
  static c10::DeviceIndex lent() { return lent_; }
  void to(c10::DeviceIndex device) { lent_ = device; }

 private:
  static inline constinit thread_local c10::DeviceIndex lent_ = -1;
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
