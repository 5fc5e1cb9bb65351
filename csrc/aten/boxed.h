// The boxed kernel, which runs the CPU kernel of any built-in operator on the device.
#pragma once

#include <ATen/core/boxing/BoxedKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>

namespace openreg {

// Registers the boxed kernel for one operator at the key `device`; it runs the kernel at the key `cpu`.
c10::RegistrationHandleRAII register_boxed_kernel(
    const c10::OperatorHandle& op, c10::DispatchKey cpu, c10::DispatchKey device);

// The boxed kernel for any operator. It defers the operator in async mode and in a capture: see Note [Deferred
// operators].
const c10::BoxedKernel& boxed_kernel();

// Registers the boxed kernel for every operator of the installed torch that has a CPU kernel but no device kernel yet,
// once per layout; returns how many.
int64_t register_boxed_kernels();

} // namespace openreg
