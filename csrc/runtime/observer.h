// A log of what the race detector (openreg_ops/openreg/races.py) must know and no operator shows: memory handed out and
// freed, events, collectives, and what the host waited for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "work.h"

namespace openreg {

// What happened is named as the method of openreg_ops.openreg.races.Races that takes it.
struct Notice {
  const char* what;
  std::uintptr_t thread; // Python's threading.get_ident()
  const void* object; // the memory or the event
  Stream stream;
  std::size_t bytes; // of an event, the collective that recorded it, or 0
};

namespace detail {
extern std::atomic<bool> observed;
void keep_notice(const char* what, const void* object, Stream stream, std::size_t bytes) noexcept;
} // namespace detail

// Nothing on the path of a launch calls this, and it costs one load while nobody observes.
inline void notice(const char* what, const void* object, Stream stream, std::size_t bytes = 0) noexcept {
  if (detail::observed.load(std::memory_order_relaxed)) [[unlikely]]
    detail::keep_notice(what, object, stream, bytes);
}

// The collective, if it is one and not the current stream, that the next event on this thread is recorded for.
inline thread_local const void* recorded_for = nullptr;

// Starts or ends the log; it is empty then.
void observe(bool on);

// The notices since the last time, in order. They are fetched, not delivered, so that a thread that
// frees memory never waits for Python.
std::vector<Notice> take_notices();

} // namespace openreg
