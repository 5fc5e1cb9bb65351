// The allocators that PyTorch sees: device memory, and the CPU allocator inside a CPU kernel's call.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <optional>

#include "runtime/per_thread.h"

namespace openreg {

// Allocates on the calling thread's current device.
c10::Allocator* device_allocator();

// Memory on one device, labeled as that device's. Throws c10::OutOfMemoryError.
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes);

// Gives a storage other memory. A copy-on-write storage drops its share without copying it first.
void replace_memory(c10::StorageImpl* storage, c10::DataPtr&& data);

// Grows or shrinks a device storage, keeping what fits.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

// Throws if a tensor with elements has no memory: the program freed its storage or resized it to nothing. `op`: the
// operator, for the message. Exported for the operators, which are in a separate library.
__attribute__((visibility("default"))) void expect_memory(const char* op, const at::TensorBase& x);

// Copies a storage's memory to the host if it is device memory.
void move_to_host(c10::StorageImpl* storage);

// While it lives, the CPU allocator hands out memory of `device` on this thread, labeled CPU, so a CPU kernel's results
// need no copy. See csrc/aten/cpu_call.h.
class LendDeviceMemory {
 public:
  explicit LendDeviceMemory(c10::DeviceIndex device) : slot_(Lent::get()), previous_(slot_) { slot_ = device; }
  ~LendDeviceMemory() { slot_ = previous_; }
  LendDeviceMemory(const LendDeviceMemory&) = delete;
  LendDeviceMemory& operator=(const LendDeviceMemory&) = delete;
  static c10::DeviceIndex lent() { return Lent::get(); }
  void to(c10::DeviceIndex device) { slot_ = device; }

 private:
  using Lent = PerThread<c10::DeviceIndex, LendDeviceMemory, -1>; // -1: none
  c10::DeviceIndex& slot_;
  const c10::DeviceIndex previous_;
};

// While it lives, host memory counts as device memory on this thread when a tensor is created from an address.
class AdoptHostMemory {
 public:
  explicit AdoptHostMemory(c10::DeviceIndex device) : previous_(adopted_) { adopted_ = device; }
  ~AdoptHostMemory() { adopted_ = previous_; }
  AdoptHostMemory(const AdoptHostMemory&) = delete;
  AdoptHostMemory& operator=(const AdoptHostMemory&) = delete;
  static c10::DeviceIndex device() { return adopted_; } // -1: none

 private:
  static inline thread_local c10::DeviceIndex adopted_ = -1;
  c10::DeviceIndex previous_;
};

// Resolves a device index from the user, where -1 is the current device; throws if there is no such device.
c10::DeviceIndex checked_index(int64_t index);
c10::DeviceIndex checked_index(std::optional<c10::Device> device);

} // namespace openreg
