// What happens at backward through an operator that registered no autograd.
#pragma once

#include <string>

namespace openreg {

// "error": backward raises, naming the operator. "warn": PyTorch's own default, which warns and
// leaves the gradient out. "nothing": the gradient is left out silently.
void set_autograd_fallback(const std::string& mode);

} // namespace openreg
