// Checks of arguments that a CPU kernel uses without a check.
#pragma once

#include "aten/traits/traits.h"

namespace openreg {

// Note [Unchecked arguments]
// Some CPU kernels read or write wherever an index, a dimension or a length says, read more numbers than a list has, or
// assume that one tensor has the shape of another. On the device, such a call raises. Shapes and lists are
// checked at the call. Values in tensors are known only when the kernel runs, so their check is a part of what runs:
// a call that needs it is not queued, and a replay checks what it reads. Only nll_loss_backward is queued with its
// check, as the loss is, whose kernel checks. The indices inside a sparse tensor are not checked here, but where it is
// made: see torch.sparse.check_sparse_tensor_invariants.

// Checks of values in tensors, which read tensors on the CPU.
Check check_bags, check_classes, check_compressed, check_ctc, check_embedding, check_offsets, check_pooling,
    check_quantized_bags, check_rows, check_segments, check_sparse_product;

// Checks of shapes and lists.
Check check_attention, check_batch_norm, check_distances, check_fractional, check_grid, check_layer_norm, check_lists,
    check_margins, check_pairs, check_pivots, check_planes, check_reflection, check_softmax, check_transform,
    check_weight_norm;

// Calls that need no check of values: the gradient counts no indices, or the loss is reduced.
namespace conditions {
Condition embedding_ignores_counts, nll_loss_backward_reduces;
} // namespace conditions

// The check of the shapes of native_layer_norm_backward; `dims`: those of normalized_shape.
void expect_layer_norm(
    const at::Tensor& grad_out, const at::Tensor& input, size_t dims, const at::Tensor& mean, const at::Tensor& rstd);

} // namespace openreg
