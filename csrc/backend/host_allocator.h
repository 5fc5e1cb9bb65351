// Pinned host memory.
#pragma once

namespace openreg {

// Whether an address lies in pinned host memory.
bool is_pinned(const void* pointer);

} // namespace openreg
