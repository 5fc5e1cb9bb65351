#include "observer.h"

#include <pthread.h>

#include <mutex>
#include <utility>

#include "fork.h"

namespace openreg {

std::atomic<bool> detail::observed{false};

namespace {

std::mutex observer_mutex;
auto& notices = *new std::vector<Notice>; // leaked: memory may be freed after main()

} // namespace

void detail::keep_notice(const char* what, const void* object, Stream stream, std::size_t bytes) noexcept {
  if (forked()) return; // another thread of the parent may have held the lock
  std::lock_guard lock(observer_mutex);
  notices.push_back({what, static_cast<std::uintptr_t>(pthread_self()), object, stream, bytes});
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
