// The c10d backend "occl": collectives on device tensors, done on the host by another backend (Gloo).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/distributed/call_queue.h"

namespace openreg {

class CollectiveCall;
class CollectiveWork;
struct CapturedCall;

// Note [Distributed]
// Device memory is host memory, so an engine for CPU tensors can work in it: it gets CPU tensors over the same memory.
// A call first waits for the current stream's work, like run(). Once all processes have made the same call (see Note
// [Matching calls]), the engine works on its own threads, so other work may continue. Work::wait() returns when the
// engine has finished, so all work launched from then on comes after it. Until then, the CPU tensors keep the device
// memory in use, even if the program resizes its storage. For futures see Note [Futures of collectives].
// A captured call is a node of a graph: each replay makes the call and keeps its stream, or in inline mode the host,
// until the engine has finished. Every process must replay it.
// The engine gets copies if it must not or cannot read device memory: under isolation, and for sparse tensors and lazy
// conjugates and negations. Its results are copied back before completion is reported.
class DistributedBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Engine = c10::intrusive_ptr<c10d::Backend>;

  explicit DistributedBackend(Engine engine);
  ~DistributedBackend() override;

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Work allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  Work allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  Work allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  Work gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  Work scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override;
  Work reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  Work reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  Work send(Tensors& tensors, int to, int tag) override;
  Work recv(Tensors& tensors, int from, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;
  Work barrier(const c10d::BarrierOptions& opts) override;

  Engine split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& opts) override;
  Engine merge(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& opts, const int& rank,
      const int& size) override;

  const std::string getBackendName() const override { return "occl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  Work endCoalescing() override;
  bool supportsSplitting() const override { return engine_->supportsSplitting(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return engine_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { engine_->setTimeout(timeout); }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool all) override;
  // The engine counts the comparisons, too.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_number_; }
  void enableCollectivesTiming() override { engine_->enableCollectivesTiming(); }
  void abort() override { engine_->abort(); }
  void shutdown() override { engine_->shutdown(); }

 private:
  using Start = std::function<Work()>; // passes a call to the engine

  template <class Function, class... Arguments>
  Start engine_call(Function function, Arguments... arguments);
  template <class CallOptions, class Function, class... Hosts>
  Work collective(CollectiveCall&& call, c10d::OpType type, CallDescription description, const CallOptions& opts,
      Function function, Hosts... hosts);
  Work collective(
      CollectiveCall&& call, c10d::OpType type, CallDescription description, bool async, const Start& start);
  void enqueue(const c10::intrusive_ptr<CollectiveWork>& work, CallDescription description, const Start& start);
  Work capture(std::vector<CapturedCall> calls);
  Work point_to_point(CollectiveCall&& call, c10d::OpType type, const Start& start);
  Work coalesce(const Work& work, bool async);

  Engine engine_;
  std::optional<CallQueue> queue_;
  std::atomic<uint64_t> sequence_number_{0}; // collectives so far
  std::mutex coalescing_;
  struct Coalesced;
  std::shared_ptr<Coalesced> coalesced_; // while calls are coalesced
};

} // namespace openreg
