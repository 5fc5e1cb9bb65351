// Device memory shared by several processes, like CUDA's IPC memory handles.
#pragma once

#include <openreg/launch.h>

#include <cstddef>

namespace openreg {

// Note [Shared memory]
// Shared memory consists of ordinary device pages with a memory file mapped over them. Another process that gets the
// file maps it over its own device pages. So an address still identifies its device, and the memory limit and
// isolation still apply. The pages become private again before they return to the pool.
struct Shared {
  void* pointer;
  std::size_t bytes; // whole pages
  int file;
  int device;
};

// At least `bytes` of new memory, zeros. Throws OutOfMemory.
Shared* new_shared(Stream stream, std::size_t bytes);

// Shares memory from allocate() in place. It must be more than half a page, so that it has its own pages. Call this in
// the order of the stream that writes to the memory. Throws OutOfMemory, with nothing changed.
Shared* share_pages(void* pages, std::size_t bytes, int device);

// Another process's memory, with as many bytes as were passed to its new_shared(); keeps a duplicate of `file`.
Shared* open_shared(Stream stream, std::size_t bytes, int file);

// Waits for the device, whose work may still use the memory.
void close_shared(Shared* shared) noexcept;

} // namespace openreg
