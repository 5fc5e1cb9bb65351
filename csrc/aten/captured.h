// Captures ATen's operators into graphs.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>
#include <vector>

#include "../runtime/graph.h"
#include "../runtime/stream.h"
#include "cpu_call.h"

namespace openreg {

// Note [Captured operators]
// A node calls the operator's CPU kernel on CPU tensors over raw memory. Its results must lie at addresses that are
// known when the operator is captured, and nothing may be computed then. So the kernel first runs once on a scratch of
// the host's memory, in tensors like the arguments: of zeros, where it refuses those, of ones, and then of identity
// matrices. This raises what is wrong with the call, at the call, and tells what comes out: which results are arguments
// or views of them, and the geometry of those that are new. New results get memory from the graph's pool. Then the node
// has one of three forms: fixed: of the structured operators in fixed.cpp, whose object (iterator, checks) is made
// once; a replay only computes. out: of other structured operators, the out= form, which writes to the results. call:
// of all others, the operator itself; what it returns is copied to the results, whose geometry must be the same.
// Operators that return views, or change only geometry, run at once on the host. An operator whose result's shape, or
// whose program, depends on values in device memory cannot be captured, and raises. CPU scalars are constants of the
// graph. Random operators draw from their generators at each replay, and during the run on the scratch from copies.

// A call that is about to run.
struct CapturedCall {
  const c10::OperatorHandle& op;
  c10::DispatchKey target; // at which its CPU kernel is
  CpuCall& call;           // has aliases of the arguments, which are on the stack
  Stream stream;
  bool draws = false;      // random numbers without a Generator argument
  bool copies = false;     // between memories: CPU tensors are pinned memory, not constants
  std::vector<std::pair<size_t, at::Generator>> generators{}; // by argument
};

// Captures a call and puts its results in the place of the arguments on the stack.
void capture_call(const CapturedCall& captured, torch::jit::Stack* stack);

} // namespace openreg
