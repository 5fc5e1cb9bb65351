// New tensors on the device, made without the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

namespace openreg {

// Makes a tensor like at::empty, for a device index that exists.
at::Tensor empty_on(
    c10::DeviceIndex device, at::IntArrayRef size, at::ScalarType dtype, std::optional<at::MemoryFormat> format);
// Makes a tensor like at::empty_strided, for a device index that exists. Exported for the operators, which are in a
// separate library.
__attribute__((visibility("default"))) at::Tensor empty_strided_on(
    c10::DeviceIndex device, at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype);

} // namespace openreg
