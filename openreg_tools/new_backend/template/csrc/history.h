// The history of device memory, for torch.acme.memory._snapshot(). Rung 9.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <memory>
#include <vector>

namespace acme {

struct HistoryEntry {
  const char* action; // as in torch.cuda.memory._snapshot(): "alloc", "free_completed", "oom"
  void* address;
  size_t size;
  c10::Stream stream;
  int64_t time_us;
  std::shared_ptr<torch::CapturedTraceback> frames; // of an allocation
};

void record_history(bool on); // also forgets what was recorded
void keep_history(const char* action, void* address, size_t size, c10::Stream stream);
std::vector<HistoryEntry> history();

} // namespace acme
