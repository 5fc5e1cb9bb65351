// The Work that a collective returns. Used only by distributed.cpp.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "../runtime/device.h"
#include "../runtime/error.h"
#include "../runtime/graph.h"
#include "../runtime/observer.h"
#include "../runtime/schedule.h"
#include "../runtime/stream.h"
#include "../runtime/wait.h"
#include "distributed_arguments.h"

namespace openreg {

using c10::ivalue::Future;

// The Work of a call on device tensors. The engine's own work begins when begin() is called.
class DeviceWork final : public c10d::Work {
 public:
  using Engine = c10::intrusive_ptr<c10d::Work>;

  // A node of a graph is not noticed: the race detector knows what it uses.
  DeviceWork(Arguments arguments, c10d::OpType type, uint64_t number, bool noticed = true)
      : Work(arguments.name.rank, type), arguments_(std::move(arguments)), number_(number),
        future_(c10::make_intrusive<Future>(c10::ListType::ofTensors(), devices())) {
    if (noticed) notice("collective_started", this, current_stream(arguments_.device));
  }
  ~DeviceWork() override { notice("collective_destroyed", this, {}); }

  // The engine has begun: completes the future when the engine's completes. Its sends, receives and partial sums have
  // none.
  void begin(Engine engine) {
    c10::intrusive_ptr<Future> future;
    try {
      future = engine->getFuture();
    } catch (const c10::Error&) {
    }
    bool follows = false;
    {
      std::lock_guard lock(ending_);
      engine_ = std::move(engine);
      engine_future_ = future;
      follows = !future && future_wanted_;
    }
    end_.notify_all();
    if (follows) follow();
    if (!future) return;
    future->addCallback([self = self()](Future& done) {
      {
        std::lock_guard lock(self->ending_);
        self->ended_ = true;
      }
      self->end_.notify_all();
      const auto error = done.hasError() ? self->explained(done.exception_ptr()) : nullptr;
      off_the_queue([self, error] {
        self->complete([&] {
          if (error) std::rethrow_exception(error);
          self->finish();
        });
      });
    });
  }
  // Calls f, which may run the callbacks that the program attached to the future. They may start a collective and wait
  // for it, which the queue's own thread must not do.
  template <class F>
  static void off_the_queue(F f) {
    if (CallQueue::on_this_thread()) std::thread(std::move(f)).detach();
    else f();
  }
  // The engine will not begin.
  void fail(const std::exception_ptr& error) {
    {
      std::lock_guard lock(ending_);
      error_ = explained(error);
      ended_ = true;
    }
    end_.notify_all();
    off_the_queue([self = self()] { self->future_->setErrorIfNeeded(self->error_); });
  }

  // The future completes only when the engine's results are in device memory.
  bool isCompleted() override {
    if (scheduled() && !done(*scheduled_)) detail::schedule_query("Work.is_completed", scheduled_->stream);
    const bool completed =
        finished_ || failure() || future_->completed() || (begun() && !engine_future_ && engine_->isCompleted());
    if (completed && isSuccess()) notice_wait();
    return completed;
  }
  bool isSuccess() const override {
    return !failure() && !future_->hasError() && (finished_ || (begun() && engine_->isSuccess()));
  }
  std::exception_ptr exception() const override {
    if (const auto error = failure()) return error;
    if (future_->hasError()) return future_->exception_ptr();
    const auto error = begun() ? engine_->exception() : nullptr;
    return error ? explained(error) : error;
  }
  int sourceRank() const override { return begun() ? engine_->sourceRank() : -1; }
  Tensors result() override { return arguments_.outputs; }
  void synchronize() override { wait(kNoTimeout); }
  // The host waits, and so does all work given to the current stream from then on.
  void blockCurrentStream() override { wait(kNoTimeout); }
  // Releases Python's lock, which synchronize() holds: the engine's threads may call the program's Python code before
  // the work is done.
  bool wait(std::chrono::milliseconds timeout) override {
    land("Work.wait");
    bool over = false;
    auto whole = [&] { over = wait_for_work(timeout); };
    detail::wait_around([](void* argument) { (*static_cast<decltype(whole)*>(argument))(); }, &whole);
    return over;
  }
  // For a node of a graph, which keeps its stream's turn, so that no other work comes between it and the next node.
  void wait_in_replay() {
    try {
      bool signals = true;
      for (bool ended = false; !ended;) {
        {
          std::unique_lock lock(ending_);
          ended = end_.wait_for(lock, detail::kSlice, [&] { return ended_ || (engine_ && !engine_future_); });
        }
        if (ended) break;
        if (detail::dropping()) throw std::runtime_error("the process was interrupted");
        try {
          signals = signals && detail::check_signals();
        } catch (const std::exception& interrupt) {
          throw NodeError(interrupt.what(), std::current_exception());
        }
      }
      if (const auto error = failure()) std::rethrow_exception(error);
      if (!engine_future_) engine_->wait(kNoTimeout);
      else if (engine_future_->hasError()) std::rethrow_exception(engine_future_->exception_ptr());
    } catch (const NodeError&) {
      throw;
    } catch (...) {
      const auto error = explained(std::current_exception());
      try {
        std::rethrow_exception(error);
      } catch (const c10::Error& what) {
        throw NodeError(what.what_without_backtrace(), error);
      } catch (const std::exception& what) {
        throw NodeError(what.what(), error);
      }
    }
  }
  void abort() override {
    if (begun()) engine_->abort();
  }
  c10::intrusive_ptr<Future> getFuture() override {
    land("Work.get_future"); // a thread that waits for a future does not ask the schedule
    bool follows = false;
    {
      std::lock_guard lock(ending_);
      if (engine_) follows = !engine_future_;
      else future_wanted_ = true;
    }
    if (follows) follow();
    return future_;
  }
  float getDuration() const override { return begun() ? engine_->getDuration() : Work::getDuration(); }
  uint64_t getSequencenumber() const override { return number_; }

  // For Note [Schedules]: the collective is the item of this ticket. The item ends when the results are in device
  // memory and the future has recorded its event, on whichever thread.
  void set_scheduled(const Ticket& ticket) { scheduled_ = ticket; }
  void finish_scheduled() {
    try {
      wait_for_work(kNoTimeout);
    } catch (...) { // which the program's wait throws
    }
    std::unique_lock lock(ending_);
    end_.wait(lock, [&] { return !engine_future_ || !ended_ || completed_; });
  }

 private:
  bool scheduled() const { return scheduled_ && detail::scheduled(); }
  void land(const char* name) {
    if (!detail::scheduled()) return;
    // Another process may need this one's collectives before it sends.
    const Ticket until = scheduled_.value_or(ticket(detail::collectives_of(arguments_.device)));
    detail::schedule_wait(name, {[until] { return done(until); }, until.stream});
  }
  c10::intrusive_ptr<DeviceWork> self() { return c10::intrusive_ptr<DeviceWork>::reclaim_copy(this); }
  bool begun() const {
    std::lock_guard lock(ending_);
    return engine_ != nullptr;
  }
  // The reason why the engine will not begin; null if it may.
  std::exception_ptr failure() const {
    std::lock_guard lock(ending_);
    return error_;
  }
  std::vector<c10::Device> devices() const {
    if (arguments_.outputs.empty()) return {};
    return {c10::Device(c10::kPrivateUse1, arguments_.device)};
  }
  // For the race detector: from now on, the current stream comes after the collective.
  void notice_wait() const { notice("collective_waited_for", this, current_stream(arguments_.device)); }
  bool wait_for_work(std::chrono::milliseconds timeout) {
    const auto begun_waiting = std::chrono::steady_clock::now();
    if (!finished_) wait_for_end(timeout);
    {
      std::lock_guard lock(ending_);
      if (error_) std::rethrow_exception(error_);
    }
    // Some of the engine's Work objects can be waited for only once.
    std::unique_lock<std::timed_mutex> one_at_a_time(waiting_, std::defer_lock);
    if (!engine_future_) {
      if (timeout == kNoTimeout) {
        one_at_a_time.lock();
      } else {
        timeout -=
            std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begun_waiting);
        timeout = std::max(timeout, std::chrono::milliseconds(1)); // 0 is without a limit
        if (!one_at_a_time.try_lock_for(timeout)) timed_out(timeout);
      }
    }
    if (!finished_) {
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
    }
    notice_wait();
    return true;
  }
  void finish() {
    std::call_once(copied_, [&] { arguments_.copy_back(); });
    finished_ = true;
  }
  // Completes the future when the engine has finished, if the engine has none.
  void follow() {
    if (followed_.exchange(true)) return;
    if (scheduled()) return complete([this] { wait_for_work(kNoTimeout); }); // the schedule has waited for it
    std::thread([self = self()] { self->complete([&] { self->wait(kNoTimeout); }); }).detach();
  }
  // Waits until the engine has finished, or has begun something that only a wait can finish. Unlike the engine's wait,
  // it can be interrupted: see Note [Interrupts].
  void wait_for_end(std::chrono::milliseconds timeout) {
    using Clock = std::chrono::steady_clock;
    const auto until = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
    detail::wait_freely(detail::Interrupt::kThrows, [&](std::chrono::nanoseconds most) {
      std::unique_lock lock(ending_);
      const auto now = Clock::now();
      const bool last = until - now <= most;
      auto ended = [&] { return ended_ || (engine_ && !engine_future_); };
      if (!end_.wait_until(lock, last ? until : now + most, ended) && last) timed_out(timeout);
      return ended();
    });
  }
  // Runs on a thread where exceptions must not escape.
  template <class Finish>
  void complete(Finish&& finish) noexcept {
    try {
      finish();
      // The future records an event for its waiters. The event belongs to the collective, not to the current stream.
      if (!arguments_.outputs.empty()) recorded_for = this;
      future_->markCompleted(c10::IValue(arguments_.outputs));
    } catch (...) {
      future_->setErrorIfNeeded(std::current_exception());
    }
    recorded_for = nullptr;
    {
      std::lock_guard lock(ending_);
      completed_ = true;
    }
    end_.notify_all();
  }
  [[noreturn]] void timed_out(std::chrono::milliseconds timeout) const {
    std::rethrow_exception(explained(
        std::make_exception_ptr(std::runtime_error("timed out after " + std::to_string(timeout.count()) + " ms"))));
  }
  // The engine's own errors are network errors; torch's errors already say what is wrong.
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
              "printed. With TORCH_DISTRIBUTED_DEBUG=DETAIL each call first names the ranks that do not come")));
    }
  }

  const Arguments arguments_;
  const uint64_t number_;
  const c10::intrusive_ptr<Future> future_;
  std::optional<Ticket> scheduled_;
  mutable std::mutex ending_; // of the next seven
  std::condition_variable end_;
  Engine engine_;                            // null until it has begun
  c10::intrusive_ptr<Future> engine_future_; // null where the engine has none
  bool ended_ = false;                       // the engine, if it has a future
  bool completed_ = false;                   // the future
  bool future_wanted_ = false;
  std::exception_ptr error_; // why the engine did not begin
  std::timed_mutex waiting_;
  std::atomic<bool> engine_waited_{false};
  std::once_flag copied_;
  std::atomic<bool> followed_{false};
  std::atomic<bool> finished_{false};
};

// The Work of captured calls, which are a node of a graph.
class CapturedWork final : public c10d::Work {
 public:
  CapturedWork(const Name& name, c10d::OpType type, Stream stream, Tensors outputs)
      : Work(name.rank, type), stream_(stream), point_(detail::capture_point(stream)), outputs_(std::move(outputs)),
        future_(c10::make_intrusive<Future>(c10::ListType::ofTensors(),
            std::vector<c10::Device>{c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(stream.device))})) {
    future_->markCompleted(c10::IValue(outputs_)); // with an event of the capture
  }

  bool isCompleted() override { refuse(); }
  bool isSuccess() const override { refuse(); }
  std::exception_ptr exception() const override { return nullptr; }
  Tensors result() override { return outputs_; }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  // What the current stream captures from now on comes after the collective.
  bool wait(std::chrono::milliseconds) override {
    if (point_) detail::join_capture(*point_, current_stream(stream_.device));
    return true;
  }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }

 private:
  [[noreturn]] void refuse() const {
    detail::refuse_capture(stream_, "a collective's query", "the collective is part of the capture, and has not run.");
  }

  const Stream stream_;
  const std::shared_ptr<const detail::CapturedPoint> point_;
  const Tensors outputs_;
  const c10::intrusive_ptr<Future> future_;
};

// The calls between startCoalescing() and endCoalescing(), as one Work.
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::ranges::all_of(works_, [](const auto& each) { return each->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::ranges::all_of(works_, [](const auto& each) { return each->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& each : works_)
      if (const auto error = each->exception()) return error;
    return nullptr;
  }
  Tensors result() override {
    Tensors all;
    for (const auto& each : works_)
      for (const auto& tensor : each->result()) all.push_back(tensor);
    return all;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + timeout;
    bool all = true;
    for (const auto& each : works_) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
      all &= each->wait(timeout == kNoTimeout ? timeout : std::max(left, std::chrono::milliseconds(1)));
    }
    return all;
  }
  void abort() override {
    for (const auto& each : works_) each->abort();
  }
  // The tensors of all Work objects, once the last one has completed.
  c10::intrusive_ptr<Future> getFuture() override {
    std::call_once(collected_, [&] {
      c10::List<c10::intrusive_ptr<Future>> futures(c10::FutureType::create(c10::ListType::ofTensors()));
      for (const auto& each : works_) futures.push_back(each->getFuture());
      future_ = c10::collectAll(futures)->then(
          [tensors = result()](Future& done) {
            for (const auto& each : done.value().toList())
              if (const auto future = each.get().toFuture(); future->hasError())
                std::rethrow_exception(future->exception_ptr());
            return c10::IValue(tensors);
          },
          c10::ListType::ofTensors());
    });
    return future_;
  }
  uint64_t getSequencenumber() const override { return works_.front()->getSequencenumber(); }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::once_flag collected_;
  c10::intrusive_ptr<Future> future_;
};

} // namespace openreg
