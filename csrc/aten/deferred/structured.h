// Structured operators whose object is created once, so that a replay only computes. See Note [Captured operators].
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

#include "runtime/stream/task.h"

namespace openreg {

// The work of an out= or in-place form on CPU tensors over raw memory. It writes to `outputs`, which must have the
// form's geometry. None if the operator has no fixed form for these arguments.
std::optional<detail::Task> fixed_call(
    const c10::OperatorHandle& op, const torch::jit::Stack& arguments, std::vector<at::Tensor> outputs);

} // namespace openreg
