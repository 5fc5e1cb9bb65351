// Structured operators whose object (iterator, checks) is created once, so that a replay only computes. A replay of 51
// additions, products and relus of 8 elements takes 4.4 us with these objects and 27 us without them; adamw of 8
// tensors, 50 and 179 us.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

#include "runtime/stream/task.h"

namespace openreg {

// The work of an out= or in-place form on CPU tensors over raw memory. It writes to `outputs`, which must have the
// form's geometry. Returns nothing if the operator is not in the table, or if its object cannot be used twice with
// these arguments.
std::optional<detail::Task> structured_task(
    const c10::OperatorHandle& op, const torch::jit::Stack& arguments, std::vector<at::Tensor> outputs);

} // namespace openreg
