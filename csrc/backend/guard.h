// Streams between c10 and the runtime.
#pragma once

#include <c10/core/Stream.h>

#include "../runtime/work.h"

namespace openreg {

// The stream that c10 names, which anyone can make of any number; throws if there is none.
Stream checked_stream(const c10::Stream& stream);

} // namespace openreg
