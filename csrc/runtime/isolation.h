// Isolation: device memory that the host touches by mistake is an error, not silent success.
#pragma once

#include <cstddef>
#include <cstdint>

namespace openreg {

// Note [Isolation]
// The host has no rights to device memory; launch() and run() open it for the work that they run.
// keys: the memory has a protection key of the processor, and a thread opens it for itself by changing a
//   register, in tens of nanoseconds.
// strict: mprotect() opens it for all threads while any of them runs work, in microseconds.
// A touch from outside ends the process with a message that names the memory and the remedy, after which the
// signal handler that was there before has its turn. OPENREG_ISOLATION: "off" (the default), "auto" (keys, where the
// processor has them, else off) or "strict".
enum class Isolation { kOff, kStrict, kKeys };
Isolation isolation() noexcept;

// Isolates the range of all devices' memory, when it is reserved.
void isolate(void* base, std::size_t bytes) noexcept;
// The first `bytes` of a device's memory, and no more, may be in use from now on.
void isolate_used(int device, void* base, std::size_t bytes) noexcept;

// Maps a file over pages of device memory, or fresh private memory where `file` is -1, isolated as they were. False,
// with errno, where the operating system refuses.
bool remap(void* pages, std::size_t bytes, int file) noexcept;

// Whether the calling thread may be host code, asked in a signal handler. With keys, a thread which is not (a worker
// of OpenMP or MKL that is older than the launch it works for) gets its rights when it first needs them.
using IsHostThread = bool (*)();
void set_host_thread(IsHostThread is_host) noexcept;

namespace detail {

extern std::uint32_t key_bits; // of the key in PKRU, which deny its memory; 0 without keys

// True if the calling thread had no rights to device memory before.
bool open_strict() noexcept;
void close_strict() noexcept;

#ifdef __x86_64__
inline std::uint32_t read_pkru() noexcept {
  std::uint32_t rights, zero;
  asm volatile(".byte 0x0f, 0x01, 0xee" : "=a"(rights), "=d"(zero) : "c"(0) : "memory"); // RDPKRU
  return rights;
}
inline void write_pkru(std::uint32_t rights) noexcept {
  asm volatile(".byte 0x0f, 0x01, 0xef" : : "a"(rights), "c"(0), "d"(0) : "memory"); // WRPKRU
}
inline bool open() noexcept {
  if (!key_bits) return open_strict();
  const auto rights = read_pkru();
  if (rights & key_bits) write_pkru(rights & ~key_bits);
  return rights & key_bits;
}
inline void close() noexcept {
  if (!key_bits) return close_strict();
  write_pkru(read_pkru() | key_bits);
}
#else
inline bool open() noexcept {
  return open_strict();
}
inline void close() noexcept {
  close_strict();
}
#endif

// While one lives, the calling thread may touch device memory. They nest.
class Access {
 public:
  Access() noexcept : Access(isolation() != Isolation::kOff) {}
  explicit Access(bool isolated) noexcept : opened_(isolated && open()) {}
  ~Access() {
    if (opened_) [[unlikely]]
      close();
  }
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;

 private:
  const bool opened_;
};

} // namespace detail
} // namespace openreg
