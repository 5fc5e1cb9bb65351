// The log that a profiler reads: what ran on the devices and when, and what the host called meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/process/attention.h"
#include "runtime/stream/task.h"

namespace openreg {

// Note [Profile]
// While a profile is on, launch(), run() and enqueue() log what they run, each time twice: as the work on its stream,
// and as the host's call that launched it. The two share a number. Both record the operator and ranges that the
// launching thread was in, which it declares with push_operator() and push_range(). Work that other work launches on
// its own thread is part of the outer work. When off, profiling costs one bit of detail::attention.

// A span of the host's program that a profiler also shows on the device; either of the two is set.
struct Range {
  std::uint64_t id;                        // the profiler's number for it
  std::shared_ptr<const std::string> name;
};

// Times are nanoseconds since 1970, as in torch's profiler.
struct Activity {
  enum On { kStream, kHost, kRange }; // kRange: of all threads; see keep_range()
  On on;
  std::int32_t kind; // as in openreg_site
  std::string name;
  Stream stream;
  std::int64_t begin, end;
  std::uint32_t launch;      // shared by the work and the host's call; 0 if nothing was launched
  std::uint64_t operation;   // the operator that the host's thread was in, 0 for none
  std::vector<Range> ranges; // the ranges that it was in, the outermost first
  std::size_t bytes;         // of a copy
  int thread;                // the host thread's id from the operating system
};

// Starts a profile, or restarts it with an empty log.
void start_profile();
// Waits for queued work and ends the profile. Returns the records in the order in which they ended.
std::vector<Activity> stop_profile();

// The operator or range that the calling thread is in. Ignored while no profile is on, as is a pop without its push.
void push_operator(std::uint64_t id);
void pop_operator();
void push_range(Range range);
void pop_range();

// Logs a range that began at some time, of range_clock(), and ends now. Work that any thread launched meanwhile is in
// it.
std::int64_t range_clock() noexcept;
void keep_range(const std::string& name, std::int64_t begin, int thread);
int thread_number() noexcept;

namespace detail {
inline bool profiling() noexcept {
  return attention.load(std::memory_order_relaxed) & kProfileBit;
}
// `task`, which logs itself if a profile is on.
Task profiled(Stream stream, const openreg_site& site, Task task);
std::int64_t begin_call() noexcept;
void end_call(const char* name, std::int64_t begin) noexcept;

// While it lives, the profile counts the time as work on the stream.
struct Running;
Running* begin_work(Stream stream, const openreg_site& site) noexcept;
void end_work(Running* work) noexcept;
class Profiled {
 public:
  Profiled(bool on, Stream stream, const openreg_site& site) noexcept
      : work_(on ? begin_work(stream, site) : nullptr) {}
  ~Profiled() {
    if (work_) [[unlikely]]
      end_work(work_);
  }
  Profiled(const Profiled&) = delete;
  Profiled& operator=(const Profiled&) = delete;

 private:
  Running* const work_;
};
} // namespace detail

// Logs a host call that launches no work.
class HostCall {
 public:
  explicit HostCall(const char* name) noexcept : name_(name), begin_(detail::profiling() ? detail::begin_call() : 0) {}
  ~HostCall() {
    if (begin_) [[unlikely]]
      detail::end_call(name_, begin_);
  }
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

 private:
  const char* name_;
  std::int64_t begin_;
};

} // namespace openreg
