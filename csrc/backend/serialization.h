// Metadata that is saved with a tensor besides its values.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace openreg {

// Returns the text that set_tag() gave the tensor: see Note [Tags].
std::optional<std::string> tag(const at::Tensor& tensor);
// Sets the tensor's text, or removes it.
void set_tag(const at::Tensor& tensor, std::optional<std::string> text);

// Copies the metadata of another tensor, if it has any.
void copy_metadata(const at::Tensor& from, const at::Tensor& to);

} // namespace openreg
