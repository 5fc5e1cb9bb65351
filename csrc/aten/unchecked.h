// Arguments that a CPU kernel uses without a check.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace openreg {

// Note [Unchecked arguments]
// Some CPU kernels read or write wherever an index, a dimension or a length says, or read more numbers than a list has.
// On the device, such a call raises. Values in tensors are known only when the kernel runs, so the check is a part of
// what runs: these operators are never queued, and a replay checks what it reads. The indices inside a sparse tensor
// are not checked here, but where it is made: see torch.sparse.check_sparse_tensor_invariants.

// Raises if the arguments, the last on the stack, are such a call of `op`. Its tensors are on the CPU.
using MissingCheck = void (*)(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// The check that the CPU kernel of `op` lacks, or null.
MissingCheck missing_check(const c10::OperatorHandle& op);

} // namespace openreg
