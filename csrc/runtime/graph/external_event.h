// Events that graphs record and wait for, like CUDA's external events.
#pragma once

#include <memory>

#include "runtime/stream/event.h"

namespace openreg {

// Note [External events]
// On a capturing stream, record() and block() of an external event become nodes of the graph and do not order the
// capture. When a replay is launched, its recording nodes get new points, which are the event's latest from then on,
// and its waiting nodes take the point that is the latest at that moment. So do the nodes of a graph that is a node of
// this one. A replay that fails or is dropped reaches its points too, so no thread waits forever. On a stream that is
// not capturing, the event is an ordinary one.
class ExternalEvent final : public Event {
 public:
  ExternalEvent(int device, bool timed);

  void record(Stream stream) override;
  void block(Stream stream) const override;
  bool query() const override;
  void synchronize() const override;
  Clock::time_point time() const override;
  bool external() const noexcept override { return true; }
  const void* identity() const noexcept override;

 private:
  struct Point;
  struct Latest;
  std::shared_ptr<Point> latest() const;
  void capture(Stream stream, bool records) const;
  std::shared_ptr<Latest> latest_; // nodes hold it too
};

} // namespace openreg
