// Streams, events and the one way to run work on a device: launch().
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

namespace openreg {

// Stream 0 of a device is its default stream; others come from new_stream().
struct Stream {
  int device;
  std::int64_t id;
};

// The calling thread's current stream on a device.
Stream current_stream(int device) noexcept;
// Makes `stream` current on its device for the calling thread and returns the previous one.
Stream exchange_stream(Stream stream) noexcept;
// A stream of the device's pool; a lower priority number is more urgent, as CUDA's.
Stream new_stream(int device, int priority) noexcept;
int stream_priority(Stream stream) noexcept;

// A point in a stream's order, with the time at which the stream reached it.
struct Event {
  int device;
  bool timed;
  std::chrono::steady_clock::time_point time{};
};

// Note [Launch mode]
// Work runs on the calling thread, at once, that is, inline on an idle
// stream. A stream therefore never has unfinished work, and everything that waits returns at once.
inline void synchronize_device(int) noexcept {}
inline void synchronize_stream(Stream) noexcept {}

// Kernels launched by the calling process so far.
std::uint64_t launch_count() noexcept;

namespace detail {
// One counter a thread, added up by launch_count(); a shared one would cost an atomic a launch.
struct LaunchCounter {
  LaunchCounter();
  ~LaunchCounter();
  std::uint64_t value = 0;
};
inline thread_local LaunchCounter launches;
} // namespace detail

// Runs `work` in the order of `stream`. Order, access to device memory and counting happen here
// and nowhere else; a kernel never does them itself.
template <class Work>
decltype(auto) launch(Stream, Work&& work) {
  ++detail::launches.value;
  return std::forward<Work>(work)();
}

} // namespace openreg
