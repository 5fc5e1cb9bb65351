#include "backend/distributed/call_queue.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <future>
#include <memory>

#include "runtime/process/interrupts.h"
#include "runtime/stream/turn.h"

namespace openreg {
namespace {

// The message of a process, with the same size for all calls of a group. The numbers for and from each process follow
// it.
struct Record {
  uint64_t rule; // its hash
  uint64_t unequal_parts;
  char text[496];
  char summed[4096]; // the elements of a small tensor
};

uint64_t hash(const std::string& text) { // FNV-1a
  uint64_t value = 14695981039346656037u;
  for (const unsigned char byte : text) value = (value ^ byte) * 1099511628211u;
  return value;
}

// The elements of a contiguous tensor, in the order in which they lie in memory.
at::Tensor flat(void* elements, const at::Tensor& like) {
  return at::from_blob(elements, {like.numel()}, like.options());
}

} // namespace

bool travels(const at::Tensor& host) {
  constexpr std::array kDtypes{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong};
  return host.layout() == at::kStrided && host.nbytes() <= sizeof Record::summed &&
      std::ranges::find(kDtypes, host.scalar_type()) != kDtypes.end();
}

CallQueue::~CallQueue() {
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  // Without Python's lock, because the end of a call's tensors may need it.
  detail::wait_around([](void* thread) { static_cast<std::thread*>(thread)->join(); }, &thread_);
}

void CallQueue::push(CallDescription call, Begin begin, Fail fail) {
  push(Entry{std::move(call), std::move(begin), std::move(fail)});
}

void CallQueue::run(const std::function<void()>& task) {
  auto call = std::make_shared<std::packaged_task<void()>>(task);
  auto done = call->get_future();
  push(Entry{std::nullopt,
      [call]() -> c10::intrusive_ptr<c10d::Work> {
        (*call)();
        return {};
      },
      nullptr});
  detail::wait_freely(detail::Interrupt::kNever,
      [&](std::chrono::nanoseconds most) { return done.wait_for(most) == std::future_status::ready; });
  done.get();
}

void CallQueue::push(Entry&& entry) {
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  entries_.push_back(std::move(entry));
  changed_.notify_all();
}

void CallQueue::work() {
  for (;;) {
    Entry entry;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || !entries_.empty(); });
      if (entries_.empty()) return;
      entry = std::move(entries_.front());
      entries_.pop_front();
    }
    try {
      if (entry.call) compare(*entry.call);
      if (const auto begun = entry.begin()) last_.emplace(begun);
    } catch (...) {
      entry.fail(std::current_exception());
    }
  }
}

// See Note [Matching calls].
void CallQueue::compare(const CallDescription& call) {
  ++number_;
  const int rank = engine_->getRank(), size = engine_->getSize();
  if (size == 1) return; // and a sum of one tensor is the tensor
  const int64_t parts = 2 * size, bytes = static_cast<int64_t>(sizeof(Record)) + parts * 8;
  auto ours = at::zeros({bytes}, at::kByte), all = at::empty({size * bytes}, at::kByte);
  auto* record = reinterpret_cast<Record*>(ours.mutable_data_ptr<uint8_t>());
  record->rule = hash(call.rule);
  record->unequal_parts = !call.sent.empty();
  std::strncpy(record->text, call.text.c_str(), sizeof record->text - 1);
  auto* numbers = reinterpret_cast<int64_t*>(record + 1);
  std::ranges::copy(call.sent, numbers);
  std::ranges::copy(call.received, numbers + size);
  if (call.summed.defined()) {
    if (const auto earlier = last_ ? last_->lock() : c10::intrusive_ptr<c10d::Work>()) try {
        earlier->wait();
      } catch (const std::exception&) { // the earlier call raises it
      }
    std::memcpy(record->summed, call.summed.const_data_ptr(), call.summed.nbytes());
  }

  c10d::AllgatherOptions options;
  options.timeout = call.timeout;
  engine_->_allgather_base(all, ours, options)->wait();

  auto of = [&](int process) {
    return reinterpret_cast<const Record*>(all.const_data_ptr<uint8_t>() + process * bytes);
  };
  auto differ = [&](int one, int other, const std::string& why) {
    // The rank that reads the message comes first.
    if (other == rank) std::swap(one, other);
    C10_THROW_ERROR(DistBackendError,
        c10::str("occl: mismatched collectives: at call ", number_, " of the group, rank ", one, " of ", size,
            " calls ", of(one)->text, ", but rank ", other, " calls ", of(other)->text, why,
            ". Every rank must make the same calls in the same order, with the same dtypes and numbers of elements. ",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL also compares shapes, and raises at the call"));
  };

  for (int other = 0; other < size; ++other)
    if (of(other)->rule != of(rank)->rule) differ(rank, other, "");
  if (call.summed.defined()) {
    auto sum = flat(call.summed.mutable_data_ptr(), call.summed);
    for (int from = 0; from < size; ++from) {
      const auto part = flat(const_cast<char*>(of(from)->summed), sum);
      from ? sum.add_(part) : sum.copy_(part);
    }
  }
  if (!of(0)->unequal_parts) return;
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to) {
      const auto sent = reinterpret_cast<const int64_t*>(of(from) + 1)[to];
      const auto received = reinterpret_cast<const int64_t*>(of(to) + 1)[size + from];
      if (sent != received)
        differ(from, to,
            c10::str(": rank ", from, " sends ", sent, " elements to rank ", to, ", which expects ", received));
    }
}

} // namespace openreg
