// The Work that a collective returns.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/distributed/collective_call.h"
#include "runtime/graph/graph.h"
#include "runtime/stream/stream.h"

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
class DeviceWork final : public StreamWork {
 public:
  using Engine = c10::intrusive_ptr<c10d::Work>;

  // A node of a graph is not `noticed`: the race detector knows what it uses.
  DeviceWork(CollectiveCall call, c10d::OpType type, uint64_t number, bool noticed = true);
  ~DeviceWork() override;

  // Follows the engine's work, which has begun.
  void begin(Engine engine);
  // Completes a call that no engine follows: with its error, or null if it is done.
  void end(const std::exception_ptr& error);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override { return failure(); }
  int sourceRank() const override { return begun() ? engine_->sourceRank() : -1; }
  Tensors result() override { return call_.outputs; }
  bool wait(std::chrono::milliseconds timeout) override;
  void block(Stream stream, bool in_callback) override;
  c10::DeviceIndex device() const override { return call_.device; }
  void abort() override;
  float getDuration() const override { return begun() ? engine_->getDuration() : Work::getDuration(); }
  uint64_t getSequencenumber() const override { return number_; }

  // Waits in a node of a graph, which keeps its stream's turn, so that no other work comes between it and the next
  // node.
  void wait_in_replay();

  // Names the ticket whose item is this collective, for Note [Schedules]. The item ends when finish_scheduled()
  // returns.
  void set_scheduled(const Ticket& ticket) { scheduled_ = ticket; }
  void finish_scheduled();

 private:
  bool scheduled() const;
  void land();
  c10::intrusive_ptr<DeviceWork> self() { return c10::intrusive_ptr<DeviceWork>::reclaim_copy(this); }
  bool begun() const;
  bool ended() const;
  std::exception_ptr failure() const;
  void await_engine();
  void wait_for_end(std::chrono::milliseconds timeout);
  bool wait_a_while();
  void wait_on_worker();
  void arrive(Stream stream);
  std::exception_ptr explained(const std::exception_ptr& error) const;

  const CollectiveCall call_;
  const uint64_t number_;
  std::optional<Ticket> scheduled_;
  mutable std::mutex ending_; // guards the next six
  std::condition_variable end_;
  Engine engine_;           // null until it has begun
  bool has_future_ = false; // the engine tells when it ends
  bool awaited_ = false;    // somebody waits for the engine
  bool followed_ = false;   // a thread of await_engine() waits for the engine
  bool ended_ = false;
  std::exception_ptr error_; // why it did not begin, or failed
  std::once_flag copied_;
};

// Makes the Work of calls that `stream` has just captured as a node of a graph.
c10::intrusive_ptr<c10d::Work> captured_work(
    const CollectiveName& name, c10d::OpType type, Stream stream, Tensors outputs);

// Makes one Work of the calls between startCoalescing() and endCoalescing().
c10::intrusive_ptr<c10d::Work> coalesced_work(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

} // namespace openreg
