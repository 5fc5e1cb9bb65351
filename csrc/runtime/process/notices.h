// A log of what the race detector (openreg_ops/openreg/races.py) needs and cannot see in operators: memory allocated
// and freed, events, collectives, and the host's waits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/stream/task.h"

namespace openreg {

// Each notice is named after the method of openreg_ops.openreg.races.Races that handles it.
struct Notice {
  const char* what;
  std::uintptr_t thread; // Python's threading.get_ident()
  const void* object; // the memory or the event
  Stream stream;
  std::size_t bytes; // of memory
};

namespace detail {
extern std::atomic<bool> observed;
void keep_notice(const char* what, const void* object, Stream stream, std::size_t bytes) noexcept;
} // namespace detail

// No launch calls this, and it costs one load while there is no observer.
inline void notice(const char* what, const void* object, Stream stream, std::size_t bytes = 0) noexcept {
  if (detail::observed.load(std::memory_order_relaxed)) [[unlikely]]
    detail::keep_notice(what, object, stream, bytes);
}

// Whether the program may learn that the work is done for which it asked: the work that an event recorded or, if
// `event` is null, all work of a stream. Only the observer refuses it: see Races.answers() in
// openreg_ops/openreg/races.py. If not refused, keeps the notice that the host comes after that work.
bool answers_query(const void* event, Stream stream);
using AnswersQuery = bool (*)(const void* event, Stream stream);
void set_answers_query(AnswersQuery answers) noexcept; // null: it refuses nothing

// Starts or ends the log, and clears it.
void observe(bool on);

// The notices since the last call, in order. They are polled, so that a thread that frees memory never waits for
// Python.
std::vector<Notice> take_notices();

} // namespace openreg
