#include "backend/new_tensor.h"

#include <ATen/EmptyTensor.h>

#include "backend/allocator.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

// Allocates on one device, even if another one is current.
struct OnDevice final : c10::Allocator {
  explicit OnDevice(c10::DeviceIndex device) : device(device) {}
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(device, bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    device_allocator()->copy_data(to, from, bytes);
  }
  c10::DeviceIndex device;
};

template <class Make>
at::Tensor make_on(c10::DeviceIndex device, Make&& make) {
  OnDevice allocator(device);
  at::Tensor tensor = make(&allocator);
  tensor.storage().unsafeGetStorageImpl()->set_allocator(device_allocator());
  return tensor;
}

} // namespace

at::Tensor empty_on(
    c10::DeviceIndex device, at::IntArrayRef size, at::ScalarType dtype, std::optional<at::MemoryFormat> format) {
  return make_on(device, [&](c10::Allocator* allocator) {
    return at::Tensor(at::detail::empty_generic(size, allocator, kDense, dtype, format));
  });
}
at::Tensor empty_strided_on(
    c10::DeviceIndex device, at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) {
  return make_on(device, [&](c10::Allocator* allocator) {
    return at::Tensor(at::detail::empty_strided_generic(size, stride, allocator, kDense, dtype));
  });
}

} // namespace openreg
