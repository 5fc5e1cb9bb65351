// Pinned host memory.
#pragma once

#include <memory>
#include <utility>

#include "runtime/stream/task.h"

namespace openreg {

// Whether an address lies in pinned host memory.
bool is_pinned(const void* pointer);

// The first and the last address of the block of pinned memory that contains an address; twice that address if there is
// none.
std::pair<const char*, const char*> pinned_block(const void* pointer);

// While the result lives, the block at this address is not reused, even if its tensors are freed or resized.
std::shared_ptr<void> keep_pinned(const void* pointer);

// Records that the work given to `stream` uses this pinned memory: once freed, it is reused only after that work.
void record_pinned_use(const void* pointer, Stream stream);

} // namespace openreg
