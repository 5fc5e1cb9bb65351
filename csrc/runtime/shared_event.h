// Events that several processes see, as CUDA's interprocess events.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "event.h"

namespace openreg {

// Note [Shared events]
// A shared event is a memory file that every process maps. Each record() takes the next generation, and the stream that
// reaches its point writes the generation to one of a few slots, on which the waiters of all processes sleep (a futex).
// A generation takes its slot when the one that had it before has been reached, so that a slot never goes back. The
// file has no name: another process opens it through /proc, of a process that has it, and nothing stays behind. A wait
// also ends, with an error, when the process that recorded the point has ended before it was reached.
class SharedEvent final : public Event {
 public:
  explicit SharedEvent(int device);
  // The event of the process that gave this handle. Throws std::invalid_argument for what is none, or is gone.
  SharedEvent(int device, const std::string& handle);

  // 64 bytes, as long as CUDA's. It is good while this process has the event.
  std::string handle() const;

  void record(Stream stream) override;
  void block(Stream stream) const override;
  bool query() const override;
  void synchronize() const override;
  Clock::time_point time() const override; // throws: it has none

 private:
  struct File;
  std::shared_ptr<File> file_; // which queued work holds too
};

} // namespace openreg
