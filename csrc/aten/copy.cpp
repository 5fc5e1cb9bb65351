// Copies between every pair of host, pinned host and devices: ATen's CPU copy over aliases, which handles every dtype
// conversion, layout, overlap check and conj/neg bit.
#include <ATen/NestedTensorImpl.h>
#include <ATen/TensorIterator.h>
#include <ATen/native/Copy.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resize.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <memory>

#include "aten/cpu_call.h"
#include "aten/deferred/deferred.h"
#include "backend/host_allocator.h"
#include "backend/identity/identity.h"
#include "backend/sync_debug.h"
#include "runtime/explore/schedule.h"
#include "runtime/memory/memory.h"
#include "runtime/process/attention.h"
#include "runtime/process/fault.h"
#include "runtime/stream/event.h"
#include "runtime/stream/launch.h"
#include "runtime/stream/profile.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

// Returns true if a tensor is exactly the bytes that it spans.
bool is_plain(const at::Tensor& x) {
  return x.layout() == at::kStrided && x.is_non_overlapping_and_dense() && !x.is_conj() && !x.is_neg() &&
      !x._is_zerotensor() && !x.is_quantized();
}

// A copy that does not have to wait for the host: bytes of one layout, between device memories or with pinned
// host memory.
bool is_plain(const at::Tensor& from, const at::Tensor& to) {
  const auto memory = [](const at::Tensor& x) {
    return is_plain(x) && (on_device(x) || (x.is_cpu() && is_pinned(x.const_data_ptr())));
  };
  return from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() && from.strides() == to.strides() &&
      from.numel() && memory(from) && memory(to);
}

// CUDA's names.
Site copy_site(const at::Tensor& from, const at::Tensor& to) {
  const auto pinned = [](const at::Tensor& x) { return x.layout() == at::kStrided && is_pinned(x.storage().data()); };
  const char* name = on_device(from) && on_device(to)
      ? from.device() == to.device() ? "Memcpy DtoD (Device -> Device)" : "Memcpy PtoP (Device -> Device)"
      : on_device(to) ? pinned(from) ? "Memcpy HtoD (Pinned -> Device)" : "Memcpy HtoD (Pageable -> Device)"
      : pinned(to)    ? "Memcpy DtoH (Device -> Pinned)"
                      : "Memcpy DtoH (Device -> Pageable)";
  return {name, Site::kCopy, to.layout() == at::kStrided ? static_cast<size_t>(to.numel()) * to.itemsize() : 0};
}

// Memory that is written to: if it is copy-on-write, it becomes the tensor's own, on its device.
void* written_memory(const at::Tensor& x) {
  const LendDeviceMemory here(x.device().index());
  return x.mutable_data_ptr();
}

// Returns true if copying bytes is faster: ATen would copy on one thread anyway, and there is no overlap to reject.
bool is_small(const at::Tensor& from, const at::Tensor& to) {
  return from.numel() <= at::internal::GRAIN_SIZE && on_device(from) && from.device() == to.device() &&
      from.has_storage() && to.has_storage() && from.storage().data() != to.storage().data();
}

// Makes one device's stream wait for the work given to the other's.
void wait_for(Stream waiting, Stream stream) {
  if (waiting == stream || stream_idle(stream)) return;
  Event event(stream.device, /*timed=*/false);
  event.record(stream);
  event.block(waiting);
}

// Smaller copies run faster than they could be queued, unless the stream already has queued work.
constexpr size_t kQueuedCopy = 1 << 20;

// Note [Pageable memory]
// As CUDA documents, a non_blocking copy to pageable memory has completed when it returns, and a copy from pageable
// memory has read it, so the host may change the memory immediately. The first kind waits. The second is converted into
// its own buffer and queued, unless its stream is idle; once that many bytes are in flight, it waits too.
constexpr size_t kStaging = size_t{64} << 20;
std::atomic<size_t> staging{0};

// The source in the destination's dtype and layout, for a queued copy; null if that is not possible.
std::shared_ptr<const at::Tensor> stage(const at::Tensor& from, const at::Tensor& to, Stream stream) {
  if (!from.is_cpu() || from.layout() != at::kStrided || from.is_quantized() || !from.has_storage() ||
      is_pinned(from.storage().data()) || !on_device(to) || !to.numel() || !is_plain(to))
    return nullptr;
  if (launch_mode() == LaunchMode::kSync || (stream_idle(stream) && !queueing())) return nullptr;
  const size_t bytes = to.nbytes();
  if (staging.fetch_add(bytes) + bytes > kStaging) {
    staging -= bytes;
    return nullptr;
  }
  std::shared_ptr<at::Tensor> staged(new at::Tensor, [bytes](at::Tensor* x) {
    delete x;
    staging -= bytes;
  });
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(kAboveBackend);
  const LendDeviceMemory none(-1);
  *staged = at::empty_strided(to.sizes(), to.strides(), to.options().device(at::kCPU));
  staged->copy_(from);
  return staged;
}

// See Note [Deferred operators]. Only memory of devices and pinned memory has an address that a replay can use.
void capture_copy(const at::Tensor& self, const at::Tensor& destination, bool non_blocking, Stream stream) {
  for (const at::Tensor& x : {self, destination}) {
    if (on_device(x)) continue;
    if (!x.is_cpu() || x.layout() != at::kStrided || !is_pinned(x.storage().data()))
      detail::refuse_capture(stream, "aten::copy_",
          "it copies between the device and pageable host memory. Copy before or after the capture, or use pinned "
          "memory with non_blocking=True.");
    if (!non_blocking)
      detail::refuse_capture(
          stream, "aten::copy_", "the host would wait for a copy with pinned memory. Pass non_blocking=True.");
  }
  const auto keep_host_memory = [&] {
    for (const at::Tensor& x : {self, destination})
      if (x.is_cpu() && x.numel()) detail::keep_in_capture(stream, keep_pinned(x.const_data_ptr()));
  };
  if (is_plain(self, destination)) {
    const void* from = self.const_data_ptr();
    void* to = destination.mutable_data_ptr();
    keep_host_memory();
    const size_t bytes = self.nbytes();
    return detail::capture(stream, copy_site(self, destination),
        [from, to, bytes, stream, type = self.scalar_type()] {
          std::memmove(to, from, bytes);
          if (copy_corrupted(stream, /*here=*/true)) flip_byte(to, type);
        },
        {{from, bytes, false}, {to, bytes, true}});
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  CpuCall call("aten::copy_", CpuCall::kAny);
  const at::Tensor &from = call.alias(self), &to = call.alias(destination, /*write=*/true);
  keep_host_memory();
  torch::jit::Stack stack{to, from, false};
  capture_operator({op, c10::DispatchKey::CPU, call, stream, false, /*copies=*/true}, &stack);
}

// Makes `stream` wait for `other`; one of them joins the other's capture.
void wait_in_capture(Stream stream, Stream other) {
  Event point(other.device, /*timed=*/false);
  point.record(other);
  point.block(stream);
}

// copy_() gets here when either side is on the device. Runs on the current stream of the source's device (the
// destination's, if the source is on the host), as on CUDA, in order with the other device's stream.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  for (const at::Tensor* x : {&self, &destination}) expect_memory("aten::copy_", *x);
  const bool between = on_device(self) && on_device(destination) && self.device() != destination.device();
  const Stream here = detail::thread_stream((on_device(self) ? self : destination).device().index());
  if (C10_UNLIKELY(watches_syncs()) && !non_blocking && (self.is_cpu() || destination.is_cpu()) && self.numel())
    synchronizes("aten::copy_");
  const Stream there = between ? detail::thread_stream(destination.device().index()) : here;
  if (C10_UNLIKELY(detail::attention.load() & detail::kCaptureBit))
    if (detail::captures(here) || detail::captures(there)) {
      if (between && detail::captures(there)) wait_in_capture(here, there);
      capture_copy(self, destination, non_blocking, here);
      // Memory allocated before its stream joined does not belong to the graph, so nothing else may reuse it.
      if (between)
        detail::keep_in_capture(here, std::make_shared<std::pair<at::Tensor, at::Tensor>>(self, destination));
      if (between) wait_in_capture(there, here);
      return destination;
    }
  if (between) wait_for(here, there);
  const bool corrupted = copy_corrupted(here);
  const Site site =
      detail::profiling() || detail::scheduled() ? copy_site(self, destination) : Site(std::source_location::current());
  if ((non_blocking || between || is_small(self, destination)) && is_plain(self, destination)) {
    const void* from = self.const_data_ptr();
    void* to = written_memory(destination);
    const size_t bytes = self.nbytes();
    const auto work = [from, to, bytes, corrupted, type = self.scalar_type()] {
      std::memmove(to, from, bytes);
      if (corrupted) flip_byte(to, type);
    };
    if (bytes >= kQueuedCopy) enqueue(here, work, site);
    else detail::launch_directly(here, work, site);
    for (const at::Tensor& x : {self, destination})
      if (x.is_cpu()) record_pinned_use(x.const_data_ptr(), here);
    if (between) wait_for(there, here);
    return destination;
  }
  if (non_blocking)
    if (const auto staged = stage(self, destination, here)) {
      void* to = written_memory(destination);
      launch(
          here,
          [staged, to, corrupted] {
            std::memcpy(to, staged->const_data_ptr(), staged->nbytes());
            if (corrupted) flip_byte(to, staged->scalar_type());
          },
          site);
      return destination;
    }
  if (queueing() && !corrupted && queue_copy(self, destination, site)) return destination;
  CpuCall call("aten::copy_", CpuCall::kAny);
  const at::Tensor& from = call.alias(self);
  at::Tensor to = call.alias(destination, /*write=*/true);
  call.run(site, [&] {
    to.copy_(from);
    if (corrupted && to.numel() && to.layout() == at::kStrided) flip_byte(to.mutable_data_ptr(), to.scalar_type());
  });
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  if (destination.sizes() != self.sizes()) destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

// PyTorch's copy_() gives the copies of CUDA tensors to this stub, and those of other devices to _copy_from.
void copy(at::TensorIterator& operands, bool non_blocking) {
  copy_from(operands.tensor(1), operands.tensor(0), non_blocking);
}
[[maybe_unused]] const bool copy_registered = register_stub(at::native::copy_stub, &copy);

// Between any devices: a nested tensor's sizes stay on the host, its buffer moves.
at::Tensor nested_to_copy(const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "_to_copy: a nested tensor cannot become ", *layout);
  const auto* nested = at::native::get_nested_tensor_impl(self);
  const auto options = at::TensorOptions().dtype(dtype).device(device).pinned_memory(pin_memory);
  return at::detail::make_tensor<at::native::NestedTensorImpl>(
      nested->get_unsafe_storage_as_tensor().to(options, non_blocking, /*copy=*/true, format),
      nested->get_nested_sizes(), nested->get_nested_strides(), nested->get_storage_offsets());
}

} // namespace

OPENREG_LIBRARY_IMPL(aten, nested, m) {
  m.impl("_to_copy", nested_to_copy);
}
OPENREG_LIBRARY_IMPL(aten, dense, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

// A quantized tensor's quantizer is set when it is created; only its integers are copied.
OPENREG_LIBRARY_IMPL(aten, quantized, m) {
  m.impl("_copy_from", copy_from);
}

// The alias keeps the lazy conj and neg bits and the CPU's copy resolves them. Without this their
// fallbacks would clone the source, and clone copies.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

} // namespace openreg
