// How an operator is deferred: its Meta kernel and its out= form. See Note [Deferred operators].
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

#include "aten/traits/traits.h"

namespace openreg {

struct Plan {
  bool possible = false; // its results can be known before it runs
  const Traits* traits = nullptr;
  const c10::KernelFunction* meta = nullptr; // the generated one; if null, the dispatcher has it
  std::vector<bool> written;                 // by argument
  std::vector<bool> number;                  // by argument: of type Scalar or float
  std::optional<c10::OperatorHandle> out;    // for an operator that returns new tensors: its out= form
};

// The plan of an operator. The reference stays valid.
const Plan& plan_of(const c10::OperatorHandle& op);

// Sets the C++ Meta kernel of an operator, "aten::add.Tensor".
void set_meta_kernel(const std::string& name, c10::KernelFunction kernel);

} // namespace openreg
