// torch.distributed on the device: the c10d backend "acmeccl", written on the runtime. Rung 11.
//
// Documents: none of the four describes torch.distributed. torch/csrc/distributed/c10d/Backend.hpp does.
//
// Each rank has a mailbox in device memory for each other rank, which that rank opens by its IPC handle. The handles
// travel through the group's store. Every call is one kernel: it sends to some ranks and receives from some, through
// these mailboxes, until all is done. A vendor with a library of collectives calls that one.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/chrono.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>

#include "common.h"

namespace acme {
namespace {

using Lists = std::vector<Tensors>;
using c10d::OpType;
using c10d::ReduceOp;
using Milliseconds = std::chrono::milliseconds;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// A ring of bytes in the receiver's memory, with one writer and one reader.
struct Mailbox {
  static constexpr uint64_t kBytes = (1 << 18) - 16;
  uint64_t written, read;
  char bytes[kBytes];
};

// Each message begins with one, so that ranks that make different calls get an error and not each other's data.
struct Header {
  uint64_t call, bytes; // call: a hash of the operation and its arguments
};

struct Transfer {
  bool send;
  Mailbox* box; // in device memory
  void* data;   // in device memory
  Header header;
  Header got{};
  uint64_t moved = 0; // bytes of the header and the data

  bool done() const { return moved == sizeof header + header.bytes; }
  // Moves as many bytes as possible now; returns true if it moved any.
  bool progress() {
    Mailbox* ring = local(box);
    const std::atomic_ref<uint64_t> written(ring->written), read(ring->read);
    const uint64_t before = moved;
    while (!done()) {
      const uint64_t available = send ? Mailbox::kBytes - (written - read) : written - read;
      const uint64_t at = (send ? written : read) % Mailbox::kBytes;
      char* memory = reinterpret_cast<char*>(send ? &header : &got) + moved;
      uint64_t left = sizeof header - moved;
      if (moved >= sizeof header) {
        memory = static_cast<char*>(local(data)) + (moved - sizeof header);
        left = header.bytes - (moved - sizeof header);
      }
      const uint64_t now = std::min({left, available, Mailbox::kBytes - at});
      if (!now) break;
      send ? std::memcpy(ring->bytes + at, memory, now) : std::memcpy(memory, ring->bytes + at, now);
      (send ? written : read) += now;
      moved += now;
      if (!send && moved == sizeof header)
        TORCH_CHECK(got.call == header.call && got.bytes == header.bytes,
            "another rank made a different call: it sends ", got.bytes, " bytes, but ", header.bytes,
            " were expected; compare operations, shapes, dtypes and tags");
    }
    return moved > before;
  }
};

void exchange(std::vector<Transfer>& transfers, Milliseconds timeout) {
  auto deadline = std::chrono::steady_clock::now() + timeout;
  for (bool all = false; !all;) {
    all = true;
    bool any = false;
    for (Transfer& transfer : transfers) {
      any |= transfer.progress();
      all &= transfer.done();
    }
    if (any) deadline = std::chrono::steady_clock::now() + timeout;
    else if (!all) sched_yield();
    TORCH_CHECK(any || all || std::chrono::steady_clock::now() < deadline, "no other rank answered for ",
        timeout.count(), " ms; look whether all ranks make this call, or raise the timeout of the process group");
  }
}

// Reduces the first dimension of `all`, in which element p is what rank p sent. All ranks get the same bits.
void reduce_ranks(const at::Tensor& all, const ReduceOp::RedOpType op, const at::Tensor& to) {
  if (op == ReduceOp::SUM) to.copy_(all.sum(0));
  else if (op == ReduceOp::AVG) to.copy_(all.sum(0) / all.size(0));
  else if (op == ReduceOp::PRODUCT) to.copy_(all.prod(0));
  else if (op == ReduceOp::MIN) to.copy_(all.amin(0));
  else if (op == ReduceOp::MAX) to.copy_(all.amax(0));
  else TORCH_CHECK(false, "this reduction is not supported; use SUM, AVG, PRODUCT, MIN or MAX");
}

// What a call returns. wait() makes the current stream wait, and not the host, as NCCL's does.
struct Work final : c10d::Work {
  Work(int rank, OpType type, Tensors results, c10::Stream stream)
      : c10d::Work(rank, type), type(type), results(std::move(results)), stream(stream), event(kDevice) {
    const c10::OptionalStreamGuard guard(stream); // on which the future records its events
    event.record(stream);
    future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    future->markCompleted(c10::IValue(this->results));
  }
  bool isCompleted() override { return event.query(); }
  bool isSuccess() const override { return event.query(); }
  void synchronize() override {
    const auto current = current_stream(stream.device_index());
    event.block(current);
    for (const at::Tensor& x : results) record_use(x, current);
    if (type == OpType::BARRIER) acme::synchronize(stream);
  }
  bool wait(Milliseconds) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  Tensors result() override { return results; }

  const OpType type;
  const Tensors results;
  const c10::Stream stream;
  c10::Event event;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

struct Backend final : c10d::Backend {
  Backend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout)
      : c10d::Backend(rank, size), store_(std::move(store)), timeout_(timeout) {}
  const std::string getBackendName() const override { return "acmeccl"; }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const bool root = rank_ == opts.rootRank;
    return call(OpType::BROADCAST, {opts.rootRank}, root ? to_all(tensors[0]) : Tensors(),
        root ? Tensors() : to_one(tensors[0], opts.rootRank), tensors);
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return reduced(OpType::ALLREDUCE, to_all(tensors[0]), tensors[0], opts.reduceOp);
  }
  WorkPointer allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return call(OpType::ALLGATHER, {}, to_all(inputs[0]), outputs[0], outputs[0]);
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return call(OpType::_ALLGATHER_BASE, {}, to_all(input), parts(output), {output});
  }
  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return reduced(OpType::_REDUCE_SCATTER_BASE, parts(input), output, opts.reduceOp);
  }
  WorkPointer send(Tensors& tensors, int peer, int tag) override {
    return call(OpType::SEND, {tag}, to_one(tensors[0], peer), {}, tensors, nullptr, kSend);
  }
  WorkPointer recv(Tensors& tensors, int peer, int tag) override {
    return call(OpType::SEND, {tag}, {}, to_one(tensors[0], peer), tensors, nullptr, kReceive);
  }
  WorkPointer barrier(const c10d::BarrierOptions&) override {
    const auto options = at::TensorOptions().device(device_at(current_device())).dtype(at::kByte);
    return call(OpType::BARRIER, {}, to_all(at::zeros({1}, options)), parts(at::zeros({size_}, options)), {});
  }

 private:
  // Each has a stream, so that a send does not keep a receive waiting. Collectives have mailboxes of their own.
  enum Lane { kCollective, kSend, kReceive };

  // Sends sends[p] to each rank p and receives receives[p] from it, where there is a tensor, and then runs `after`.
  WorkPointer call(OpType type, std::vector<int64_t> arguments, const Tensors& sends, const Tensors& receives,
      Tensors results, std::function<void()> after = nullptr, Lane lane = kCollective) {
    for (const Tensors* tensors : {&sends, &receives})
      for (const at::Tensor& x : *tensors)
        TORCH_CHECK(!x.defined() || (x.device().type() == kDevice && x.is_contiguous()),
            "acmeccl: expected contiguous tensors on acme, but got one on ", x.device(), "; call .contiguous()");
    connect(results);
    const c10::Stream stream = streams_[lane];
    wait_for(stream, current_stream(stream.device_index()));
    uint64_t hash = 0xCBF29CE484222325; // FNV
    arguments.push_back(static_cast<int64_t>(type));
    for (const int64_t argument : arguments) hash = (hash ^ static_cast<uint64_t>(argument)) * 0x100000001B3;
    std::vector<Transfer> transfers;
    for (const bool sending : {true, false})
      for (size_t peer = 0; peer < (sending ? sends : receives).size(); ++peer) {
        const at::Tensor& x = (sending ? sends : receives)[peer];
        if (!x.defined()) continue;
        record_use(x, stream);
        Mailbox* box = (sending ? outgoing_ : incoming_)[peer] + (lane == kCollective ? 0 : 1);
        if (peer == static_cast<size_t>(rank_)) continue;
        transfers.push_back({sending, box, View(x, !sending).data, {hash, x.nbytes()}});
      }
    const c10::OptionalStreamGuard guard(stream);
    const auto own = static_cast<size_t>(rank_);
    if (own < sends.size() && own < receives.size() && sends[own].defined() && receives[own].defined())
      at::Tensor(receives[own]).copy_(sends[own]);
    launch(native(stream), c10d::opTypeToString(type).c_str(),
        [transfers = std::move(transfers), timeout = timeout_, after]() mutable {
          exchange(transfers, timeout);
          if (after) after();
        });
    sequence_ += lane == kCollective;
    return c10::make_intrusive<Work>(rank_, type, std::move(results), stream);
  }

  // Sends inputs[p] to each rank p, and reduces what this rank gets into `output`.
  WorkPointer reduced(OpType type, const Tensors& inputs, const at::Tensor& output, const ReduceOp& op) {
    auto sizes = output.sizes().vec();
    sizes.insert(sizes.begin(), size_);
    const at::Tensor all = at::empty(sizes, output.options());
    return call(type, {static_cast<int64_t>(op.op_)}, inputs, all.unbind(0), {output},
        [from = View(all), to = View(output, true), op = op.op_] { reduce_ranks(from.tensor(), op, to.tensor()); });
  }

  Tensors to_all(const at::Tensor& x) { return Tensors(static_cast<size_t>(size_), x); }
  Tensors to_one(const at::Tensor& x, int64_t peer) {
    Tensors all(static_cast<size_t>(size_));
    all.at(static_cast<size_t>(peer)) = x;
    return all;
  }
  // The part of a tensor that belongs to each rank.
  Tensors parts(const at::Tensor& x) {
    TORCH_CHECK(x.dim() > 0 && x.size(0) % size_ == 0, "acmeccl: expected a first dimension that is a multiple of ",
        size_, ", the number of ranks, but got shape ", x.sizes());
    return x.chunk(size_);
  }

  // At the first call, gives each rank a mailbox and opens theirs.
  void connect(const Tensors& tensors) {
    if (!incoming_.empty()) return;
    const c10::Device device = tensors.empty() ? device_at(current_device()) : tensors[0].device();
    const auto bytes = static_cast<int64_t>(2 * sizeof(Mailbox));
    boxes_ = at::zeros({size_, bytes}, at::TensorOptions().device(device).dtype(at::kByte));
    acme::synchronize(current_stream(device.index()));
    acme_ipc_handle handle;
    check(acme_ipc_export(boxes_.const_data_ptr(), &handle), "acmeccl");
    const auto* first = reinterpret_cast<const uint8_t*>(&handle);
    store_->set("acmeccl/" + std::to_string(rank_), std::vector<uint8_t>(first, first + sizeof handle));
    auto* mine = static_cast<Mailbox*>(boxes_.mutable_data_ptr());
    for (int peer = 0; peer < size_; ++peer) {
      std::memcpy(&handle, store_->get("acmeccl/" + std::to_string(peer)).data(), sizeof handle);
      void* theirs = mine;
      if (peer != rank_) check(acme_ipc_open(&handle, &theirs), "acmeccl");
      outgoing_.push_back(static_cast<Mailbox*>(theirs) + 2 * rank_);
      incoming_.push_back(mine + 2 * peer);
    }
    for (int lane = 0; lane < 3; ++lane) streams_.push_back(c10::impl::VirtualGuardImpl(kDevice).getNewStream(device));
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  Milliseconds timeout_;
  uint64_t sequence_ = 0;
  at::Tensor boxes_;
  std::vector<Mailbox*> outgoing_, incoming_; // by rank; each is one for collectives, and one for sends
  std::vector<c10::Stream> streams_;          // by lane
};

} // namespace

void bind_distributed(py::module_& m) {
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(m, "DistributedBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, int, Milliseconds>());
}

} // namespace acme
