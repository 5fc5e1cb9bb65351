// What a tensor carries besides its values: the metadata of torch._utils.set_tensor_metadata(), in PyTorch's
// BackendMeta.

#include "backend/serialization.h"

#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/clone_native.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>
#include <torch/library.h>

#include <unordered_map>

#include "backend/identity/identity.h"

// Note [Metadata]
// detach() keeps the BackendMeta of a tensor, and saving what save() and load() below write and read. ATen's clone()
// and to() make a new tensor without it, so the device has its own.
// openreg_ops/torch_patches/deepcopy.py does the same for copy.deepcopy().
namespace openreg {
namespace {

using Metadata = std::unordered_map<std::string, bool>;

struct Meta final : c10::BackendMeta {
  explicit Meta(Metadata entries) : entries(std::move(entries)) {}
  const Metadata entries; // shared by tensors; different metadata is a different object
};

Metadata metadata(const at::Tensor& tensor) {
  const auto* meta = dynamic_cast<const Meta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return meta ? meta->entries : Metadata();
}

void set_metadata(const at::Tensor& tensor, Metadata entries) {
  c10::intrusive_ptr<c10::BackendMeta> meta;
  if (!entries.empty()) meta = c10::make_intrusive<Meta>(std::move(entries));
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
}

void save(const at::Tensor& tensor, Metadata& entries) {
  entries.merge(metadata(tensor));
}

void load(const at::Tensor& tensor, Metadata& entries) {
  set_metadata(tensor, entries);
}

// PyTorch saves the metadata of PrivateUse1's tensors, and of no other device that has kernels here.
const bool serialization_registered = [] {
  if (!is_cuda()) torch::jit::TensorBackendMetaRegistry(identity.type, &save, &load);
  return true;
}();

at::Tensor with_metadata_of(const at::Tensor& from, at::Tensor to) {
  copy_metadata(from, to);
  return to;
}

at::Tensor clone(const at::Tensor& self, std::optional<at::MemoryFormat> format) {
  return with_metadata_of(self, at::native::clone(self, format));
}

at::Tensor to_copy(const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
    std::optional<at::MemoryFormat> format) {
  return with_metadata_of(self, at::native::_to_copy(self, dtype, layout, device, pin_memory, non_blocking, format));
}

} // namespace

void copy_metadata(const at::Tensor& from, const at::Tensor& to) {
  if (auto meta = from.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr()) [[unlikely]]
    to.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
}

} // namespace openreg

OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("clone", openreg::clone);
  m.impl("_to_copy", openreg::to_copy);
}
