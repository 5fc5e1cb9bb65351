// Streams: which is current, where their work runs, and how the host waits for it.
#pragma once

#include <openreg/launch.h>

#include <cstdint>
#include <vector>

namespace openreg {

// Makes `stream` current on its device for the calling thread and returns the previous one.
Stream exchange_stream(Stream stream) noexcept;
// Returns a stream of the device's pool. As in CUDA, a lower priority number is more urgent.
Stream new_stream(int device, int priority) noexcept;
// Returns the priority number of a stream: 0 or, for an urgent one, -1.
int stream_priority(Stream stream) noexcept;
// Returns true if this is a default stream or may come from new_stream().
bool is_stream(Stream stream) noexcept;
// Throws std::invalid_argument unless is_stream().
void check_stream(Stream stream);

// Note [Launch mode]
// Work on a stream runs in submission order; the mode says where.
// inline: on the calling thread, immediately, while the stream is idle. If it has queued work (a
//   sleep, a large non_blocking copy, a wait for an event), launch() queues behind it, and run(),
//   whose work uses the caller's stack, first waits for it.
// async: launch() always queues the work for the stream's worker thread, and the host runs ahead. An exception from the
// work is kept, and the next call that waits for the device throws it.
// sync: inline, and nothing is ever left queued: an error appears at its line.
enum class LaunchMode { kInline, kAsync, kSync };
LaunchMode launch_mode() noexcept;
void set_launch_mode(LaunchMode mode) noexcept;

// Waits for the stream's work, and throws the device's first AsyncError since the last wait.
void synchronize_stream(Stream stream);
// Waits for the work of all streams of the device, and throws its first AsyncError since the last wait.
void synchronize_device(int device);
// Returns true if the stream has no queued work. Never waits.
bool stream_idle(Stream stream) noexcept;
// Answers a program's query of stream_idle(). A capture refuses it, and a schedule counts it as a step.
bool query_stream(Stream stream);

// Returns the position at which the pools hand out streams again, so that a program can get the same streams in each
// order of a schedule.
std::vector<std::uint32_t> next_streams();
void set_next_streams(const std::vector<std::uint32_t>& next);

namespace detail {

// Returns the calling thread's current stream on a device.
Stream thread_stream(int device) noexcept;
// Does what synchronize_stream() does, for the runtime itself: Note [Capture] does not apply to it.
void finish_stream(Stream stream, const char* name = "wait");

} // namespace detail
} // namespace openreg
