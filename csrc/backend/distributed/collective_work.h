// The Work that a collective returns.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <vector>

#include "backend/distributed/collective_call.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/task.h"

namespace openreg {

// Note [Futures of collectives]
// As with NCCL, the future of a collective is complete from the beginning, and its event stands for the collective: so
// a callback runs where then() is called, and every process makes the calls of its callbacks in the same order. The
// callback's stream waits for the collective on its worker, which runs nothing else until then. wait() on a future is
// Work::wait(), on the host, and throws what that throws. If the collective fails after its callback has run, the
// callback's stream keeps the error, as for a kernel.
class StreamWork : public c10d::Work {
 public:
  using Work::Work;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  // Makes `stream`, which is current, wait. A callback's stream waits without the host.
  virtual void block(Stream stream, bool in_callback) = 0;
  virtual c10::DeviceIndex device() const = 0;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
};

// The Work of one call on device tensors.
class CollectiveWork : public StreamWork {
 public:
  using StreamWork::StreamWork;
  // Follows the engine's work, which has begun.
  virtual void begin(c10::intrusive_ptr<c10d::Work> engine) = 0;
  // Completes a call that no engine follows: with its error, or null if it is done.
  virtual void end(const std::exception_ptr& error) = 0;
  // Waits in a node of a graph, which keeps its stream's turn, so that no other work comes between it and the next
  // node.
  virtual void wait_in_replay() = 0;
  // Names the ticket whose item is this collective, for Note [Schedules]. The item ends when finish_scheduled()
  // returns.
  virtual void set_scheduled(const Ticket& ticket) = 0;
  virtual void finish_scheduled() = 0;
};

// Makes the Work of a call. A node of a graph is not `noticed`: the race detector knows what it uses.
c10::intrusive_ptr<CollectiveWork> collective_work(
    CollectiveCall call, c10d::OpType type, uint64_t number, bool noticed = true);

// Makes the Work of calls that `stream` has just captured as a node of a graph.
c10::intrusive_ptr<c10d::Work> captured_work(
    const CollectiveName& name, c10d::OpType type, Stream stream, Tensors outputs);

// Makes one Work of the calls between startCoalescing() and endCoalescing().
c10::intrusive_ptr<c10d::Work> coalesced_work(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

} // namespace openreg
