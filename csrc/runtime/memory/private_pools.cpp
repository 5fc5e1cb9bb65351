#include "runtime/memory/private_pools.h"

#include <array>
#include <atomic>
#include <mutex>

#include "runtime/device.h"
#include "runtime/graph/graph.h"
#include "runtime/memory/pool.h"
#include "runtime/process/fork.h"

namespace openreg {
namespace detail {

std::int64_t PrivatePools::owner_of(std::int64_t stream, PoolId pool) {
  std::size_t free = parts_.size();
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].pool == pool && parts_[i].stream == stream) return static_cast<std::int64_t>(kStreams + i);
    if (parts_[i].pool == PoolId{}) free = i;
  }
  if (free == parts_.size()) parts_.emplace_back();
  parts_[free] = {pool, stream, 0};
  return static_cast<std::int64_t>(kStreams + free);
}

bool PrivatePools::release(PoolId pool, PoolUser user) noexcept {
  const auto found = users_.find(pool);
  if (found == users_.end()) return false;
  --found->second.of(user);
  if (found->second.graphs + found->second.pools) return false;
  users_.erase(found);
  return true;
}

PrivatePools::Users PrivatePools::users(PoolId pool) const noexcept {
  const auto found = users_.find(pool);
  return found == users_.end() ? Users{} : found->second;
}

} // namespace detail

namespace {

std::atomic<unsigned long long> pools_made{0};
struct ThreadPools {
  std::array<PoolId, kMaxDevices> by_device{};
  ~ThreadPools() { // a thread may end inside use_pool()
    for (int device = 0; device < kMaxDevices; ++device)
      if (by_device[static_cast<std::size_t>(device)] != PoolId{}) use_pool(device, {});
  }
};
thread_local ThreadPools thread_pools;

} // namespace

PoolId detail::pool_for(Stream stream) {
  if (const PoolId captured = capture_pool(stream); captured != PoolId{}) return captured;
  return thread_pools.by_device[static_cast<std::size_t>(stream.device)];
}

PoolId new_pool(PoolUser user) noexcept {
  const auto number = ++pools_made;
  return user == PoolUser::kGraph ? PoolId{number, 0} : PoolId{0, number};
}

void retain_pool(int device, PoolId pool, PoolUser user) {
  check_not_forked();
  if (auto* pools = detail::memory().pools) pools[device].retain(pool, user);
}

void release_pool(int device, PoolId pool, PoolUser user) noexcept {
  if (forked()) return; // another thread of the parent may have held the lock
  if (auto* pools = detail::memory().pools) pools[device].release(pool, user);
}

int pool_users(int device, PoolId pool) noexcept {
  auto* pools = detail::memory().pools;
  return pools && !forked() ? pools[device].users(pool) : 0;
}

PoolId use_pool(int device, PoolId pool) {
  if (forked()) return {};
  static std::mutex mutex;
  static int uses = 0; // devices of threads
  std::lock_guard lock(mutex);
  const PoolId before = std::exchange(thread_pools.by_device[static_cast<std::size_t>(device)], pool);
  uses += (pool != PoolId{}) - (before != PoolId{});
  if (uses) detail::attention.fetch_or(detail::kPoolBit);
  else detail::attention.fetch_and(~detail::kPoolBit);
  return before;
}

} // namespace openreg
