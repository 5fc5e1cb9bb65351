// Events shared by several processes, like CUDA's interprocess events.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/stream/event.h"

namespace openreg {

// Note [Shared events]
// A shared event is a memory file that every process maps. Each record() takes the next generation. When the stream
// reaches the point, it writes the generation to one of a few slots, on which the waiters of all processes sleep (a
// futex). A generation takes its slot once the slot's previous generation has been reached, so a slot never goes
// backward. The file has no name: another process opens it through the /proc entry of a process that has it, and no
// file is left behind. A wait also ends, with an error, if the process that recorded the point ends before the point is
// reached.
class SharedEvent final : public Event {
 public:
  explicit SharedEvent(int device);
  // The event behind a handle from its process. Throws std::invalid_argument if it is not a handle or the event is
  // gone.
  SharedEvent(int device, const std::string& handle);

  // 64 bytes, the size of CUDA's handle. It is valid as long as this process has the event.
  std::string handle() const;

  void record(Stream stream) override;
  void block(Stream stream) const override;
  bool query() const override;
  void synchronize() const override;
  Clock::time_point time() const override; // always throws: it has no timing

 private:
  struct File;
  std::shared_ptr<File> file_; // queued work holds it too
};

} // namespace openreg
