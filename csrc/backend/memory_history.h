// Allocator events and the code that caused them, for torch.openreg.memory._record_memory_history().
#pragma once

#include <torch/csrc/profiler/combined_traceback.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../runtime/memory.h"

namespace openreg {

struct HistoryOptions {
  enum Context { kNone, kState, kAlloc, kAll }; // of what tracebacks are kept: see torch.cuda's function
  bool events;                                  // keep all events, not only the allocations that still live
  Context context;
  bool cpp; // frames of C++ too
  std::size_t max_entries; // of one device; the latest are kept
};

using Traceback = std::shared_ptr<torch::CapturedTraceback>;

struct HistoryEntry {
  MemoryAction action;
  const void* address;
  std::size_t size, free; // bytes asked for, and of the device still free then
  Stream stream;
  std::int64_t time_us; // since 1970
  Traceback traceback;  // or null
};

// Records from now on, as options say; nullopt ends that and forgets everything.
void record_memory_history(std::optional<HistoryOptions> options);
void clear_memory_history();
bool memory_history_recorded() noexcept;

// A device's entries, in the order in which they happened.
std::vector<HistoryEntry> memory_history(int device);

// Who allocated the memory at an address, or null.
Traceback allocation_traceback(const void* address);

} // namespace openreg
