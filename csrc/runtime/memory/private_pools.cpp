#include "runtime/memory/private_pools.h"

namespace openreg::detail {

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

} // namespace openreg::detail
