// Which operators take CPU scalars, 0-dim CPU tensors, beside tensors on the device.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

namespace openreg {

// Note [CPU scalars]
// What CUDA refuses is refused here. PyTorch generates a check into the CUDA wrapper of an operator: all of its tensors
// must be on one device. Where native_functions.yaml turns that off (device_check: NoCheck), the kernel decides. A
// TensorIterator takes one CPU scalar, if the operator allows any. setup.py reads the native_functions.yaml of the
// installed torch for both; host_scalars.cpp has the kernels that decide in another way.
enum class HostScalars { kNone, kOne, kLast, kAny }; // kLast: only as the last of the inputs

// `name` is an operator's without its overload, "aten::add_". Operators that CUDA does not have take any.
HostScalars host_scalars(std::string_view name);

// Throw where CUDA refuses a CPU scalar: one more, if there is `another`; one before a tensor on the device.
void check_scalar(const char* name, bool another);
void check_scalar_is_last(const char* name);

// How many CPU scalars operators take, 0 or 1, as native_functions.yaml has it. Called once, at import.
void set_host_scalars(const std::unordered_map<std::string, int>& counts);

} // namespace openreg
