// Tells which operators of PyTorch have a Meta kernel in C++, which computes shapes, strides and dtypes of results.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace openreg {

// Names the operators, such as "aten::add.Tensor", whose Meta kernel is a Python function.
void set_python_meta_kernels(const std::vector<std::string>& ops);

// Returns true if an operator's Meta kernel is in C++. Only such a kernel gives the strides that the CPU gives.
bool has_cpp_meta_kernel(const c10::OperatorHandle& op);

// Returns true if an out= form is structured. Its Meta kernel is in C++, even if a Python function replaces it.
bool is_structured_out(const c10::OperatorHandle& op);

} // namespace openreg
