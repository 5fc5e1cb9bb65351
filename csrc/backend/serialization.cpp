// A tag: a text of the user's that belongs to a tensor, and an example of BackendMeta, the place that PyTorch has
// for what a backend knows of a tensor.
#include "serialization.h"

#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/clone_native.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>
#include <torch/library.h>

#include <string_view>
#include <unordered_map>

// Note [Tags]
// detach() keeps the BackendMeta of a tensor, and saving what save() and load() below write and read. clone() and to()
// are ours to mend: ATen's make a new tensor, which knows nothing of the old.
namespace openreg {
namespace {

struct Tag final : c10::BackendMeta {
  explicit Tag(std::string text) : text(std::move(text)) {}
  const std::string text; // tensors share it; another tag is another object
};

// PyTorch's format has room for names and booleans: the text is part of the name.
constexpr std::string_view kName = "openreg.tag=";

void save(const at::Tensor& tensor, std::unordered_map<std::string, bool>& metadata) {
  if (const auto text = tag(tensor)) metadata[std::string(kName) + *text] = true;
}

void load(const at::Tensor& tensor, std::unordered_map<std::string, bool>& metadata) {
  for (const auto& [name, on] : metadata)
    if (on && name.starts_with(kName)) set_tag(tensor, name.substr(kName.size()));
}

const bool registered = [] {
  torch::jit::TensorBackendMetaRegistry(c10::kPrivateUse1, &save, &load);
  return true;
}();

at::Tensor with_tag_of(const at::Tensor& from, at::Tensor to) {
  if (auto meta = from.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr()) [[unlikely]]
    to.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
  return to;
}

at::Tensor clone(const at::Tensor& self, std::optional<at::MemoryFormat> format) {
  return with_tag_of(self, at::native::clone(self, format));
}

at::Tensor to_copy(const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
    std::optional<at::MemoryFormat> format) {
  return with_tag_of(self, at::native::_to_copy(self, dtype, layout, device, pin_memory, non_blocking, format));
}

} // namespace

std::optional<std::string> tag(const at::Tensor& tensor) {
  const auto* tag = dynamic_cast<const Tag*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return tag ? std::optional(tag->text) : std::nullopt;
}

void set_tag(const at::Tensor& tensor, std::optional<std::string> text) {
  TORCH_CHECK(tensor.is_privateuseone(), "set_tag: expected a tensor on openreg, but got one on ", tensor.device(),
      "; move it with .to()");
  c10::intrusive_ptr<c10::BackendMeta> meta;
  if (text) meta = c10::make_intrusive<Tag>(std::move(*text));
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
}

} // namespace openreg

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("clone", openreg::clone);
  m.impl("_to_copy", openreg::to_copy);
}
