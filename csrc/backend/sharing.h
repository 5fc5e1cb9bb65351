// Storages in memory that other processes see; see Note [Shared memory] in csrc/runtime/shared.h.
#pragma once

#include <c10/core/Storage.h>

namespace openreg {

// Moves a device storage to shared memory, unless it is there already, and waits until what the device was given
// has written it. Returns the memory's file, which stays the storage's. It cannot be resized from then on.
int share_storage(const c10::Storage& storage);

// The storage of `bytes` that another process has shared.
c10::Storage open_storage(int file, size_t bytes, int64_t device);

} // namespace openreg
