#include "backend/distributed/process_group.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <utility>

#include "backend/allocator.h"
#include "backend/distributed/work.h"
#include "backend/identity/identity.h"
#include "runtime/device.h"
#include "runtime/explore/schedule.h"
#include "runtime/graph/graph.h"
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

// A collective and the tensors whose dtypes and numbers of elements must be the same on every process.
template <class Options>
Call call_of(const Name& name, const Tensors& same, const Options& opts, const std::string& option = {}) {
  Call call;
  call.timeout = opts.timeout;
  call.rule = call.text = option.empty() ? std::string(name.operation) : c10::str(name.operation, "(", option, ")");
  const char* separator = " of ";
  for (const auto& each : same) {
    const auto dtype = c10::getDtypeNames(each.scalar_type()).first;
    call.rule += c10::str(" ", dtype, " ", each.numel());
    call.text += c10::str(std::exchange(separator, ", "), dtype, " ", each.sizes());
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

// The number of elements that each process sends or receives if `sizes` splits the first dimension; equal parts
// without.
std::vector<int64_t> parts(
    const Name& name, const char* argument, const at::Tensor& x, const std::vector<int64_t>& sizes) {
  const int64_t rows = x.dim() ? x.size(0) : 1;
  if (sizes.empty()) return std::vector<int64_t>(name.size, x.numel() / name.size);
  if (static_cast<int>(sizes.size()) != name.size)
    C10_THROW_ERROR(ValueError,
        c10::str("occl: ", name.operation, ": expected ", argument, " with one number for each of ", name.size,
            " ranks, but got ", sizes));
  std::vector<int64_t> counts;
  for (const auto each : sizes) counts.push_back(rows ? each * (x.numel() / rows) : 0);
  return counts;
}
std::vector<int64_t> parts(const Name& name, const char* argument, const Tensors& list) {
  if (static_cast<int>(list.size()) != name.size)
    C10_THROW_ERROR(ValueError,
        c10::str("occl: ", name.operation, ": expected ", argument, " with one tensor for each of ", name.size,
            " ranks, but got ", list.size()));
  std::vector<int64_t> counts;
  for (const auto& each : list) counts.push_back(each.numel());
  return counts;
}

} // namespace

// A call in a node of a graph. `begin` passes it to the engine.
struct CapturedCall {
  Arguments arguments;
  c10d::OpType type;
  Stream stream;
  std::function<void(const c10::intrusive_ptr<DeviceWork>&)> begin;
};

using c10d::OpType;
using Work = DistributedBackend::Work;

DistributedBackend::DistributedBackend(Engine engine)
    : Backend(engine->getRank(), engine->getSize()), engine_(std::move(engine)), queue_(std::in_place, engine_) {}

// Without Python's lock: the engine waits for its threads, which may need it to free the last tensors of a call.
DistributedBackend::~DistributedBackend() {
  queue_.reset();
  detail::wait_around([](void* engine) { static_cast<Engine*>(engine)->reset(); }, &engine_);
}

struct DistributedBackend::Coalesced {
  std::vector<Work> works;
  std::vector<CapturedCall> exchanges; // captured sends and receives
};

// Passes a collective to the queue, after the current stream's work.
template <class Start>
Work DistributedBackend::collective(Arguments&& arguments, OpType type, Call call, bool async, Start&& start) {
  const Site site(arguments.name.operation);
  if (arguments.device == -1) arguments.device = static_cast<c10::DeviceIndex>(current_device());
  const auto stream = current_stream(arguments.device);
  if (detail::captures(stream)) {
    if (type == OpType::BARRIER)
      detail::refuse_capture(
          stream, arguments.name.operation, "the host waits for the other processes. Move it out of the capture.");
    const auto begin = [this, call = std::move(call), start](const auto& work) mutable {
      ++sequence_number_;
      queue_->push(
          call, [work, start]() mutable { work->begin(start()); },
          [work](const std::exception_ptr& error) { work->fail(error); });
    };
    return coalesce(capture({{std::move(arguments), type, stream, begin}}), async);
  }
  const auto work = c10::make_intrusive<DeviceWork>(std::move(arguments), type, ++sequence_number_);
  if (detail::scheduled()) {
    work->set_scheduled(detail::queue_collective(
        stream,
        [this, work, call = std::move(call), start] {
          queue_->push(
              call, [work, start]() mutable { work->begin(start()); },
              [work](const std::exception_ptr& error) { work->fail(error); });
          work->finish_scheduled();
        },
        site));
    return coalesce(work, async);
  }
  openreg::run(
      stream,
      [&] {
        queue_->push(
            std::move(call), [work, start]() mutable { work->begin(start()); },
            [work](const std::exception_ptr& error) { work->fail(error); });
      },
      site);
  return coalesce(work, async);
}

// Makes the calls a node of the graph. They all begin before one is waited for.
Work DistributedBackend::capture(std::vector<CapturedCall> calls) {
  const Name name = calls.front().arguments.name;
  const OpType type = calls.size() == 1 ? calls.front().type : OpType::COALESCED;
  const Stream stream = calls.front().stream;
  Tensors outputs;
  std::vector<MemoryUse> uses;
  for (CapturedCall& each : calls) {
    if (each.stream != stream)
      detail::refuse_capture(each.stream, each.arguments.name.operation,
          "it is coalesced with one on another stream. Make all of them on one stream.");
    std::ranges::move(std::exchange(each.arguments.outputs, {}), std::back_inserter(outputs));
    std::ranges::move(std::exchange(each.arguments.uses, {}), std::back_inserter(uses));
  }
  auto node = [backend = c10::intrusive_ptr<DistributedBackend>::reclaim_copy(this), calls = std::move(calls)] {
    std::vector<c10::intrusive_ptr<DeviceWork>> works;
    for (const CapturedCall& each : calls) {
      each.arguments.copy_to_hosts();
      works.push_back(c10::make_intrusive<DeviceWork>(
          Arguments(each.arguments.name), each.type, backend->sequence_number_, /*noticed=*/false));
      each.begin(works.back());
    }
    for (size_t i = 0; i < calls.size(); ++i) {
      works[i]->wait_in_replay();
      calls[i].arguments.copy_from_hosts();
    }
  };
  detail::capture(stream, Site(name.operation), detail::Task(std::move(node)), std::move(uses));
  return c10::make_intrusive<CapturedWork>(name, type, stream, std::move(outputs));
}

// Sends and receives begin immediately. They are not ordered with collectives, nor with the sends and receives of other
// processes.
template <class Start>
Work DistributedBackend::point_to_point(Arguments&& arguments, OpType type, Start&& start) {
  const Site site(arguments.name.operation);
  if (arguments.device == -1) arguments.device = static_cast<c10::DeviceIndex>(current_device());
  const auto stream = current_stream(arguments.device);
  if (detail::captures(stream)) {
    if (type == OpType::RECVANYSOURCE)
      detail::refuse_capture(
          stream, arguments.name.operation, "the host would read which process sent the message. Pass src to recv().");
    CapturedCall call{std::move(arguments), type, stream, [start](const auto& work) mutable { work->begin(start()); }};
    std::lock_guard lock(coalescing_);
    if (!coalesced_) return capture({std::move(call)});
    coalesced_->exchanges.push_back(std::move(call)); // a receive before a send must not wait for it
    return {};
  }
  const auto work = c10::make_intrusive<DeviceWork>(std::move(arguments), type, sequence_number_);
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
  return c10::make_intrusive<CoalescedWork>(rank_, std::move(works));
}

Work DistributedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Arguments arguments({"broadcast", rank_, size_});
  auto hosts = arguments.output(tensors);
  auto call = call_of(arguments.name, tensors, opts, root_of(opts));
  return collective(std::move(arguments), OpType::BROADCAST, std::move(call), opts.asyncOp,
      [engine = engine_, hosts, opts]() mutable { return engine->broadcast(hosts, opts); });
}
Work DistributedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  Arguments arguments({"allreduce", rank_, size_});
  arguments.sparse = true;
  auto hosts = arguments.output(tensors);
  auto call = call_of(arguments.name, tensors, opts, name_of(opts.reduceOp));
  return collective(std::move(arguments), OpType::ALLREDUCE, std::move(call), opts.asyncOp,
      [engine = engine_, hosts, opts]() mutable { return engine->allreduce(hosts, opts); });
}
Work DistributedBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  Arguments arguments({"allreduce_sparse", rank_, size_});
  arguments.sparse = true;
  auto hosts = arguments.output(tensors);
  auto call = call_of(arguments.name, tensors, opts, name_of(opts.reduceOp));
  return collective(std::move(arguments), OpType::_ALLREDUCE_SPARSE, std::move(call), opts.asyncOp,
      [engine = engine_, hosts, opts]() mutable { return engine->allreduce_sparse(hosts, opts); });
}
Work DistributedBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  Arguments arguments({"allreduce_coalesced", rank_, size_});
  auto hosts = arguments.output(tensors);
  auto call = call_of(arguments.name, tensors, opts, name_of(opts.reduceOp));
  return collective(std::move(arguments), OpType::ALLREDUCE_COALESCED, std::move(call), opts.asyncOp,
      [engine = engine_, hosts, opts]() mutable { return engine->allreduce_coalesced(hosts, opts); });
}
Work DistributedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Arguments arguments({"reduce", rank_, size_});
  auto hosts = arguments.output(tensors);
  auto call = call_of(arguments.name, tensors, opts, name_of(opts.reduceOp) + ", " + root_of(opts));
  return collective(std::move(arguments), OpType::REDUCE, std::move(call), opts.asyncOp,
      [engine = engine_, hosts, opts]() mutable { return engine->reduce(hosts, opts); });
}
Work DistributedBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  Arguments arguments({"allgather", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  auto call = call_of(arguments.name, inputs, opts);
  return collective(std::move(arguments), OpType::ALLGATHER, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, opts]() mutable { return engine->allgather(to, from, opts); });
}
Work DistributedBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  Arguments arguments({"allgather_base", rank_, size_});
  auto to = arguments.output(output);
  auto from = arguments.input(input);
  flatten(to, from, size_);
  auto call = call_of(arguments.name, {input}, opts);
  return collective(std::move(arguments), OpType::_ALLGATHER_BASE, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, opts]() mutable { return engine->_allgather_base(to, from, opts); });
}
Work DistributedBackend::allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  Arguments arguments({"allgather_coalesced", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  auto call = call_of(arguments.name, inputs, opts);
  return collective(std::move(arguments), OpType::ALLGATHER_COALESCED, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, opts]() mutable { return engine->allgather_coalesced(to, from, opts); });
}
Work DistributedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  Arguments arguments({"allgather_into_tensor_coalesced", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  for (size_t i = 0; i < std::min(to.size(), from.size()); ++i) flatten(to[i], from[i], size_);
  auto call = call_of(arguments.name, inputs, opts);
  return collective(std::move(arguments), OpType::ALLGATHER_COALESCED, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, opts]() mutable { return engine->allgather_into_tensor_coalesced(to, from, opts); });
}
Work DistributedBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  Arguments arguments({"gather", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  auto call = call_of(arguments.name, inputs, opts, root_of(opts));
  return collective(std::move(arguments), OpType::GATHER, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, opts]() mutable { return engine->gather(to, from, opts); });
}
Work DistributedBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) {
  Arguments arguments({"scatter", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  auto call = call_of(arguments.name, outputs, opts, root_of(opts));
  return collective(std::move(arguments), OpType::SCATTER, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, opts]() mutable { return engine->scatter(to, from, opts); });
}
Work DistributedBackend::reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) {
  Arguments arguments({"reduce_scatter", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  auto call = call_of(arguments.name, outputs, opts, name_of(opts.reduceOp));
  return collective(std::move(arguments), OpType::REDUCE_SCATTER, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, opts]() mutable { return engine->reduce_scatter(to, from, opts); });
}
Work DistributedBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  Arguments arguments({"reduce_scatter_base", rank_, size_});
  auto to = arguments.output(output);
  auto from = arguments.input(input);
  flatten(from, to, size_);
  auto call = call_of(arguments.name, {output}, opts, name_of(opts.reduceOp));
  return collective(std::move(arguments), OpType::_REDUCE_SCATTER_BASE, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, opts]() mutable { return engine->_reduce_scatter_base(to, from, opts); });
}
Work DistributedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  Arguments arguments({"reduce_scatter_tensor_coalesced", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  for (size_t i = 0; i < std::min(to.size(), from.size()); ++i) flatten(from[i], to[i], size_);
  auto call = call_of(arguments.name, outputs, opts, name_of(opts.reduceOp));
  return collective(std::move(arguments), OpType::REDUCE_SCATTER_TENSOR_COALESCED, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, opts]() mutable { return engine->reduce_scatter_tensor_coalesced(to, from, opts); });
}
Work DistributedBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) {
  Arguments arguments({"alltoall_base", rank_, size_});
  auto to = arguments.output(output);
  auto from = arguments.input(input);
  auto call = call_of(arguments.name, {input}, opts);
  call.rule = c10::str(arguments.name.operation, " ", input.scalar_type());
  call.sent = parts(arguments.name, "input_split_sizes", input, input_sizes);
  call.received = parts(arguments.name, "output_split_sizes", output, output_sizes);
  return collective(std::move(arguments), OpType::ALLTOALL_BASE, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, output_sizes, input_sizes, opts]() mutable {
        return engine->alltoall_base(to, from, output_sizes, input_sizes, opts);
      });
}
Work DistributedBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  Arguments arguments({"alltoall", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  auto call = call_of(arguments.name, inputs, opts);
  call.sent = parts(arguments.name, "input_tensor_list", inputs);
  call.received = parts(arguments.name, "output_tensor_list", outputs);
  call.rule = c10::str(arguments.name.operation, " ", inputs.front().scalar_type());
  return collective(std::move(arguments), OpType::ALLTOALL, std::move(call), opts.asyncOp,
      [engine = engine_, to, from, opts]() mutable { return engine->alltoall(to, from, opts); });
}
Work DistributedBackend::send(Tensors& tensors, int to, int tag) {
  Arguments arguments({"send", rank_, size_});
  auto hosts = arguments.input(tensors);
  return point_to_point(std::move(arguments), OpType::SEND,
      [engine = engine_, hosts, to, tag]() mutable { return engine->send(hosts, to, tag); });
}
Work DistributedBackend::recv(Tensors& tensors, int from, int tag) {
  Arguments arguments({"recv", rank_, size_});
  auto hosts = arguments.output(tensors);
  return point_to_point(std::move(arguments), OpType::RECV,
      [engine = engine_, hosts, from, tag]() mutable { return engine->recv(hosts, from, tag); });
}
Work DistributedBackend::recvAnysource(Tensors& tensors, int tag) {
  Arguments arguments({"recvAnysource", rank_, size_});
  auto hosts = arguments.output(tensors);
  return point_to_point(std::move(arguments), OpType::RECVANYSOURCE,
      [engine = engine_, hosts, tag]() mutable { return engine->recvAnysource(hosts, tag); });
}
// With a device: waits for the current stream of the named device, or of the current one.
Work DistributedBackend::barrier(const c10d::BarrierOptions& opts) {
  Arguments arguments({"barrier", rank_, size_});
  if (!opts.device_ids.empty()) arguments.device = checked_index(opts.device_ids.front());
  else if (opts.device && on_device(*opts.device)) arguments.device = checked_index(opts.device);
  auto call = call_of(arguments.name, {}, opts);
  return collective(std::move(arguments), OpType::BARRIER, std::move(call), opts.asyncOp,
      [engine = engine_, opts] { return engine->barrier(opts); });
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
// devices only.
OPENREG_LIBRARY_IMPL(c10d, sparse, m) {
  m.impl("allreduce_", torch::CppFunction::makeFromBoxedFunction<&to_dense_key>());
}

} // namespace openreg
