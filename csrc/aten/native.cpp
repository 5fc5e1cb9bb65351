// CpuCall, and the boxed kernel that serves every operator with a CPU kernel.
#include "native.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/clone.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COW.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "../runtime/memory.h"
#include "host_scalars.h"
#include "own_memory.h"
#include "wider.h"

namespace openreg {
namespace {

using c10::BackendComponent;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;
using c10::TensorImpl;

// TensorImpl's protected members, by name: an alias is a copy of all of them but for the device.
struct Access : TensorImpl {
  using TensorImpl::copy_generic_tensor_metadata;
  using TensorImpl::device_opt_;
  using TensorImpl::key_set_;
  using TensorImpl::storage_;
};

constexpr DispatchKeySet kPython = DispatchKeySet(DispatchKey::Python) | DispatchKeySet(DispatchKey::PythonTLSSnapshot);

DispatchKeySet cpu_keys(DispatchKeySet keys) {
  return (keys - kAutocast - kPython).remove_backend(BackendComponent::PrivateUse1Bit) |
      DispatchKeySet(BackendComponent::CPUBit);
}

const c10::Device kHost(c10::kCPU);

bool on_device(const TensorImpl* impl) {
  return impl->key_set().has_backend(BackendComponent::PrivateUse1Bit);
}

c10::intrusive_ptr<StorageImpl> new_alias_storage() {
  return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, kHost),
      c10::GetAllocator(c10::kCPU), /*resizable=*/true);
}

at::Tensor borrow(TensorImpl* impl) {
  return at::Tensor(c10::intrusive_ptr<TensorImpl>::reclaim_copy(impl));
}

// Labels a storage's memory as the device's; memory from elsewhere is copied in first.
void relabel_storage(StorageImpl* storage, c10::DeviceIndex device) {
  if (storage->device_type() != c10::kCPU) return;
  auto& data = storage->_mutable_data_ptr_no_checks();
  if (data.get() && device_of(data.get()) < 0) {
    // A worker thread, or a mapped file, allocated this outside the lending scope.
    c10::DataPtr copy = allocate_on(device, storage->nbytes());
    run(current_stream(device), [&] { std::memcpy(copy.get(), data.get(), storage->nbytes()); });
    replace_memory(storage, std::move(copy));
  } else {
    data.unsafe_set_device(c10::Device(c10::kPrivateUse1, device));
  }
  storage->set_allocator(device_allocator());
}

// Copies a storage's memory to the host, if it is the device's.
void move_to_host(StorageImpl* storage) {
  const void* data = storage->data();
  if (!data || device_of(data) < 0) return;
  LendDeviceMemory none(-1);
  c10::DataPtr copy = c10::GetAllocator(c10::kCPU)->allocate(storage->nbytes());
  const detail::Access access;
  std::memcpy(copy.get(), data, storage->nbytes());
  replace_memory(storage, std::move(copy));
}

} // namespace

// One alias, and the tensor it stands for.
struct CpuCall::Slot {
  at::Tensor pooled;                         // the alias of a dense tensor
  at::Tensor special;                        // the alias of any other, made for the call
  std::array<at::Tensor, 3> members;         // of a sparse tensor: a kernel may give it others
  c10::intrusive_ptr<StorageImpl> storage;   // the pooled alias's own storage
  TensorImpl* real = nullptr;
  const at::Tensor* original = nullptr;
  StorageImpl* shown = nullptr;              // the storage that the alias was given
  void* data = nullptr;                      // what `storage` pointed to when the call began
  size_t bytes = 0;
  bool write = false, dense = true, lazy = false; // lazy: `storage` is a lazy clone

  const at::Tensor& alias() const { return dense ? pooled : special; }
  // Gives a lazy clone memory of its own. What is written to does not wait for the kernel to do it: torch cannot resize
  // a lazy clone.
  void materialize() {
    LendDeviceMemory here(real->device().index());
    storage->mutable_data();
  }
};

struct CpuCall::Slots {
  std::vector<std::unique_ptr<Slot>> all;
  size_t top = 0;
};

CpuCall::Slots& CpuCall::slots() {
  static thread_local Slots instance;
  return instance;
}

CpuCall::CpuCall(const char* name, Devices devices)
    : slots_(slots()), base_(slots_.top), devices_(devices), name_(name), lend_(LendDeviceMemory::lent()),
      below_autograd_(kAboveBackend) {}

// Gives the slots back. An alias that somebody kept (or that went to Python) is left to them, with a
// copy of its memory on the host, where a CPU tensor is read; the slot starts afresh.
CpuCall::~CpuCall() {
  for (size_t i = base_; i < slots_.top; ++i)
    if (Slot& slot = *slots_.all[i]; C10_UNLIKELY(!slot.dense)) {
      slot.special.reset();
      slot.members = {};
    }
  // Last to first: an alias that shares an earlier one's storage lets go of it before that is looked at.
  for (size_t i = slots_.top; i-- > base_;) {
    Slot& slot = *slots_.all[i];
    if (slot.dense) {
      TensorImpl* alias = slot.pooled.unsafeGetTensorImpl();
      const bool own = slot.shown == slot.storage.get();
      const bool kept = slot.pooled.use_count() != 1 || alias->autograd_meta() || alias->pyobj_slot()->load_pyobj() ||
          alias->is_wrapped_number();
      if (C10_UNLIKELY(kept || (own && slot.storage.use_count() != 2) ||
              alias->unsafe_storage().unsafeGetStorageImpl() != slot.shown)) {
        if (own && (slot.pooled.use_count() != 1 || slot.storage.use_count() != 2)) try {
            move_to_host(slot.storage.get());
          } catch (const c10::Error&) { // no memory on the host, so what was kept has none either
            slot.storage->set_nbytes(0);
            replace_memory(slot.storage.get(), c10::DataPtr(nullptr, kHost));
          }
        slot.pooled.reset();
        slot.storage.reset();
      } else if (C10_UNLIKELY(slot.lazy)) {
        replace_memory(slot.storage.get(), c10::DataPtr(nullptr, kHost));
      } else if (!own) {
        alias->*(&Access::storage_) = c10::Storage(slot.storage);
      }
    }
    slot.real = nullptr;
  }
  slots_.top = base_;
}

c10::DeviceIndex CpuCall::device() {
  if (device_ < 0) set_device(checked_index(-1));
  return device_;
}

void CpuCall::set_device(c10::DeviceIndex device) {
  device_ = device;
  lend_.to(device);
}

CpuCall::Slot& CpuCall::take(TensorImpl* real, const at::Tensor* original, bool write) {
  if (slots_.top == slots_.all.size()) slots_.all.push_back(std::make_unique<Slot>());
  Slot& slot = *slots_.all[slots_.top++];
  slot.real = real;
  slot.original = original;
  slot.write = write;
  slot.lazy = false;
  return slot;
}

// The slot of a tensor that was passed before.
CpuCall::Slot* CpuCall::find(const TensorImpl* real) {
  constexpr size_t kMany = 16;
  if (C10_LIKELY(slots_.top - base_ <= kMany)) {
    for (size_t i = base_; i < slots_.top; ++i)
      if (slots_.all[i]->real == real) return slots_.all[i].get();
    return nullptr;
  }
  if (!index_) {
    index_ = std::make_unique<std::unordered_map<const void*, Slot*>>();
    for (size_t i = base_; i < slots_.top; ++i) index(*slots_.all[i]);
  }
  auto it = index_->find(real);
  return it == index_->end() ? nullptr : it->second;
}

// The dense slot whose alias shows this storage, other than the newest slot.
CpuCall::Slot* CpuCall::find(const StorageImpl* real) {
  if (C10_UNLIKELY(index_ != nullptr)) {
    auto it = index_->find(real);
    return it == index_->end() ? nullptr : it->second;
  }
  for (size_t i = base_; i + 1 < slots_.top; ++i) {
    Slot& other = *slots_.all[i];
    if (other.dense && other.shown == other.storage.get() &&
        other.real->unsafe_storage().unsafeGetStorageImpl() == real)
      return &other;
  }
  return nullptr;
}

void CpuCall::index(Slot& slot) {
  index_->emplace(slot.real, &slot);
  if (slot.dense && slot.shown == slot.storage.get())
    index_->emplace(slot.real->unsafe_storage().unsafeGetStorageImpl(), &slot);
}

namespace {

// Refuses the CPU scalars that CUDA refuses.
void check_scalar(const char* name, bool another) {
  const HostScalars accepted = host_scalars(name);
  TORCH_CHECK(accepted != HostScalars::kNone, name,
      ": Expected all tensors to be on the same device, but found a 0-dim CPU tensor among those on openreg. This "
      "operator takes no CPU scalars, as on CUDA; move it with .to()");
  TORCH_CHECK(!another || accepted == HostScalars::kAny, name,
      ": Expected all tensors to be on the same device, but found more than one 0-dim CPU tensor. This operator takes "
      "one CPU scalar, as on CUDA; move the others with .to()");
}

void check_scalar_is_last(const char* name) {
  TORCH_CHECK(host_scalars(name) != HostScalars::kLast, name,
      ": Expected all tensors to be on the same device, but found a 0-dim CPU tensor among those on openreg. This "
      "operator takes a CPU scalar as its last tensor only, as on CUDA; move it with .to()");
}

} // namespace

const at::Tensor& CpuCall::host(const at::Tensor& tensor, bool write) {
  // What an operator computes on comes first, so a host tensor may not: x[i] takes i from the host, not x.
  if (devices_ == kSame && tensor.is_cpu() && !write && ((host_tensors_ && device_ >= 0) || tensor.dim() == 0)) {
    if (!host_tensors_) check_scalar(name_, !host_storages_.empty());
    if (tensor.has_storage())
      host_storages_.push_back(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    return tensor;
  }
  if (devices_ == kAny && tensor.is_cpu()) return tensor;
  refuse(tensor);
}

void CpuCall::refuse(const at::Tensor& tensor) const {
  const bool known = device_ >= 0;
  const std::string here = known ? c10::str("openreg:", static_cast<int>(device_)) : "openreg";
  TORCH_CHECK(std::strcmp(name_, "aten::index") != 0, // which has a sentence of its own, as on CUDA
      "aten::index: indices should be either on cpu or on the same device as the indexed tensor (",
      known ? here : tensor.device().str(), "); move one with .to()");
  TORCH_CHECK(false, name_, ": Expected all tensors to be on the same device, but found at least two devices, ", here,
      " and ", tensor.device(),
      "! Move one with .to(); a CPU tensor may take part only if it has no dimension and is not written to.");
}

const at::Tensor& CpuCall::alias(const at::Tensor& tensor, bool write) {
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!tensor.defined()) return tensor;
  if (C10_UNLIKELY(!on_device(impl))) return host(tensor, write);
  if (C10_UNLIKELY(!host_storages_.empty()) && !write) check_scalar_is_last(name_);
  const c10::DeviceIndex index = impl->device().index();
  if (device_ < 0) {
    set_device(index);
  } else if (C10_UNLIKELY(index != device_ && devices_ == kSame)) {
    refuse(tensor);
  }
  if (Slot* known = find(impl)) {
    known->write |= write;
    if (C10_UNLIKELY(write && known->lazy)) known->materialize();
    return known->alias();
  }
  Slot& slot = take(impl, &tensor, write);
  slot.dense = impl->key_set().has(DispatchKey::PrivateUse1);
  if (C10_LIKELY(slot.dense)) alias_dense(slot);
  else alias_special(slot);
  if (C10_UNLIKELY(index_ != nullptr)) this->index(slot);
  return slot.alias();
}

void CpuCall::alias_dense(Slot& slot) {
  if (C10_UNLIKELY(!slot.pooled.defined())) {
    c10::InferenceMode normal(false); // the alias outlives this call's mode
    slot.storage = new_alias_storage();
    slot.pooled = at::detail::make_tensor<TensorImpl>(
        c10::Storage(slot.storage), DispatchKeySet(DispatchKey::CPU), caffe2::TypeMeta::Make<float>());
  }
  TensorImpl* alias = slot.pooled.unsafeGetTensorImpl();
  TensorImpl* real = slot.real;
  Access::copy_generic_tensor_metadata(real, alias);
  alias->*(&Access::key_set_) = cpu_keys(real->key_set());
  alias->*(&Access::device_opt_) = kHost;
  if (C10_UNLIKELY(real->is_wrapped_number())) alias->set_wrapped_number(true);

  StorageImpl* storage = real->unsafe_storage().unsafeGetStorageImpl();
  slot.shown = slot.storage.get();
  if (Slot* other = find(storage)) {
    alias->*(&Access::storage_) = c10::Storage(other->storage);
    slot.shown = other->storage.get();
    if (C10_UNLIKELY(slot.write && other->lazy)) other->materialize();
    return;
  }
  if (C10_UNLIKELY(storage->has_materializer() && !slot.write)) {
    // A lazy clone: what is read stays shared. A kernel may write what its schema does not say (batch_norm's
    // statistics), or through another argument: that becomes the clone's own, and by carry_back() the tensor's.
    auto clone = c10::impl::cow::lazy_clone_storage(*storage);
    slot.data = const_cast<void*>(clone->data());
    slot.bytes = storage->nbytes();
    auto data = std::move(clone->_mutable_data_ptr_no_checks());
    data.unsafe_set_device(kHost);
    slot.storage->set_data_ptr_noswap(std::move(data));
    slot.storage->set_materializer(&c10::impl::cow::materialize_cow);
    slot.storage->unsafe_set_nbytes(slot.bytes);
    slot.storage->set_resizable(storage->resizable());
    slot.lazy = true;
    return;
  }
  {
    LendDeviceMemory here(real->device().index()); // where copy-on-write memory becomes the tensor's own
    slot.data = storage->mutable_data();
  }
  TORCH_CHECK(slot.data || real->numel() == 0 || real->key_set().has(DispatchKey::ZeroTensor),
      "openreg: a kernel got a tensor of shape ", real->sizes(),
      " without memory: its storage was freed or resized to nothing, or it is a wrapper whose own dispatch was turned "
      "off");
  slot.bytes = storage->nbytes();
  auto& data = slot.storage->_mutable_data_ptr_no_checks();
  if (C10_UNLIKELY(!data.unsafe_reset_data_and_ctx(slot.data)))
    slot.storage->set_data_ptr_noswap(c10::DataPtr(slot.data, kHost));
  slot.storage->unsafe_set_nbytes(slot.bytes);
  if (C10_UNLIKELY(storage->resizable() != slot.storage->resizable()))
    slot.storage->set_resizable(storage->resizable());
}

// Layouts whose TensorImpl is a class of its own: the same class, over aliases of its members.
void CpuCall::alias_special(Slot& slot) {
  TensorImpl* real = slot.real;
  const DispatchKeySet keys = real->key_set();
  // Slots do not move, so `slot` stays valid while the members take theirs.
  if (keys.has_any(c10::sparse_ks)) {
    auto* sparse = static_cast<at::SparseTensorImpl*>(real);
    auto made = c10::make_intrusive<at::SparseTensorImpl>(DispatchKeySet(DispatchKey::SparseCPU), real->dtype());
    made->raw_resize_(sparse->sparse_dim(), sparse->dense_dim(), sparse->sizes());
    slot.members = {sparse->indices(), sparse->values()};
    made->set_indices_and_values_unsafe(alias(slot.members[0], slot.write), alias(slot.members[1], slot.write));
    made->set_coalesced(sparse->coalesced());
    slot.special = at::Tensor(std::move(made));
  } else if (keys.has_any(c10::sparse_csr_ks)) {
    auto* csr = static_cast<at::SparseCsrTensorImpl*>(real);
    auto made = c10::make_intrusive<at::SparseCsrTensorImpl>(
        DispatchKeySet(DispatchKey::SparseCsrCPU), kHost, csr->layout(), real->dtype());
    slot.members = {csr->compressed_indices(), csr->plain_indices(), csr->values()};
    made->set_member_tensors(alias(slot.members[0], slot.write), alias(slot.members[1], slot.write),
        alias(slot.members[2], slot.write), real->sizes());
    slot.special = at::Tensor(std::move(made));
  } else if (keys.has(DispatchKey::QuantizedPrivateUse1) || keys.has(DispatchKey::NestedTensorPrivateUse1)) {
    StorageImpl* storage = real->unsafe_storage().unsafeGetStorageImpl();
    auto* keep = new c10::Storage(real->unsafe_storage());
    c10::DataPtr data(
        const_cast<void*>(storage->data()), keep, [](void* p) { delete static_cast<c10::Storage*>(p); }, kHost);
    slot.data = data.get();
    slot.bytes = storage->nbytes();
    c10::Storage shown(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), slot.bytes, std::move(data),
        c10::GetAllocator(c10::kCPU), storage->resizable()));
    slot.shown = shown.unsafeGetStorageImpl();
    if (keys.has(DispatchKey::QuantizedPrivateUse1)) {
      auto made = c10::make_intrusive<at::QTensorImpl>(std::move(shown), DispatchKeySet(DispatchKey::QuantizedCPU),
          real->dtype(), static_cast<at::QTensorImpl*>(real)->quantizer());
      made->set_sizes_and_strides(real->sizes(), real->strides(), real->storage_offset());
      slot.special = at::Tensor(std::move(made));
    } else {
      auto* nested = static_cast<at::native::NestedTensorImpl*>(real);
      slot.special = at::Tensor(c10::make_intrusive<at::native::NestedTensorImpl>(std::move(shown),
          DispatchKeySet(DispatchKey::NestedTensorCPU), real->dtype(), nested->get_nested_sizes(),
          nested->get_nested_strides(), nested->get_storage_offsets()));
    }
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "openreg: a tensor with dispatch keys ", keys,
        " has no representation on the device; use a strided, sparse, quantized or nested tensor");
  }
}

at::Generator CpuCall::generator(const std::optional<at::Generator>& generator) {
  const at::Generator& used = generator && generator->defined() ? *generator : default_generator(device());
  TORCH_CHECK(used.device().is_privateuseone() && used.device().index() == device(),
      "Expected a generator on openreg:", static_cast<int>(device()), " but found one on ", used.device(),
      "; make it with torch.Generator(device=...)");
  return inner_generator(used);
}

void CpuCall::carry_back() {
  for (size_t i = base_; i < slots_.top; ++i) {
    // Memory first, by the slot that owns the alias storage: any argument that shares it may have grown it.
    Slot& slot = *slots_.all[i];
    StorageImpl* storage = slot.storage.get();
    if (!slot.dense || slot.shown != storage) continue;
    if (C10_LIKELY(storage->data_ptr().get() == slot.data && storage->nbytes() == slot.bytes)) continue;
    StorageImpl* real = slot.real->unsafe_storage().unsafeGetStorageImpl();
    const size_t bytes = storage->nbytes();
    c10::DataPtr grown = storage->set_data_ptr(c10::DataPtr(nullptr, kHost));
    if (grown.get() != slot.data) {
      grown.unsafe_set_device(c10::Device(c10::kPrivateUse1, device_));
      replace_memory(real, std::move(grown));
    }
    real->set_nbytes(bytes);
  }
  for (size_t i = base_; i < slots_.top; ++i) {
    Slot& slot = *slots_.all[i];
    if (!slot.write || C10_UNLIKELY(!slot.dense)) continue;
    TensorImpl *real = slot.real, *alias = slot.pooled.unsafeGetTensorImpl();
    if (C10_UNLIKELY(alias->unsafe_storage().unsafeGetStorageImpl() != slot.shown)) {
      // The kernel gave the tensor another storage (set_): that of another argument, or a new one.
      relabel(alias);
      real->set_storage_keep_dtype(alias->unsafe_storage());
    }
    if (C10_UNLIKELY(real->sizes() != alias->sizes() || real->strides() != alias->strides() ||
            real->storage_offset() != alias->storage_offset()))
      real->set_sizes_and_strides(alias->sizes(), alias->strides(), alias->storage_offset());
  }
  for (size_t i = base_; i < slots_.top; ++i) // last: their members are among the others
    if (Slot& slot = *slots_.all[i]; C10_UNLIKELY(!slot.dense) && slot.write) carry_back_special(slot);
}

void CpuCall::carry_back_special(Slot& slot) {
  TensorImpl *real = slot.real, *alias = slot.special.unsafeGetTensorImpl();
  const DispatchKeySet keys = real->key_set();
  if (keys.has_any(c10::sparse_ks)) {
    auto *to = static_cast<at::SparseTensorImpl*>(real), *from = static_cast<at::SparseTensorImpl*>(alias);
    at::Tensor indices = result(from->indices()), values = result(from->values());
    to->raw_resize_(from->sparse_dim(), from->dense_dim(), from->sizes());
    to->set_indices_and_values_unsafe(indices, values);
    to->set_coalesced(from->coalesced());
  } else if (keys.has_any(c10::sparse_csr_ks)) {
    auto *to = static_cast<at::SparseCsrTensorImpl*>(real), *from = static_cast<at::SparseCsrTensorImpl*>(alias);
    to->set_member_tensors(
        result(from->compressed_indices()), result(from->plain_indices()), result(from->values()), from->sizes());
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(alias->unsafe_storage().unsafeGetStorageImpl() == slot.shown &&
            slot.shown->data_ptr().get() == slot.data && slot.shown->nbytes() == slot.bytes,
        "openreg: a quantized or nested tensor cannot be resized in place; make a new one");
    if (keys.has(DispatchKey::QuantizedPrivateUse1)) {
      if (real->sizes() != alias->sizes() || real->strides() != alias->strides())
        real->set_sizes_and_strides(alias->sizes(), alias->strides(), alias->storage_offset());
      static_cast<at::QTensorImpl*>(real)->set_quantizer_(static_cast<at::QTensorImpl*>(alias)->quantizer());
    }
  }
}

// Makes a device tensor of what a kernel made, in place.
void CpuCall::relabel(TensorImpl* impl) {
  const DispatchKeySet keys = impl->key_set();
  if (!keys.has_backend(BackendComponent::CPUBit)) return;
  const c10::Device here(c10::kPrivateUse1, device());
  if (C10_UNLIKELY(keys.has_any(c10::sparse_ks) || keys.has_any(c10::sparse_csr_ks))) {
    at::Tensor members[3];
    if (keys.has_any(c10::sparse_ks)) {
      auto* sparse = static_cast<at::SparseTensorImpl*>(impl);
      members[0] = result(sparse->indices());
      members[1] = result(sparse->values());
    } else {
      auto* csr = static_cast<at::SparseCsrTensorImpl*>(impl);
      members[0] = result(csr->compressed_indices());
      members[1] = result(csr->plain_indices());
      members[2] = result(csr->values());
    }
    impl->_change_backend_component_keys(here);
    impl->*(&Access::device_opt_) = here;
    if (keys.has_any(c10::sparse_ks)) {
      auto* sparse = static_cast<at::SparseTensorImpl*>(impl);
      const bool coalesced = sparse->coalesced(); // which setting the members forgets
      sparse->set_indices_and_values_unsafe(members[0], members[1]);
      sparse->set_coalesced(coalesced);
    } else
      static_cast<at::SparseCsrTensorImpl*>(impl)->set_member_tensors(
          members[0], members[1], members[2], impl->sizes());
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(impl->has_storage(), "openreg: this operator gives a ", impl->layout(),
      " tensor, which has no representation on the device; use a strided layout");
  if (C10_UNLIKELY(keys.has(DispatchKey::NestedTensorCPU))) { // whose shape is tensors too, which the host reads
    auto* nested = static_cast<at::native::NestedTensorImpl*>(impl);
    for (const at::Tensor& t :
        {nested->get_nested_sizes(), nested->get_nested_strides(), nested->get_storage_offsets()})
      move_to_host(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
  StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  bool view = false;
  for (size_t i = base_; i < slots_.top && !view; ++i) {
    Slot& slot = *slots_.all[i];
    if (slot.shown == storage && slot.real->has_storage()) {
      impl->set_storage_keep_dtype(slot.real->unsafe_storage());
      view = true;
    }
  }
  if (!view) relabel_storage(storage, here.index());
  impl->*(&Access::key_set_) = ((keys - kAutocast).remove_backend(BackendComponent::CPUBit) |
      DispatchKeySet(BackendComponent::PrivateUse1Bit) | DispatchKeySet(DispatchKey::AutocastPrivateUse1));
  impl->*(&Access::device_opt_) = here;
}

at::Tensor CpuCall::result(at::Tensor tensor) {
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!tensor.defined() || on_device(impl)) return tensor;
  for (size_t i = base_; i < slots_.top; ++i)
    if (slots_.all[i]->alias().unsafeGetTensorImpl() == impl) return borrow(slots_.all[i]->real);
  if (C10_UNLIKELY(!host_storages_.empty()) && impl->has_storage())
    for (const StorageImpl* storage : host_storages_)
      if (impl->unsafe_storage().unsafeGetStorageImpl() == storage) return tensor;
  relabel(impl);
  return tensor;
}

bool CpuCall::passed(const at::Tensor& tensor) const {
  for (size_t i = base_; i < slots_.top; ++i)
    if (slots_.all[i]->alias().is_same(tensor)) return true;
  return !host_storages_.empty();
}

bool CpuCall::views_argument(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return false;
  for (size_t i = base_; i < slots_.top; ++i)
    if (slots_.all[i]->shown == tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()) return true;
  return false;
}

const at::Tensor& CpuCall::original(const at::Tensor& alias) const {
  for (size_t i = base_; i < slots_.top; ++i)
    if (slots_.all[i]->alias().is_same(alias)) return *slots_.all[i]->original;
  return alias;
}

void resize_storage(StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  c10::DataPtr grown = allocate_on(storage->device().index(), bytes);
  if (storage->nbytes() && bytes)
    run(current_stream(storage->device().index()),
        [&] { std::memcpy(grown.get(), storage->data(), std::min(bytes, storage->nbytes())); });
  replace_memory(storage, std::move(grown));
  storage->set_nbytes(bytes);
}

// ---- the boxed kernel ----

namespace {

// Operators whose CPU arguments are by design on the host: on CUDA too, lengths and index lists may be.
const std::unordered_set<std::string> kHostArguments = {"aten::_pack_padded_sequence", "aten::index",
    "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_masked_index",
    "aten::_unsafe_masked_index_put_accumulate", "aten::_ctc_loss", "aten::_pad_packed_sequence",
    "aten::_nested_from_padded", "aten::_nested_tensor_from_mask", "aten::_nested_view_from_buffer",
    "aten::_nested_view_from_buffer_copy", "aten::quantized_gru", "aten::quantized_lstm"};
// Operators that read no data of their tensor arguments, which may lie on any device.
const std::unordered_set<std::string> kReadsNoData = {"aten::empty_quantized"};
// Results that stay on the host: the batch sizes of a packed sequence steer Python code.
const std::unordered_map<std::string, size_t> kHostResults = {{"aten::_pack_padded_sequence", 1}};

// CPU kernels that ask an argument whether it requires grad, to save what only backward needs.
const std::unordered_set<std::string> kAsksRequiresGrad = {"aten::_sparse_mm_reduce_impl"};
// Composites that work on aliases only: they ask by name for a CPU tensor, or call a CPU stub directly.
const std::unordered_set<std::string> kHostComposites = {
    "aten::mode", "aten::mode.values", "aten::conj_physical_", "aten::_batch_norm_no_update"};

// Runs the CPU kernel of one operator; `target` is the CPU's key for the layout it serves.
class NativeKernel final : public c10::OperatorKernel {
 public:
  NativeKernel(const c10::OperatorHandle& op, DispatchKey target) : target_(target) {
    const c10::FunctionSchema& schema = op.schema();
    for (const auto& argument : schema.arguments()) {
      const auto* info = argument.alias_info();
      write_.push_back(info && info->isWrite());
      const auto& type = argument.type();
      generator_.push_back(type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())));
      takes_generator_ |= generator_.back();
      takes_device_ |= type->isSubtypeOf(*c10::OptionalType::create(c10::DeviceObjType::get()));
    }
    // The flash kernel bears the tag but refuses dropout, and so never draws.
    draws_ = !takes_generator_ && op.hasTag(at::Tag::nondeterministic_seeded) &&
        schema.name() != "aten::_scaled_dot_product_flash_attention_for_cpu";
    host_arguments_ = kHostArguments.count(schema.name()) > 0;
    host_lists_only_ = host_arguments_ && schema.name().find("index_put") != std::string::npos;
    reads_no_data_ = kReadsNoData.count(schema.name()) > 0;
    takes_results_ = takes_results(schema);
    if (constexpr std::string_view kForeach = "aten::_foreach_"; schema.name().starts_with(kForeach)) {
      each_ = "aten::" + schema.name().substr(kForeach.size());
      for (size_t i = 0; i < write_.size() && host_scalars(each_) == HostScalars::kLast; ++i)
        if (schema.arguments()[i].type()->isSubtypeOf(*c10::ListType::ofTensors())) last_list_ = i;
    }
    asks_requires_grad_ = kAsksRequiresGrad.count(schema.name()) > 0;
    if (auto it = kHostResults.find(schema.name()); it != kHostResults.end()) host_result_ = it->second;
    if (target == DispatchKey::CPU || target == DispatchKey::SparseCsrCPU) wider_ = Wider::of(schema.name());
  }

  void operator()(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
    if (C10_UNLIKELY(wider_ != nullptr)) {
      const bool dense = target_ == DispatchKey::CPU;
      if (wider_->run(op, stack, dense ? DispatchKey::PrivateUse1 : DispatchKey::SparseCsrPrivateUse1)) return;
    }
    if (C10_UNLIKELY(takes_results_) && target_ == DispatchKey::CPU && call_with_own_memory(op, stack)) return;
    if (C10_UNLIKELY(queueing()) && target_ == DispatchKey::CPU && queue_operator(op, stack)) return;
    // The stack holds the only reference to some arguments, which the call needs until its own end.
    c10::SmallVector<at::Tensor, 8> held;
    CpuCall call(op.operator_name().name.c_str(), reads_no_data_ ? CpuCall::kAny : CpuCall::kSame);
    bool for_host = false; // the caller asks for a CPU result, which then is none of the device's
    if (host_arguments_) call.allow_host_tensors();
    const size_t count = write_.size();
    held.reserve(count);
    for (size_t i = 0; i < count && takes_device_; ++i) {
      c10::IValue& value = (*stack)[stack->size() - count + i];
      if (!value.isDevice()) continue;
      for_host = value.toDevice().is_cpu();
      if (for_host) continue;
      call.set_device(checked_index(value.toDevice()));
      value = kHost;
    }
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = (*stack)[stack->size() - count + i];
      if (value.isTensor()) {
        held.push_back(std::move(value).toTensor());
        // The indices may be on the host; of the values, as CUDA has it, one without a dimension.
        if (C10_UNLIKELY(host_lists_only_)) call.allow_host_tensors(held.back().dim() == 0);
        const at::Tensor& alias = call.alias(held.back(), write_[i]);
        if (C10_UNLIKELY(asks_requires_grad_) && held.back().requires_grad()) alias.set_requires_grad(true);
        value = alias;
      } else if (value.isTensorList()) {
        const auto list = value.toTensorList();
        c10::List<at::Tensor> aliases;
        aliases.reserve(list.size());
        lists_hold(held, list);
        if (C10_UNLIKELY(i < last_list_)) // before the list that may have CPU scalars
          for (const at::Tensor& t : list)
            if (t.is_cpu()) check_scalar_is_last(each_.c_str());
        for (const at::Tensor& t : list) aliases.push_back(call.alias(t, write_[i]));
        value = std::move(aliases);
      } else if (value.isOptionalTensorList()) {
        const auto list = value.toOptionalTensorList();
        c10::List<std::optional<at::Tensor>> aliases;
        aliases.reserve(list.size());
        if (C10_UNLIKELY(host_arguments_)) call.allow_host_tensors();
        for (const std::optional<at::Tensor>& t : list) {
          if (t) held.push_back(*t);
          aliases.push_back(t ? std::optional(call.alias(*t, write_[i])) : std::nullopt);
        }
        value = std::move(aliases);
      }
    }
    for (size_t i = 0; i < count && takes_generator_; ++i)
      if (generator_[i]) {
        c10::IValue& value = (*stack)[stack->size() - count + i];
        value = call.generator(value.toOptional<at::Generator>());
      }
    {
      LendGenerator lend(draws_, draws_ ? call.device() : c10::DeviceIndex(0));
      call.device();
      LendDeviceMemory memory(for_host ? c10::DeviceIndex(-1) : LendDeviceMemory::lent());
      call.run([&] { op.redispatchBoxed(DispatchKeySet(target_), stack); });
    }
    if (C10_UNLIKELY(for_host)) return;
    const size_t returns = op.schema().returns().size();
    for (size_t i = 0; i < returns; ++i) {
      c10::IValue& value = (*stack)[stack->size() - returns + i];
      if (value.isTensor()) {
        at::Tensor out = std::move(value).toTensor();
        value = C10_UNLIKELY(i == host_result_) ? to_host(std::move(out)) : own(call, std::move(out));
      } else if (value.isTensorList()) {
        auto list = value.toTensorList();
        c10::List<at::Tensor> out;
        out.reserve(list.size());
        for (const at::Tensor& t : list) out.push_back(call.result(t));
        value = std::move(out);
      }
    }
  }

 private:
  static void lists_hold(c10::SmallVector<at::Tensor, 8>& held, const c10::List<at::Tensor>& list) {
    for (const at::Tensor& t : list) held.push_back(t);
  }
  // A tensor that a kernel returns and somebody keeps (a quantizer its scales, Python its objects)
  // stays theirs: ours is a view where it views an argument, else a copy.
  static at::Tensor own(CpuCall& call, at::Tensor tensor) {
    if (C10_UNLIKELY(tensor.use_count() > 1 && tensor.defined() && !call.passed(tensor))) {
      if (call.views_argument(tensor)) tensor = tensor.alias();
      else tensor = openreg::run(current_stream(call.device()), [&] { return to_host(tensor).clone(); });
    }
    return call.result(std::move(tensor));
  }
  static at::Tensor to_host(at::Tensor tensor) {
    if (tensor.has_storage()) move_to_host(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    return tensor;
  }

  DispatchKey target_;
  std::vector<bool> write_, generator_;
  bool takes_generator_ = false, takes_device_ = false, takes_results_ = false;
  bool draws_ = false; // random numbers, without a Generator argument
  bool host_arguments_ = false, host_lists_only_ = false, asks_requires_grad_ = false, reads_no_data_ = false;
  size_t host_result_ = static_cast<size_t>(-1);
  const Wider* wider_ = nullptr;
  std::string each_;     // of a foreach operator: what it calls for each element
  size_t last_list_ = 0; // of one that takes CPU scalars in its last list only
};

struct Layout {
  DispatchKey cpu, device;
};
constexpr Layout kLayouts[] = {
    {DispatchKey::CPU, DispatchKey::PrivateUse1},
    {DispatchKey::SparseCPU, DispatchKey::SparsePrivateUse1},
    {DispatchKey::SparseCsrCPU, DispatchKey::SparseCsrPrivateUse1},
    {DispatchKey::QuantizedCPU, DispatchKey::QuantizedPrivateUse1},
    {DispatchKey::NestedTensorCPU, DispatchKey::NestedTensorPrivateUse1},
};

// The namespaces whose operators ship with torch. Others are third-party libraries': those fall
// back, by policy, unless the user asks to share their CPU kernels (openreg_ops.fallback.share).
const std::unordered_set<std::string> kNamespaces = {
    "aten", "quantized", "_quantized", "sparse", "mkl", "mkldnn", "onednn"};

} // namespace

c10::RegistrationHandleRAII register_native_kernel(const c10::OperatorHandle& op, DispatchKey cpu, DispatchKey device) {
  return c10::Dispatcher::singleton().registerImpl(op.operator_name(), device,
      c10::KernelFunction::makeFromBoxedFunctor<NativeKernel>(std::make_unique<NativeKernel>(op, cpu)), std::nullopt,
      nullptr, "csrc/aten/native.cpp, sharing the CPU's kernel");
}

const c10::BoxedKernel& native_kernel() {
  struct Any final : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
      static thread_local std::unordered_map<const c10::FunctionSchema*, NativeKernel> known;
      known.try_emplace(&op.schema(), op, DispatchKey::CPU).first->second(op, keys, stack);
    }
  };
  static const auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<Any>());
  return kernel;
}

int64_t register_native_kernels() {
  // Leaked: taking a registration back while the process ends would race with the dispatcher's own end.
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto ns = name.getNamespace();
    if (!ns || !kNamespaces.count(std::string(*ns))) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    for (const auto& [cpu, device] : kLayouts) {
      const bool composite = cpu == DispatchKey::CPU && kHostComposites.count(toString(name));
      if (!(op->hasKernelForDispatchKey(cpu) || composite) || op->hasKernelForDispatchKey(device)) continue;
      // A composite differentiates through its parts; a backend kernel would cut that off, unless the
      // operator has a derivative of its own as well (mish_backward).
      if (cpu == DispatchKey::CPU && op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
          !op->hasKernelForDispatchKey(DispatchKey::Autograd))
        continue;
      registered->push_back(register_native_kernel(*op, cpu, device));
    }
  }
  return static_cast<int64_t>(registered->size());
}

} // namespace openreg
