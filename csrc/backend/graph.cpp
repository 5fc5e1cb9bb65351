#include "backend/graph.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <memory>
#include <string>

#include "backend/device_index.h"
#include "backend/identity/identity.h"
#include "runtime/device.h"
#include "runtime/memory/memory.h"
#include "runtime/process/error.h"
#include "runtime/process/fork.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

[[maybe_unused]] const bool registered = [] {
  std::string key = identity.name; // torch looks for it in upper case
  std::transform(key.begin(), key.end(), key.begin(), [](unsigned char c) { return std::toupper(c); });
  at::GraphImplRegistry()->Register(key, [](at::GraphImplArgs args) -> std::unique_ptr<at::GraphImplInterface> {
    return std::make_unique<DeviceGraph>(args);
  });
  return true;
}();

} // namespace

DeviceGraph::~DeviceGraph() {
  reset();
}

void DeviceGraph::register_generator_state(const at::Generator& generator) {
  TORCH_CHECK(generator.defined() && on_device(generator.device()),
      "register_generator_state: expected a torch.Generator on ", identity.name, ", but got one on ",
      generator.defined() ? generator.device().str() : "no device", "; make it with torch.Generator(device=...)");
  generators_.push_back(generator);
}

void DeviceGraph::capture_begin(at::MempoolId_t pool, at::GraphCaptureMode mode) {
  initialize();
  std::lock_guard lock(state_);
  TORCH_CHECK(!capturing_ && !graph_, "capture_begin: this graph has ",
      capturing_ ? "a capture that has not ended" : "been captured", "; call reset() first, or use another graph");
  const Stream stream = current_stream(current_device());
  const PoolId used = pool == at::MempoolId_t{0, 0} ? new_pool(PoolUser::kGraph) : pool;
  std::vector<const void*> generators;
  for (const auto& each : generators_) generators.push_back(each.unsafeGetGeneratorImpl());
  const auto how = mode == at::GraphCaptureMode::ThreadLocal ? CaptureMode::kThreadLocal
      : mode == at::GraphCaptureMode::Relaxed                ? CaptureMode::kRelaxed
                                                             : CaptureMode::kGlobal;
  begin_capture(stream, used, how, std::move(generators));
  stream_ = stream;
  pool_ = used;
  capturing_ = true;
}

void DeviceGraph::capture_end() {
  check_not_forked();
  std::unique_lock lock(state_);
  TORCH_CHECK(capturing_, "capture_end: no capture has begun; call capture_begin() first");
  const Stream began = stream_, stream = current_stream(began.device);
  if (stream != began) { // the program made another one current and left it so
    lock.unlock();
    reset();
    throw_device_error(error_prefix() + "a capture must end on the stream that it began on, stream " +
        std::to_string(began.id) + ", but the current one is stream " + std::to_string(stream.id) +
        "; make that one current. The capture is over, and its memory is free");
  }
  capturing_ = false;
  graph_ = end_capture(began);
  const bool empty = graph_->nodes.empty();
  lock.unlock();
  if (empty)
    TORCH_WARN(
        "The graph is empty. This usually means that the graph was attempted to be captured on wrong device or "
        "stream.");
}

void DeviceGraph::instantiate() {
  TORCH_CHECK(graph(), "instantiate: no graph has been captured; capture one first");
  TORCH_CHECK(keep_graph_,
      "instantiate: expected a graph created with keep_graph=True; others are executable when the "
      "capture ends");
}

void DeviceGraph::replay() {
  check_not_forked(); // before the locks, which another thread of the parent may have held
  const auto graph = this->graph();
  TORCH_CHECK(graph, "replay: no graph has been captured; capture one first");
  const Stream stream = current_stream(graph->device);
  std::lock_guard lock(replays_);
  if (detail::captures(stream)) return openreg::replay(graph, stream);
  if (last_ && replayed_on_ != stream) last_->block(stream);
  openreg::replay(graph, stream);
  if (stream_idle(stream)) last_.reset(); // nothing is left to wait for
  else last_.emplace(stream.device, /*timed=*/false).record(stream);
  replayed_on_ = stream;
}

void DeviceGraph::reset() {
  if (forked()) return;
  std::shared_ptr<Graph> old; // freed without the lock
  std::lock_guard lock(state_);
  old = std::move(graph_);
  if (!std::exchange(capturing_, false)) return;
  try {
    end_capture(stream_);
  } catch (const std::exception&) { // it was void, or a stream had not joined; either way it is over
  }
}

at::MempoolId_t DeviceGraph::pool() const {
  std::lock_guard lock(state_);
  TORCH_CHECK(graph_ || capturing_, "pool: no graph has been captured; capture one first");
  return pool_;
}

void DeviceGraph::debug_dump(const std::string& path) {
  const auto graph = this->graph();
  TORCH_CHECK(graph, "debug_dump: no graph has been captured; capture one first");
  if (!debug_ && !keep_graph_) {
    TORCH_WARN(
        "debug_dump: the graph is not kept. Call enable_debug_mode() before the capture, or create the graph with "
        "keep_graph=True.");
    return;
  }
  std::ofstream file(path);
  file << to_dot(*graph);
  TORCH_CHECK(file.flush(), "debug_dump: cannot write ", path);
}

} // namespace openreg
