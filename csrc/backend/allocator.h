// The allocators that PyTorch sees: of device memory, and of CPU memory, which wraps PyTorch's own.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include "backend/device_index.h"
#include "backend/lent_memory.h"

namespace openreg {

// Returns the allocator of device memory, which allocates on the calling thread's current device.
c10::Allocator* device_allocator();

// Allocates memory on one device. Throws c10::OutOfMemoryError.
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes);

// Gives a storage other memory. A copy-on-write storage drops its share without copying it first.
void replace_memory(c10::StorageImpl* storage, c10::DataPtr&& data);

// Grows or shrinks a device storage, and keeps the bytes that fit.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

// Throws an error of operator `op` if a tensor with elements has no memory: the program freed its storage or resized it
// to nothing. Exported for the operators, which are in a separate library.
__attribute__((visibility("default"))) void expect_memory(const char* op, const at::TensorBase& x);

// Copies a storage's memory to the host if it is device memory.
void move_to_host(c10::StorageImpl* storage);

} // namespace openreg
