// Private pools: memory of a device that only some allocations get.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "runtime/device.h"

namespace openreg {

// Note [Private pools]
// A private pool holds memory that no other allocation gets: the memory of graphs, whose addresses must stay valid, and
// of torch.openreg.MemPool. Allocations come from it while their stream is captured into a graph of the pool, and
// inside use_pool() on the calling thread. As in CUDA, each stream has its own free blocks in a pool. A pool lives as
// long as it has a user. Afterwards its free memory returns to the general pool; memory that tensors still occupy
// follows when they are freed.
using PoolId = std::pair<unsigned long long, unsigned long long>; // c10::MempoolId_t; {0, 0}: no private pool
// Graphs and MemPools are counted separately: empty_cache() may return only the memory of a pool without graphs.
enum class PoolUser { kPool, kGraph };

namespace detail {

// A device's private pools and their users. The part of a pool that one stream allocates has a number, from kStreams
// on, which owns pages and blocks like a stream's number.
class PrivatePools {
 public:
  struct Part {
    PoolId pool;
    std::int64_t stream;
    std::size_t live; // allocations
  };
  struct Users {
    int pools = 0, graphs = 0;
    int& of(PoolUser user) { return user == PoolUser::kGraph ? graphs : pools; }
  };

  static bool is_private(std::int64_t owner) { return owner >= static_cast<std::int64_t>(kStreams); }
  Part& part(std::int64_t owner) { return parts_[static_cast<std::size_t>(owner) - kStreams]; }
  std::int64_t stream_of(std::int64_t owner) const {
    return is_private(owner) ? parts_[static_cast<std::size_t>(owner) - kStreams].stream : owner;
  }
  PoolId pool_of(std::int64_t owner) const {
    return is_private(owner) ? parts_[static_cast<std::size_t>(owner) - kStreams].pool : PoolId{};
  }
  // The owner after the last part.
  std::int64_t end() const { return static_cast<std::int64_t>(kStreams + parts_.size()); }
  // The number of a stream's part; the first number that is free for a new part.
  std::int64_t owner_of(std::int64_t stream, PoolId pool);

  void retain(PoolId pool, PoolUser user) { ++users_[pool].of(user); }
  // True if that was the last user.
  bool release(PoolId pool, PoolUser user) noexcept;
  Users users(PoolId pool) const noexcept;
  bool used(PoolId pool) const { return users_.contains(pool); }

 private:
  std::vector<Part> parts_;
  std::map<PoolId, Users> users_;
};

} // namespace detail
} // namespace openreg
