// torch.distributed on the device: the c10d backend "acmeccl", written on the runtime. Rung 11.
//
// Documents: none of the four describes torch.distributed. torch/csrc/distributed/c10d/Backend.hpp does.
//
// Each rank has a mailbox in device memory for each other rank, which that rank opens by its IPC handle. The handles
// travel through the group's store. Everything is one operation, exchange(): a kernel that sends to some ranks and
// receives from some, through these mailboxes, until all is done. A vendor with a library of collectives calls that one.
#include "distributed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstring>

#include "common.h"

namespace acme {
namespace {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using c10d::OpType;
using c10d::ReduceOp;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// A ring of bytes in the receiver's memory, with one writer and one reader.
struct Mailbox {
  static constexpr uint64_t kBytes = (1 << 18) - 16;
  uint64_t written, read;
  char bytes[kBytes];
};

// One message of an exchange, to or from `peer`. The receiver checks the header, so that ranks that make different
// calls get an error and not each other's data.
struct Header {
  uint64_t call, bytes; // call: a hash of the operation and its arguments
};
struct Transfer {
  bool send;
  Mailbox* box; // in device memory
  void* data;   // in device memory
  Header header;
  uint64_t moved = 0; // bytes of the header and the data

  bool done() const { return moved == sizeof header + header.bytes; }
  // Moves as many bytes as possible now; returns true if it moved any.
  bool progress(Header& got) {
    Mailbox* ring = local(box);
    std::atomic_ref<uint64_t> written(ring->written), read(ring->read);
    bool any = false;
    while (!done()) {
      const uint64_t available = send ? Mailbox::kBytes - (written - read.load()) : written.load() - read;
      const uint64_t at = (send ? written : read) % Mailbox::kBytes;
      const bool in_header = moved < sizeof header;
      char* memory = in_header ? reinterpret_cast<char*>(send ? &header : &got) + moved
                               : static_cast<char*>(local(data)) + (moved - sizeof header);
      const uint64_t left = in_header ? sizeof header - moved : header.bytes - (moved - sizeof header);
      const uint64_t now = std::min({left, available, Mailbox::kBytes - at});
      if (!now) break;
      send ? std::memcpy(ring->bytes + at, memory, now) : std::memcpy(memory, ring->bytes + at, now);
      (send ? written : read) += now;
      moved += now;
      any = true;
      if (!send && moved == sizeof header)
        TORCH_CHECK(got.call == header.call && got.bytes == header.bytes, "another rank made a different call: it sends ",
            got.bytes, " bytes, but ", header.bytes, " were expected; compare operations, shapes, dtypes and tags");
    }
    return any;
  }
};

void exchange(std::vector<Transfer>& transfers, std::chrono::milliseconds timeout) {
  std::vector<Header> got(transfers.size());
  auto deadline = std::chrono::steady_clock::now() + timeout;
  for (bool all = false; !all;) {
    all = true;
    bool any = false;
    for (size_t i = 0; i < transfers.size(); ++i) {
      any |= transfers[i].progress(got[i]);
      all &= transfers[i].done();
    }
    if (any) deadline = std::chrono::steady_clock::now() + timeout;
    else if (!all) sched_yield();
    TORCH_CHECK(any || all || std::chrono::steady_clock::now() < deadline, "no other rank answered for ",
        timeout.count(), " ms; look whether all ranks make this call, or raise the timeout of the process group");
  }
}

// What a call returns. wait() makes the current stream wait, and not the host, as NCCL's does.
struct Done final : c10d::Work {
  Done(int rank, OpType type, Tensors results, c10::Stream stream, bool host)
      : Work(rank, type), results(std::move(results)), stream(stream), event(kDevice), host(host) {
    const c10::OptionalStreamGuard guard(stream); // the future records its events there
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
    for (const at::Tensor& x : results) c10::getDeviceAllocator(kDevice)->recordStream(x.storage().data_ptr(), current);
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (host) acme::synchronize(stream); // for barrier(), and to raise an error
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  Tensors result() override { return results; }

  Tensors results;
  const c10::Stream stream;
  c10::Event event;
  const bool host;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

void reduce_into(at::Tensor to, const at::Tensor& from, ReduceOp::RedOpType op) {
  if (op == ReduceOp::SUM || op == ReduceOp::AVG) to.add_(from);
  else if (op == ReduceOp::PRODUCT) to.mul_(from);
  else if (op == ReduceOp::MIN) to.copy_(at::minimum(to, from));
  else if (op == ReduceOp::MAX) to.copy_(at::maximum(to, from));
  else if (op == ReduceOp::BAND) to.bitwise_and_(from);
  else if (op == ReduceOp::BOR) to.bitwise_or_(from);
  else if (op == ReduceOp::BXOR) to.bitwise_xor_(from);
  else TORCH_CHECK(false, "this reduction is not supported; use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR");
}

struct Backend final : c10d::Backend {
  Backend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)
      : c10d::Backend(rank, size), store_(std::move(store)), timeout_(timeout) {}
  const std::string getBackendName() const override { return "acmeccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    Call call(*this, OpType::BROADCAST, tensors, {opts.rootRank, opts.rootTensor});
    at::Tensor data = call.dense(tensors.at(0));
    if (rank_ == opts.rootRank) call.send_all(data);
    else call.receive(opts.rootRank, data);
    return call.run({{data, tensors[0]}});
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return reduce_all(OpType::ALLREDUCE, tensors, opts.reduceOp);
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return reduce_all(OpType::ALLREDUCE_COALESCED, tensors, opts.reduceOp);
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return reduce_all(OpType::REDUCE, tensors, opts.reduceOp, opts.rootRank);
  }

  WorkPointer allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return move(OpType::ALLGATHER, outputs.at(0), Tensors(static_cast<size_t>(size_), inputs.at(0)));
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return move(OpType::_ALLGATHER_BASE, parts(output), Tensors(static_cast<size_t>(size_), input));
  }
  WorkPointer gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return move(OpType::GATHER, outputs.empty() ? Tensors() : outputs[0], to_one(inputs.at(0), opts.rootRank));
  }
  WorkPointer scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override {
    return move(OpType::SCATTER, to_one(outputs.at(0), opts.rootRank), inputs.empty() ? Tensors() : inputs[0]);
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return move(OpType::ALLTOALL, outputs, inputs);
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) override {
    const auto split = [&](const at::Tensor& x, std::vector<int64_t>& sizes) {
      return sizes.empty() ? parts(x) : x.split_with_sizes(sizes);
    };
    return move(OpType::ALLTOALL_BASE, split(output, output_sizes), split(input, input_sizes));
  }
  WorkPointer reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) override {
    return scatter_reduced(OpType::REDUCE_SCATTER, outputs.at(0), inputs.at(0), opts.reduceOp);
  }
  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return scatter_reduced(OpType::_REDUCE_SCATTER_BASE, output, parts(input), opts.reduceOp);
  }

  WorkPointer send(Tensors& tensors, int peer, int tag) override {
    Call call(*this, OpType::SEND, tensors, {tag}, Lane::kSend);
    call.send(peer, call.dense(tensors.at(0)));
    return call.run({});
  }
  WorkPointer recv(Tensors& tensors, int peer, int tag) override {
    Call call(*this, OpType::SEND, tensors, {tag}, Lane::kReceive);
    at::Tensor data = call.dense(tensors.at(0));
    call.receive(peer, data);
    return call.run({{data, tensors[0]}});
  }
  WorkPointer barrier(const c10d::BarrierOptions&) override {
    Tensors token{at::empty({1}, at::TensorOptions().device(device_at(current_device())).dtype(at::kByte))};
    Call call(*this, OpType::BARRIER, token, {});
    call.host = true;
    call.send_all(token[0]);
    for (int peer = 0; peer < size_; ++peer) call.receive(peer, at::empty_like(token[0]));
    return call.run({});
  }

 private:
  // Collectives, sends and receives each have a stream, so that a send does not keep a receive waiting; and collectives
  // have mailboxes of their own.
  enum class Lane { kCollective, kSend, kReceive };

  // One call: collects its transfers, and runs them as one kernel on the lane's stream.
  struct Call {
    Call(Backend& group, OpType type, const Tensors& tensors, std::vector<int64_t> arguments, Lane lane = Lane::kCollective)
        : group(group), type(type), lane(lane), device(group.connect(tensors)), stream(group.streams_[static_cast<int>(lane)]) {
      for (const at::Tensor& x : tensors) {
        TORCH_CHECK(x.device() == device, "acmeccl: expected tensors on ", device, ", but got one on ", x.device());
        inputs.push_back(x);
      }
      arguments.push_back(static_cast<int64_t>(type));
      for (const int64_t argument : arguments) hash = (hash ^ static_cast<uint64_t>(argument)) * 0x100000001B3;
    }
    // A tensor whose bytes are its elements in order: `x`, or a copy.
    at::Tensor dense(const at::Tensor& x) {
      kept.push_back(x.contiguous());
      return kept.back();
    }
    void add(bool send, int peer, const at::Tensor& x) {
      if (peer == group.rank_) return;
      Mailbox* box = send ? group.outgoing_[static_cast<size_t>(peer)] : group.incoming_[static_cast<size_t>(peer)];
      transfers.push_back({send, box + (lane == Lane::kCollective ? 0 : 1), const_cast<void*>(x.const_data_ptr()),
          {hash, static_cast<uint64_t>(x.nbytes())}});
      kept.push_back(x);
    }
    void send(int peer, const at::Tensor& x) { add(true, peer, x); }
    void receive(int peer, const at::Tensor& x) { add(false, peer, x); }
    void send_all(const at::Tensor& x) {
      for (int peer = 0; peer < group.size_; ++peer) send(peer, x);
    }

    // Runs the transfers and then `after`, a kernel; then copies results that were received elsewhere to their place.
    WorkPointer run(const std::vector<std::pair<at::Tensor, at::Tensor>>& results, std::function<void()> after = nullptr) {
      c10::Event ready(kDevice);
      ready.record(current_stream(device.index()));
      ready.block(stream);
      launch(native(stream), c10d::opTypeToString(type).c_str(),
          [transfers = std::move(transfers), timeout = group.timeout_, after]() mutable {
            exchange(transfers, timeout);
            if (after) after();
          });
      const c10::OptionalStreamGuard guard(stream);
      for (const auto& [from, to] : results)
        if (!from.is_same(to)) at::Tensor(to).copy_(from, true);
      for (const Tensors* tensors : {&kept, &inputs})
        for (const at::Tensor& x : *tensors) c10::getDeviceAllocator(kDevice)->recordStream(x.storage().data_ptr(), stream);
      if (lane == Lane::kCollective) ++group.sequence_;
      return c10::make_intrusive<Done>(group.rank_, type, inputs, stream, host);
    }

    Backend& group;
    const OpType type;
    const Lane lane;
    const c10::Device device;
    const c10::Stream stream;
    bool host = false;
    uint64_t hash = 0xCBF29CE484222325;
    Tensors inputs, kept;
    std::vector<Transfer> transfers;
  };

  // Every rank sends its tensors to the others, and reduces in the order of the ranks: all get the same bits.
  WorkPointer reduce_all(OpType type, Tensors& tensors, const ReduceOp& op, int64_t root = -1) {
    Call call(*this, type, tensors, {static_cast<int64_t>(op.op_), root});
    const bool receives = root < 0 || root == rank_;
    std::vector<std::pair<at::Tensor, at::Tensor>> results;
    std::vector<std::vector<View>> all; // for each tensor, by rank
    for (const at::Tensor& x : tensors) {
      const at::Tensor data = call.dense(x);
      for (int peer = 0; peer < size_; ++peer)
        if (root < 0 || root == peer) call.send(peer, data);
      if (!receives) continue;
      results.emplace_back(data, x);
      all.emplace_back();
      for (int peer = 0; peer < size_; ++peer) {
        const at::Tensor from = peer == rank_ ? data : at::empty_like(data);
        call.receive(peer, from);
        all.back().emplace_back(from);
      }
    }
    return call.run(results, [all, op = op.op_, rank = static_cast<size_t>(rank_)] {
      for (const auto& views : all) reduce_views(views, op, views[rank]);
    });
  }

  static void reduce_views(const std::vector<View>& views, ReduceOp::RedOpType op, const View& result) {
    at::Tensor sum = views[0].tensor().clone();
    for (size_t i = 1; i < views.size(); ++i) reduce_into(sum, views[i].tensor(), op);
    if (op == ReduceOp::AVG) sum.div_(static_cast<int64_t>(views.size()));
    result.tensor().copy_(sum);
  }

  // Sends inputs[p] to each rank p, and receives outputs[p] from it; an undefined tensor stands for nothing.
  WorkPointer move(OpType type, Tensors outputs, const Tensors& inputs) {
    Tensors involved;
    for (const Tensors* tensors : std::initializer_list<const Tensors*>{&outputs, &inputs})
      for (const at::Tensor& x : *tensors)
        if (x.defined()) involved.push_back(x);
    Call call(*this, type, involved, {});
    std::vector<std::pair<at::Tensor, at::Tensor>> results;
    for (int peer = 0; peer < size_; ++peer) {
      const auto i = static_cast<size_t>(peer);
      const bool sends = i < inputs.size() && inputs[i].defined(), receives = i < outputs.size() && outputs[i].defined();
      const at::Tensor from = sends ? call.dense(inputs[i]) : at::Tensor();
      const at::Tensor to = receives ? call.dense(outputs[i]) : at::Tensor();
      if (sends) call.send(peer, from);
      if (receives) call.receive(peer, to);
      if (receives) results.emplace_back(peer == rank_ && sends ? from : to, outputs[i]);
    }
    return call.run(results);
  }

  WorkPointer scatter_reduced(OpType type, at::Tensor& output, const Tensors& inputs, const ReduceOp& op) {
    Tensors involved = inputs;
    involved.push_back(output);
    Call call(*this, type, involved, {static_cast<int64_t>(op.op_)});
    const at::Tensor result = call.dense(output);
    std::vector<View> views;
    for (int peer = 0; peer < size_; ++peer) {
      const at::Tensor mine = call.dense(inputs.at(static_cast<size_t>(peer)));
      const at::Tensor from = peer == rank_ ? mine : at::empty_like(result);
      call.send(peer, mine);
      call.receive(peer, from);
      views.emplace_back(from);
    }
    return call.run({{result, output}}, [views, op = op.op_, to = View(result)] { reduce_views(views, op, to); });
  }

  // The parts of a tensor that belong to each rank.
  Tensors parts(const at::Tensor& x) {
    TORCH_CHECK(x.dim() > 0 && x.size(0) % size_ == 0, "acmeccl: expected a first dimension that is a multiple of ", size_,
        ", the number of ranks, but got shape ", x.sizes());
    return x.chunk(size_);
  }
  Tensors to_one(const at::Tensor& x, int64_t root) {
    Tensors all(static_cast<size_t>(size_));
    all.at(static_cast<size_t>(root)) = x;
    return all;
  }

  // At the first call, gives each rank a mailbox and opens theirs. Returns the device of the group.
  c10::Device connect(const Tensors& tensors) {
    if (!incoming_.empty()) return streams_[0].device();
    const c10::Device device = tensors.empty() ? device_at(current_device()) : tensors[0].device();
    TORCH_CHECK(device.type() == kDevice, "acmeccl: expected tensors on acme, but got one on ", device);
    const c10::DeviceGuard guard(device);
    const auto bytes = static_cast<int64_t>(2 * sizeof(Mailbox));
    boxes_ = at::empty({size_, bytes}, at::TensorOptions().device(device).dtype(at::kByte)).zero_();
    acme::synchronize(current_stream(device.index()));
    acme_ipc_handle handle;
    check(acme_ipc_export(boxes_.const_data_ptr(), &handle), "acmeccl");
    const auto* first = reinterpret_cast<const uint8_t*>(&handle);
    store_->set("acmeccl/" + std::to_string(rank_), std::vector<uint8_t>(first, first + sizeof handle));
    auto* mine = static_cast<Mailbox*>(boxes_.mutable_data_ptr());
    for (int peer = 0; peer < size_; ++peer) {
      const auto sent = store_->get("acmeccl/" + std::to_string(peer));
      std::memcpy(&handle, sent.data(), sizeof handle);
      void* theirs = mine;
      if (peer != rank_) check(acme_ipc_open(&handle, &theirs), "acmeccl");
      outgoing_.push_back(static_cast<Mailbox*>(theirs) + 2 * rank_);
      incoming_.push_back(mine + 2 * peer);
    }
    for (int lane = 0; lane < 3; ++lane)
      streams_.push_back(c10::impl::VirtualGuardImpl(kDevice).getNewStream(device));
    return device;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  uint64_t sequence_ = 0;
  at::Tensor boxes_;
  std::vector<Mailbox*> outgoing_, incoming_; // by rank; each is one for collectives and one for sends
  std::vector<c10::Stream> streams_;          // by lane
};

} // namespace

void bind_distributed(py::module_& m) {
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(m, "DistributedBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, int, std::chrono::milliseconds>(),
          py::call_guard<py::gil_scoped_release>());
}

} // namespace acme
