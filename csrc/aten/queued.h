// Queues ATen's operators on their stream in async mode, so that the host runs ahead. See Note [Queued operators].
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

#include "../runtime/stream.h"

namespace openreg {

inline constexpr c10::DispatchKeySet kAutocast =
    c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1) | c10::DispatchKeySet(c10::DispatchKey::AutocastCPU);
// Autograd and autocast have had their turn when a backend kernel runs.
inline constexpr c10::DispatchKeySet kAboveBackend = c10::autograd_dispatch_keyset_with_ADInplaceOrView | kAutocast;

// Note [Queued operators]
// A kernel can be queued when its results are known before it has run: of a structured operator, whose Meta kernel
// tells their shapes, strides and dtypes, and refuses bad arguments at once. The results are allocated, and what is
// queued is the out= form on CPU tensors over raw memory, made here: the task holds none of the caller's
// tensors, whose last reference might drop on the worker, and the allocator's stream order keeps their memory.
// In-place and out= forms, fills and copies go the same way. All else runs as CpuCall::run() does, after a wait.
// Torch puts Meta kernels in Python, which take up to a millisecond, over most of its own ones in C++; those that
// unboxed.cpp names are called past them.
//
// A Meta kernel does not refuse all that the kernel does: the dtypes that it has no code for, floating indices, an
// out= that overlaps itself, a number that does not fit. These must be raised by the call, so the first call of each
// Signature (dtypes, sizes, strides, and the other arguments) is a trial, which runs the kernel on zeros in a scratch
// of host memory. The host runs ahead from the first call on. If the kernel raises or warns there, all calls of that
// signature run in line, and so raise what they raise in inline mode. The trial of a call that is too large for the
// scratch has two elements in each dimension: its Meta kernel has accepted the shapes. What is left to appear at the
// next synchronization depends on values in device memory, such as an index out of range: a device-side assert on CUDA.
// linalg's operators look at their own results, and are never queued.

inline bool queueing() noexcept {
  return (detail::attention.load(std::memory_order_relaxed) & detail::kModeBit) != 0 &&
      launch_mode() == LaunchMode::kAsync;
}

// The C++ Meta kernel of an operator, "aten::add.Tensor".
void set_meta_kernel(const std::string& name, c10::KernelFunction kernel);

// Whether torch generated a Meta kernel for the operator, in C++; `called`: and no other one stands above it.
bool has_generated_meta(const c10::OperatorHandle& op, bool called);

// Queues an operator on its device's current stream and puts the results in the place of the arguments on the stack;
// false, with nothing changed, where it must run now.
bool queue_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The out= form of a structured operator, which computes the same in the same layout; none for others.
std::optional<c10::OperatorHandle> structured_out(const c10::OperatorHandle& op);

// The same for a copy within one device.
bool queue_copy(const at::Tensor& from, const at::Tensor& to, Site site);

} // namespace openreg
