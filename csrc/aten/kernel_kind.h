// Records which kernels of the device run the CPU's kernel, and how. The tools ask for it.
#pragma once

#include <ATen/core/operator_name.h>
#include <torch/library.h>

#include <string>
#include <utility>

#include "backend/identity/identity.h"

namespace openreg {

enum class KernelKind { kBoxed, kDirect };

void record_kernel(const c10::OperatorName& op, c10::DispatchKey key, KernelKind kind);

// Returns what a key of the device has for an operator, such as "aten::add.Tensor": "boxed" or "direct" if its kernel
// runs the CPU's, "own" if it is another kernel, "" if it has none.
std::string kernel_kind(const std::string& op, const std::string& key);

// Registers kernels like the library of namespace aten, and records that they are direct.
struct DirectKernels {
  torch::Library& library;

  template <class Kernel>
  void impl(const std::string& name, Kernel&& kernel) {
    library.impl(name.c_str(), std::forward<Kernel>(kernel));
    const auto dot = name.find('.');
    record_kernel({"aten::" + name.substr(0, dot), dot == name.npos ? "" : name.substr(dot + 1)}, identity.dense,
        KernelKind::kDirect);
  }
};

} // namespace openreg
