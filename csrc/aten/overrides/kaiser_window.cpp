// kaiser_window: PyTorch's composite creates the window on the device and then calls this stub.
#include <ATen/TensorIterator.h>
#include <ATen/native/UnaryOps.h>

#include "aten/deferred/deferred.h"
#include "backend/identity/identity.h"

namespace openreg {
namespace {

void kaiser_window(at::TensorIteratorBase& iter, int64_t length, double beta) {
  const Stream stream = current_stream(iter.device(0).index());
  if (C10_UNLIKELY(detail::captures(stream)))
    capture_unary(stream, "aten::kaiser_window", iter,
        [length, beta](auto& on_memory) { at::native::kaiser_window_stub(at::kCPU, on_memory, length, beta); });
  else run(stream, [&] { at::native::kaiser_window_stub(at::kCPU, iter, length, beta); });
}

[[maybe_unused]] const bool kaiser_window_registered = register_stub(at::native::kaiser_window_stub, &kaiser_window);

} // namespace
} // namespace openreg
