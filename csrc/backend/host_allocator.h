// Pinned host memory.
#pragma once

#include <memory>
#include <utility>

#include "runtime/stream/task.h"

namespace openreg {

// Returns true if an address lies in pinned host memory.
bool is_pinned(const void* pointer);

// Returns where the block of pinned memory that contains an address begins and ends, or that address twice if there is
// none.
std::pair<const char*, const char*> pinned_block(const void* pointer);

// Keeps the block at this address from being reused while the result lives, even if its tensors are freed or resized.
std::shared_ptr<void> keep_pinned(const void* pointer);

// Records that the work given to `stream` uses this pinned memory, which is then reused only after that work.
void record_pinned_use(const void* pointer, Stream stream);

} // namespace openreg
