// Arguments that a CPU kernel uses without a check.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace openreg {

// Note [Unchecked arguments]
// Some CPU kernels read or write wherever an index, a dimension or a length says, read more numbers than a list has, or
// assume that one tensor has the shape of another. On the device, such a call raises. Shapes and lists are
// checked at the call. Values in tensors are known only when the kernel runs, so their check is a part of what runs:
// a call that needs it is not queued, and a replay checks what it reads. Only nll_loss_backward is queued with its
// check, as the loss is, whose kernel checks. The indices inside a sparse tensor are not checked here, but where it is
// made: see torch.sparse.check_sparse_tensor_invariants.

// Raises if the arguments, the last on the stack, are such a call of `op`. A check of values reads tensors on the CPU.
using MissingCheck = void (*)(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// The check of values in tensors that the CPU kernel of `op` lacks, or null.
MissingCheck missing_check(const c10::OperatorHandle& op);

// The same for one call, which may need none: a loss that is reduced, or a gradient that counts no indices.
MissingCheck missing_check(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// The check of shapes and lists that it lacks, or null.
MissingCheck missing_shape_check(const c10::OperatorHandle& op);

// The check of the shapes of native_layer_norm_backward; `dims`: those of normalized_shape.
void expect_layer_norm(
    const at::Tensor& grad_out, const at::Tensor& input, size_t dims, const at::Tensor& mean, const at::Tensor& rstd);

} // namespace openreg
