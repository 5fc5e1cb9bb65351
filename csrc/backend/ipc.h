// Storages in memory shared with other processes; see Note [Shared memory] in csrc/runtime/memory/ipc_memory.h.
#pragma once

#include <c10/core/Storage.h>

namespace openreg {

// Moves a device storage to shared memory, unless it is already there, and waits until the device's queued work has
// written it. Returns the memory's file, which the storage still owns. The storage cannot be resized from then on.
int share_storage(const c10::Storage& storage);

// Opens a storage of `bytes` bytes that another process has shared.
c10::Storage open_storage(int file, size_t bytes, int64_t device);

} // namespace openreg
