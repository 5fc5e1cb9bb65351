// Memory that processes share. Rung 8.
#pragma once

#include <c10/core/Storage.h>

#include <string>

namespace acme {

std::string share_memory(const c10::Storage& storage); // waits for the current stream, and returns a handle
// `file` is a descriptor that closes when the storage is freed.
c10::Storage open_memory(const std::string& handle, size_t size, int64_t device, int file);

} // namespace acme
