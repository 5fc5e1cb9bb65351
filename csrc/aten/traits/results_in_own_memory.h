// Arguments that a CPU kernel cannot use in place: out= results, and inputs that it reads as if they were contiguous.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace openreg {

// Returns true if an operator has results to write to: the `out=` arguments of its schema.
bool takes_results(const c10::FunctionSchema& schema);

// Calls `op` with results in their own memory and copies them to their destination; returns false, with nothing
// changed, if the kernel can write there itself. See Note [Results in their own memory].
bool call_with_own_memory(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The arguments of `op` that its CPU kernel reads as if they were contiguous, by their positions.
std::vector<size_t> read_as_contiguous(const c10::OperatorHandle& op);
// Replaces each of these arguments that is a strided tensor on the device with a contiguous one.
void make_contiguous(const std::vector<size_t>& which, const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace openreg
