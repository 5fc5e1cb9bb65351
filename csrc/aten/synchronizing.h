// Which ATen operators make the host wait for the device on CUDA, for torch.openreg.set_sync_debug_mode.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace openreg {

// Whether a call waits, given its arguments, the first of which is at this place on the stack.
using Synchronizes = bool (*)(const c10::IValue* arguments);

// Null for an operator that never waits. Those that copy between host and device, and _local_scalar_dense, report
// themselves.
Synchronizes synchronizes_on_cuda(const c10::OperatorHandle& op);

} // namespace openreg
