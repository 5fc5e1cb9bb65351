// New tensors on the device, made without the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

namespace openreg {

// at::empty and at::empty_strided for a device index that exists. empty_strided_on() is also for the operators, which
// are in a separate library.
at::Tensor empty_on(
    c10::DeviceIndex device, at::IntArrayRef size, at::ScalarType dtype, std::optional<at::MemoryFormat> format);
__attribute__((visibility("default"))) at::Tensor empty_strided_on(
    c10::DeviceIndex device, at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype);

} // namespace openreg
