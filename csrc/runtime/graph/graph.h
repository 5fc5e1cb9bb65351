// Graphs: the work of streams, recorded once and replayed without the host.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/memory/private_pools.h"
#include "runtime/stream/stream.h"
#include "runtime/stream/task.h"
#include "runtime/stream/watchers.h"

namespace openreg {

// Note [Capture]
// While a stream is captured, launch() appends the work to a graph, as a node that owns its arguments, and runs
// nothing. run(), which needs the result immediately, and every wait of the host raise. Memory comes from the graph's
// private pool, so addresses stay valid. Another stream joins the capture when it waits for an event that was recorded
// on a captured stream, and must be joined back in the same way before the end. Work keeps its order: a node comes
// after the last node of its stream and after the events that the stream has waited for. Work inside work runs
// immediately, as always, and is not captured. An error invalidates the capture: launches on its streams raise until
// end_capture(), which also raises, and frees everything. A replay is one launch. It walks the nodes in the order of
// their capture, which always respects their edges.
enum class CaptureMode {
  kGlobal,      // no thread may do what can break a capture: wait for the device, query events, launch elsewhere
  kThreadLocal, // the capturing thread may not
  kRelaxed      // any thread may, except on a captured stream
};

// Memory that a node reads or writes.
struct MemoryUse {
  const void* address;
  std::size_t bytes;
  bool written;
};

// Called when a replay is launched on a stream; returns an object that the replay needs and keeps until its end: see
// Note [External events].
using ReplayPoint = std::function<std::shared_ptr<void>(Stream)>;

struct GraphNode {
  detail::Task work;
  openreg_site site;
  Stream stream;
  std::string where;                // the line of the program that launched it, or nothing
  std::vector<std::uint32_t> after; // nodes that come first
  std::vector<MemoryUse> uses;      // the known ones
  bool declared = false;            // whether these are all
};

// Note [Replayed draws]
// A replay draws random numbers as if at its launch, but the state in which it leaves a generator is known only after
// it has run. So each generator has a ReplayedDraws: before the host uses the generator, it waits for the replays that
// draw from it, and a replay on another stream comes after them. If two threads launch such replays at the same time,
// the replays have no order, and their draws mix.
class ReplayedDraws {
 public:
  bool pending() const noexcept { return pending_.load(std::memory_order_acquire); }
  void wait(); // until all have run; throws what signal handlers raise, but no device errors
  // Called before and after a replay is launched on `stream`.
  void come_before(Stream stream);
  void launched(Stream stream);

 private:
  std::vector<Ticket> unfinished();
  std::mutex mutex_;
  std::atomic<bool> pending_{false};
  std::vector<Ticket> replays_; // at most one per stream
};

class Graph {
 public:
  Graph(int device, PoolId pool);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void use(int device); // keeps its pool on this device too

  const int device;
  const PoolId pool;
  std::vector<GraphNode> nodes;
  std::vector<std::shared_ptr<void>> kept; // what the nodes need; freed with the graph
  std::vector<int> devices;                // on which it has memory
  std::vector<ReplayPoint> points;
  std::vector<std::shared_ptr<ReplayedDraws>> draws; // of the generators that it draws from
};

// Begins to capture `stream`. `generators`: the ones besides the defaults that its random operators may draw from.
void begin_capture(Stream stream, PoolId pool, CaptureMode mode, std::vector<const void*> generators = {});
// Ends the capture that began on `stream` and returns its graph. The capture is over whether or not this throws.
std::shared_ptr<Graph> end_capture(Stream stream);
// Returns true if a stream is captured, by its own capture or by one that it has joined.
bool is_capturing(Stream stream) noexcept;

// Returns true if work that is launched on the device's current stream is captured. One load while nothing is.
inline bool capturing(int device) noexcept {
  return detail::any_capture() && detail::captures(detail::thread_stream(device));
}

// Calls `walk(argument)`, which runs the nodes, with what they need set up around it. Set once, by the backend.
using AroundReplay = void (*)(void (*walk)(void*), void* argument);
void set_around_replay(AroundReplay around) noexcept;
struct MemoryCopy {
  void* to;
  const void* from;
  std::size_t bytes;
};
// Launches a graph on `stream`, with copies before and after it, or captures all of this as one node.
void replay(std::shared_ptr<const Graph> graph, Stream stream, std::vector<MemoryCopy> before = {},
    std::vector<MemoryCopy> after = {});

// Names the line of the program that the calling thread is in, "train.py:12". Set once, by the bindings.
using WhereIsCaller = std::string (*)();
void set_where_is_caller(WhereIsCaller where) noexcept;
std::string where_is_caller();

// The nodes and edges in the language of Graphviz.
std::string to_dot(const Graph& graph);

namespace detail {

// Returns true if the calling thread captures any stream.
bool in_capture() noexcept;
// Adds a node to the capture of the stream. `uses`: the memory that it uses, or nothing if that is unknown.
void capture(Stream stream, const openreg_site& site, Task work, std::vector<MemoryUse> uses);
// Keeps something as long as the graph.
void keep_in_capture(Stream stream, std::shared_ptr<void> kept);
// Adds a point to the graph and returns its number. The node uses the number to get what the point returned at launch.
std::size_t add_replay_point(Stream stream, ReplayPoint point);
void* replay_point(std::size_t number) noexcept;
bool is_kept_in_capture(Stream stream, const void* kept) noexcept;
// Records that the graph draws from a generator; returns whether it has drawn so far.
void draw_in_capture(Stream stream, const std::shared_ptr<ReplayedDraws>& draws);
bool draws_in_capture(Stream stream, const ReplayedDraws* draws) noexcept;
bool has_generator(Stream stream, const void* generator) noexcept;

// Throws that a capture does not permit `what`, such as "aten::nonzero" or "synchronize", and invalidates the capture.
[[noreturn]] void refuse_capture(Stream stream, const std::string& what, const std::string& why);

// While one lives, the calling thread's work is not captured, and its memory does not come from a capture's pool.
class NotCaptured {
 public:
  NotCaptured() noexcept;
  ~NotCaptured();
  NotCaptured(const NotCaptured&) = delete;
  NotCaptured& operator=(const NotCaptured&) = delete;
};

} // namespace detail
} // namespace openreg
