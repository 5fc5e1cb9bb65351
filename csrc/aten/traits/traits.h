// What is special about a built-in operator: one row for each, in traits.cpp.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace openreg {

// Note [Traits]
// The device shares the CPU's kernels, and does what CUDA does. Where an operator's kernel needs more than aliases of
// its arguments, or CUDA treats an operator in its own way, traits.cpp has a row that says so; everything else
// about an operator is derived from its schema and its tags. The functions that rows point to are in the other files of
// this folder, as are the mechanisms that only rows ask for. The boxed kernel keeps a copy of its row; other
// code looks it up. A direct kernel (direct.h) does not read its row in inline and sync mode: it sends the calls that
// need the row to the boxed kernel.

// A condition on the arguments of a call, the first of which is at this place on the stack.
using Condition = bool(const c10::IValue* arguments);

// Raises if the arguments of a call, the last on the stack, break a rule.
using Check = void(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Which tensors may be on the host, whatever their shape: none; indices, which are in lists; or all except the first.
enum class HostTensors { kNone, kIndices, kAll };

// How many CPU scalars, 0-dim CPU tensors, may be among the tensors: see Note [CPU scalars]. kLast: one, as the last
// input. kDerived: see cpu_scalars().
enum class CpuScalars { kDerived, kNone, kOne, kLast, kAny };

// How arguments determine the dtype that an operator computes in: see Note [Wider dtypes].
enum class Computes { kInOneDtype, kInPromoted, kTransforms };

struct Traits {
  // ---- tensors on the host ----
  HostTensors host_tensors = HostTensors::kNone;
  bool captures_host_tensors = false; // a capture takes them as constants
  bool reads_no_data = false;         // takes tensors of any device, for their properties
  CpuScalars cpu_scalars = CpuScalars::kDerived;
  const char* only_cpu_scalar = nullptr; // the only argument that may be a CPU scalar; "": none may
  const char* wrong_device = nullptr; // CUDA's own error for a tensor on another device

  // ---- calls for which CUDA does something special ----
  Condition* synchronizes = nullptr;      // the host waits: see torch.openreg.set_sync_debug_mode
  Condition* nondeterministic = nullptr;  // no deterministic kernel: see torch.use_deterministic_algorithms
  Condition* has_dynamic_shape = nullptr; // the shape of a result depends on values

  // ---- what the CPU's kernel lacks ----
  Check* check_shapes = nullptr; // of shapes and lists: see Note [Unchecked arguments]
  Check* check_values = nullptr; // of values in tensors
  Condition* checks_no_values_if = nullptr; // calls that need no check of values
  bool queues_check = false;                // a queued call makes the check
  std::uint64_t lacks = 0; // dtypes that CUDA has, one bit for each
  Computes computes = Computes::kInOneDtype;
  bool ignores_strides = false;        // of out= tensors: see Note [Results in their own memory]
  std::vector<const char*> contiguous; // inputs that it reads as if they were contiguous
  bool contiguous_rows = false;        // only the last dimension of these must be contiguous

  // ---- how the CPU's kernel runs ----
  bool runs_on_aliases = false;    // a composite that works only on CPU tensors
  bool asks_requires_grad = false; // saves for backward what only backward needs
  bool never_draws = false;        // despite its tag
  bool has_no_memory = false;      // gives a tensor without memory
  bool inspects_results = false;   // raises for values of its results, on CUDA too, and so is not queued
  bool fills = false;              // writes to its first argument, whatever its shape
  bool takes_indices = false;      // its integers are indices, which it does not convert
};

// The row of an operator and what its tags and its name add. The reference stays valid.
const Traits& traits_of(const c10::OperatorHandle& op);

// The row for an operator's name without overload, such as "aten::add_".
const Traits& row_of(std::string_view name);

// The check of values that this call needs, or null.
inline Check* check_of_values(const Traits& traits, const torch::jit::Stack& stack, size_t arguments) {
  const bool needed = traits.check_values &&
      !(traits.checks_no_values_if && traits.checks_no_values_if(&stack[stack.size() - arguments]));
  return needed ? traits.check_values : nullptr;
}

} // namespace openreg
