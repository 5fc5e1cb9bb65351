#include "runtime/memory/ipc_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "runtime/memory/memory.h"
#include "runtime/process/fork.h"
#include "runtime/process/isolation.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/turn.h"

namespace openreg {
namespace {

std::string failed(const char* what, int error) {
  return std::string("openreg: cannot share memory between processes: ") + what + ": " + std::strerror(error) +
      "; free some memory, raise `ulimit -n` or the memory limit of the container, or share less";
}

std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kMemoryPage - 1) / kMemoryPage * kMemoryPage;
}

// Like synchronize_device(), but keeps the work's errors for the caller's next synchronization, and defers signals.
void wait(int device) noexcept {
  for (std::int64_t id = 0; id < static_cast<std::int64_t>(kStreams); ++id) {
    const Ticket all = ticket({device, id});
    if (done(all)) continue;
    detail::wait_freely(detail::Interrupt::kNever, [&](auto) {
      while (!done(all)) std::this_thread::sleep_for(std::chrono::microseconds(50));
      return true;
    });
  }
}

int memory_file(std::size_t bytes) {
  const int file = memfd_create("openreg", MFD_CLOEXEC);
  if (file < 0) throw OutOfMemory(failed("memfd_create()", errno));
  int error;
  while ((error = posix_fallocate(file, 0, static_cast<off_t>(bytes))) == EINTR) {
  }
  if (!error) return file;
  close(file);
  throw OutOfMemory(failed("posix_fallocate()", error));
}

// Owns `file` from here on.
Shared* map_file(Stream stream, std::size_t bytes, int file) {
  std::unique_ptr<Shared> shared(new Shared{nullptr, bytes, file, stream.device});
  try {
    shared->pointer = allocate(stream, bytes);
    synchronize_device(stream.device); // poison is queued after the stream's work
  } catch (...) {
    close(file);
    deallocate(shared->pointer);
    throw;
  }
  if (remap(shared->pointer, bytes, file)) return shared.release();
  const int error = errno;
  close_shared(shared.release());
  throw OutOfMemory(failed("mmap()", error));
}

} // namespace

Shared* new_shared(Stream stream, std::size_t bytes) {
  bytes = whole_pages(bytes);
  return map_file(stream, bytes, memory_file(bytes));
}

Shared* share_pages(void* pages, std::size_t bytes, int device) {
  const auto whole = whole_pages(bytes);
  const int file = memory_file(whole);
  std::unique_ptr<Shared> shared(new Shared{pages, whole, file, device});
  int error = 0;
  for (std::size_t at = 0; at < bytes && !error;) {
    const auto written = pwrite(file, static_cast<const char*>(pages) + at, bytes - at, static_cast<off_t>(at));
    if (written > 0) at += static_cast<std::size_t>(written);
    else if (errno != EINTR) error = errno;
  }
  if (!error && remap(pages, whole, file)) return shared.release();
  if (!error) error = errno;
  close(file);
  throw OutOfMemory(failed("write() or mmap()", error));
}

Shared* open_shared(Stream stream, std::size_t bytes, int file) {
  const int own = fcntl(file, F_DUPFD_CLOEXEC, 0);
  if (own < 0) throw OutOfMemory(failed("dup()", errno));
  return map_file(stream, whole_pages(bytes), own);
}

void close_shared(Shared* shared) noexcept {
  if (!forked()) { // a child created by fork() can neither use the device nor free its memory
    wait(shared->device);
    if (!remap(shared->pointer, shared->bytes, -1)) {
      std::fprintf(stderr, "openreg: cannot unmap shared device memory: %s\n", std::strerror(errno));
      std::abort();
    }
    deallocate(shared->pointer);
  }
  close(shared->file);
  delete shared;
}

} // namespace openreg
