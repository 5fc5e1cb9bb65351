#include "backend/distributed/process_group.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <utility>

#include "backend/allocator.h"
#include "backend/distributed/collective_work.h"
#include "backend/identity/identity.h"
#include "runtime/device.h"
#include "runtime/explore/schedule.h"
#include "runtime/graph/graph.h"
#include "runtime/stream/launch.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

using Lists = DistributedBackend::Lists;

// Views a tensor and its parts, one per process, as one-dimensional: the engine splits the first dimension, but NCCL,
// and therefore SyncBatchNorm, accepts any shapes.
void flatten(at::Tensor& whole, at::Tensor& part, int processes) {
  if (!whole.is_contiguous() || !part.is_contiguous() || whole.numel() != processes * part.numel()) return;
  whole = whole.view(-1);
  part = part.view(-1);
}

// Describes a collective. The dtypes and numbers of elements of `same` must be the same on every process.
CallDescription describe(const CollectiveName& name, const Tensors& same, const std::string& option = {}) {
  CallDescription call;
  call.rule = call.text = option.empty() ? std::string(name.operation) : c10::str(name.operation, "(", option, ")");
  const char* separator = " of ";
  for (const auto& tensor : same) {
    const auto dtype = c10::getDtypeNames(tensor.scalar_type()).first;
    call.rule += c10::str(" ", dtype, " ", tensor.numel());
    call.text += c10::str(std::exchange(separator, ", "), dtype, " ", tensor.sizes());
  }
  return call;
}

std::string name_of(const c10d::ReduceOp& op) {
  static constexpr std::array names{"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  const auto index = static_cast<size_t>(op.op_);
  return index < names.size() ? names[index] : std::to_string(index);
}
template <class Options>
std::string root_of(const Options& opts) {
  return c10::str("root ", opts.rootRank);
}

// Returns the number of elements that each process sends or receives if `sizes` splits the first dimension, or equal
// parts if it is empty.
std::vector<int64_t> parts(
    const CollectiveName& name, const char* argument, const at::Tensor& x, const std::vector<int64_t>& sizes) {
  const int64_t rows = x.dim() ? x.size(0) : 1;
  if (sizes.empty()) return std::vector<int64_t>(name.size, x.numel() / name.size);
  if (static_cast<int>(sizes.size()) != name.size)
    C10_THROW_ERROR(ValueError,
        c10::str("occl: ", name.operation, ": expected ", argument, " with one number for each of ", name.size,
            " ranks, but got ", sizes));
  std::vector<int64_t> counts;
  for (const auto size : sizes) counts.push_back(rows ? size * (x.numel() / rows) : 0);
  return counts;
}
std::vector<int64_t> parts(const CollectiveName& name, const char* argument, const Tensors& list) {
  if (static_cast<int>(list.size()) != name.size)
    C10_THROW_ERROR(ValueError,
        c10::str("occl: ", name.operation, ": expected ", argument, " with one tensor for each of ", name.size,
            " ranks, but got ", list.size()));
  std::vector<int64_t> counts;
  for (const auto& tensor : list) counts.push_back(tensor.numel());
  return counts;
}

} // namespace

using c10d::Backend;
using c10d::OpType;
using Work = DistributedBackend::Work;

// A call in a node of a graph. `begin` passes it to the engine.
struct CapturedCall {
  CollectiveCall call;
  OpType type;
  Stream stream;
  std::function<void(const c10::intrusive_ptr<CollectiveWork>&)> begin;
};

struct DistributedBackend::Coalesced {
  std::vector<Work> works;
  std::vector<CapturedCall> exchanges; // captured sends and receives
};

DistributedBackend::DistributedBackend(Engine engine)
    : Backend(engine->getRank(), engine->getSize()), engine_(std::move(engine)), queue_(std::in_place, engine_) {}

// Without Python's lock: the engine waits for its threads, which may need it to free the last tensors of a call.
DistributedBackend::~DistributedBackend() {
  queue_.reset();
  detail::wait_around([](void* engine) { static_cast<Engine*>(engine)->reset(); }, &engine_);
}

// A call of one of the engine's functions.
template <class Function, class... Arguments>
DistributedBackend::Start DistributedBackend::engine_call(Function function, Arguments... arguments) {
  return [engine = engine_, function, ... arguments = std::move(arguments)]() mutable {
    return (engine.get()->*function)(arguments...);
  };
}

template <class CallOptions, class Function, class... Hosts>
Work DistributedBackend::collective(CollectiveCall&& call, OpType type, CallDescription description,
    const CallOptions& opts, Function function, Hosts... hosts) {
  description.timeout = opts.timeout;
  return collective(
      std::move(call), type, std::move(description), opts.asyncOp, engine_call(function, std::move(hosts)..., opts));
}

// Passes a collective to the queue.
void DistributedBackend::enqueue(
    const c10::intrusive_ptr<CollectiveWork>& work, CallDescription description, const Start& start) {
  const bool summed = description.summed.defined();
  queue_->push(
      std::move(description),
      [work, start, summed]() -> Work {
        const Work begun = summed ? Work() : start();
        summed ? work->end(nullptr) : work->begin(begun);
        return begun;
      },
      [work](const std::exception_ptr& error) { work->end(error); });
}

// Passes a collective to the queue, after the current stream's work.
Work DistributedBackend::collective(
    CollectiveCall&& call, OpType type, CallDescription description, bool async, const Start& start) {
  const Site site(call.name.operation);
  call.choose_device();
  const auto stream = current_stream(call.device);
  if (detail::captures(stream)) {
    if (type == OpType::BARRIER)
      detail::refuse_capture(
          stream, call.name.operation, "the host waits for the other processes. Move it out of the capture.");
    const auto begin = [this, description = std::move(description), start](const auto& work) {
      ++sequence_number_;
      enqueue(work, description, start);
    };
    return coalesce(capture({{std::move(call), type, stream, begin}}), async);
  }
  const auto work = collective_work(std::move(call), type, ++sequence_number_);
  if (detail::scheduled())
    work->set_scheduled(detail::queue_collective(
        stream,
        [this, work, description = std::move(description), start] {
          enqueue(work, description, start);
          work->finish_scheduled();
        },
        site));
  else openreg::run(stream, [&] { enqueue(work, std::move(description), start); }, site);
  return coalesce(work, async);
}

// Makes the calls a node of the graph. They all begin before one is waited for.
Work DistributedBackend::capture(std::vector<CapturedCall> calls) {
  const CollectiveName name = calls.front().call.name;
  const OpType type = calls.size() == 1 ? calls.front().type : OpType::COALESCED;
  const Stream stream = calls.front().stream;
  Tensors outputs;
  std::vector<MemoryUse> uses;
  for (CapturedCall& captured : calls) {
    if (captured.stream != stream)
      detail::refuse_capture(captured.stream, captured.call.name.operation,
          "it is coalesced with one on another stream. Make all of them on one stream.");
    std::ranges::move(std::exchange(captured.call.outputs, {}), std::back_inserter(outputs));
    std::ranges::move(std::exchange(captured.call.uses, {}), std::back_inserter(uses));
  }
  auto node = [backend = c10::intrusive_ptr<DistributedBackend>::reclaim_copy(this), calls = std::move(calls)] {
    std::vector<c10::intrusive_ptr<CollectiveWork>> works;
    for (const CapturedCall& captured : calls) {
      captured.call.copy_to_hosts();
      works.push_back(collective_work(
          CollectiveCall(captured.call.name), captured.type, backend->sequence_number_, /*noticed=*/false));
      captured.begin(works.back());
    }
    for (size_t i = 0; i < calls.size(); ++i) {
      works[i]->wait_in_replay();
      calls[i].call.copy_from_hosts();
    }
  };
  detail::capture(stream, Site(name.operation), detail::Task(std::move(node)), std::move(uses));
  return captured_work(name, type, stream, std::move(outputs));
}

// Sends and receives begin immediately. They are not ordered with collectives, nor with the sends and receives of other
// processes.
Work DistributedBackend::point_to_point(CollectiveCall&& call, OpType type, const Start& start) {
  const Site site(call.name.operation);
  call.choose_device();
  const auto stream = current_stream(call.device);
  if (detail::captures(stream)) {
    if (type == OpType::RECVANYSOURCE)
      detail::refuse_capture(
          stream, call.name.operation, "the host would read which process sent the message. Pass src to recv().");
    CapturedCall captured{std::move(call), type, stream, [start](const auto& work) { work->begin(start()); }};
    std::lock_guard lock(coalescing_);
    if (!coalesced_) return capture({std::move(captured)});
    coalesced_->exchanges.push_back(std::move(captured)); // a receive before a send must not wait for it
    return {};
  }
  const auto work = collective_work(std::move(call), type, sequence_number_);
  openreg::run(stream, [&] { work->begin(start()); }, site);
  return coalesce(work, false);
}

// Between startCoalescing() and endCoalescing(), calls return no work, as with NCCL, unless the caller wants one. So a
// receive before a send does not wait for it.
Work DistributedBackend::coalesce(const Work& work, bool async) {
  std::lock_guard lock(coalescing_);
  if (!coalesced_) return work;
  coalesced_->works.push_back(work);
  return async ? work : Work();
}
void DistributedBackend::startCoalescing() {
  std::lock_guard lock(coalescing_);
  coalesced_ = std::make_shared<Coalesced>();
}
Work DistributedBackend::endCoalescing() {
  std::lock_guard lock(coalescing_);
  const auto calls = std::exchange(coalesced_, nullptr);
  if (!calls) return {};
  auto& [works, exchanges] = *calls;
  if (!exchanges.empty()) works.push_back(capture(std::move(exchanges)));
  if (works.empty()) return {};
  return coalesced_work(rank_, std::move(works));
}

Work DistributedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  CollectiveCall call({"broadcast", rank_, size_});
  return collective(std::move(call), OpType::BROADCAST, describe(call.name, tensors, root_of(opts)), opts,
      &Backend::broadcast, call.output(tensors));
}

Work DistributedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  CollectiveCall call({"allreduce", rank_, size_});
  call.sparse = true;
  auto hosts = call.output(tensors);
  auto description = describe(call.name, tensors, name_of(opts.reduceOp));
  if (opts.reduceOp == c10d::ReduceOp::SUM && hosts.size() == 1 && travels(hosts.front())) {
    description.rule += " in the description";
    description.summed = hosts.front();
  }
  return collective(std::move(call), OpType::ALLREDUCE, std::move(description), opts, &Backend::allreduce, hosts);
}

Work DistributedBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  CollectiveCall call({"allreduce_sparse", rank_, size_});
  call.sparse = true;
  return collective(std::move(call), OpType::_ALLREDUCE_SPARSE, describe(call.name, tensors, name_of(opts.reduceOp)),
      opts, &Backend::allreduce_sparse, call.output(tensors));
}

Work DistributedBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  CollectiveCall call({"allreduce_coalesced", rank_, size_});
  return collective(std::move(call), OpType::ALLREDUCE_COALESCED, describe(call.name, tensors, name_of(opts.reduceOp)),
      opts, &Backend::allreduce_coalesced, call.output(tensors));
}

Work DistributedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  CollectiveCall call({"reduce", rank_, size_});
  return collective(std::move(call), OpType::REDUCE,
      describe(call.name, tensors, name_of(opts.reduceOp) + ", " + root_of(opts)), opts, &Backend::reduce,
      call.output(tensors));
}

Work DistributedBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  CollectiveCall call({"allgather", rank_, size_});
  auto to = call.output(outputs);
  auto from = call.input(inputs);
  return collective(
      std::move(call), OpType::ALLGATHER, describe(call.name, inputs), opts, &Backend::allgather, to, from);
}

Work DistributedBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  CollectiveCall call({"allgather_base", rank_, size_});
  auto to = call.output(output);
  auto from = call.input(input);
  flatten(to, from, size_);
  return collective(std::move(call), OpType::_ALLGATHER_BASE, describe(call.name, {input}), opts,
      &Backend::_allgather_base, to, from);
}

Work DistributedBackend::allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  CollectiveCall call({"allgather_coalesced", rank_, size_});
  auto to = call.output(outputs);
  auto from = call.input(inputs);
  return collective(std::move(call), OpType::ALLGATHER_COALESCED, describe(call.name, inputs), opts,
      &Backend::allgather_coalesced, to, from);
}

Work DistributedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  CollectiveCall call({"allgather_into_tensor_coalesced", rank_, size_});
  auto to = call.output(outputs);
  auto from = call.input(inputs);
  for (size_t i = 0; i < std::min(to.size(), from.size()); ++i) flatten(to[i], from[i], size_);
  return collective(std::move(call), OpType::ALLGATHER_COALESCED, describe(call.name, inputs), opts,
      &Backend::allgather_into_tensor_coalesced, to, from);
}

Work DistributedBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  CollectiveCall call({"gather", rank_, size_});
  auto to = call.output(outputs);
  auto from = call.input(inputs);
  return collective(
      std::move(call), OpType::GATHER, describe(call.name, inputs, root_of(opts)), opts, &Backend::gather, to, from);
}

Work DistributedBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) {
  CollectiveCall call({"scatter", rank_, size_});
  auto to = call.output(outputs);
  auto from = call.input(inputs);
  return collective(
      std::move(call), OpType::SCATTER, describe(call.name, outputs, root_of(opts)), opts, &Backend::scatter, to, from);
}

Work DistributedBackend::reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) {
  CollectiveCall call({"reduce_scatter", rank_, size_});
  auto to = call.output(outputs);
  auto from = call.input(inputs);
  return collective(std::move(call), OpType::REDUCE_SCATTER, describe(call.name, outputs, name_of(opts.reduceOp)), opts,
      &Backend::reduce_scatter, to, from);
}

Work DistributedBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  CollectiveCall call({"reduce_scatter_base", rank_, size_});
  auto to = call.output(output);
  auto from = call.input(input);
  flatten(from, to, size_);
  return collective(std::move(call), OpType::_REDUCE_SCATTER_BASE,
      describe(call.name, {output}, name_of(opts.reduceOp)), opts, &Backend::_reduce_scatter_base, to, from);
}

Work DistributedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  CollectiveCall call({"reduce_scatter_tensor_coalesced", rank_, size_});
  auto to = call.output(outputs);
  auto from = call.input(inputs);
  for (size_t i = 0; i < std::min(to.size(), from.size()); ++i) flatten(from[i], to[i], size_);
  return collective(std::move(call), OpType::REDUCE_SCATTER_TENSOR_COALESCED,
      describe(call.name, outputs, name_of(opts.reduceOp)), opts, &Backend::reduce_scatter_tensor_coalesced, to, from);
}

Work DistributedBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) {
  CollectiveCall call({"alltoall_base", rank_, size_});
  auto to = call.output(output);
  auto from = call.input(input);
  auto description = describe(call.name, {input});
  description.rule = c10::str(call.name.operation, " ", input.scalar_type());
  description.sent = parts(call.name, "input_split_sizes", input, input_sizes);
  description.received = parts(call.name, "output_split_sizes", output, output_sizes);
  return collective(std::move(call), OpType::ALLTOALL_BASE, std::move(description), opts, &Backend::alltoall_base, to,
      from, output_sizes, input_sizes);
}

Work DistributedBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  CollectiveCall call({"alltoall", rank_, size_});
  auto to = call.output(outputs);
  auto from = call.input(inputs);
  auto description = describe(call.name, inputs);
  description.sent = parts(call.name, "input_tensor_list", inputs);
  description.received = parts(call.name, "output_tensor_list", outputs);
  description.rule = c10::str(call.name.operation, " ", inputs.front().scalar_type());
  return collective(std::move(call), OpType::ALLTOALL, std::move(description), opts, &Backend::alltoall, to, from);
}

Work DistributedBackend::send(Tensors& tensors, int to, int tag) {
  CollectiveCall call({"send", rank_, size_});
  return point_to_point(std::move(call), OpType::SEND, engine_call(&Backend::send, call.input(tensors), to, tag));
}

Work DistributedBackend::recv(Tensors& tensors, int from, int tag) {
  CollectiveCall call({"recv", rank_, size_});
  return point_to_point(std::move(call), OpType::RECV, engine_call(&Backend::recv, call.output(tensors), from, tag));
}

Work DistributedBackend::recvAnysource(Tensors& tensors, int tag) {
  CollectiveCall call({"recvAnysource", rank_, size_});
  return point_to_point(
      std::move(call), OpType::RECVANYSOURCE, engine_call(&Backend::recvAnysource, call.output(tensors), tag));
}

// Waits for the current stream of the device that the options name, or of the current device.
Work DistributedBackend::barrier(const c10d::BarrierOptions& opts) {
  CollectiveCall call({"barrier", rank_, size_});
  if (!opts.device_ids.empty()) call.device = checked_index(opts.device_ids.front());
  else if (opts.device && on_device(*opts.device)) call.device = checked_index(opts.device);
  return collective(std::move(call), OpType::BARRIER, describe(call.name, {}), opts, &Backend::barrier);
}
// Runs in the order of the collectives, because the engine counts their tags. It is not compared, because the engine
// itself reports which ranks are missing.
void DistributedBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool all) {
  detail::check_host_call("monitored_barrier");
  queue_->run([&] { engine_->monitoredBarrier(opts, all); });
}

DistributedBackend::Engine DistributedBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& ranks, const c10::intrusive_ptr<Options>& opts) {
  return c10::make_intrusive<DistributedBackend>(engine_->split(store, ranks, opts));
}
DistributedBackend::Engine DistributedBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<Options>& opts, const int& rank, const int& size) {
  return c10::make_intrusive<DistributedBackend>(engine_->merge(store, opts, rank, size));
}

namespace {
void to_dense_key(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(identity.dense), stack);
}
} // namespace

// Gloo sums sparse tensors too; c10d has a kernel at this key for its own
// devices only, of which CUDA is one.
OPENREG_LIBRARY_IMPL(c10d, sparse, m) {
  if (is_cuda()) return;
  m.impl("allreduce_", torch::CppFunction::makeFromBoxedFunction<&to_dense_key>());
}

} // namespace openreg
