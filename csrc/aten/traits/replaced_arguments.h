// Calls an operator with other tensors in place of some of its arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

namespace openreg {

// Calls the operator at `key`, below autograd. `replace` is called once with each tensor among the arguments and with
// whether the operator writes to it; it returns what the kernel gets, which may be the tensor itself. What a kernel
// writes to a replacement is copied to the argument, and returned as that argument; `finish` converts other results.
// Raises if memory that is written overlaps with itself or in part with other arguments: the kernel does not see that.
void call_with_replaced(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey key,
    c10::function_ref<at::Tensor(const at::Tensor& argument, bool written)> replace,
    c10::function_ref<at::Tensor(const at::Tensor& result)> finish);

} // namespace openreg
