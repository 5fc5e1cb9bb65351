#include "aten/deferred/arguments.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "backend/map_tensors.h"

namespace openreg {
namespace {

using c10::StorageImpl;

// A CPU tensor like `x` with this storage.
at::Tensor on_storage(const at::Tensor& x, c10::Storage storage) {
  const c10::InferenceMode mode(x.is_inference());
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype());
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  if (x.is_conj()) impl->_set_conj(true);
  if (x.is_neg()) impl->_set_neg(true);
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

c10::Storage host_storage(const StorageImpl* memory) {
  return c10::Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), memory->nbytes(),
      c10::DataPtr(const_cast<void*>(memory->data()), c10::kCPU), nullptr, /*resizable=*/false));
}

// Zeros, which take up memory only when they are first written to.
c10::Storage scratch_storage(size_t bytes) {
  void* data = std::calloc(1, std::max<size_t>(bytes, 64));
  TORCH_CHECK_WITH(
      OutOfMemoryError, data, "openreg: out of host memory for the scratch buffer of a capture, ", bytes, " bytes");
  return c10::Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), bytes,
      c10::DataPtr(data, data, &std::free, c10::kCPU), c10::GetAllocator(c10::kCPU), /*resizable=*/true));
}

// Storages that arguments share, each with what stands for it.
class SharedStorages {
 public:
  template <class Make>
  const c10::Storage& of(const StorageImpl* storage, const Make& make) {
    for (const auto& [known, made] : made_)
      if (known == storage) return made;
    return made_.emplace_back(storage, make()).second;
  }

 private:
  std::vector<std::pair<const StorageImpl*, c10::Storage>> made_;
};

} // namespace

StorageImpl* storage_of(const at::Tensor& x) {
  return x.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

at::Tensor host_tensor(const at::Tensor& x, const StorageImpl* memory) {
  return on_storage(x, host_storage(memory));
}

at::Tensor zeros_like_strided(const at::Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::Tensor made(at::detail::empty_strided_cpu(sizes, strides, x.scalar_type()));
  if (const size_t bytes = made.storage().nbytes()) std::memset(storage_of(made)->mutable_data(), 0, bytes);
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

MemoryUse use_of(const at::Tensor& host, bool written) {
  size_t bytes = host.numel() ? host.itemsize() : 0;
  for (int64_t d = 0; bytes && d < host.dim(); ++d)
    bytes += static_cast<size_t>((host.size(d) - 1) * host.stride(d)) * host.itemsize();
  return {host.const_data_ptr(), bytes, written};
}

void Arguments::add(const at::Tensor& given, const at::Tensor& real, bool written) {
  if (Argument* known = find(given)) known->written |= written;
  else all_.push_back({given, real, {}, {}, {}, written});
}

Argument* Arguments::find(const at::Tensor& given) {
  for (Argument& each : all_)
    if (each.given.is_same(given)) return &each;
  return nullptr;
}

const Argument* Arguments::find_scratch(const at::Tensor& x) const {
  for (const Argument& each : all_)
    if (each.scratch.is_same(x)) return &each;
  return nullptr;
}

const Argument* Arguments::find_scratch(const StorageImpl* storage) const {
  for (const Argument& each : all_)
    if (each.scratch.has_storage() && storage_of(each.scratch) == storage) return &each;
  return nullptr;
}

void Arguments::keep_value(Argument& argument) {
  argument.constant = true;
  argument.host = argument.given.detach().clone();
  if (argument.given.unsafeGetTensorImpl()->is_wrapped_number())
    argument.host.unsafeGetTensorImpl()->set_wrapped_number(true);
}

void Arguments::make_host() {
  SharedStorages shared;
  for (Argument& each : all_) {
    if (each.constant) continue;
    // A tensor that is only read may be a lazy clone: only its alias has its memory.
    const StorageImpl* storage = storage_of(each.real);
    if (storage->has_materializer()) storage = storage_of(each.given);
    each.host = on_storage(each.given, shared.of(storage, [&] { return host_storage(storage); }));
    if (each.written) // a capture may have resized it
      each.host.unsafeGetTensorImpl()->set_sizes_and_strides(
          each.real.sizes(), each.real.strides(), each.real.storage_offset());
  }
}

void Arguments::make_meta() {
  for (Argument& each : all_) {
    const at::Tensor& x = each.given;
    each.meta = at::Tensor(at::detail::empty_strided_meta(x.sizes(), x.strides(), x.scalar_type()));
    if (x.unsafeGetTensorImpl()->is_wrapped_number()) each.meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

void Arguments::make_scratch(Values values) {
  SharedStorages shared;
  for (Argument& each : all_) {
    if (each.constant) {
      each.scratch = each.host;
      continue;
    }
    const StorageImpl* storage = storage_of(each.given);
    each.scratch = on_storage(each.given, shared.of(storage, [&] { return scratch_storage(storage->nbytes()); }));
    if (values == Values::kOnes) each.scratch.fill_(1);
    if (values == Values::kIdentity && each.scratch.dim() > 1) each.scratch.diagonal(0, -2, -1).fill_(1);
  }
}

void Arguments::make_small_scratch() {
  for (Argument& each : all_) {
    std::vector<int64_t> sizes = each.given.sizes().vec(), strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 0;) {
      sizes[i] = std::min<int64_t>(sizes[i], 2);
      if (i + 1 < sizes.size()) strides[i] = strides[i + 1] * sizes[i + 1];
    }
    each.scratch = each.constant ? each.host : zeros_like_strided(each.given, sizes, strides);
  }
}

torch::jit::Stack Arguments::view(const c10::IValue* first, size_t count, at::Tensor Argument::* view) {
  torch::jit::Stack stack;
  stack.reserve(count + 2); // an out= form takes results too
  for (size_t i = 0; i < count; ++i)
    stack.push_back(map_tensors(first[i], [&](const at::Tensor& x) { return x.defined() ? find(x)->*view : x; }));
  return stack;
}

size_t Arguments::bytes() const {
  size_t bytes = 0;
  for (const Argument& each : all_)
    bytes += each.constant ? 0 : std::max(each.given.nbytes(), storage_of(each.given)->nbytes());
  return bytes;
}

std::vector<MemoryUse> Arguments::uses() const {
  std::vector<MemoryUse> uses;
  for (const Argument& each : all_)
    if (each.host.numel()) uses.push_back(use_of(each.host, each.written));
  return uses;
}

} // namespace openreg
