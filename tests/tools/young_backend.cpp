// A backend at its beginning: eight kernels, and no generator, streams, events, hooks or synchronize.
// tests/tools/test_young_backend.py runs the tools on it.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    return {memory, memory, &std::free, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;

C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<kDevice>);

// The same memory as a tensor of the CPU.
at::Tensor host(const at::Tensor& x) {
  if (x.is_cpu()) return x;
  return at::from_blob(const_cast<void*>(x.const_data_ptr()), x.sizes(), x.strides(), at::TensorOptions(x.dtype()));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, keys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      keys, dtype.value_or(at::kFloat));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  host(to).copy_(host(from));
  return to;
}

at::Tensor& fill(at::Tensor& x, const at::Scalar& value) {
  host(x).fill_(value);
  return x;
}

at::Scalar item(const at::Tensor& x) { return host(x).item(); }

at::Tensor view(const at::Tensor& x, c10::SymIntArrayRef size) {
  return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor on_device(const at::Tensor& result, const at::Tensor& like) {
  at::Tensor out = at::empty(result.sizes(), like.options());
  host(out).copy_(result);
  return out;
}

at::Tensor add(const at::Tensor& x, const at::Tensor& y, const at::Scalar& factor) {
  return on_device(at::add(host(x), host(y), factor), x);
}

at::Tensor twice(const at::Tensor& x) { return on_device(host(x) * 2, x); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("fill_.Scalar", fill);
  m.impl("_local_scalar_dense", item);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("add.Tensor", add);
}

TORCH_LIBRARY(young, m) {
  m.def("twice(Tensor x) -> Tensor");
  m.impl("twice", c10::DispatchKey::PrivateUse1, twice);
}

} // namespace
