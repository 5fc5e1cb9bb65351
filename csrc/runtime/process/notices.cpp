#include "runtime/process/notices.h"

#include <pthread.h>

#include <mutex>
#include <utility>

#include "runtime/process/fork.h"

namespace openreg {

std::atomic<bool> detail::observed{false};

namespace {

std::mutex observer_mutex;
auto& notices = *new std::vector<Notice>; // leaked: memory may be freed after main()
std::atomic<AnswersQuery> observers_answer{nullptr};

} // namespace

void detail::keep_notice(NoticeKind kind, const void* object, Stream stream, std::size_t bytes) noexcept {
  if (forked()) return; // another thread of the parent may have held the lock
  std::lock_guard lock(observer_mutex);
  notices.push_back({kind, static_cast<std::uintptr_t>(pthread_self()), object, stream, bytes});
}

bool answers_query(const void* event, Stream stream) {
  if (!detail::observed.load(std::memory_order_relaxed)) [[likely]]
    return true;
  if (const auto answers = observers_answer.load(); answers && !answers(event, stream)) return false;
  notice(event ? NoticeKind::kEventSynchronized : NoticeKind::kStreamSynchronized, event, stream);
  return true;
}

void set_answers_query(AnswersQuery answers) noexcept {
  observers_answer = answers;
}

void observe(bool on) {
  std::lock_guard lock(observer_mutex);
  notices.clear();
  detail::observed.store(on);
}

std::vector<Notice> take_notices() {
  if (forked()) return {};
  std::lock_guard lock(observer_mutex);
  return std::exchange(notices, {});
}

} // namespace openreg
