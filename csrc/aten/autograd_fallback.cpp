// See autograd_fallback.h, and Note [Replacing a fallback].

#include "aten/autograd_fallback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <optional>

#include "backend/identity/identity.h"

// Note [Replacing a fallback]
// libtorch registers its own fallback for AutogradPrivateUse1, which at most warns, and the dispatcher accepts one
// fallback per key. There is no public way to remove that one, so we call Dispatcher::deregisterFallback_, which is
// exported but private. An explicit template instantiation may name a private member ([temp.explicit]/12); this one
// does nothing else.
namespace openreg {
namespace {

using Deregister = void (c10::Dispatcher::*)(c10::DispatchKey);
template <Deregister member>
struct Expose {
  friend void deregister_fallback(c10::Dispatcher& dispatcher, c10::DispatchKey key) { (dispatcher.*member)(key); }
};
void deregister_fallback(c10::Dispatcher& dispatcher, c10::DispatchKey key);
template struct Expose<&c10::Dispatcher::deregisterFallback_>;

} // namespace

void set_autograd_fallback(const std::string& mode) {
  TORCH_CHECK_VALUE(mode == "error" || mode == "warn" || mode == "nothing",
      "openreg_ops.autograd: expected the mode \"error\", \"warn\" or \"nothing\", but got \"", mode, "\"");
  // Leaked: see register_boxed_kernels().
  static auto* library = new std::optional<torch::Library>;
  if (library->has_value()) library->reset();
  else deregister_fallback(c10::Dispatcher::singleton(), identity.autograd);
  library->emplace(torch::Library::IMPL, "_", identity.autograd, __FILE__, __LINE__);
  if (mode == "error") {
    (*library)->fallback(torch::autograd::autogradNotImplementedFallback());
  } else if (mode == "warn") {
    torch::autograd::setAutogradFallbackMode(torch::autograd::AutogradFallbackMode::Warn);
    (*library)->fallback(torch::autograd::basicAutogradNotImplementedFallback());
  } else {
    (*library)->fallback(torch::CppFunction::makeFallthrough());
  }
}

} // namespace openreg
