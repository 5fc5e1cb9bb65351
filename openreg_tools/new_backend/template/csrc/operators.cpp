// The operators that every backend must have: creating, viewing, resizing, reading and copying tensors. Rungs 2 and 3.
//
// Documents: "Extending dispatcher for a new backend in C++", section "Register kernels for the new backend", and its
// note on views of memory that the host cannot access; "Operator Registration", section "Operator Set".
#include <ATen/Dispatch_v2.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "common.h"

namespace acme {

at::Tensor View::tensor() const {
  return at::from_blob(acme_local(data), sizes, strides, at::TensorOptions().dtype(dtype));
}

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Makes the device of a new tensor current, and checks what was asked for.
c10::Device checked(std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(
      layout.value_or(c10::kStrided) == c10::kStrided, "acme: only strided tensors can be created, not ", *layout);
  TORCH_CHECK(!pinned.value_or(false), "acme: only CPU tensors can be pinned; drop pin_memory or device");
  return device_at(checked_index(device ? device->index() : -1));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(checked(layout, device, pinned));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pinned) {
  const c10::DeviceGuard guard(checked(layout, device, pinned));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// Grows the storage of `self` to what its geometry needs.
void reserve_storage(const at::Tensor& self) {
  const auto offset = static_cast<size_t>(self.storage_offset());
  const size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize(), offset);
  if (self.numel() && bytes > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  for (const int64_t extent : size) TORCH_CHECK(extent >= 0, "resize_: expected sizes above -1, but got ", size);
  if (self.sizes() != size) self.unsafeGetTensorImpl()->generic_set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  reserve_storage(self);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data()) self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  else self.unsafeGetTensorImpl()->generic_set_sizes_contiguous(size);
  reserve_storage(self);
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  const at::Tensor nothing = at::empty({0}, self.options());
  return set_storage(self, nothing.storage(), 0, {0}, {});
}

// .item() reads one element, so it waits for the stream.
at::Scalar local_scalar_dense(const at::Tensor& self) {
  const auto stream = current_stream(self.device().index());
  c10::complex<double> element; // as large as the largest dtype
  check(acme_copy(&element, View(self).data, self.element_size(), native(stream)), "item");
  synchronize(stream);
  return AT_DISPATCH_V2(self.scalar_type(), "_local_scalar_dense",
      AT_WRAP([&] { return at::Scalar(*reinterpret_cast<const scalar_t*>(&element)); }), AT_EXPAND(AT_ALL_TYPES),
      AT_EXPAND(AT_COMPLEX_TYPES), at::kComplexHalf, at::kHalf, at::kBool, at::kBFloat16, AT_EXPAND(AT_FLOAT8_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES));
}

// Module.to() asks whether it may change the data of a parameter, and else replaces the parameter.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  constexpr c10::DispatchKeySet dense(c10::DispatchKey::Dense);
  return self.key_set() == from.key_set() || (self.key_set().has_any(dense) && from.key_set().has_any(dense));
}

void record_stream(at::Tensor& self, at::Stream stream) {
  record_use(self, stream);
}

// ---- copies ----

// Returns true if the elements of both lie in memory one after the other, in the same order and in one dtype.
bool is_plain(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// On one device: any strides and dtypes.
void copy_strided(const at::Tensor& from, const at::Tensor& to) {
  launch(native_stream(to), "copy_",
      [from = View(from), to = View(to, true), conj = from.is_conj() != to.is_conj(),
          neg = from.is_neg() != to.is_neg()] {
        at::Tensor source = from.tensor();
        if (conj) source = source.conj();
        if (neg) source = source._neg_view();
        to.tensor().copy_(source);
      });
}

// Plain memory between a host and a device, or two devices. Runs on the stream of the source's device, as on CUDA.
void copy_plain(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor& on_device = from.is_cpu() ? to : from;
  const auto stream = current_stream(on_device.device().index());
  const bool between = !from.is_cpu() && !to.is_cpu() && from.device() != to.device();
  const auto other = between ? current_stream(to.device().index()) : stream;
  wait_for(stream, other);
  check(acme_copy(View(to, true).data, View(from).data, from.nbytes(), native(stream)), "copy_");
  wait_for(other, stream);
  const at::Tensor& host = from.is_cpu() ? from : to;
  if (!host.is_cpu()) return;
  // Memory that is not pinned may move or change before the copy runs, so the host waits.
  if (non_blocking && acme_memory_of(host.const_data_ptr(), nullptr) == ACME_PINNED)
    at::getHostAllocator(kDevice)->record_event(
        const_cast<void*>(host.const_data_ptr()), host.storage().data_ptr().get_context(), stream);
  else synchronize(stream);
}

// copy_() calls this if one side is on the device. Whatever is not plain goes through a plain copy of the source.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.sizes() != to.sizes()) return copy_from(self.expand_as(to), to, non_blocking);
  if (self.numel() == 0 || self.is_same(to)) return to;
  at::assert_no_internal_overlap(to);
  if (self.device() == to.device()) {
    copy_strided(self, to);
  } else if (is_plain(self, to)) {
    copy_plain(self, to, non_blocking);
  } else if (self.is_cpu()) {
    const at::Tensor dense = at::empty_like(to, to.options().device(c10::kCPU)).copy_(self);
    const at::Tensor there = at::empty_strided(dense.sizes(), dense.strides(), to.options());
    copy_plain(dense, there, false);
    copy_strided(there, to);
  } else {
    const at::Tensor dense = at::empty_like(self).copy_(self);
    const at::Tensor there = at::empty_strided(dense.sizes(), dense.strides(), self.options().device(to.device()));
    copy_plain(dense, there, false);
    to.copy_(there);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", resize_);
  m.impl("set_", set_empty);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}
// Copies resolve lazy conjugates and negatives themselves. Without this, the fallbacks of these keys would clone the
// source, and clone copies.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace acme
