// The table of openreg/c_api.h. Each function checks what comes from outside, calls the runtime, and turns exceptions
// into statuses.

#include "runtime/interface.h"

#include <openreg/c_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/device.h"
#include "runtime/memory/contents.h"
#include "runtime/memory/memory.h"
#include "runtime/process/error.h"
#include "runtime/process/fault.h"
#include "runtime/process/notices.h"
#include "runtime/stream/event.h"
#include "runtime/stream/launch.h"

struct openreg_event {
  openreg::Event event;
};

namespace openreg {
namespace {

// The calling thread's last error.
struct LastError {
  openreg_status status;
  std::exception_ptr exception;
  std::string message;
};
thread_local LastError last;
std::atomic<ThrowError> memory_error{nullptr};

openreg_status keep_exception(openreg_status status, const char* message) {
  last = {status, std::current_exception(), message};
  return status;
}

void throw_last() {
  if (const auto thrower = memory_error.load(); thrower && last.status == OPENREG_ERROR_MEMORY) thrower(last.message);
  if (!last.exception)
    throw std::logic_error(
        "openreg: throw_error() was called, but no call has failed since the last throw_error(); call it once, "
        "after a status that is not OPENREG_OK");
  std::rethrow_exception(std::exchange(last.exception, nullptr));
}

// The status of an exception that the runtime has thrown.
openreg_status status_of(const std::exception& error) noexcept {
  if (dynamic_cast<const std::invalid_argument*>(&error)) return OPENREG_ERROR_ARGUMENT;
  if (dynamic_cast<const OutOfMemory*>(&error)) return OPENREG_ERROR_MEMORY;
  return is_device_error(error) ? OPENREG_ERROR_DEVICE : OPENREG_ERROR_OTHER;
}

template <class Call>
openreg_status guarded(Call&& call) {
  detail::work_threw = false;
  try {
    call();
    return OPENREG_OK;
  } catch (const std::exception& error) {
    return keep_exception(
        std::exchange(detail::work_threw, false) ? OPENREG_ERROR_OTHER : status_of(error), error.what());
  } catch (...) {
    detail::work_threw = false;
    return keep_exception(OPENREG_ERROR_OTHER, "work threw an object that is not a std::exception");
  }
}

Stream checked(openreg_stream stream) {
  const Stream ours{stream.device, stream.id};
  check_stream(ours);
  return ours;
}

int checked_device(const char* function, int device) {
  if (device < 0 || device >= device_count())
    throw std::invalid_argument(std::string(function) + ": there is no device " + std::to_string(device) +
        ": this process has " + std::to_string(device_count()) + " (OPENREG_DEVICE_COUNT)");
  check_usable(device);
  return device;
}

void check_memory(const char* function, const void* memory) {
  if (device_of(memory) < 0)
    throw std::invalid_argument(std::string(function) +
        ": expected memory of the device, from allocate() or a tensor on openreg, but got a host address");
}

std::string hexadecimal(const void* address) {
  std::ostringstream text;
  text << address;
  return text.str();
}

// Throws unless `memory` starts a block in use.
void check_block(const char* function, const void* memory) {
  check_memory(function, memory);
  const MemoryOwner owner = owner_of(memory);
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(std::string(function) + ": expected an address from allocate(), but got " +
        hexadecimal(memory) + " of device " + std::to_string(owner.device) + ", " + why);
  };
  if (!owner.block.size) refuse("where nothing is allocated; was it freed before?");
  if (owner.block.state != MemoryBlock::kAllocated) refuse("which has been freed already; free memory once");
  if (owner.block.address != memory)
    refuse("which is byte " +
        std::to_string(static_cast<const char*>(memory) - static_cast<const char*>(owner.block.address)) +
        " of a block that starts at " + hexadecimal(owner.block.address) + "; give that address");
}

// Dereferences a required argument; throws if it is null.
template <class T>
T& given(const char* what, T* pointer) {
  if (!pointer) throw std::invalid_argument(std::string("expected ") + what + ", but got NULL");
  return *pointer;
}

openreg_event& checked(openreg_event* event) {
  return given("an event from create_event()", event);
}

// Throws unless one block in use holds all of the bytes at an address.
void check_range(const char* function, const void* memory, std::size_t bytes) {
  const MemoryOwner owner = owner_of(memory);
  const auto before = static_cast<std::size_t>(
      static_cast<const char*>(memory) - static_cast<const char*>(owner.block.address ? owner.block.address : memory));
  if (!owner.block.size || owner.block.state == MemoryBlock::kFree)
    throw std::invalid_argument(std::string(function) + ": nothing is allocated at " + hexadecimal(memory) +
        " of device " + std::to_string(owner.device) + "; use it before it is freed");
  if (bytes > owner.block.size - before)
    throw std::invalid_argument(std::string(function) + ": " + std::to_string(bytes) + " bytes at " +
        hexadecimal(memory) + " end after the block of " + std::to_string(owner.block.size) + " bytes at " +
        hexadecimal(owner.block.address) + "; copy what it holds");
}

// Checks a site that came from outside, and fills in what errors, profiles and faults read.
openreg_site checked(const openreg_site* site) {
  openreg_site ours = given("a site", site);
  if (!ours.name && !ours.function)
    throw std::invalid_argument("expected a site with a name or a function, but got NULL for both");
  if (ours.kind < OPENREG_KERNEL || ours.kind > OPENREG_WAIT)
    throw std::invalid_argument(
        "expected a site of kind OPENREG_KERNEL, OPENREG_COPY or OPENREG_WAIT, but got " + std::to_string(ours.kind));
  if (!ours.function) ours.function = ours.name;
  if (!ours.file) ours.file = "unknown";
  return ours;
}

const openreg_work& checked(const openreg_work* work) {
  const openreg_work& ours = given("work", work);
  if (!ours.run) throw std::invalid_argument("expected work with a function run, but got NULL");
  if (!ours.keep != !ours.drop)
    throw std::invalid_argument("expected work with both keep and drop, or neither, but got NULL for one of them");
  return ours;
}

// Copies the bytes at `from` to `to`, and flips one of them if a fault strikes.
struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
  bool corrupted;
  void operator()() const {
    std::memmove(to, from, bytes);
    if (corrupted && bytes) static_cast<unsigned char*>(to)[bytes / 2] ^= 1;
  }
};

constexpr std::array<const char*, 6> kFaults{"allocation", "kernel", "copy", "lost", "kernel_latency", "copy_latency"};

Fault fault_of(const char* name) {
  const auto found = std::find_if(kFaults.begin(), kFaults.end(), [&](auto each) { return !std::strcmp(each, name); });
  if (found == kFaults.end())
    throw std::invalid_argument(std::string("arm_fault: expected \"allocation\", \"kernel\", \"copy\", \"lost\", "
                                            "\"kernel_latency\" or \"copy_latency\", but got \"") +
        name + "\"");
  return static_cast<Fault>(found - kFaults.begin());
}

constexpr openreg_interface table{
    .major = OPENREG_MAJOR,
    .minor = OPENREG_MINOR,

    .last_error = [] { return last.message.c_str(); },
    .throw_error = &throw_last,

    .device_count = [] { return device_count(); },
    .current_device = [] { return current_device(); },
    .set_device =
        [](int32_t device) { return guarded([&] { exchange_device(checked_device("set_device", device)); }); },
    .synchronize_device =
        [](int32_t device) {
          return guarded([&] {
            synchronize_device(checked_device("synchronize_device", device));
            notice(NoticeKind::kDeviceSynchronized, nullptr, {device, 0});
          });
        },

    .current_stream = [](int32_t device) -> openreg_stream {
      if (device < 0 || device >= kMaxDevices) return {device, 0};
      const Stream stream = detail::thread_stream(device);
      return {stream.device, stream.id};
    },
    .set_stream = [](openreg_stream stream) { return guarded([&] { exchange_stream(checked(stream)); }); },
    .new_stream =
        [](int32_t device, int32_t priority, openreg_stream* out) {
          return guarded([&] {
            const Stream stream = new_stream(checked_device("new_stream", device), priority);
            given("a place for the stream", out) = {stream.device, stream.id};
          });
        },
    .query_stream =
        [](openreg_stream stream, int32_t* idle) {
          return guarded([&] {
            const Stream ours = checked(stream);
            check_usable(ours.device);
            if (!(given("a place for the answer", idle) = query_stream(ours) && answers_query(nullptr, ours))) return;
            throw_kept_error(ours.device, /*keep=*/true);
          });
        },
    .synchronize_stream =
        [](openreg_stream stream) {
          return guarded([&] {
            synchronize_stream(checked(stream));
            notice(NoticeKind::kStreamSynchronized, nullptr, checked(stream));
          });
        },

    .launch =
        [](openreg_stream stream, const openreg_site* site, const openreg_work* work, void* context) {
          return guarded([&] { detail::launch({stream.device, stream.id}, checked(site), checked(work), context); });
        },
    .run =
        [](openreg_stream stream, const openreg_site* site, const openreg_work* work, void* context) {
          return guarded([&] { detail::run({stream.device, stream.id}, checked(site), checked(work), context); });
        },
    .enqueue =
        [](openreg_stream stream, const openreg_site* site, const openreg_work* work, void* context) {
          return guarded([&] { detail::enqueue({stream.device, stream.id}, checked(site), checked(work), context); });
        },
    .copy =
        [](void* to, const void* from, size_t bytes, openreg_stream stream) {
          return guarded([&] {
            const Stream ours = checked(stream);
            const bool to_device = device_of(to) >= 0, from_device = device_of(from) >= 0;
            if (bytes && (!to || !from))
              throw std::invalid_argument(
                  std::string("copy: expected two addresses, but ") + (to ? "from" : "to") + " is NULL");
            if (bytes && !to_device && !from_device) check_memory("copy", to);
            for (const void* memory : {static_cast<const void*>(to), from})
              if (bytes && device_of(memory) >= 0) check_range("copy", memory, bytes);
            const char* name = !from_device ? "Memcpy HtoD (Host -> Device)"
                : !to_device                ? "Memcpy DtoH (Device -> Host)"
                                            : "Memcpy DtoD (Device -> Device)";
            Copy copy{to, from, bytes, copy_corrupted(ours)};
            detail::launch(ours, Site(name, Site::kCopy, bytes), impl::WorkOf<Copy>::table, &copy);
          });
        },

    .allocate =
        [](openreg_stream stream, size_t bytes, void** out) {
          return guarded([&] {
            void*& place = given("a place for the address", out);
            place = allocate(checked(stream), bytes);
          });
        },
    .deallocate =
        [](void* memory) {
          return guarded([&] {
            if (memory) check_block("deallocate", memory);
            deallocate(memory);
          });
        },
    .record_stream =
        [](void* memory, openreg_stream stream) {
          return guarded([&] {
            check_block("record_stream", memory);
            if (const Stream ours = checked(stream); device_of(memory) != ours.device)
              throw std::invalid_argument("record_stream: memory of device " + std::to_string(device_of(memory)) +
                  " cannot be kept for a stream of device " + std::to_string(ours.device) +
                  "; record a stream of the memory's device that waits for an event of the other device");
            record_stream(memory, checked(stream));
          });
        },
    .device_of = [](const void* address) { return device_of(address); },

    .create_event =
        [](int32_t device, int32_t timed, openreg_event** out) {
          return guarded([&] {
            openreg_event*& place = given("a place for the event", out);
            place = new openreg_event{Event(checked_device("create_event", device), timed != 0)};
          });
        },
    .destroy_event =
        [](openreg_event* event) {
          if (!event) return;
          notice(NoticeKind::kEventDestroyed, event, {});
          delete event;
        },
    .record_event =
        [](openreg_event* event, openreg_stream stream) {
          return guarded([&] {
            if (checked(event).event.device() != stream.device)
              throw std::invalid_argument("record_event: an event of device " + std::to_string(event->event.device()) +
                  " cannot be recorded on a stream of device " + std::to_string(stream.device) +
                  "; create the event on the stream's device");
            event->event.record(checked(stream));
            notice(NoticeKind::kEventRecorded, event, checked(stream));
          });
        },
    .wait_event =
        [](openreg_event* event, openreg_stream stream) {
          return guarded([&] {
            checked(event).event.block(checked(stream));
            notice(NoticeKind::kEventWaitedFor, event, checked(stream));
          });
        },
    .query_event =
        [](openreg_event* event, int32_t* reached) {
          return guarded([&] {
            check_usable(checked(event).event.device());
            if (!(given("a place for the answer", reached) = event->event.query() && answers_query(event, {}))) return;
            throw_kept_error(event->event.device(), /*keep=*/true);
          });
        },
    .synchronize_event =
        [](openreg_event* event) {
          return guarded([&] {
            checked(event).event.synchronize();
            notice(NoticeKind::kEventSynchronized, event, {});
          });
        },
    .elapsed_time =
        [](openreg_event* start, openreg_event* end, double* milliseconds) {
          return guarded([&] {
            const Event &a = checked(start).event, &b = checked(end).event;
            if (!a.timed() || !b.timed() || a.device() != b.device() || !a.recorded() || !b.recorded())
              throw std::invalid_argument(
                  "elapsed_time: expected two timed events of one device, which have been recorded");
            given("a place for the time", milliseconds) =
                std::chrono::duration<double, std::milli>(b.time() - a.time()).count();
          });
        },

    .arm_fault =
        [](const char* fault, int32_t device, uint64_t after, uint64_t times, int64_t nanoseconds, int32_t* number) {
          return guarded([&] {
            int32_t& place = given("a place for the number", number);
            if (device < -1) checked_device("arm_fault", device);
            if (nanoseconds < 0)
              throw std::invalid_argument(
                  "arm_fault: expected nanoseconds of at least 0, but got " + std::to_string(nanoseconds));
            given("the name of a fault", fault);
            place = arm(
                {fault_of(fault), device < 0 ? -1 : checked_device("arm_fault", device), after, times, nanoseconds});
          });
        },
    .disarm_fault = [](int32_t number) { return disarm(number); },
    .reset_device =
        [](int32_t device) {
          return guarded([&] {
            if (device < 0 || device >= device_count()) checked_device("reset_device", device);
            reset_device(device);
          });
        },
};

} // namespace

void set_memory_error(ThrowError thrower) noexcept {
  memory_error = thrower;
}

} // namespace openreg

const openreg_interface* openreg_get_interface(uint32_t major, uint32_t minor, const char** error) {
  if (major == OPENREG_MAJOR && minor <= OPENREG_MINOR) return &openreg::table;
  thread_local std::string message;
  message = "openreg: this program was built for version " + std::to_string(major) + "." + std::to_string(minor) +
      " of the device's C interface, and the installed openreg_ops has " + std::to_string(OPENREG_MAJOR) + "." +
      std::to_string(OPENREG_MINOR) +
      (major == OPENREG_MAJOR || major > OPENREG_MAJOR ? "; install a newer openreg_ops" : "; build the program again");
  if (error) *error = message.c_str();
  return nullptr;
}
