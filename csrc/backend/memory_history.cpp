#include "backend/memory_history.h"

#include <chrono>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "runtime/device.h"
#include "runtime/process/fork.h"

namespace openreg {
namespace {

struct History {
  std::mutex mutex;
  HistoryOptions options{};
  std::unordered_map<int, std::deque<HistoryEntry>> entries; // by device
  std::unordered_map<const void*, Traceback> holders;        // by the address of memory that is in use
};

History& history() {
  static History* instance = new History; // leaked: memory may be freed after main()
  return *instance;
}

Traceback traceback(MemoryAction action, const HistoryOptions& options) {
  const auto needed = action == MemoryAction::kAllocated ? HistoryOptions::kState
      : action == MemoryAction::kFailed                  ? HistoryOptions::kAlloc
                                                         : HistoryOptions::kAll;
  if (action == MemoryAction::kFreed || options.context < needed) return nullptr;
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/true, options.cpp);
}

void keep(MemoryAction action, const void* address, std::size_t bytes, Stream stream) {
  if (forked()) return; // another thread may have had the lock
  auto& all = history();
  const auto options = [&] {
    std::lock_guard lock(all.mutex);
    return all.options;
  }();
  // Outside our lock: it may wait for Python's.
  HistoryEntry entry{action, address, bytes, action == MemoryAction::kFailed ? free_memory(stream.device) : 0, stream,
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count(),
      traceback(action, options)};
  std::lock_guard lock(all.mutex);
  if (action == MemoryAction::kAllocated) all.holders[address] = entry.traceback;
  if (action == MemoryAction::kFreed) all.holders.erase(address);
  if (!options.events || !options.max_entries) return;
  auto& entries = all.entries[stream.device];
  entries.push_back(std::move(entry));
  while (entries.size() > options.max_entries) entries.pop_front();
}

} // namespace

void record_memory_history(std::optional<HistoryOptions> options) {
  set_memory_watcher(nullptr);
  if (!options) return clear_memory_history();
  {
    std::lock_guard lock(history().mutex);
    history().options = *options;
  }
  set_memory_watcher(&keep);
}

void clear_memory_history() {
  std::lock_guard lock(history().mutex);
  history().entries.clear();
  history().holders.clear();
}

std::vector<HistoryEntry> memory_history(int device) {
  std::lock_guard lock(history().mutex);
  const auto& entries = history().entries[device];
  return {entries.begin(), entries.end()};
}

Traceback allocation_traceback(const void* address) {
  std::lock_guard lock(history().mutex);
  const auto found = history().holders.find(address);
  return found == history().holders.end() ? nullptr : found->second;
}

} // namespace openreg
