// What the files of torch_acme share, by file. Every rung.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/acme.h"

namespace acme {

using Tensors = std::vector<at::Tensor>;
constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

inline c10::Device device_at(int index) {
  return {kDevice, static_cast<c10::DeviceIndex>(index)};
}

// Raises the runtime's error.
inline void check(acme_error error, const char* what) {
  TORCH_CHECK_WITH(OutOfMemoryError, error != ACME_OUT_OF_MEMORY, "acme: ", what, ": ", acme_error_message());
  TORCH_CHECK(error == ACME_OK, "acme: ", what, ": ", acme_error_message());
}

// ---- device.cpp ----

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::DeviceIndex checked_index(int64_t index); // -1 is the current device; raises if there is no such device
c10::Stream current_stream(c10::DeviceIndex device);
acme_stream* native(c10::Stream stream);
inline acme_stream* native_stream(c10::DeviceIndex device) {
  return native(current_stream(device));
}
inline acme_stream* native_stream(const at::TensorBase& x) {
  return native_stream(x.device().index());
}
void synchronize(c10::Stream stream); // waits for its work, and raises if a kernel failed
void wait_for(c10::Stream stream, c10::Stream other); // later work of `stream` waits for what `other` has now

// ---- memory.cpp ----

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes);
c10::DeviceAllocator* device_allocator();
inline void record_use(const at::TensorBase& x, c10::Stream stream) {
  device_allocator()->recordStream(x.storage().data_ptr(), stream);
}
void record_history(bool on); // forgets what was recorded before
std::vector<c10::CachingDeviceAllocator::TraceEntry> history();

// ---- generator.cpp ----

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
// Reserves `count` numbers of `generator`, or of the default one. Returns the seed and the offset of the first, from
// which a kernel computes them with Philox.
using MaybeGenerator = std::optional<at::Generator>;
std::pair<uint64_t, uint64_t> reserve(const MaybeGenerator& generator, c10::DeviceIndex device, uint64_t count);
at::Generator for_fallback(const MaybeGenerator& generator, c10::DeviceIndex device); // of the CPU; a new one each time

// ---- fallback.cpp ----

std::map<std::string, int64_t> fallback_counts(bool reset); // calls by operator: your to-do list
std::string set_fallback_policy(const std::string& policy); // "allow", "warn" or "error"; returns the one before

// ---- serialization.cpp ----

std::string share_memory(const c10::Storage& storage); // waits for the current stream, and returns a handle
c10::Storage open_memory(const std::string& handle, size_t size, int64_t device, int file); // `file`: closed at the end

// ---- kernels ----

// Where a kernel, which runs on the stream's thread, can read and write device memory. A kernel for real hardware gets
// the pointer itself.
template <class T>
T* local(T* pointer) {
  return static_cast<T*>(acme_local(pointer));
}

// The geometry of a tensor, which a kernel owns. In a kernel, tensor() is a CPU tensor over the same memory, with which
// the stand-in's kernels call ATen. A kernel for real hardware reads the fields. They do not say whether a tensor is a
// lazy conjugate or negative (is_conj, is_neg). PyTorch resolves these before it calls most kernels, but not before mm,
// bmm, dot and other products.
struct View {
  View(const at::TensorBase& x, bool write = false) // write: the kernel changes x
      : data(write ? x.mutable_data_ptr() : const_cast<void*>(x.const_data_ptr())), sizes(x.sizes().vec()),
        strides(x.strides().vec()), dtype(x.scalar_type()) {
    TORCH_CHECK(data || !x.numel(), "acme: a kernel got a tensor of shape ", x.sizes(),
        " without memory: its storage was freed or resized to nothing");
  }
  at::Tensor tensor() const; // operators.cpp
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

// Runs `work`, a function without arguments, in the order of `stream`. It owns what it uses: pointers and sizes, but no
// references, and no device tensors, because freeing one needs the allocator. An exception that it throws is raised by
// the next synchronization.
template <class Work>
void launch(acme_stream* stream, const char* name, Work work) {
  auto owned = std::make_unique<Work>(std::move(work));
  Work* pointer = owned.get();
  const acme_kernel kernel = [](const void* arguments) -> const char* {
    const std::unique_ptr<Work> work(*static_cast<Work* const*>(arguments));
    thread_local std::string failure;
    try {
      (*work)();
      return nullptr;
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    return failure.c_str();
  };
  check(acme_launch(stream, name, kernel, &pointer, sizeof pointer), name);
  owned.release(); // the kernel deletes it
}

// Returns a result with the shape, dtype and layout of inputs[0], which the kernel `work(result, inputs)` computes.
// It gets CPU tensors over the memory of the device.
template <class Work>
at::Tensor compute(const char* name, const Tensors& inputs, Work work) {
  for (const at::Tensor& x : inputs)
    TORCH_CHECK(!x.is_conj() && !x.is_neg(), name, ": expected no lazy conjugate or negative, but got one; ",
        "call resolve_conj() and resolve_neg() first");
  at::Tensor result = at::empty_like(inputs[0]);
  std::vector<View> views(inputs.begin(), inputs.end());
  launch(native_stream(result), name, [to = View(result), views, work] {
    Tensors local;
    for (const View& view : views) local.push_back(view.tensor());
    work(to.tensor(), local);
  });
  return result;
}

} // namespace acme
