// What counts as using a device before fork(); see Note [Fork] in stream.h.
#pragma once

namespace openreg {

// Torch has initialized the device in this process, which it does before the first use from Python: as with CUDA, a
// child made by fork() may not use it then. Throws in such a child.
void initialize();

} // namespace openreg
