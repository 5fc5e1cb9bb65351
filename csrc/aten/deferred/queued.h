// Queues ATen's operators on their stream in async mode, so that the host runs ahead. See Note [Queued operators].
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

#include "backend/identity/identity.h"
#include "runtime/process/attention.h"
#include "runtime/stream/stream.h"

namespace openreg {

// Note [Queued operators]
// A kernel can be queued if its results are known before it runs. This holds for structured operators: their Meta
// kernel computes the results' shapes, strides and dtypes, and rejects bad arguments immediately. The results are
// allocated, and the out= form is queued on CPU tensors over raw memory, created here. The task holds none of the
// caller's tensors, because their last reference might be dropped on the worker; the allocator's stream order keeps
// their memory alive. In-place and out= forms, fills and copies work the same way. Everything else runs through
// CpuCall::run(), after a wait. Torch overrides most of its own C++ Meta kernels with Python ones, which take up to a
// millisecond; for the operators that unboxed.cpp names, we bypass them.
// A Meta kernel does not reject everything that the kernel rejects: unsupported dtypes, floating-point indices, an out=
// that overlaps itself, a number that does not fit. The call itself must raise for these. So the first call of each
// Signature (dtypes, sizes, strides, and the other arguments) is a trial, which runs the kernel on zeros in scratch
// host memory. The host runs ahead from the first call on. If the kernel raises or warns in the trial, all calls of
// that signature run inline, and raise what they raise in inline mode. If a call is too large for the scratch memory,
// its trial has two elements in each dimension: its Meta kernel has accepted the shapes. The errors that remain for the
// next synchronization depend on values in device memory, such as an index out of range; on CUDA, these are device-side
// asserts. linalg's operators inspect their own results and are never queued.

inline bool queueing() noexcept {
  return (detail::attention.load(std::memory_order_relaxed) & detail::kModeBit) != 0 &&
      launch_mode() == LaunchMode::kAsync;
}

// The C++ Meta kernel of an operator, "aten::add.Tensor".
void set_meta_kernel(const std::string& name, c10::KernelFunction kernel);

// Queues an operator on its device's current stream and replaces the arguments on the stack with the results; returns
// false, with nothing changed, if the operator must run now.
bool queue_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The out= form of a structured operator, which computes the same results in the same layout; none for others.
std::optional<c10::OperatorHandle> structured_out(const c10::OperatorHandle& op);

// The same for a copy within one device.
bool queue_copy(const at::Tensor& from, const at::Tensor& to, Site site);

} // namespace openreg
