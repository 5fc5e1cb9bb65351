// Device memory that several processes see, as CUDA's IPC handles give it.
#pragma once

#include <cstddef>

#include "work.h"

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

// Makes memory of allocate(), of more than half a page and so with pages of its own, shared where it is. Call it in the
// order of the stream that writes to the memory. Throws OutOfMemory; nothing has changed then.
Shared* share_pages(void* pages, std::size_t bytes, int device);

// The memory of another process, of as many bytes as its new_shared() was asked for; keeps a duplicate of `file`.
Shared* open_shared(Stream stream, std::size_t bytes, int file);

// Waits for the device, whose work may still use the memory.
void close_shared(Shared* shared) noexcept;

} // namespace openreg
