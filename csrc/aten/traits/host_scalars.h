// Which operators take CPU scalars, 0-dim CPU tensors, beside tensors on the device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <string_view>
#include <unordered_map>

namespace openreg {

// Note [CPU scalars]
// The device rejects what CUDA rejects. PyTorch generates a check into each operator's CUDA wrapper: all of its tensors
// must be on one device. If native_functions.yaml turns that off (device_check: NoCheck), the kernel decides. A
// TensorIterator accepts one CPU scalar, if the operator allows any. setup.py reads both from the native_functions.yaml
// of the installed torch; host_scalars.cpp lists the kernels that decide in another way, by operator or by argument.
enum class HostScalars { kNone, kOne, kLast, kAny }; // kLast: only as the last of the inputs

// `name` is an operator without its overload, such as "aten::add_". Operators that CUDA does not have accept any
// number.
HostScalars host_scalars(std::string_view name);

// The same for the form with tensors, which a foreach operator calls for each element.
HostScalars host_scalars_of_each(const std::string& name);

// Throws where CUDA rejects an argument that is on the CPU, in its words; null for an operator without such a rule.
using ScalarCheck = void (*)(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
ScalarCheck scalar_check(const c10::OperatorHandle& op);

// Throw where CUDA rejects a CPU scalar: a second one, if there is `another`; one before a tensor on the device.
void check_scalar(const char* name, bool another);
void check_scalar_is_last(const char* name);

// Sets how many CPU scalars operators accept, 0 or 1, from native_functions.yaml. Called once, at import.
void set_host_scalars(const std::unordered_map<std::string, int>& counts);

} // namespace openreg
