// The device for C++: streams, work, memory, events. It does not need PyTorch; openreg/torch.h adds tensors.
//
// Functions report errors as exceptions whose message says what to do. If PyTorch is loaded, they throw PyTorch's own
// types, so Python raises torch.OutOfMemoryError and torch.AcceleratorError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "launch.h"

namespace openreg {
inline namespace v1 {

// ---- devices ----

inline int device_count() {
  return impl::interface().device_count();
}
// The calling thread's current device.
inline int current_device() {
  return impl::interface().current_device();
}
inline void set_device(int device) {
  impl::check(impl::interface().set_device(device));
}
// Waits for the device's work; throws what the work threw.
inline void synchronize(int device) {
  impl::check(impl::interface().synchronize_device(device));
}

// ---- streams ----

namespace impl {
inline openreg_stream to_c(Stream stream) {
  return {stream.device, stream.id};
}
} // namespace impl

// A stream of the device's pool; a lower priority number is more urgent: 0 or -1.
inline Stream new_stream(int device, int priority = 0) {
  openreg_stream out;
  impl::check(impl::interface().new_stream(device, priority, &out));
  return {out.device, out.id};
}
inline void set_stream(Stream stream) {
  impl::check(impl::interface().set_stream(impl::to_c(stream)));
}
// Returns true if all work launched on it has run.
inline bool query(Stream stream) {
  std::int32_t idle;
  impl::check(impl::interface().query_stream(impl::to_c(stream), &idle));
  return idle;
}
inline void synchronize(Stream stream) {
  impl::check(impl::interface().synchronize_stream(impl::to_c(stream)));
}

// While it lives, `stream` is the calling thread's current stream on its device.
class StreamGuard {
 public:
  explicit StreamGuard(Stream stream) : previous_(current_stream(stream.device)) { set_stream(stream); }
  ~StreamGuard() { impl::interface().set_stream(impl::to_c(previous_)); }
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  const Stream previous_;
};

// ---- memory ----

// 64-byte aligned memory for work on `stream`.
inline void* allocate(Stream stream, std::size_t bytes) {
  void* out;
  impl::check(impl::interface().allocate(impl::to_c(stream), bytes, &out));
  return out;
}
// Work that has already been launched on its stream may still use the memory.
inline void deallocate(void* memory) {
  impl::check(impl::interface().deallocate(memory));
}
// The work given to `stream` so far uses the memory too: it is not reused before that work has run.
inline void record_stream(void* memory, Stream stream) {
  impl::check(impl::interface().record_stream(memory, impl::to_c(stream)));
}
// The device whose memory has this address, or -1.
inline int device_of(const void* address) {
  return impl::interface().device_of(address);
}
// In a debug build (without NDEBUG), throws unless the address is on the stream's device; otherwise does nothing.
inline void check_address([[maybe_unused]] const void* address, [[maybe_unused]] Stream stream) {
#ifndef NDEBUG
  const int found = device_of(address);
  if (found == stream.device) return;
  throw std::invalid_argument("openreg: expected an address of device " + std::to_string(stream.device) + ", but got " +
      (found < 0 ? std::string("a host address; pass memory from allocate() or a tensor on openreg")
                 : "one of device " + std::to_string(found) + "; copy it, or launch on a stream of that device"));
#endif
}

// Copies between host and device, or between devices, in the order of `stream`. Host memory must live until it has run.
inline void copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  impl::check(impl::interface().copy(to, from, bytes, impl::to_c(stream)));
}

// ---- events ----

// A point in a stream's order; with `timed`, also the time when the stream reached it.
class Event {
 public:
  explicit Event(int device, bool timed = false) {
    impl::check(impl::interface().create_event(device, timed, &event_));
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event() {
    if (event_) impl::interface().destroy_event(event_);
  }
  void record(Stream stream) { impl::check(impl::interface().record_event(event_, impl::to_c(stream))); }
  // Work launched on `stream` from now on waits for the event.
  void block(Stream stream) const { impl::check(impl::interface().wait_event(event_, impl::to_c(stream))); }
  bool query() const {
    std::int32_t reached;
    impl::check(impl::interface().query_event(event_, &reached));
    return reached;
  }
  void synchronize() const { impl::check(impl::interface().synchronize_event(event_)); }
  // Milliseconds from this event to `end`; waits for both.
  double elapsed_time(const Event& end) const {
    double out;
    impl::check(impl::interface().elapsed_time(event_, end.event_, &out));
    return out;
  }

 private:
  openreg_event* event_ = nullptr;
};

// ---- faults ----

// While it lives, a fault is armed: see arm_fault() in c_api.h.
class Fault {
 public:
  explicit Fault(const char* kind, int device = -1, std::uint64_t after = 0, std::uint64_t times = 1,
      std::int64_t nanoseconds = 0) {
    impl::check(impl::interface().arm_fault(kind, device, after, times, nanoseconds, &number_));
  }
  // How often it struck.
  std::uint64_t stop() { return impl::interface().disarm_fault(std::exchange(number_, 0)); }
  ~Fault() { stop(); }
  Fault(const Fault&) = delete;
  Fault& operator=(const Fault&) = delete;

 private:
  std::int32_t number_ = 0;
};

} // namespace v1
} // namespace openreg
