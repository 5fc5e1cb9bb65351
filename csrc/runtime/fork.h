// What a process made by fork() may do with a device.
#pragma once

namespace openreg {

// Note [Fork]
// A child made by fork() has none of its parent's threads, so what the parent had queued never runs
// there. As with CUDA, a child whose parent had used a device may not use one: launching and allocating
// throw. What it may do is free what it inherited, and end.
bool forked() noexcept;
void check_not_forked(); // throws std::runtime_error in such a child

// Torch has initialized the device in this process, which it does before the first use from Python and which counts as
// using it. Throws in such a child.
void initialize();

} // namespace openreg
