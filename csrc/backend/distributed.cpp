#include "distributed.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "../runtime/device.h"
#include "../runtime/isolation.h"
#include "../runtime/stream.h"
#include "../runtime/wait.h"
#include "allocator.h"

namespace openreg {
namespace {

using Tensors = DistributedBackend::Tensors;
using Lists = DistributedBackend::Lists;
using c10::ivalue::Future;

// A call as its messages name it.
struct Name {
  const char* operation;
  int rank, size;
};

// The device tensors of one call, and what the engine is given for them.
class Arguments {
 public:
  explicit Arguments(const Name& name) : name(name) {}

  at::Tensor input(const at::Tensor& tensor) {
    check(tensor);
    if (tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg() || isolation() != Isolation::kOff) {
      const c10::AutoGradMode no_grad(false);
      return tensor.to(at::kCPU);
    }
    return at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
        .strides(tensor.strides())
        .deleter([memory = tensor.storage()](void*) {})
        .options(tensor.options().device(at::kCPU))
        .target_device(at::kCPU)
        .make_tensor();
  }
  at::Tensor output(const at::Tensor& tensor) {
    auto host = input(tensor);
    outputs.push_back(tensor);
    if (!host.has_storage() || host.const_data_ptr() != tensor.const_data_ptr()) copies.emplace_back(tensor, host);
    return host;
  }
  template <class T>
  std::vector<T> input(const std::vector<T>& list) {
    std::vector<T> hosts;
    for (const auto& each : list) hosts.push_back(input(each));
    return hosts;
  }
  template <class T>
  std::vector<T> output(const std::vector<T>& list) {
    std::vector<T> hosts;
    for (const auto& each : list) hosts.push_back(output(each));
    return hosts;
  }
  void copy_back() const {
    if (copies.empty()) return;
    const c10::AutoGradMode no_grad(false);
    for (const auto& [tensor, host] : copies) tensor.copy_(host.to(tensor.device()));
    synchronize_stream(current_stream(device));
  }

  const Name name;
  c10::DeviceIndex device = -1;
  Tensors outputs;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;

 private:
  void check(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().is_privateuseone(), "occl: ", name.operation, ": expected tensors on openreg, but got ",
        "one on ", tensor.device(), "; move it with .to(\"openreg\")");
    if (device == -1) device = tensor.device().index();
    TORCH_CHECK(tensor.device().index() == device, "occl: ", name.operation, ": expected tensors on one device, but ",
        "got openreg:", static_cast<int>(device), " and ", tensor.device(), "; move one with .to()");
  }
};

// What the engine's work is to the user: the same, in device tensors.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(Arguments arguments, c10d::OpType type, c10::intrusive_ptr<c10d::Work> engine)
      : Work(arguments.name.rank, type), arguments_(std::move(arguments)), engine_(std::move(engine)),
        future_(c10::make_intrusive<Future>(c10::ListType::ofTensors(), devices())) {}

  // Completes the future when the engine's is; its sends, receives and sums in parts have none.
  void follow_engine() {
    try {
      engine_future_ = engine_->getFuture();
    } catch (const c10::Error&) {
      return;
    }
    engine_future_->addCallback([self = self()](Future& done) {
      {
        std::lock_guard lock(self->ending_);
        self->ended_ = true;
      }
      self->end_.notify_all();
      self->complete([&] {
        if (done.hasError()) std::rethrow_exception(self->explained(done.exception_ptr()));
        self->finish();
      });
    });
  }

  bool isCompleted() override { return finished_ || engine_->isCompleted(); }
  bool isSuccess() const override { return !future_->hasError() && (finished_ || engine_->isSuccess()); }
  std::exception_ptr exception() const override {
    if (future_->hasError()) return future_->exception_ptr();
    const auto error = engine_->exception();
    return error ? explained(error) : error;
  }
  int sourceRank() const override { return engine_->sourceRank(); }
  Tensors result() override { return arguments_.outputs; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    // Some of the engine's works can be waited for only once.
    std::unique_lock<std::timed_mutex> one_at_a_time(waiting_, std::defer_lock);
    if (!engine_future_) {
      if (timeout == kNoTimeout) one_at_a_time.lock();
      else if (!one_at_a_time.try_lock_for(timeout)) timed_out(timeout);
    }
    if (finished_) return true;
    if (engine_future_) wait_for_end(timeout);
    try {
      if (!engine_waited_ && !engine_->wait(timeout)) return false;
      engine_waited_ = true;
    } catch (const c10::Error& error) {
      if (std::string_view(error.what_without_backtrace()).starts_with("Operation timed out")) timed_out(timeout);
      throw;
    } catch (...) {
      std::rethrow_exception(explained(std::current_exception()));
    }
    finish();
    return true;
  }
  void abort() override { engine_->abort(); }
  c10::intrusive_ptr<Future> getFuture() override {
    if (!engine_future_)
      std::call_once(followed_,
          [&] { std::thread([self = self()] { self->complete([&] { self->wait(kNoTimeout); }); }).detach(); });
    return future_;
  }
  float getDuration() const override { return engine_->getDuration(); }
  uint64_t getSequencenumber() const override { return engine_->getSequencenumber(); }

 private:
  c10::intrusive_ptr<DeviceWork> self() { return c10::intrusive_ptr<DeviceWork>::reclaim_copy(this); }
  std::vector<c10::Device> devices() const {
    if (arguments_.outputs.empty()) return {};
    return {c10::Device(c10::kPrivateUse1, arguments_.device)};
  }
  void finish() {
    std::call_once(copied_, [&] { arguments_.copy_back(); });
    finished_ = true;
  }
  // Unlike the engine's wait, it can be interrupted: see Note [Interrupts].
  void wait_for_end(std::chrono::milliseconds timeout) {
    using Clock = std::chrono::steady_clock;
    const auto until = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
    detail::wait_freely(detail::Interrupt::kThrows, [&](std::chrono::nanoseconds most) {
      std::unique_lock lock(ending_);
      const auto now = Clock::now();
      const bool last = until - now <= most;
      if (!end_.wait_until(lock, last ? until : now + most, [&] { return ended_; }) && last) timed_out(timeout);
      return ended_;
    });
  }
  // Runs on a thread that an exception must not leave.
  template <class Finish>
  void complete(Finish&& finish) noexcept {
    try {
      finish();
      future_->markCompleted(c10::IValue(arguments_.outputs));
    } catch (...) {
      future_->setErrorIfNeeded(std::current_exception());
    }
  }
  [[noreturn]] void timed_out(std::chrono::milliseconds timeout) const {
    std::rethrow_exception(explained(
        std::make_exception_ptr(std::runtime_error("timed out after " + std::to_string(timeout.count()) + " ms"))));
  }
  // The engine's own errors are the network's; torch's say what is wrong as they are.
  std::exception_ptr explained(const std::exception_ptr& error) const {
    try {
      std::rethrow_exception(error);
    } catch (const c10::Error&) {
      return error;
    } catch (const std::exception& what) {
      const auto& [operation, rank, size] = arguments_.name;
      return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
          c10::str("occl: ", operation, " on rank ", rank, " of ", size, " failed: ", what.what(),
              ". A process of the group has ended, or did not make this call within the timeout; see what it "
              "printed")));
    }
  }

  const Arguments arguments_;
  const c10::intrusive_ptr<c10d::Work> engine_;
  const c10::intrusive_ptr<Future> future_;
  c10::intrusive_ptr<Future> engine_future_; // null where the engine has none
  std::mutex ending_;
  std::condition_variable end_;
  bool ended_ = false; // the engine, if it has a future
  std::timed_mutex waiting_;
  std::atomic<bool> engine_waited_{false};
  std::once_flag copied_, followed_;
  std::atomic<bool> finished_{false};
};

// Shows a tensor and its parts, one for each process, as one-dimensional: the engine cuts the first dimension, while
// NCCL, and so SyncBatchNorm, takes any shapes.
void flatten(at::Tensor& whole, at::Tensor& part, int processes) {
  if (!whole.is_contiguous() || !part.is_contiguous() || whole.numel() != processes * part.numel()) return;
  whole = whole.view(-1);
  part = part.view(-1);
}

// Hands a call to the engine behind the current stream's work.
template <class Start>
c10::intrusive_ptr<c10d::Work> start(Arguments&& arguments, c10d::OpType type, Start&& start) {
  if (arguments.device == -1) arguments.device = static_cast<c10::DeviceIndex>(current_device());
  auto engine = run(current_stream(arguments.device), start, Site(arguments.name.operation));
  auto work = c10::make_intrusive<DeviceWork>(std::move(arguments), type, std::move(engine));
  work->follow_engine();
  return work;
}

} // namespace

using c10d::OpType;
using Work = DistributedBackend::Work;

DistributedBackend::DistributedBackend(Engine engine)
    : Backend(engine->getRank(), engine->getSize()), engine_(std::move(engine)) {}

Work DistributedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Arguments arguments({"broadcast", rank_, size_});
  auto hosts = arguments.output(tensors);
  return start(std::move(arguments), OpType::BROADCAST, [&] { return engine_->broadcast(hosts, opts); });
}
Work DistributedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  Arguments arguments({"allreduce", rank_, size_});
  auto hosts = arguments.output(tensors);
  return start(std::move(arguments), OpType::ALLREDUCE, [&] { return engine_->allreduce(hosts, opts); });
}
Work DistributedBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  Arguments arguments({"allreduce_sparse", rank_, size_});
  auto hosts = arguments.output(tensors);
  return start(std::move(arguments), OpType::_ALLREDUCE_SPARSE, [&] { return engine_->allreduce_sparse(hosts, opts); });
}
Work DistributedBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  Arguments arguments({"allreduce_coalesced", rank_, size_});
  auto hosts = arguments.output(tensors);
  return start(
      std::move(arguments), OpType::ALLREDUCE_COALESCED, [&] { return engine_->allreduce_coalesced(hosts, opts); });
}
Work DistributedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Arguments arguments({"reduce", rank_, size_});
  auto hosts = arguments.output(tensors);
  return start(std::move(arguments), OpType::REDUCE, [&] { return engine_->reduce(hosts, opts); });
}
Work DistributedBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  Arguments arguments({"allgather", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  return start(std::move(arguments), OpType::ALLGATHER, [&] { return engine_->allgather(to, from, opts); });
}
Work DistributedBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  Arguments arguments({"allgather_base", rank_, size_});
  auto to = arguments.output(output);
  auto from = arguments.input(input);
  flatten(to, from, size_);
  return start(std::move(arguments), OpType::_ALLGATHER_BASE, [&] { return engine_->_allgather_base(to, from, opts); });
}
Work DistributedBackend::allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  Arguments arguments({"allgather_coalesced", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  return start(
      std::move(arguments), OpType::ALLGATHER_COALESCED, [&] { return engine_->allgather_coalesced(to, from, opts); });
}
Work DistributedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  Arguments arguments({"allgather_into_tensor_coalesced", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  return start(std::move(arguments), OpType::ALLGATHER_COALESCED,
      [&] { return engine_->allgather_into_tensor_coalesced(to, from, opts); });
}
Work DistributedBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  Arguments arguments({"gather", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  return start(std::move(arguments), OpType::GATHER, [&] { return engine_->gather(to, from, opts); });
}
Work DistributedBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) {
  Arguments arguments({"scatter", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  return start(std::move(arguments), OpType::SCATTER, [&] { return engine_->scatter(to, from, opts); });
}
Work DistributedBackend::reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) {
  Arguments arguments({"reduce_scatter", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  return start(std::move(arguments), OpType::REDUCE_SCATTER, [&] { return engine_->reduce_scatter(to, from, opts); });
}
Work DistributedBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  Arguments arguments({"reduce_scatter_base", rank_, size_});
  auto to = arguments.output(output);
  auto from = arguments.input(input);
  flatten(from, to, size_);
  return start(std::move(arguments), OpType::_REDUCE_SCATTER_BASE,
      [&] { return engine_->_reduce_scatter_base(to, from, opts); });
}
Work DistributedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  Arguments arguments({"reduce_scatter_tensor_coalesced", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  return start(std::move(arguments), OpType::REDUCE_SCATTER_TENSOR_COALESCED,
      [&] { return engine_->reduce_scatter_tensor_coalesced(to, from, opts); });
}
Work DistributedBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) {
  Arguments arguments({"alltoall_base", rank_, size_});
  auto to = arguments.output(output);
  auto from = arguments.input(input);
  return start(std::move(arguments), OpType::ALLTOALL_BASE,
      [&] { return engine_->alltoall_base(to, from, output_sizes, input_sizes, opts); });
}
Work DistributedBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  Arguments arguments({"alltoall", rank_, size_});
  auto to = arguments.output(outputs);
  auto from = arguments.input(inputs);
  return start(std::move(arguments), OpType::ALLTOALL, [&] { return engine_->alltoall(to, from, opts); });
}
Work DistributedBackend::send(Tensors& tensors, int to, int tag) {
  Arguments arguments({"send", rank_, size_});
  auto hosts = arguments.input(tensors);
  return start(std::move(arguments), OpType::SEND, [&] { return engine_->send(hosts, to, tag); });
}
Work DistributedBackend::recv(Tensors& tensors, int from, int tag) {
  Arguments arguments({"recv", rank_, size_});
  auto hosts = arguments.output(tensors);
  return start(std::move(arguments), OpType::RECV, [&] { return engine_->recv(hosts, from, tag); });
}
Work DistributedBackend::recvAnysource(Tensors& tensors, int tag) {
  Arguments arguments({"recvAnysource", rank_, size_});
  auto hosts = arguments.output(tensors);
  return start(std::move(arguments), OpType::RECVANYSOURCE, [&] { return engine_->recvAnysource(hosts, tag); });
}
// Of a device: it waits for the current stream of the device that is named, or
// else the current one.
Work DistributedBackend::barrier(const c10d::BarrierOptions& opts) {
  Arguments arguments({"barrier", rank_, size_});
  if (!opts.device_ids.empty()) arguments.device = checked_index(opts.device_ids.front());
  else if (opts.device && opts.device->is_privateuseone()) arguments.device = checked_index(opts.device);
  return start(std::move(arguments), OpType::BARRIER, [&] { return engine_->barrier(opts); });
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
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
}
} // namespace

// Gloo sums sparse tensors too; c10d has a kernel at this key for its own
// devices only.
TORCH_LIBRARY_IMPL(c10d, SparsePrivateUse1, m) {
  m.impl("allreduce_", torch::CppFunction::makeFromBoxedFunction<&to_dense_key>());
}

} // namespace openreg
