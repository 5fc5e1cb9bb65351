// openreg.h with tensors, for packages built with PyTorch's headers.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "openreg.h"

namespace openreg {
inline namespace v1 {

// The current stream of the tensor's device.
inline Stream current_stream(const at::Tensor& x) {
  TORCH_CHECK(x.defined() && x.is_privateuseone(), "openreg: expected a tensor on openreg, but got ",
      x.defined() ? "one on " + x.device().str() : "None", "; move it with .to(\"openreg\")");
  return current_stream(static_cast<int>(x.get_device()));
}

// Runs `work` on the current stream of the tensor's device: launch(x, [n = x.numel(), p = x.data_ptr<float>()] { … }).
// It holds pointers and sizes, not tensors, and may outlive the call that launches it.
template <class Work>
void launch(const at::Tensor& x, Work&& work, Site site = std::source_location::current()) {
  launch(current_stream(x), std::forward<Work>(work), site);
}

// The work given to `stream` so far uses the tensor's memory too, like torch.Tensor.record_stream().
inline void record_stream(const at::Tensor& x, Stream stream) {
  record_stream(x.storage().mutable_data(), stream);
}

inline Stream from_torch(const c10::Stream& stream) {
  return {static_cast<int>(stream.device_index()), stream.id()};
}
inline c10::Stream to_torch(Stream stream) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(stream.device)), stream.id);
}

} // namespace v1
} // namespace openreg
