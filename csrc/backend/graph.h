// Graphs of the device as PyTorch sees them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/GraphImplInterface.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "runtime/graph/graph.h"
#include "runtime/stream/event.h"

namespace openreg {

// The graph that torch.accelerator.Graph makes. torch.openreg.Graph is this class.
class DeviceGraph final : public at::GraphImplInterface {
 public:
  explicit DeviceGraph(const at::GraphImplArgs& args = {}) : keep_graph_(args.keep_graph) {}
  ~DeviceGraph() override;

  // Lets the random operators of the next capture draw from a generator.
  void register_generator_state(const at::Generator& generator);
  void capture_begin(at::MempoolId_t pool = {0, 0}, at::GraphCaptureMode mode = at::GraphCaptureMode::Default) override;
  void capture_end() override;
  void instantiate() override;
  void replay() override;
  void reset() override;
  at::MempoolId_t pool() const override;
  void enable_debug_mode() override { debug_ = true; }
  void debug_dump(const std::string& path) override;

  // Returns the captured graph, or null. Another thread may reset() this object meanwhile; the graph lives as long as
  // the result.
  std::shared_ptr<Graph> graph() const {
    std::lock_guard lock(state_);
    return graph_;
  }

 private:
  const bool keep_graph_;
  bool debug_ = false;
  std::vector<at::Generator> generators_;
  mutable std::mutex state_; // guards the next four
  bool capturing_ = false;
  Stream stream_{-1, 0}; // the stream that it captures
  PoolId pool_{};        // the pool of the last capture
  std::shared_ptr<Graph> graph_;
  std::mutex replays_;        // guards the next two
  std::optional<Event> last_; // after the last replay; a replay on another stream waits for it
  Stream replayed_on_{-1, 0};
};

} // namespace openreg
