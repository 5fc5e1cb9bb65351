// A log of what the race detector (openreg_ops/sanitizer/history.py) needs and cannot see in operators: memory
// allocated and freed, events, collectives, and the host's waits.
#pragma once

#include <openreg/launch.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace openreg {

// What a notice reports of its object and its stream. history.py has a method for each, such as event_recorded().
enum class NoticeKind : std::uint8_t {
  kAllocated, // memory was allocated on the stream
  kFreed, // memory was freed
  kResized, // a storage got other memory, in which the stream copied what fits
  kStreamRecorded, // the stream uses memory until it is freed
  kHostFreed, // pinned memory of the host was freed
  kEventRecorded, // the stream records the event
  kEventWaitedFor, // the stream waits for the event
  kRecordCaptured, // a graph got a node that records the event
  kWaitCaptured, // a graph got a node that waits for the event
  kEventSynchronized, // the host comes after the event
  kEventDestroyed, // the event is gone, and its address may be another one's
  kStreamSynchronized, // the host comes after all work of the stream
  kDeviceSynchronized, // the host comes after all work of the device
  kCollectiveStarted, // a collective comes after the work of the stream
  kCollectiveWaitedFor, // the stream waits for the collective
  kCollectiveDestroyed, // the collective is gone
};

struct Notice {
  NoticeKind kind;
  std::uintptr_t thread; // Python's threading.get_ident()
  const void* object; // the memory, the event or the collective; null if there is none
  Stream stream;
  std::size_t bytes; // of memory
};

namespace detail {
extern std::atomic<bool> observed;
void keep_notice(NoticeKind kind, const void* object, Stream stream, std::size_t bytes) noexcept;
} // namespace detail

// Logs a notice. No launch calls this, and it costs one load while there is no observer.
inline void notice(NoticeKind kind, const void* object, Stream stream, std::size_t bytes = 0) noexcept {
  if (detail::observed.load(std::memory_order_relaxed)) [[unlikely]]
    detail::keep_notice(kind, object, stream, bytes);
}

// Returns true if the program may learn that the work for which it asked is done: the work that an event recorded or,
// if `event` is null, all work of a stream. Only the observer refuses it: see Races.answers() in
// openreg_ops/sanitizer/history.py. If not refused, keeps the notice that the host comes after that work.
bool answers_query(const void* event, Stream stream);
using AnswersQuery = bool (*)(const void* event, Stream stream);
void set_answers_query(AnswersQuery answers) noexcept; // null: it refuses nothing

// Starts or ends the log, and clears it.
void observe(bool on);

// The notices since the last call, in order. They are polled, so that a thread that frees memory never waits for
// Python.
std::vector<Notice> take_notices();

} // namespace openreg
