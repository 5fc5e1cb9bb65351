// Metadata that is saved with a tensor besides its values.
#pragma once

#include <ATen/core/Tensor.h>

namespace openreg {

// Copies the metadata of another tensor, if it has any.
void copy_metadata(const at::Tensor& from, const at::Tensor& to);

} // namespace openreg
