#include "observer.h"

#include <pthread.h>

#include <mutex>
#include <utility>

namespace openreg {

std::atomic<bool> detail::observed{false};

namespace {

std::mutex observer_mutex;
auto& notices = *new std::vector<Notice>; // leaked: memory may be freed after main()

} // namespace

void detail::keep_notice(const char* what, const void* object, Stream stream, std::size_t bytes) noexcept {
  std::lock_guard lock(observer_mutex);
  notices.push_back({what, static_cast<std::uintptr_t>(pthread_self()), object, stream, bytes});
}

void observe(bool on) {
  std::lock_guard lock(observer_mutex);
  notices.clear();
  detail::observed.store(on);
}

std::vector<Notice> take_notices() {
  std::lock_guard lock(observer_mutex);
  return std::exchange(notices, {});
}

} // namespace openreg
