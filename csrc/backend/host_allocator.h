// Pinned host memory.
#pragma once

#include "../runtime/work.h"

namespace openreg {

// Whether an address lies in pinned host memory.
bool is_pinned(const void* pointer);

// Records that the work given to `stream` uses this pinned memory: once freed, it is reused only after that work.
void record_pinned_use(const void* pointer, Stream stream);

} // namespace openreg
