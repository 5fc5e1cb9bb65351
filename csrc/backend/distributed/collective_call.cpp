#include "backend/distributed/collective_call.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <utility>

#include "backend/allocator.h"
#include "backend/identity/identity.h"
#include "runtime/device.h"
#include "runtime/memory/memory.h"
#include "runtime/process/isolation.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

// Makes a CPU tensor over device memory. The program may resize the storage before the engine has finished, so the
// result keeps the block, too.
at::Tensor over_memory(const at::Tensor& tensor) {
  void* data = tensor.mutable_data_ptr();
  void* block = tensor.storage().mutable_data();
  hold_memory(block);
  std::shared_ptr<void> held(block, &release_memory);
  return at::for_blob(data, tensor.sizes())
      .strides(tensor.strides())
      .deleter([storage = tensor.storage(), held = std::move(held)](void*) {})
      .options(tensor.options().device(at::kCPU))
      .target_device(at::kCPU)
      .make_tensor();
}

} // namespace

at::Tensor CollectiveCall::output(const at::Tensor& tensor) {
  auto host = host_of(tensor, /*written=*/true);
  outputs.push_back(tensor);
  if (captured()) return host;
  if (host.has_storage() && tensor.has_storage() && host.const_data_ptr() == tensor.const_data_ptr()) return host;
  copies_.push_back({host, tensor, tensor.has_storage() ? tensor.const_data_ptr() : nullptr});
  return host;
}

void CollectiveCall::choose_device() {
  if (device == -1) device = static_cast<c10::DeviceIndex>(current_device());
}

void CollectiveCall::copy_back() const {
  if (copies_.empty()) return;
  const c10::AutoGradMode no_grad(false);
  const detail::NotCaptured own; // another thread may capture
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
  for (const auto& [host, tensor, memory] : copies_) {
    if (memory && tensor.const_data_ptr() != memory) continue; // the program has given it other memory
    tensor.copy_(host.to(tensor.device()));
  }
  synchronize_stream(current_stream(device));
}

void CollectiveCall::copy_to_hosts() const {
  for (const auto& [host, device, written] : staged_) host.copy_(device);
}

void CollectiveCall::copy_from_hosts() const {
  for (const auto& [host, device, written] : staged_)
    if (written) device.copy_(host);
}

bool CollectiveCall::captured() const {
  return detail::captures(current_stream(device));
}

at::Tensor CollectiveCall::host_of(const at::Tensor& tensor, bool written) {
  check(tensor);
  const bool plain = tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg();
  if (captured()) {
    if (!plain)
      detail::refuse_capture(current_stream(device), name.operation,
          "it takes a sparse tensor, or a lazy conjugate or negation, which the host would have to copy. Move it out "
          "of the capture, or make the tensor dense first.");
    const auto memory = over_memory(tensor);
    uses.push_back({tensor.const_data_ptr(), tensor.nbytes(), written});
    if (isolation() == Isolation::kOff) return memory;
    return staged_.emplace_back(Staged{at::empty_like(memory), memory, written}).host;
  }
  if (!plain || isolation() != Isolation::kOff) {
    const c10::AutoGradMode no_grad(false);
    return tensor.to(at::kCPU);
  }
  return over_memory(tensor);
}

void CollectiveCall::check(const at::Tensor& tensor) {
  TORCH_CHECK(on_device(tensor.device()), "occl: ", name.operation, ": expected tensors on ", identity.name,
      ", but got one on ", tensor.device(), "; move it with .to(\"", identity.name, "\")");
  if (device == -1) device = tensor.device().index();
  TORCH_CHECK(tensor.device().index() == device, "occl: ", name.operation, ": expected tensors on one device, but ",
      "got ", device_at(device), " and ", tensor.device(), "; move one with .to()");
  expect_memory(name.operation, tensor);
  if (tensor.layout() == at::kSparse && sparse) return;
  if (tensor.layout() != at::kStrided)
    C10_THROW_ERROR(ValueError,
        c10::str("occl: ", name.operation, ": expected dense tensors, but got layout ", tensor.layout(),
            "; call .to_dense()"));
  // Like NCCL, the engine reads and writes elements as if the tensor were contiguous.
  if (!tensor.is_contiguous(tensor.suggest_memory_format()))
    C10_THROW_ERROR(ValueError,
        c10::str("occl: ", name.operation, ": Tensors must be contiguous, but got one of shape ", tensor.sizes(),
            " with strides ", tensor.strides(), "; call .contiguous()"));
}

} // namespace openreg
