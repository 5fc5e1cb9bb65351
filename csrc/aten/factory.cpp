// The operators that every backend must provide: creating, viewing, resizing and reading tensors.
#include <ATen/Context.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <mutex>

#include "aten/deferred/deferred.h"
#include "backend/allocator.h"
#include "backend/identity/identity.h"
#include "backend/new_tensor.h"
#include "backend/sync_debug.h"
#include "runtime/memory/memory.h"
#include "runtime/stream/launch.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

// Checks the arguments of empty() and empty_strided(), and makes the device current.
c10::DeviceIndex checked_options(const char* name, std::optional<c10::Layout> layout, std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, name, ": expected a strided layout, but got ", *layout);
  TORCH_CHECK(!pin_memory.value_or(false), name, ": only dense CPU tensors can be pinned; drop pin_memory or device");
  return checked_index(device);
}

// A number from Python may stand for no dtype.
c10::ScalarType checked_dtype(const char* name, std::optional<at::ScalarType> dtype) {
  const auto type = c10::dtype_or_default(dtype);
  TORCH_CHECK(type >= static_cast<c10::ScalarType>(0) && type < c10::ScalarType::Undefined, name,
      ": expected a dtype, but got the number ", static_cast<int>(type));
  return type;
}

// Returns true if torch.utils.deterministic.fill_uninitialized_memory is on.
bool fills() {
  return C10_UNLIKELY(
      at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory());
}

at::Tensor filled(at::Tensor tensor) {
  if (fills()) at::native::fill_empty_deterministic_(tensor);
  return tensor;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  return filled(
      empty_on(checked_options("empty", layout, device, pin_memory), size, checked_dtype("empty", dtype), format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  return filled(empty_strided_on(checked_options("empty_strided", layout, device, pin_memory), size, stride,
      checked_dtype("empty_strided", dtype)));
}

// Grows `storage` to hold this geometry. Call it before setting the geometry: if memory runs out, the tensor must stay
// unchanged.
void reserve(
    const c10::Storage& storage, at::IntArrayRef size, at::OptionalIntArrayRef stride, size_t item, int64_t offset) {
  const size_t bytes = stride ? at::detail::computeStorageNbytes(size, *stride, item, static_cast<size_t>(offset))
                              : at::detail::computeStorageNbytesContiguous(size, item, static_cast<size_t>(offset));
  if (c10::multiply_integers(size) && bytes > storage.nbytes()) resize_storage(storage.unsafeGetStorageImpl(), bytes);
}

// Gives `self` this geometry; the storage grows if necessary and never shrinks.
void set_geometry(const at::Tensor& self, at::IntArrayRef size, at::OptionalIntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() == size && (!stride || impl->strides() == *stride)) return;
  reserve(self.storage(), size, stride, self.dtype().itemsize(), self.storage_offset());
  if (stride) impl->set_sizes_and_strides(size, *stride);
  else impl->generic_set_sizes_contiguous(size);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  for (const int64_t extent : size)
    TORCH_CHECK(extent >= 0, "resize_: trying to create a tensor with negative dimension ", extent, ": ", size);
  const size_t before = self.storage().nbytes();
  set_geometry(self, size, std::nullopt);
  if (format) {
    TORCH_CHECK(*format != at::MemoryFormat::Preserve, "resize_: unsupported memory format ", *format);
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  if (fills()) at::native::fill_resize_deterministic_(self, static_cast<int64_t>(before));
  return self;
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  // A geometry that the tensor already has does not grow the storage: out-of-range access raises below.
  const bool same = self.sizes() == size && (!stride.data() || self.strides() == stride);
  if (!same && offset >= 0 && source.device() == self.device() && (!stride.data() || size.size() == stride.size()))
    reserve(
        source, size, stride.data() ? at::OptionalIntArrayRef(stride) : std::nullopt, self.dtype().itemsize(), offset);
  at::native::checkSetStorage(self, source, offset, size, stride); // which rejects the rest
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  set_geometry(self, size, stride.data() ? at::OptionalIntArrayRef(stride) : std::nullopt);
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  const auto device = self.device();
  at::Tensor nothing = empty({0}, self.scalar_type(), {}, device, {}, {});
  return set_storage_offset(self, nothing.storage(), 0, {0}, {});
}

at::Scalar element(const void* data, int64_t offset, at::ScalarType type) {
  return AT_DISPATCH_V2(type, "_local_scalar_dense",
      AT_WRAP([&] { return at::Scalar(static_cast<const scalar_t*>(data)[offset]); }), AT_EXPAND(AT_ALL_TYPES),
      AT_EXPAND(AT_COMPLEX_TYPES), at::kComplexHalf, at::kHalf, at::kBool, at::kBFloat16, AT_EXPAND(AT_FLOAT8_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES));
}

// .item(): one element, read in place.
at::Scalar local_scalar_dense(const at::Tensor& self) {
  TORCH_CHECK(self.numel() > 0, "_local_scalar_dense: expected a tensor of one element, but got an empty one of shape ",
      self.sizes());
  const void* data = self.storage().data();
  TORCH_CHECK(data, "_local_scalar_dense: expected a tensor with memory, but the storage of this one, of shape ",
      self.sizes(), ", was freed or resized to nothing");
  if (C10_LIKELY(!watches_syncs()))
    if (at::Scalar value; detail::read_if_idle(
            self.device().index(), [&] { value = element(data, self.storage_offset(), self.scalar_type()); }))
      return value;
  const Stream stream = detail::thread_stream(self.device().index());
  if (detail::captures(stream))
    detail::refuse_capture(stream, "aten::_local_scalar_dense",
        "the host would read a value of the device, as .item(), bool(), int() and float() do. Keep the value in a "
        "tensor, or read it after a replay.");
  synchronizes("aten::_local_scalar_dense");
  return detail::run_directly(
      stream, [&] { return element(self.storage().data(), self.storage_offset(), self.scalar_type()); },
      std::source_location::current());
}

// Returns true if `self.data = from` is possible. Module.to() asks, and keeps its parameters if it is. Torch's own
// answer covers only CPU, CUDA and similar devices; sparse tensors follow that answer whatever this one says.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  constexpr c10::DispatchKeySet dense(c10::DispatchKey::Dense);
  return self.key_set() == from.key_set() || (self.key_set().has_any(dense) && from.key_set().has_any(dense));
}

// Takes SymInts: a boxed call of PyTorch's kernel, which takes int64_t, fails an internal assertion for some values.
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream_of_tensor(at::Tensor& self, at::Stream stream) {
  TORCH_CHECK(stream.device_type() == identity.type && stream.device_index() == self.device().index(),
      "record_stream: expected a stream on ", self.device(), ", but got one on ", stream.device());
  record_stream(const_cast<void*>(self.storage().data()), {stream.device_index(), stream.id()});
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_", set_empty);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream_of_tensor);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}
OPENREG_LIBRARY_IMPL(aten, autograd, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

// The boxed kernel passes a Storage unchanged, and ATen's kernel of this name does not check its device.
OPENREG_LIBRARY_IMPL(aten, quantized, m) {
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_quantized_);
}

} // namespace openreg
