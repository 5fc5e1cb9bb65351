// Defers ATen's operators: to their stream's queue in async mode, and to a graph in a capture.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <utility>
#include <vector>

#include "aten/cpu_call.h"
#include "runtime/graph/graph.h"
#include "runtime/process/attention.h"
#include "runtime/stream/stream.h"

namespace at {
struct TensorIteratorBase;
}

namespace openreg {

// Note [Deferred operators]
// A deferred call returns its results before they are computed. Async mode defers calls so that the host runs ahead; a
// capture defers them to each replay. Both take the same steps:
//  1. Collect the tensor arguments (arguments.h).
//  2. Find the geometry of the results without the arguments' values, and raise the errors of the call.
//  3. Allocate the results: on their device, or in the graph's pool.
//  4. Build one task, which calls the operator's CPU kernel on CPU tensors over raw memory: the out= form of a
//     structured operator, which writes to the results, an in-place form, or, only in a capture, the operator itself,
//     whose return values are copied to the results and must have the same geometry. Checks of values are part of it. A
//     replay of some structured operators only computes (structured.h).
//  5. Append the task to the stream's queue or to the graph. It holds none of the caller's tensors, because their last
//     reference might be dropped on a worker; the allocator's stream order, or the pool, keeps their memory.
// The two differ in step 2, and in what happens to a call that cannot be deferred.
//
// The queue takes operators whose Meta kernel tells the results' shapes, strides and dtypes and rejects bad arguments
// in microseconds: structured operators, in-place and out= forms, fills and copies. Everything else runs through
// CpuCall::run(), after a wait. Torch overrides most of its own C++ Meta kernels with Python ones, which take up to a
// millisecond; for the operators that direct.cpp names, we bypass them. A Meta kernel does not reject everything that
// the kernel rejects: unsupported dtypes, floating-point indices, an out= that overlaps itself, a number that does not
// fit. So the first call of each Signature (dtypes, sizes, strides, and the other arguments) is a trial, which runs the
// kernel on zeros in scratch memory. If the kernel raises or warns in the trial, all calls of that signature run
// inline, and raise what they raise in inline mode. The trial of a large call has two elements in each dimension: its
// Meta kernel has accepted the shapes. The errors that remain for the next synchronization depend on values in device
// memory, such as an index out of range; on CUDA, these are device-side asserts. linalg's operators inspect their own
// results and are never queued.
//
// A capture takes every operator on strided tensors or raises, so it always runs the kernel once on scratch memory,
// with tensors like the arguments, filled with zeros or, if the kernel rejects those, with ones or identity matrices.
// This shows which results are arguments or views of them, and the geometry of the new ones. Operators that return
// views, or change only geometry, run immediately on the host. An operator whose result shape, or whose program,
// depends on values in device memory raises. CPU scalars are constants of the graph. Random operators draw from their
// generators at each replay, and from copies of them during the scratch run.

inline bool queueing() noexcept {
  return (detail::attention.load(std::memory_order_relaxed) & detail::kModeBit) != 0 &&
      launch_mode() == LaunchMode::kAsync;
}

// Queues an operator on its device's current stream and replaces the arguments on the stack with the results; returns
// false, with nothing changed, if the operator must run now.
bool queue_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Queues a copy within one device; returns false if it must run now.
bool queue_copy(const at::Tensor& from, const at::Tensor& to, Site site);

// A call that is about to be captured.
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
void capture_operator(const CapturedCall& captured, torch::jit::Stack* stack);

// Corrupts a copy for an injected fault: see Note [Faults]. Any nonzero byte would read as True.
inline void flip_byte(void* data, at::ScalarType type) {
  static_cast<unsigned char*>(data)[0] ^= type == at::kBool ? 1 : 0xFF;
}

// Captures a kernel of one input and one output.
void capture_unary(
    Stream stream, const char* name, at::TensorIteratorBase& iter, std::function<void(at::TensorIteratorBase&)> kernel);

} // namespace openreg
