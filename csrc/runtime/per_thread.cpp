#include "runtime/per_thread.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

extern "C" void* __libc_stack_end; // an address on the process's first stack

namespace openreg {
namespace {

// The pointer of the calling thread if the process began with it, else null.
const void* if_first() noexcept {
  if (syscall(SYS_gettid) != getpid()) return nullptr;
  // In a process that a thread forked, that thread has the stack it had.
  pthread_attr_t attributes;
  void* stack = nullptr;
  std::size_t bytes = 0;
  if (pthread_getattr_np(pthread_self(), &attributes)) return nullptr;
  pthread_attr_getstack(&attributes, &stack, &bytes);
  pthread_attr_destroy(&attributes);
  const auto end = reinterpret_cast<std::uintptr_t>(__libc_stack_end), begin = reinterpret_cast<std::uintptr_t>(stack);
  return end - begin < bytes ? thread_pointer() : nullptr;
}

} // namespace

const void* pointer_of_first_thread() noexcept {
  static const void* const pointer = if_first(); // which reads /proc/self/maps
  return pointer;
}

} // namespace openreg
