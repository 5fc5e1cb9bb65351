#include "runtime/graph/graph.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "runtime/device.h"
#include "runtime/memory/memory.h"
#include "runtime/process/error.h"
#include "runtime/process/fault.h"
#include "runtime/stream/launch.h"
#include "runtime/stream/profile.h"
#include "runtime/stream/queue.h"
#include "runtime/stream/turn.h"

namespace openreg {

using Frontier = std::vector<std::uint32_t>; // the nodes that the next node comes after

namespace detail {

struct Capture {
  std::mutex mutex;
  std::shared_ptr<Graph> graph;
  Stream origin;
  CaptureMode mode;
  pthread_t thread;
  std::vector<const void*> generators;
  std::vector<std::pair<Stream, Frontier>> streams; // the captured ones, the origin first
  std::string error;                                // why it is invalid

  Frontier& frontier(Stream stream) {
    return std::find_if(streams.begin(), streams.end(), [&](const auto& each) { return each.first == stream; })->second;
  }
};

struct CapturedPoint {
  std::weak_ptr<Capture> capture;
  Frontier after;
};

} // namespace detail

namespace {

using detail::Capture;
using detail::CapturedPoint;

// The process's captures, by stream. A reader holds its own reference, because another thread may end the capture in
// the meantime.
std::mutex captures_mutex;
struct Captures {
  std::vector<std::shared_ptr<Capture>> all;
  std::array<std::shared_ptr<Capture>, kMaxDevices * kStreams> by_stream;
};
Captures& all_captures() {
  static auto* instance = new Captures; // leaked: a thread may use it after main()
  return *instance;
}

std::shared_ptr<Capture>& captured_at(Stream stream) {
  return all_captures()
      .by_stream[static_cast<std::size_t>(stream.device) * kStreams + static_cast<std::size_t>(stream.id)];
}

thread_local int not_captured = 0;

std::shared_ptr<Capture> capture_of(Stream stream) {
  if (!(detail::attention.load() & detail::kCaptureBit) || not_captured || detail::in_work()) return nullptr;
  std::lock_guard lock(captures_mutex);
  return captured_at(stream);
}

std::atomic<AroundReplay> around_replay{nullptr};
std::atomic<WhereIsCaller> ask_where{nullptr};

std::string not_permitted(const std::string& what) {
  return error_prefix() + "operation not permitted when stream is capturing: " + what;
}

[[noreturn]] void refuse(Capture& capture, const std::string& what, const std::string& why) {
  const std::string line = where_is_caller();
  const std::string message = not_permitted(what) + (line.empty() ? "" : " at " + line) + ": " + why;
  {
    std::lock_guard lock(capture.mutex);
    if (capture.error.empty()) capture.error = message;
  }
  throw_device_error(message + " The capture is now invalid.");
}

void check_valid(Capture& capture, const char* what) {
  std::lock_guard lock(capture.mutex);
  if (capture.error.empty()) return;
  throw_device_error(error_prefix() + "operation failed due to a previous error during capture: " + what +
      " was launched on a stream whose capture is invalid. The error was: " + capture.error);
}

std::string node_name(const openreg_site& site) {
  return site.name ? site.name : site.function ? site.function : "work";
}

void add(std::vector<std::uint32_t>& nodes, const std::vector<std::uint32_t>& more) {
  nodes.insert(nodes.end(), more.begin(), more.end());
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
}

// The first capture whose mode forbids the calling thread to do what may break it, or null.
std::shared_ptr<Capture> forbidding() {
  if (!(detail::attention.load() & detail::kCaptureBit) || not_captured || detail::in_work()) return nullptr;
  std::lock_guard lock(captures_mutex);
  for (const auto& each : all_captures().all) {
    const bool own = pthread_equal(each->thread, pthread_self());
    if (own ? each->mode != CaptureMode::kRelaxed : each->mode == CaptureMode::kGlobal) return each;
  }
  return nullptr;
}

} // namespace

Graph::Graph(int device, PoolId pool) : device(device), pool(pool) {
  use(device);
}

Graph::~Graph() {
  nodes.clear();
  kept.clear();
  for (const int each : devices) release_pool(each, pool, PoolUser::kGraph);
}

void Graph::use(int device) {
  if (std::find(devices.begin(), devices.end(), device) != devices.end()) return;
  retain_pool(device, pool, PoolUser::kGraph);
  devices.push_back(device);
}

void begin_capture(Stream stream, PoolId pool, CaptureMode mode, std::vector<const void*> generators) {
  check_stream(stream);
  check_usable(stream.device);
  if (stream.id == 0)
    throw_device_error(error_prefix() +
        "a graph must be captured on a stream other than the default one. Make one current with `with "
        "torch.openreg.stream(torch.openreg.Stream()):`. A replay may run on any stream.");
  auto capture = std::make_shared<Capture>();
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = pthread_self();
  capture->generators = std::move(generators);
  capture->streams = {{stream, {}}};
  capture->graph = std::make_shared<Graph>(stream.device, pool); // before the lock: it takes the lock of the memory
  std::lock_guard lock(captures_mutex);
  if (captured_at(stream))
    throw_device_error(error_prefix() + "the current stream is already being captured; end that capture first");
  for (const auto& each : all_captures().all)
    if (each->graph->pool == pool && each->graph->device == stream.device)
      throw_device_error(error_prefix() + "a capture that has not ended uses this memory pool; use another pool");
  captured_at(stream) = capture;
  all_captures().all.push_back(std::move(capture));
  detail::attention.fetch_or(detail::kCaptureBit);
}

std::shared_ptr<Graph> end_capture(Stream stream) {
  std::shared_ptr<Capture> capture;
  {
    std::lock_guard lock(captures_mutex);
    capture = captured_at(stream);
    if (!capture || capture->origin != stream) {
      const bool other = capture != nullptr;
      throw_device_error(other
              ? error_prefix() + "a capture must end on the stream that it began on; make that one current"
              : error_prefix() +
                  "the current stream is not captured; capture_end() must be called on the stream on "
                  "which "
                  "capture_begin() was");
    }
    for (const auto& [each, frontier] : capture->streams) captured_at(each) = nullptr;
    std::erase(all_captures().all, capture);
    if (all_captures().all.empty()) detail::attention.fetch_and(~detail::kCaptureBit);
  }
  std::lock_guard lock(capture->mutex);
  auto graph = std::move(capture->graph);
  if (!capture->error.empty())
    throw_device_error(error_prefix() + "operation failed due to a previous error during capture. " + capture->error);
  if (capture->mode != CaptureMode::kRelaxed && !pthread_equal(capture->thread, pthread_self()))
    throw_device_error(
        error_prefix() + "a capture must end on the thread that it began on, unless its mode is relaxed");
  // The nodes that the end of the origin comes after, directly or indirectly.
  std::vector<bool> joined(graph->nodes.size());
  for (const auto last : capture->streams.front().second) joined[last] = true;
  for (std::size_t i = graph->nodes.size(); i-- > 0;)
    if (joined[i])
      for (const auto before : graph->nodes[i].after) joined[before] = true;
  for (std::size_t i = 0; i < joined.size(); ++i) {
    if (joined[i]) continue;
    const GraphNode& node = graph->nodes[i];
    throw_device_error(error_prefix() + "capturing stream has unjoined work: " + node_name(node.site) +
        (node.where.empty() ? "" : " at " + node.where) + " was captured on stream " + std::to_string(node.stream.id) +
        " of " + device_name(node.stream.device) +
        ", and the capture's stream has not waited for it. Call capture_stream.wait_stream(other) before the end.");
  }
  return graph;
}

bool is_capturing(Stream stream) noexcept {
  if (!(detail::attention.load() & detail::kCaptureBit)) return false;
  std::lock_guard lock(captures_mutex);
  return captured_at(stream) != nullptr;
}

namespace {

bool is_captured(Stream stream) noexcept {
  return !not_captured && !detail::in_work() && is_capturing(stream);
}

} // namespace

bool detail::in_capture() noexcept {
  if (!(attention.load() & kCaptureBit)) return false;
  std::lock_guard lock(captures_mutex);
  return std::any_of(all_captures().all.begin(), all_captures().all.end(),
      [](const auto& each) { return pthread_equal(each->thread, pthread_self()); });
}

namespace {

PoolId pool_of_capture(Stream stream) noexcept {
  const auto capture = capture_of(stream);
  if (!capture) return {};
  std::lock_guard lock(capture->mutex);
  if (!capture->graph) return {};
  capture->graph->use(stream.device);
  return capture->graph->pool;
}

bool capture_launch(Stream stream, const openreg_site& site, const openreg_work& work, void* context) {
  if (const auto capture = capture_of(stream)) {
    detail::capture(stream, site, detail::Task(work, context), {});
    return true;
  }
  if (not_captured || detail::in_work()) return false;
  std::shared_ptr<Capture> forbids;
  {
    std::lock_guard lock(captures_mutex);
    for (const auto& each : all_captures().all)
      if (each->mode == CaptureMode::kGlobal && !pthread_equal(each->thread, pthread_self())) forbids = each;
  }
  if (forbids)
    refuse(*forbids, node_name(site),
        "another thread captures a graph in the mode \"global\", in which only that thread may launch work. Wait for "
        "the end of the capture, or capture with capture_error_mode=\"thread_local\".");
  return false;
}

} // namespace

void detail::capture(Stream stream, const openreg_site& site, Task work, std::vector<MemoryUse> uses) {
  const auto capture = capture_of(stream);
  if (!capture) throw std::logic_error("openreg: expected a stream that is being captured");
  check_valid(*capture, node_name(site).c_str());
  std::string line = where_is_caller();
  std::lock_guard lock(capture->mutex);
  if (!capture->graph) return; // it has just ended
  auto& nodes = capture->graph->nodes;
  Frontier& frontier = capture->frontier(stream);
  const bool declared = !uses.empty();
  nodes.push_back({std::move(work), site, stream, std::move(line), frontier, std::move(uses), declared});
  frontier = {static_cast<std::uint32_t>(nodes.size() - 1)};
}

void detail::keep_in_capture(Stream stream, std::shared_ptr<void> kept) {
  if (const auto capture = capture_of(stream)) {
    std::lock_guard lock(capture->mutex);
    if (capture->graph) capture->graph->kept.push_back(std::move(kept));
  }
}

std::size_t detail::add_replay_point(Stream stream, ReplayPoint point) {
  const auto capture = capture_of(stream);
  if (!capture) throw std::logic_error("openreg: expected a stream that is being captured");
  std::lock_guard lock(capture->mutex);
  if (!capture->graph) return 0; // it has just ended
  capture->graph->points.push_back(std::move(point));
  return capture->graph->points.size() - 1;
}

bool detail::is_kept_in_capture(Stream stream, const void* kept) noexcept {
  const auto capture = capture_of(stream);
  if (!capture) return false;
  std::lock_guard lock(capture->mutex);
  return capture->graph && std::any_of(capture->graph->kept.begin(), capture->graph->kept.end(), [&](const auto& each) {
    return each.get() == kept;
  });
}

void detail::draw_in_capture(Stream stream, const std::shared_ptr<ReplayedDraws>& draws) {
  const auto capture = capture_of(stream);
  if (!capture) return;
  std::lock_guard lock(capture->mutex);
  if (!capture->graph) return;
  auto& all = capture->graph->draws;
  if (std::find(all.begin(), all.end(), draws) == all.end()) all.push_back(draws);
}

bool detail::draws_in_capture(Stream stream, const ReplayedDraws* draws) noexcept {
  const auto capture = capture_of(stream);
  if (!capture) return false;
  std::lock_guard lock(capture->mutex);
  return capture->graph &&
      std::any_of(capture->graph->draws.begin(), capture->graph->draws.end(),
          [&](const auto& each) { return each.get() == draws; });
}

bool detail::has_generator(Stream stream, const void* generator) noexcept {
  const auto capture = capture_of(stream);
  return capture &&
      std::find(capture->generators.begin(), capture->generators.end(), generator) != capture->generators.end();
}

void detail::refuse_capture(Stream stream, const std::string& what, const std::string& why) {
  if (const auto capture = capture_of(stream)) {
    check_valid(*capture, what.c_str());
    refuse(*capture, what, why);
  }
  throw_device_error(not_permitted(what) + ": " + why);
}

namespace {

void check_call(const char* what, Stream stream) {
  for (std::int64_t id = 0; id < static_cast<std::int64_t>(kStreams); ++id) {
    if (stream.device == kAnyDevice || (stream.id >= 0 && stream.id != id)) continue;
    if (const auto capture = capture_of({stream.device, id}))
      refuse(*capture, what,
          "the stream is being captured, and none of its work has run. Do it before or after the capture.");
  }
  if (const auto capture = forbidding())
    refuse(*capture, what,
        pthread_equal(capture->thread, pthread_self())
            ? "the host must not wait for the device or query it while it captures a graph. Do it before or after the "
              "capture."
            : "another thread captures a graph in the mode \"global\", in which no thread may wait for the device or "
              "query it. Wait for the end of the capture, or capture with capture_error_mode=\"thread_local\".");
}

std::shared_ptr<const CapturedPoint> point_of_capture(Stream stream) {
  const auto capture = capture_of(stream);
  if (!capture) return nullptr;
  std::lock_guard lock(capture->mutex);
  return std::make_shared<const CapturedPoint>(CapturedPoint{capture, capture->frontier(stream)});
}

void join_capture(const CapturedPoint& point, Stream stream) {
  const auto capture = point.capture.lock();
  const auto own = capture_of(stream);
  {
    std::lock_guard lock(captures_mutex);
    const bool active =
        capture && std::find(all_captures().all.begin(), all_captures().all.end(), capture) != all_captures().all.end();
    if (active && (!own || own == capture)) {
      std::lock_guard inner(capture->mutex);
      if (!own) {
        captured_at(stream) = capture;
        capture->streams.push_back({stream, point.after});
      } else add(capture->frontier(stream), point.after);
      return;
    }
  }
  const char* why = "the event was recorded in another capture. Record it again on a stream of this one.";
  if (own) refuse(*own, "a wait for an event", why);
  throw_device_error(error_prefix() +
      "cannot wait for an event of a capture that has ended: none of its work has run. Record the event after the "
      "replay.");
}

const bool watches_captures = [] {
  detail::capture_watcher = {
      .captures = &is_captured,
      .in_capture = &detail::in_capture,
      .pool = &pool_of_capture,
      .launch = &capture_launch,
      .add = [](Stream stream, const openreg_site& site,
                 detail::Task work) { detail::capture(stream, site, std::move(work), {}); },
      .refuse = &detail::refuse_capture,
      .check_host_call = &check_call,
      .point = &point_of_capture,
      .join = &join_capture,
  };
  return true;
}();

} // namespace

detail::NotCaptured::NotCaptured() noexcept {
  ++not_captured;
}
detail::NotCaptured::~NotCaptured() {
  --not_captured;
}

void set_where_is_caller(WhereIsCaller where) noexcept {
  ask_where = where;
}

std::string where_is_caller() {
  const auto ask = ask_where.load();
  return ask ? ask() : std::string();
}

// ---- replay ----

void set_around_replay(AroundReplay around) noexcept {
  around_replay = around;
}

namespace {

using Points = std::vector<std::shared_ptr<void>>; // what a graph's replay points returned, by number
thread_local const Points* walked_points = nullptr;

// One replay of a graph, as work.
struct Walk {
  std::shared_ptr<const Graph> graph;
  Stream stream;
  std::vector<MemoryCopy> before, after;
  Points points;
  std::optional<std::size_t> nested; // for a node of another graph: the point that returns its points

  void operator()() const {
    copy(before);
    if (const auto around = around_replay.load())
      around([](void* self) { static_cast<const Walk*>(self)->walk(); }, const_cast<Walk*>(this));
    else walk();
    copy(after);
  }

  void copy(const std::vector<MemoryCopy>& copies) const {
    for (const auto& [to, from, bytes] : copies) {
      const Site site("Memcpy DtoD (Device -> Device)", Site::kCopy, bytes);
      const detail::Profiled profiled(detail::profiling(), stream, site);
      std::memcpy(to, from, bytes);
    }
  }

  void walk() const {
    const Points* mine = nested ? static_cast<const Points*>(detail::replay_point(*nested)) : &points;
    struct Restore {
      const Points* before;
      ~Restore() { walked_points = before; }
    } restore{std::exchange(walked_points, mine)};
    const GraphNode* at = nullptr;
    try {
      for (const GraphNode& node : graph->nodes) {
        at = &node;
        const auto attention = detail::attention.load(std::memory_order_relaxed);
        if (attention & (detail::kFaultBit | detail::kProfileBit)) [[unlikely]] {
          if ((attention & detail::kFaultBit) && detail::kernel_fails(stream, node.site, /*here=*/true)) continue;
          const detail::Profiled profiled(attention & detail::kProfileBit, stream, node.site);
          const_cast<detail::Task&>(node.work)();
        } else const_cast<detail::Task&>(node.work)();
      }
    } catch (const NodeError&) {
      throw;
    } catch (const std::exception& error) {
      if (is_device_error(error)) throw;
      const std::string what = error.what();
      throw std::runtime_error(error_prefix() + what.substr(0, what.find("\nException raised from")) + "\nIn " +
          node_name(at->site) + ", a node of a graph" + (at->where.empty() ? "" : ", captured at " + at->where));
    }
  }
};

} // namespace

void* detail::replay_point(std::size_t number) noexcept {
  return walked_points ? (*walked_points)[number].get() : nullptr; // its capture ended while another thread launched it
}

std::vector<Ticket> ReplayedDraws::unfinished() {
  std::lock_guard lock(mutex_);
  std::erase_if(replays_, [](const Ticket& each) { return done(each); });
  pending_.store(!replays_.empty(), std::memory_order_release);
  return replays_;
}

void ReplayedDraws::wait() {
  for (const Ticket& each : unfinished()) detail::wait_for(each);
  unfinished();
}

void ReplayedDraws::come_before(Stream stream) {
  if (!pending()) return;
  for (const Ticket& each : unfinished())
    if (each.stream != stream) detail::queue_wait(stream, each, Site("wait for random numbers", Site::kWait));
}

void ReplayedDraws::launched(Stream stream) {
  if (stream_idle(stream)) return;
  std::lock_guard lock(mutex_);
  std::erase_if(replays_, [&](const Ticket& each) { return each.stream == stream || done(each); });
  replays_.push_back(ticket(stream));
  pending_.store(true, std::memory_order_release);
}

void replay(
    std::shared_ptr<const Graph> graph, Stream stream, std::vector<MemoryCopy> before, std::vector<MemoryCopy> after) {
  const HostCall call("openregGraphLaunch");
  check_usable(stream.device);
  const auto draws = graph->draws;
  const bool captured = detail::captures(stream);
  for (const auto& each : draws)
    if (captured) detail::draw_in_capture(stream, each);
    else if (!detail::in_work()) each->come_before(stream);
  Walk walk{std::move(graph), stream, std::move(before), std::move(after), {}, {}};
  const auto launch = [](const Graph& launched, Stream stream) {
    Points points;
    for (const ReplayPoint& each : launched.points) points.push_back(each(stream));
    return points;
  };
  if (!captured) walk.points = launch(*walk.graph, stream);
  else if (!walk.graph->points.empty())
    walk.nested = detail::add_replay_point(stream,
        [launch, inner = walk.graph](Stream stream) { return std::make_shared<Points>(launch(*inner, stream)); });
  try {
    detail::launch_graph(stream, Site("graph"), impl::WorkOf<Walk>::table, &walk, walk.graph->nodes.size());
  } catch (const NodeError& error) {
    std::rethrow_exception(error.error);
  } catch (const std::exception& error) {
    if (is_device_error(error)) throw;
    throw_device_error(error.what());
  }
  for (const auto& each : draws)
    if (!captured) each->launched(stream);
}

std::string to_dot(const Graph& graph) {
  std::ostringstream out;
  const auto quoted = [](std::string text) {
    for (std::size_t i = 0; (i = text.find_first_of("\"\\", i)) != std::string::npos; i += 2) text.insert(i, "\\");
    return text;
  };
  out << "digraph \"" << device_name(graph.device) << "\" {\n  node [shape=box];\n";
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const GraphNode& node = graph.nodes[i];
    out << "  n" << i << " [label=\"" << i << ": " << quoted(node_name(node.site));
    if (!node.where.empty()) out << "\\n" << quoted(node.where);
    out << "\\nstream " << node.stream.id << " of " << device_name(node.stream.device) << "\"];\n";
  }
  for (std::size_t i = 0; i < graph.nodes.size(); ++i)
    for (const auto before : graph.nodes[i].after) out << "  n" << before << " -> n" << i << ";\n";
  out << "}\n";
  return out.str();
}

} // namespace openreg
