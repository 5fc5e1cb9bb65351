#include "per_thread.h"

#include <pthread.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace openreg {
namespace {

// The pointer of the calling thread if the process began with it, else null.
const void* if_first() noexcept {
  if (syscall(SYS_gettid) != getpid()) return nullptr;
  // In a process that a thread forked, that thread has the stack it had. The kernel gives a process, with its first
  // stack, random bytes on it.
  pthread_attr_t attributes;
  void* stack = nullptr;
  std::size_t bytes = 0;
  if (pthread_getattr_np(pthread_self(), &attributes)) return nullptr;
  pthread_attr_getstack(&attributes, &stack, &bytes);
  pthread_attr_destroy(&attributes);
  return getauxval(AT_RANDOM) - reinterpret_cast<std::uintptr_t>(stack) < bytes ? thread_pointer() : nullptr;
}

} // namespace

const void* pointer_of_first_thread() noexcept {
  static const void* const pointer = if_first(); // which reads /proc/self/maps
  return pointer;
}

} // namespace openreg
