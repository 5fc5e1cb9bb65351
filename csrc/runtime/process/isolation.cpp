#include "runtime/process/isolation.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "runtime/process/attention.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace openreg {

constinit std::uint32_t detail::key_bits = 0;

namespace {

char* range = nullptr; // all devices' memory, once it is reserved
std::size_t range_bytes = 0;
[[maybe_unused]] int key = -1; // x86's

Isolation mode = Isolation::kOff;
const bool mode_from_environment = [] {
  const char* text = std::getenv("OPENREG_ISOLATION");
  if (!text || !*text || !std::strcmp(text, "off")) return true;
  if (!std::strcmp(text, "strict")) {
    mode = Isolation::kStrict;
  } else if (std::strcmp(text, "auto") != 0) {
    std::fprintf(stderr, "openreg: OPENREG_ISOLATION=\"%s\" is not auto, strict or off; using off\n", text);
    return true;
  } else {
#ifdef __x86_64__
    key = pkey_alloc(0, PKEY_DISABLE_ACCESS); // fails if the processor or the kernel has none
    if (key < 0) return true;
    detail::key_bits = 3u << (2 * key);
    mode = Isolation::kKeys;
#else
    return true;
#endif
  }
  detail::attention.fetch_or(detail::kIsolationBit);
  return true;
}();

// ---- strict ----

std::mutex isolation_mutex;
int inside = 0; // threads that run work
thread_local bool this_inside = false;

// The part of a device's range that is in use. The rest stays closed, because mprotect() takes longer on a wider range.
struct Used {
  char* base;
  std::size_t bytes;
};
std::array<Used, 64> used{};

void check(bool success, const char* what) noexcept {
  if (success) return;
  std::fprintf(
      stderr, "openreg: %s of device memory failed: %s; set OPENREG_ISOLATION=off\n", what, std::strerror(errno));
  std::abort();
}

void protect(char* base, std::size_t bytes, int rights) noexcept {
  check(mprotect(base, bytes, rights) == 0, "mprotect()");
}

void protect_used(int rights) noexcept {
  for (const auto& [base, bytes] : used)
    if (bytes) protect(base, bytes, rights);
}

// A child inherits the access rights unchanged, but only one of the threads.
const bool rights_follow_forks = [] {
  if (mode != Isolation::kStrict) return true;
  pthread_atfork([] { isolation_mutex.lock(); }, [] { isolation_mutex.unlock(); },
      [] {
        const bool open = inside > 0;
        inside = this_inside;
        if (open && !inside) protect_used(PROT_NONE);
        isolation_mutex.unlock();
      });
  return true;
}();

// ---- the fault handler: only async-signal-safe code ----

struct sigaction previous;
constinit ReportAccess report = nullptr;
std::atomic<char*> reported{nullptr}; // the latest address: a handler that returns would see it again forever
IsHostThread is_host_thread = [] { return gettid() == getpid(); };

const char* verb(const void* context) {
#ifdef __x86_64__
  return static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2 ? "wrote to" : "read";
#else
  return "touched";
#endif
}

#ifdef __x86_64__
// Where XSAVE stores PKRU, state component 9 of the processor.
constexpr std::uint64_t kPkruComponent = std::uint64_t{1} << 9;
std::uint32_t pkru_offset = 0;

// Gives the interrupted thread access to device memory from now on, through the registers that sigreturn restores.
bool grant(void* context) {
  auto* state = reinterpret_cast<char*>(static_cast<ucontext_t*>(context)->uc_mcontext.fpregs);
  // The kernel's description of the frame: a magic number, its size, its components.
  constexpr std::size_t kWords = 464, kHeader = 512;
  constexpr std::uint32_t kMagic = 0x46505853;
  std::uint32_t magic;
  std::uint64_t components, present;
  std::memcpy(&magic, state + kWords, sizeof magic);
  std::memcpy(&components, state + kWords + 8, sizeof components);
  if (magic != kMagic || !(components & kPkruComponent) || !pkru_offset) return false;
  std::memcpy(&present, state + kHeader, sizeof present);
  present |= kPkruComponent;
  std::memcpy(state + kHeader, &present, sizeof present);
  std::uint32_t rights;
  std::memcpy(&rights, state + pkru_offset, sizeof rights);
  rights &= ~detail::key_bits;
  std::memcpy(state + pkru_offset, &rights, sizeof rights);
  return true;
}
#endif

// Passes the signal to the previous handler.
void chain(int signal, siginfo_t* info, void* context) {
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(signal, info, context);
  const bool sent = info->si_code <= 0; // from raise() or kill(), so it does not recur by itself
  if (previous.sa_handler == SIG_IGN && sent) return;
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(signal);
  struct sigaction end{};
  end.sa_handler = SIG_DFL;
  sigaction(signal, &end, nullptr);
  if (sent) raise(signal); // arrives when this returns
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  auto* address = static_cast<char*>(info->si_addr);
  if (info->si_code > 0 && static_cast<std::size_t>(address - range) < range_bytes) {
#ifdef __x86_64__
    if (info->si_code == SEGV_PKUERR && !is_host_thread() && grant(context)) {
      errno = error;
      return;
    }
#endif
    if (reported.exchange(address) != address) report(address, verb(context));
    else previous = {}; // SIG_DFL
  }
  chain(signal, info, context);
  errno = error;
}

} // namespace

Isolation isolation() noexcept {
  return mode;
}

void set_host_thread(IsHostThread is_host) noexcept {
  is_host_thread = is_host;
}

void set_report_access(ReportAccess reporter) noexcept {
  report = reporter;
}

void isolate(void* base, std::size_t bytes) noexcept {
  if (mode == Isolation::kOff) return;
  std::lock_guard lock(isolation_mutex);
  range = static_cast<char*>(base);
  range_bytes = bytes;
#ifdef __x86_64__
  if (mode == Isolation::kKeys) {
    check(pkey_mprotect(base, bytes, PROT_READ | PROT_WRITE, key) == 0, "pkey_mprotect()");
    std::uint32_t size, supervisor, unused;
    __cpuid_count(0xD, 9, size, pkru_offset, supervisor, unused);
  }
#endif
  if (mode == Isolation::kStrict) {
    protect(range, bytes, PROT_NONE);
    // Core dumps do not need it, and the kernel does not merge mappings that differ in this flag on closing, only to
    // split them on opening.
    madvise(base, bytes, MADV_DONTDUMP);
  }
  struct sigaction ours{};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &ours, &previous);
}

void isolate_used(int device, void* base, std::size_t bytes) noexcept {
  if (mode != Isolation::kStrict) return;
  std::lock_guard lock(isolation_mutex);
  auto& now = used[static_cast<std::size_t>(device)];
  if (bytes <= now.bytes) return;
  now = {static_cast<char*>(base), bytes};
  madvise(base, bytes, MADV_DODUMP);
  if (inside) protect(now.base, bytes, PROT_READ | PROT_WRITE);
}

bool remap(void* pages, std::size_t bytes, int file) noexcept {
  std::lock_guard lock(isolation_mutex); // in strict mode another thread may open or close the memory
  const int rights = mode == Isolation::kStrict && !inside ? PROT_NONE : PROT_READ | PROT_WRITE;
  const int kind = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  if (mmap(pages, bytes, rights, kind | MAP_FIXED, file, 0) == MAP_FAILED) return false;
  if (file < 0) madvise(pages, bytes, MADV_HUGEPAGE);
#ifdef __x86_64__
  if (mode == Isolation::kKeys) return pkey_mprotect(pages, bytes, rights, key) == 0;
#endif
  return true;
}

// One system call for the entire range: its cost depends on the pages in use, because the kernel skips the others.
bool detail::open_strict() noexcept {
  if (this_inside) return false;
  std::lock_guard lock(isolation_mutex);
  if (inside++ == 0) protect_used(PROT_READ | PROT_WRITE);
  return this_inside = true;
}

void detail::close_strict() noexcept {
  std::lock_guard lock(isolation_mutex);
  this_inside = false;
  if (--inside == 0) protect_used(PROT_NONE);
}

} // namespace openreg
