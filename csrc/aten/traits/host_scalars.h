// Which operators take CPU scalars, 0-dim CPU tensors, beside tensors on the device.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "aten/traits/traits.h"

namespace openreg {

// Note [CPU scalars]
// The device rejects what CUDA rejects. PyTorch generates a check into each operator's CUDA wrapper: all of its tensors
// must be on one device. If native_functions.yaml turns that off (device_check: NoCheck), the kernel decides. A
// TensorIterator accepts one CPU scalar, if the operator allows any. setup.py reads both from the native_functions.yaml
// of the installed torch; traits.cpp lists the kernels that decide in another way, by operator or by argument.

// How many CPU scalars an operator takes. `name` is without the overload, such as "aten::add_". Operators that CUDA
// does not have accept any number.
CpuScalars cpu_scalars(std::string_view name);

// Throws, in CUDA's words, if one of the arguments is on the CPU and the operator's row names other arguments that may
// be.
void check_cpu_scalar(const Traits& traits, const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Throw where CUDA rejects a CPU scalar: a second one, if there is `another`; one before a tensor on the device.
void check_scalar(const char* name, bool another);
void check_scalar_is_last(const char* name);

// Sets how many CPU scalars operators accept, 0 or 1, from native_functions.yaml. Called once, at import.
void set_host_scalars(const std::unordered_map<std::string, int>& counts);

} // namespace openreg
