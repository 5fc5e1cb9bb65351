// Variables of each thread that operators read many times.
#pragma once

namespace openreg {

// What the processor knows a thread by.
inline const void* thread_pointer() noexcept {
#ifdef __x86_64__ // where clang lacks the function
  const void* pointer;
  asm("mov %%fs:0, %0" : "=r"(pointer));
  return pointer;
#else
  return __builtin_thread_pointer();
#endif
}

// The pointer of the thread that the process began with, which no thread that starts later gets; null if another
// thread loads the runtime.
const void* pointer_of_first_thread() noexcept;
inline const void* const main_thread __attribute__((visibility("hidden"))) = pointer_of_first_thread();

// A T of each thread, as thread_local T makes it. A library that is loaded at run time calls __tls_get_addr to find
// such a variable, which takes 2 to 3 ns. The main thread's T is a static variable, on a cache line of its own.
template <class T, class Name, T initial = T{}>
class PerThread {
 public:
  static T& get() noexcept {
    if (thread_pointer() == main_thread) [[likely]]
      return main_threads_.value;
    return other_threads();
  }

 private:
  struct alignas(64) Line {
    T value;
  };
  // Not inlined, because clang would call __tls_get_addr before the comparison.
  [[gnu::noinline]] static T& other_threads() noexcept {
    static constinit thread_local T value = initial;
    return value;
  }
  static inline constinit Line main_threads_ __attribute__((visibility("hidden"))) = {initial};
};

} // namespace openreg
