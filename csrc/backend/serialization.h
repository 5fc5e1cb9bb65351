// What of a tensor is saved beside its numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace openreg {

// The text that set_tag() gave the tensor; see Note [Tags].
std::optional<std::string> tag(const at::Tensor& tensor);
void set_tag(const at::Tensor& tensor, std::optional<std::string> text);

} // namespace openreg
