// Device memory that several processes see, as CUDA's IPC handles give it.
#pragma once

#include <cstddef>

#include "stream.h"

namespace openreg {

// Note [Shared memory]
// Shared memory is pages of a device like any other, with a memory file mapped over them. Another process that is
// given the file maps it over pages of its own device. So an address still tells its device, the limit counts, and
// isolation holds. The pages become private again before they go back to the pool.
struct Shared {
  void* pointer;
  std::size_t bytes; // whole pages
  int file;
  int device;
};

// At least `bytes` of new memory, zeros. Throws OutOfMemory.
Shared* new_shared(Stream stream, std::size_t bytes);

// The memory of another process, of as many bytes as its new_shared() was asked for; keeps a duplicate of `file`.
Shared* open_shared(Stream stream, std::size_t bytes, int file);

// Maps a file over pages of device memory, or fresh private memory where `file` is -1, isolated as they were. False,
// with errno, where the operating system refuses. Defined in isolation.cpp.
bool remap(void* pages, std::size_t bytes, int file) noexcept;

// Waits for the device, whose work may still use the memory.
void close_shared(Shared* shared) noexcept;

} // namespace openreg
