// Events: points in a stream's order.
#pragma once

#include <openreg/launch.h>

#include <chrono>
#include <memory>

namespace openreg {

// A point in a stream's order, with the time at which the stream reached it. Copies share the point.
class Event {
 public:
  using Clock = std::chrono::steady_clock;
  Event(int device, bool timed);
  virtual ~Event() = default;
  int device() const noexcept { return device_; }
  bool timed() const noexcept { return timed_; }
  virtual void record(Stream stream);
  virtual void block(Stream stream) const; // work launched on `stream` from now on runs after the point
  bool recorded() const noexcept; // in this process
  virtual bool query() const;
  virtual void synchronize() const; // throws as synchronize_stream()
  virtual Clock::time_point time() const;
  virtual bool external() const noexcept { return false; }
  // As long as an event or a graph uses it; null if the race detector knows it by something else.
  virtual const void* identity() const noexcept { return this; }

 private:
  struct Point;
  void check_host(const char* what) const; // throws where Note [Capture] forbids queries from the host
  int device_;
  bool timed_;
  std::shared_ptr<Point> point_; // of the latest record()
};

} // namespace openreg
