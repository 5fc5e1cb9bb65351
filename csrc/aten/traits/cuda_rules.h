// What CUDA does at a call of an ATen operator: it makes the host wait, which torch.openreg.set_sync_debug_mode
// reports, or has no deterministic kernel, which torch.use_deterministic_algorithms refuses.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace openreg {

// Whether it does so at a call, given its arguments, the first of which is at this place on the stack.
using CudaRule = bool (*)(const c10::IValue* arguments);

// Null for an operator that never waits. Those that copy between host and device, and _local_scalar_dense, report
// themselves.
CudaRule synchronizes_on_cuda(const c10::OperatorHandle& op);

// Null for an operator that is deterministic on CUDA, or whose CPU kernel refuses by itself.
CudaRule nondeterministic_on_cuda(const c10::OperatorHandle& op);

// Raises or warns, if torch.use_deterministic_algorithms asks for it.
void refuse_nondeterministic(const std::string& op);

} // namespace openreg
