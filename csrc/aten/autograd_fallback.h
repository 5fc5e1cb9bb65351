// What happens in backward through an operator without an autograd kernel.
#pragma once

#include <string>

namespace openreg {

// "error": backward raises, naming the operator. "warn": PyTorch's own default, which warns and
// leaves the gradient out. "nothing": the gradient is left out silently.
void set_autograd_fallback(const std::string& mode);

} // namespace openreg
