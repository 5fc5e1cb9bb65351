// What the interface for other programs (openreg/c_api.h) asks of the backend.
#pragma once

#include "runtime/process/error.h"

namespace openreg {

// Throws the type that torch has for OutOfMemory; OutOfMemory itself is thrown until it is set.
void set_memory_error(ThrowError thrower) noexcept;

} // namespace openreg
