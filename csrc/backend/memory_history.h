// Allocator events and the code that caused them, for torch.openreg.memory._record_memory_history().
#pragma once

#include <torch/csrc/profiler/combined_traceback.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/memory/memory.h"

namespace openreg {

struct HistoryOptions {
  enum Context { kNone, kState, kAlloc, kAll }; // the events that get tracebacks, as in torch.cuda's function
  bool events;                                  // keep all events, not only live allocations
  Context context;
  bool cpp; // frames of C++ too
  std::size_t max_entries; // how many of a device's entries are kept, the latest
};

using Traceback = std::shared_ptr<torch::CapturedTraceback>;

struct HistoryEntry {
  MemoryAction action;
  const void* address;
  std::size_t size, free; // bytes requested, and bytes of the device free at that time
  Stream stream;
  std::int64_t time_us; // since 1970
  Traceback traceback;  // or null
};

// Starts recording with these options; nullopt stops recording and clears everything.
void record_memory_history(std::optional<HistoryOptions> options);
void clear_memory_history();

// Returns a device's entries, in chronological order.
std::vector<HistoryEntry> memory_history(int device);

// Returns the traceback of the allocation at an address, or null.
Traceback allocation_traceback(const void* address);

} // namespace openreg
