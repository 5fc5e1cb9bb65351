// Captures ATen's operators into graphs.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>
#include <vector>

#include "aten/cpu_call.h"
#include "runtime/graph/graph.h"
#include "runtime/stream/stream.h"

namespace openreg {

// Note [Captured operators]
// A node calls the operator's CPU kernel on CPU tensors over raw memory. The addresses of its results must be known
// when the operator is captured, but the capture must not compute anything. So the kernel first runs once on scratch
// host memory, with tensors like the arguments, filled with zeros or, if it rejects those, with ones or
// identity matrices. This raises errors in the call, at the call, and shows the results: which are arguments or views
// of them, and the geometry of the new ones.
// New results get memory from the graph's pool. The node then has one of three forms. "fixed", for the structured
// operators in fixed.cpp: their object (iterator, checks) is created once, and a replay only computes. "out", for other
// structured operators: the out= form, which writes to the results. "call", for all others: the operator itself; its
// return values are copied to the results and must have the same geometry. Operators that return views, or change only
// geometry, run immediately on the host. An operator whose result shape, or whose program, depends on values in device
// memory cannot be captured, and raises. CPU scalars are constants of the graph. Random operators draw from their
// generators at each replay, and from copies of them during the scratch run.

// A call that is about to run.
struct CapturedCall {
  const c10::OperatorHandle& op;
  c10::DispatchKey target; // at which its CPU kernel is
  CpuCall& call;           // has aliases of the arguments on the stack
  Stream stream;
  bool draws = false;      // random numbers without a Generator argument
  bool copies = false;     // between memories: CPU tensors are pinned memory, not constants
  std::vector<std::pair<size_t, at::Generator>> generators{}; // by argument
};

// Captures a call and replaces the arguments on the stack with its results.
void capture_call(const CapturedCall& captured, torch::jit::Stack* stack);

} // namespace openreg
