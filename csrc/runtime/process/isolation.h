// Isolation: if the host touches device memory by mistake, that is an error instead of a silent success.
#pragma once

#include <cstddef>
#include <cstdint>

namespace openreg {

// Note [Isolation]
// The host has no access to device memory; launch() and run() open it for the work that they run.
// keys: the memory has a protection key of the processor, and a thread opens it for itself by changing a
//   register, in tens of nanoseconds.
// strict: mprotect() opens it for all threads while any of them runs work, in microseconds.
// Any other access ends the process with a message that names the memory and the remedy; then the previous signal
// handler runs. OPENREG_ISOLATION: "off" (the default), "auto" (keys if the processor has them, else off) or "strict".
enum class Isolation { kOff, kStrict, kKeys };
Isolation isolation() noexcept;

// Describes an access that is not permitted to standard error. `verb`: what the host did. Called in a signal handler.
// Set once, by memory/access_report.cpp.
using ReportAccess = void (*)(const char* address, const char* verb);
void set_report_access(ReportAccess report) noexcept;

// Isolates the range of all devices' memory. Called when it is reserved.
void isolate(void* base, std::size_t bytes) noexcept;
// From now on, only the first `bytes` of a device's memory may be in use.
void isolate_used(int device, void* base, std::size_t bytes) noexcept;

// Maps a file over pages of device memory, or fresh private memory if `file` is -1, with the same isolation. Returns
// false, with errno set, if the operating system refuses.
bool remap(void* pages, std::size_t bytes, int file) noexcept;

// Returns true if the calling thread may be host code. Called in a signal handler. With keys, a thread that is not (an
// OpenMP or MKL worker that is older than the launch it works for) gets access when it first needs it.
using IsHostThread = bool (*)();
void set_host_thread(IsHostThread is_host) noexcept;

namespace detail {

extern std::uint32_t key_bits; // the key's bits in PKRU that deny access to its memory; 0 without keys

// True if the calling thread had no access to device memory before.
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

// While it lives, the calling thread may touch device memory. Nests.
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
