#include "runtime/stream/ipc_event.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <utility>

#include "runtime/process/error.h"
#include "runtime/process/fault.h"
#include "runtime/stream/launch.h"
#include "runtime/stream/profile.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/turn.h"

namespace openreg {

using Generation = std::uint32_t;
constexpr Generation kEventSlots = 256; // points in flight at once, over all processes

struct EventSlot {
  std::atomic<Generation> reached;
  std::atomic<int> process; // that recorded the next generation
};
struct EventPage {
  std::atomic<Generation> taken, latest;
  EventSlot slots[kEventSlots];
};
static_assert(std::atomic<Generation>::is_always_lock_free); // otherwise processes would not share it

namespace {

struct EventHandle {
  char magic[8];
  std::int64_t process, file;
  std::uint64_t device, inode;
  char rest[24];
};
static_assert(sizeof(EventHandle) == 64);
constexpr char kEventMagic[8] = "openreg";

// Generations wrap around.
bool is_at_least(Generation a, Generation b) {
  return static_cast<std::int32_t>(a - b) >= 0;
}

// Returns true if the process has neither ended nor become a zombie.
bool is_running(int process) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(process) + "/stat"), stat);
  const auto name_ends = stat.rfind(')');
  return name_ends != std::string::npos && stat.size() > name_ends + 2 && stat[name_ends + 2] != 'Z';
}

[[noreturn]] void cannot_share(const char* what) {
  throw std::runtime_error(std::string("openreg: cannot share an event between processes: ") + what + ": " +
      std::strerror(errno) + "; raise `ulimit -n` or the memory limit of the container");
}

} // namespace

struct SharedEvent::File {
  // Owns `number` from here on.
  explicit File(int number) : number(number) {
    void* mapped = mmap(nullptr, sizeof(EventPage), PROT_READ | PROT_WRITE, MAP_SHARED, number, 0);
    if (mapped != MAP_FAILED) page = static_cast<EventPage*>(mapped);
    else {
      close(number);
      cannot_share("mmap()");
    }
  }
  ~File() {
    munmap(page, sizeof(EventPage));
    close(number);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  EventSlot& slot(Generation point) const { return page->slots[point % kEventSlots]; }
  bool reached(Generation point) const {
    return point == 0 || is_at_least(slot(point).reached.load(std::memory_order_acquire), point);
  }
  void reach(Generation point) const {
    slot(point).reached.store(point, std::memory_order_release);
    syscall(SYS_futex, &slot(point).reached, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  // Returns true if the point was reached, or never will be, because the process that recorded it has ended.
  bool decided(Generation point) const {
    if (reached(point)) return true;
    const int process = slot(point).process.load();
    return process != getpid() && !is_running(process);
  }
  // Describes a wait for decided() to a schedule.
  static detail::Awaited awaited(const std::shared_ptr<File>& file, Generation point) {
    return {[file, point] { return file->decided(point); }, {kAnyDevice, -1}};
  }
  // Returns true if the point was reached within `most`; may return early. Throws if it never will be.
  bool wait_for(Generation point, std::chrono::nanoseconds most) const {
    auto& word = slot(point).reached;
    const Generation seen = word.load(std::memory_order_acquire);
    if (is_at_least(seen, point)) return true;
    most = std::min<std::chrono::nanoseconds>(most, detail::kSlice);
    const timespec time{0, static_cast<long>(most.count())};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
    if (!decided(point)) return false;
    if (reached(point)) return true;
    throw std::runtime_error("openreg: process " + std::to_string(slot(point).process.load()) +
        " recorded an event and ended before its stream reached it; synchronize there before the process ends");
  }
  void wait(Generation point, detail::Interrupt interrupt) const {
    if (reached(point)) return;
    detail::wait_freely(interrupt, [&](auto most) {
      const auto until = std::chrono::steady_clock::now() + most;
      while (!wait_for(point, most))
        if (std::chrono::steady_clock::now() >= until) return false;
      return true;
    });
  }

  Generation take() const {
    const Generation point = page->taken.fetch_add(1) + 1;
    try {
      wait(point - kEventSlots, detail::Interrupt::kNever);
    } catch (const std::runtime_error&) { // its process has ended, so the slot is free
    }
    slot(point).process.store(getpid());
    for (Generation before = page->latest.load(); !is_at_least(before, point);)
      if (page->latest.compare_exchange_weak(before, point)) break;
    return point;
  }

  const int number;
  EventPage* page = nullptr;
};

SharedEvent::SharedEvent(int device) : Event(device, /*timed=*/false) {
  const int number = memfd_create("openreg event", MFD_CLOEXEC);
  if (number < 0) cannot_share("memfd_create()");
  if (ftruncate(number, sizeof(EventPage))) {
    close(number);
    cannot_share("ftruncate()");
  }
  file_ = std::make_shared<File>(number);
  // As if the generations before the first had been reached.
  for (Generation i = 0; i < kEventSlots; ++i) file_->slot(i).reached.store(i ? i - kEventSlots : 0);
}

SharedEvent::SharedEvent(int device, const std::string& handle) : Event(device, /*timed=*/false) {
  EventHandle named;
  if (handle.size() != sizeof named)
    throw std::invalid_argument("from_ipc_handle: expected a handle of 64 bytes, but got " +
        std::to_string(handle.size()) + "; pass what ipc_handle() returned");
  std::memcpy(&named, handle.data(), sizeof named);
  if (std::memcmp(named.magic, kEventMagic, sizeof kEventMagic))
    throw std::invalid_argument(
        "from_ipc_handle: these bytes are not a handle of an openreg event; pass what ipc_handle() returned");
  const std::string path = "/proc/" + std::to_string(named.process) + "/fd/" + std::to_string(named.file);
  const int number = open(path.c_str(), O_RDWR | O_CLOEXEC);
  const int error = errno;
  struct stat found{};
  const bool same = number >= 0 && !fstat(number, &found) && found.st_ino == named.inode &&
      found.st_dev == named.device && found.st_size == sizeof(EventPage);
  if (!same) {
    if (number >= 0) close(number);
    throw std::invalid_argument("from_ipc_handle: process " + std::to_string(named.process) +
        " no longer has the event" + (number < 0 ? std::string(" (") + std::strerror(error) + ")" : "") +
        "; keep it there until this process has opened it");
  }
  file_ = std::make_shared<File>(number);
}

std::string SharedEvent::handle() const {
  struct stat found{};
  if (fstat(file_->number, &found)) cannot_share("fstat()");
  EventHandle named{};
  std::memcpy(named.magic, kEventMagic, sizeof kEventMagic);
  named.process = getpid();
  named.file = file_->number;
  named.device = found.st_dev;
  named.inode = found.st_ino;
  return std::string(reinterpret_cast<const char*>(&named), sizeof named);
}

namespace {

void refuse_in_capture(Stream stream) {
  if (detail::captures(stream))
    detail::capture_watcher.refuse(stream, "an interprocess event",
        "a replay would record or wait for it again, which other processes cannot tell apart. Use an event of this "
        "process, or record it after the replay.");
}

} // namespace

void SharedEvent::record(Stream stream) {
  const HostCall call("openregEventRecord");
  check_usable(stream.device);
  refuse_in_capture(stream);
  const Generation point = file_->take();
  if (stream_idle(stream)) file_->reach(point);
  else detail::queue_signal(stream, [file = file_, point] { file->reach(point); }, Site("record an event"));
}

void SharedEvent::block(Stream stream) const {
  const HostCall call("openregStreamWaitEvent");
  check_usable(stream.device);
  refuse_in_capture(stream);
  const Generation point = file_->page->latest.load();
  if (file_->reached(point)) return;
  const auto wait = [file = file_, point] { // on a worker, which holds no turn and handles no signals
    while (!file->wait_for(point, detail::kSlice) && !detail::dropping()) {
    }
  };
  detail::queue_wait(stream, wait, Site("wait for an event", Site::kWait), File::awaited(file_, point));
}

bool SharedEvent::query() const {
  detail::check_host_call("an event's query");
  if (detail::scheduled()) detail::schedule_watcher.query("Event.query", {device(), -1});
  return file_->reached(file_->page->latest.load());
}

void SharedEvent::synchronize() const {
  detail::check_host_call("an event's synchronize");
  const HostCall call("openregEventSynchronize");
  check_usable(device());
  const Generation point = file_->page->latest.load();
  if (detail::scheduled() && !file_->reached(point))
    detail::schedule_watcher.wait("Event.synchronize", File::awaited(file_, point));
  file_->wait(point, detail::Interrupt::kThrows);
  throw_kept_error(device());
}

Event::Clock::time_point SharedEvent::time() const {
  throw std::logic_error("openreg: an interprocess event has no time");
}

} // namespace openreg
