// _linalg_check_errors, with which linalg.inv, linalg.solve and their like raise for a singular matrix. Outside of a
// capture the host reads the result, as on CUDA. In a graph the check is a node, and a replay raises at the next wait.
#include <ATen/ops/_linalg_check_errors_native.h>
#include <torch/library.h>

#include <string>
#include <string_view>

#include "../native.h"

namespace openreg {
namespace {

void linalg_check_errors(const at::Tensor& info, std::string_view api_name, bool is_matrix) {
  if (!capturing(info.device().index())) return at::native::_linalg_check_errors(info, api_name, is_matrix);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_linalg_check_errors", "");
  torch::jit::Stack stack{info, std::string(api_name), is_matrix};
  native_kernel().callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_linalg_check_errors", linalg_check_errors);
}

} // namespace openreg
