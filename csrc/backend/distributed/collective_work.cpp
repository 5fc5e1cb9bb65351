#include "backend/distributed/collective_work.h"

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "backend/guard.h"
#include "backend/identity/identity.h"
#include "runtime/device.h"
#include "runtime/explore/schedule.h"
#include "runtime/graph/graph.h"
#include "runtime/process/error.h"
#include "runtime/process/interrupts.h"
#include "runtime/process/notices.h"
#include "runtime/stream/event.h"
#include "runtime/stream/launch.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/turn.h"

namespace openreg {
namespace {

using c10::ivalue::Future;
using Clock = std::chrono::steady_clock;

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& what) {
    return what.what_without_backtrace();
  } catch (const std::exception& what) {
    return what.what();
  }
}

// The event in the future of a collective.
class WorkEvent final : public Event {
 public:
  explicit WorkEvent(c10::intrusive_ptr<StreamWork> work) : Event(work->device(), false), work_(std::move(work)) {}
  void record(Stream) override {}
  void block(Stream stream) const override { work_->block(stream, is_callback_stream(stream)); }
  bool query() const override { return work_->isCompleted(); }
  void synchronize() const override { work_->wait(kNoTimeout); }
  const void* identity() const noexcept override { return nullptr; } // the race detector knows the collective instead

 private:
  const c10::intrusive_ptr<StreamWork> work_;
};

class DeviceWork final : public CollectiveWork {
 public:
  DeviceWork(CollectiveCall call, c10d::OpType type, uint64_t number, bool noticed)
      : CollectiveWork(call.name.rank, type), call_(std::move(call)), number_(number) {
    if (noticed) notice(NoticeKind::kCollectiveStarted, this, current_stream(call_.device));
  }
  ~DeviceWork() override { notice(NoticeKind::kCollectiveDestroyed, this, {}); }
  void begin(c10::intrusive_ptr<c10d::Work> engine) override {
    c10::intrusive_ptr<Future> future;
    try {
      future = engine->getFuture();
    } catch (const c10::Error&) { // its sends, receives and partial sums have none
    }
    bool awaited = false;
    {
      std::lock_guard lock(ending_);
      engine_ = std::move(engine);
      has_future_ = future.defined();
      awaited = awaited_;
    }
    if (future)
      future->addCallback(
          [self = self()](Future& done) { self->end(done.hasError() ? done.exception_ptr() : nullptr); });
    else if (awaited) await_engine();
  }
  void end(const std::exception_ptr& error) override {
    {
      std::lock_guard lock(ending_);
      if (error) error_ = explained(error);
      ended_ = true;
    }
    end_.notify_all();
  }
  bool isCompleted() override {
    if (scheduled() && !done(*scheduled_)) detail::schedule_query("Work.is_completed", scheduled_->stream);
    await_engine();
    const auto [engine, ended, error] = state();
    if (ended && !error) arrive(current_stream(device()));
    return ended;
  }
  bool isSuccess() const override {
    const auto [engine, ended, error] = state();
    return !error && (engine || ended);
  }
  // Releases Python's lock, which synchronize() holds: others may need it before the work is done.
  bool wait(std::chrono::milliseconds timeout) override {
    land();
    auto whole = [&] { wait_for_end(timeout); };
    detail::wait_around([](void* argument) { (*static_cast<decltype(whole)*>(argument))(); }, &whole);
    if (const auto error = state().error) std::rethrow_exception(error);
    arrive(current_stream(device()));
    return true;
  }
  // The host waits for what has to be copied back, and for what a schedule orders.
  void block(Stream stream, bool in_callback) override {
    if (!in_callback || call_.has_copies() || detail::scheduled() || detail::captures(stream) ||
        launch_mode() == LaunchMode::kSync) {
      wait(kNoTimeout);
      return;
    }
    notice(NoticeKind::kCollectiveWaitedFor, this, stream);
    if (const auto [engine, ended, error] = state(); ended && !error) return;
    const Site site("wait for a collective", Site::kWait);
    detail::queue_wait(stream, [self = self()] { self->wait_on_worker(); }, site);
  }
  void abort() override {
    if (state().engine) engine_->abort();
  }
  void wait_in_replay() override {
    bool signals = true;
    await_engine();
    while (!wait_a_while()) {
      if (detail::dropping()) {
        const auto error = explained(std::make_exception_ptr(std::runtime_error("the process was interrupted")));
        throw NodeError(text_of(error), error);
      }
      try {
        signals = signals && detail::check_signals();
      } catch (const std::exception& interrupt) {
        throw NodeError(interrupt.what(), std::current_exception());
      }
    }
    if (const auto error = state().error) throw NodeError(text_of(error), error);
  }
  void finish_scheduled() override {
    await_engine();
    std::unique_lock lock(ending_);
    end_.wait(lock, [&] { return ended_; });
  }
  std::exception_ptr exception() const override { return state().error; }
  int sourceRank() const override { return state().engine ? engine_->sourceRank() : -1; }
  Tensors result() override { return call_.outputs; }
  c10::DeviceIndex device() const override { return call_.device; }
  float getDuration() const override { return state().engine ? engine_->getDuration() : Work::getDuration(); }
  uint64_t getSequencenumber() const override { return number_; }
  void set_scheduled(const Ticket& ticket) override { scheduled_ = ticket; }

 private:
  struct State {
    bool engine, ended;
    std::exception_ptr error;
  };
  c10::intrusive_ptr<DeviceWork> self() { return c10::intrusive_ptr<DeviceWork>::reclaim_copy(this); }
  bool scheduled() const { return scheduled_ && detail::scheduled(); }
  void land() {
    if (!detail::scheduled()) return;
    // Another process may need this one's collectives before it sends.
    const Ticket until = scheduled_.value_or(ticket(detail::collectives_of(device())));
    detail::schedule_wait("Work.wait", {[until] { return done(until); }, until.stream});
  }
  State state() const {
    std::lock_guard lock(ending_);
    return {engine_ != nullptr, ended_, error_};
  }
  // Lets somebody wait for the end. A thread waits for an engine without a future, once.
  void await_engine() {
    {
      std::lock_guard lock(ending_);
      awaited_ = true;
      if (!engine_ || has_future_ || std::exchange(followed_, true)) return;
    }
    std::thread([self = self()] {
      std::exception_ptr error;
      try {
        self->engine_->wait(kNoTimeout);
      } catch (...) {
        error = std::current_exception();
      }
      self->end(error);
    }).detach();
  }
  // Waits until the end, the timeout or Ctrl-C: see Note [Interrupts].
  void wait_for_end(std::chrono::milliseconds timeout) {
    const auto until = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
    await_engine();
    detail::wait_freely(detail::Interrupt::kThrows, [&](std::chrono::nanoseconds most) {
      std::unique_lock lock(ending_);
      const auto now = Clock::now();
      const bool last = until - now <= most;
      if (!end_.wait_until(lock, last ? until : now + most, [&] { return ended_; }) && last)
        std::rethrow_exception(explained(
            std::make_exception_ptr(std::runtime_error("timed out after " + std::to_string(timeout.count()) + " ms"))));
      return ended_;
    });
  }
  // Returns true if the call has ended.
  bool wait_a_while() {
    std::unique_lock lock(ending_);
    return end_.wait_for(lock, detail::kSlice, [&] { return ended_; });
  }
  // Waits on a stream's worker, which holds no turn and handles no signals.
  void wait_on_worker() {
    await_engine();
    while (!wait_a_while())
      if (detail::dropping()) return;
    if (const auto error = state().error) throw std::runtime_error(text_of(error));
  }
  // Orders `stream` after the collective, whose results are then in device memory.
  void arrive(Stream stream) {
    notice(NoticeKind::kCollectiveWaitedFor, this, stream);
    std::call_once(copied_, [&] { call_.copy_back(); });
  }
  // Adds the call and the remedy to the engine's own errors, which are network errors. PyTorch's errors already say
  // what is wrong.
  std::exception_ptr explained(const std::exception_ptr& error) const {
    try {
      std::rethrow_exception(error);
    } catch (const c10::Error&) {
      return error;
    } catch (const std::exception& what) {
      const auto& [operation, rank, size] = call_.name;
      return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
          c10::str("occl: ", operation, " on rank ", rank, " of ", size, " failed: ", what.what(),
              ". A process of the group has ended, or did not make this call within the timeout; see what it "
              "printed. With TORCH_DISTRIBUTED_DEBUG=DETAIL each call first names the ranks that do not come")));
    }
  }

  const CollectiveCall call_;
  const uint64_t number_;
  std::optional<Ticket> scheduled_;
  mutable std::mutex ending_; // guards the next six
  std::condition_variable end_;
  c10::intrusive_ptr<c10d::Work> engine_; // null until it has begun
  bool has_future_ = false;               // the engine tells when it ends
  bool awaited_ = false;                  // somebody waits for the engine
  bool followed_ = false;                 // a thread of await_engine() waits for the engine
  bool ended_ = false;
  std::exception_ptr error_; // why it did not begin, or failed
  std::once_flag copied_;
};

class CapturedWork final : public StreamWork {
 public:
  CapturedWork(const CollectiveName& name, c10d::OpType type, Stream stream, Tensors outputs)
      : StreamWork(name.rank, type), stream_(stream),
        point_(detail::any_capture() ? detail::capture_watcher.point(stream) : nullptr), outputs_(std::move(outputs)) {}

  bool isCompleted() override { refuse(); }
  bool isSuccess() const override { refuse(); }
  std::exception_ptr exception() const override { return nullptr; }
  Tensors result() override { return outputs_; }
  bool wait(std::chrono::milliseconds) override {
    block(current_stream(stream_.device), false);
    return true;
  }
  // What the stream captures from now on comes after the collective.
  void block(Stream stream, bool) override {
    if (point_) detail::capture_watcher.join(*point_, stream);
  }
  c10::DeviceIndex device() const override { return static_cast<c10::DeviceIndex>(stream_.device); }

 private:
  [[noreturn]] void refuse() const {
    detail::refuse_capture(stream_, "a collective's query", "the collective is part of the capture, and has not run.");
  }

  const Stream stream_;
  const std::shared_ptr<const detail::CapturedPoint> point_;
  const Tensors outputs_;
};

class CoalescedWork final : public StreamWork {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : StreamWork(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_)
      if (const auto error = work->exception()) return error;
    return nullptr;
  }
  Tensors result() override {
    Tensors all;
    for (const auto& work : works_) std::ranges::move(work->result(), std::back_inserter(all));
    return all;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const auto until = Clock::now() + timeout;
    bool all = true;
    for (const auto& work : works_) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
      all &= work->wait(timeout == kNoTimeout ? timeout : std::max(left, std::chrono::milliseconds(1)));
    }
    return all;
  }
  void abort() override {
    for (const auto& work : works_) work->abort();
  }
  void block(Stream stream, bool in_callback) override {
    for (const auto& work : works_) static_cast<StreamWork&>(*work).block(stream, in_callback);
  }
  c10::DeviceIndex device() const override { return static_cast<StreamWork&>(*works_.front()).device(); }
  uint64_t getSequencenumber() const override { return works_.front()->getSequencenumber(); }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

} // namespace

c10::intrusive_ptr<Future> StreamWork::getFuture() {
  const c10::Device where(identity.type, device());
  auto future = c10::make_intrusive<Future>(c10::ListType::ofTensors(), std::vector{where});
  Tensors outputs = result();
  // The future records an event for each device of these. A barrier has no tensors.
  const auto none = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, where), nullptr, false);
  std::vector<Future::WeakStorage> storages;
  storages.emplace_back(none);
  for (const auto& output : outputs)
    if (output.has_storage()) storages.push_back(output.storage().getWeakStorageImpl());
  record_as(std::make_unique<WorkEvent>(c10::intrusive_ptr<StreamWork>::reclaim_copy(this)));
  future->markCompleted(std::move(outputs), std::move(storages));
  record_as(nullptr); // if that failed
  return future;
}

c10::intrusive_ptr<CollectiveWork> collective_work(
    CollectiveCall call, c10d::OpType type, uint64_t number, bool noticed) {
  return c10::make_intrusive<DeviceWork>(std::move(call), type, number, noticed);
}

c10::intrusive_ptr<c10d::Work> captured_work(
    const CollectiveName& name, c10d::OpType type, Stream stream, Tensors outputs) {
  return c10::make_intrusive<CapturedWork>(name, type, stream, std::move(outputs));
}

c10::intrusive_ptr<c10d::Work> coalesced_work(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  return c10::make_intrusive<CoalescedWork>(rank, std::move(works));
}

} // namespace openreg
