// The calls of ATen operators for which CUDA makes the host wait, which torch.openreg.set_sync_debug_mode reports, or
// has no deterministic kernel, which torch.use_deterministic_algorithms refuses.
#pragma once

#include <string>

#include "aten/traits/traits.h"

namespace openreg {

// What rows of traits.cpp ask about the arguments of a call.
namespace conditions {
Condition always, is_not_empty;
Condition index_has_mask, index_waits, index_put_waits, masked_fill_reads_value, index_fill_reads_value;
Condition where_moves_value, equal_compares_values, isin_sorts, mode_sorts, segment_reduce_checks_lengths;
Condition matrix_exp_reads_norms, normal_reads_std, repeat_interleave_sums;
Condition bincount_has_weights, embedding_bag_takes_max, dense_embedding_bag_takes_max, nll_loss2d_reduces;
Condition put_accumulates, scatter_has_index, scatter_multiplies;
} // namespace conditions

// Raises or warns, if torch.use_deterministic_algorithms asks for it.
void refuse_nondeterministic(const std::string& op);

} // namespace openreg
