// What a process created by fork() may do with a device.
#pragma once

namespace openreg {

// Note [Fork]
// A child created by fork() has none of its parent's threads, so its parent's queued work never runs there. As with
// CUDA, a child whose parent had used a device cannot use one: launching and allocating throw. It may free memory,
// seed generators and exit. For these it takes no mutex, because another thread of the parent may have held it.
// Returns true in such a child.
bool forked() noexcept;
// Throws std::runtime_error in such a child.
void check_not_forked();

// Records that torch has initialized the device in this process, which it does before the first use from Python and
// which counts as a use. Throws in such a child.
void initialize();
// Returns true if this process has used the device.
bool initialized() noexcept;

// Records that this process has used a device. Called before a fork().
void note_use() noexcept;

} // namespace openreg
