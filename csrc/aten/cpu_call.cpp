#include "aten/cpu_call.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COW.h>

#include <array>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "aten/deferred/deferred.h"
#include "aten/traits/host_scalars.h"
#include "aten/traits/traits.h"
#include "backend/generator.h"
#include "backend/identity/identity.h"
#include "runtime/memory/memory.h"

namespace openreg {
namespace {

using c10::BackendComponent;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;
using c10::TensorImpl;

// TensorImpl's protected members, by name: an alias copies all of them except the device.
struct Access : TensorImpl {
  using TensorImpl::copy_generic_tensor_metadata;
  using TensorImpl::device_opt_;
  using TensorImpl::key_set_;
  using TensorImpl::storage_;
};

constexpr DispatchKeySet kPython = DispatchKeySet(DispatchKey::Python) | DispatchKeySet(DispatchKey::PythonTLSSnapshot);

DispatchKeySet cpu_keys(DispatchKeySet keys) {
  const DispatchKeySet others(DispatchKeySet::RAW, (keys - kAutocast - kPython).raw_repr() & ~kBackend.raw_repr());
  return others | DispatchKeySet(BackendComponent::CPUBit);
}

const c10::Device kHost(c10::kCPU);

bool has_device_keys(const TensorImpl* impl) {
  return impl->key_set().has_any(kBackend);
}

c10::intrusive_ptr<StorageImpl> new_alias_storage() {
  return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, kHost),
      c10::GetAllocator(c10::kCPU), /*resizable=*/true);
}

// Gives a sparse tensor the dimensions and sizes of another one, including sizes that a SymInt keeps on the heap.
void take_sizes(at::SparseTensorImpl* to, const at::SparseTensorImpl* from) {
  if (C10_UNLIKELY(from->has_symbolic_sizes_strides()))
    to->resize_(from->sparse_dim(), from->dense_dim(), from->sym_sizes());
  else to->raw_resize_(from->sparse_dim(), from->dense_dim(), from->sizes());
}

at::Tensor borrow(TensorImpl* impl) {
  return at::Tensor(c10::intrusive_ptr<TensorImpl>::reclaim_copy(impl));
}

// Labels a storage's memory as device memory; memory from elsewhere is copied in first.
void relabel_storage(StorageImpl* storage, c10::DeviceIndex device) {
  if (storage->device_type() != c10::kCPU) return;
  auto& data = storage->_mutable_data_ptr_no_checks();
  if (data.get() && device_of(data.get()) < 0) {
    // A worker thread, or a mapped file, allocated this outside the lending scope.
    c10::DataPtr copy = allocate_on(device, storage->nbytes());
    run(current_stream(device), [&] { std::memcpy(copy.get(), data.get(), storage->nbytes()); });
    replace_memory(storage, std::move(copy));
  } else {
    data.unsafe_set_device(device_at(device));
  }
  storage->set_allocator(device_allocator());
}

// Copies what a kernel keeps to the host. Called in a destructor: if the host has no memory, it ends up without memory.
void keep_on_host(StorageImpl* storage) noexcept {
  try {
    move_to_host(storage);
  } catch (const c10::Error&) {
    storage->set_nbytes(0);
    replace_memory(storage, c10::DataPtr(nullptr, kHost));
  }
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
  // Gives a lazy clone its own memory. Arguments that are written to do not wait for the kernel to do it, because torch
  // cannot resize a lazy clone.
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

// Returns the slots. An alias that is still referenced (or that Python has) stays with its owner, with a copy of its
// memory on the host, because CPU tensors are read there; the slot starts over.
CpuCall::~CpuCall() {
  for (size_t i = base_; i < slots_.top; ++i)
    if (Slot& slot = *slots_.all[i]; C10_UNLIKELY(!slot.dense)) {
      slot.special.reset();
      slot.members = {};
    }
  // Last to first: an alias that shares an earlier one's storage releases it before the earlier one is checked.
  for (size_t i = slots_.top; i-- > base_;) {
    Slot& slot = *slots_.all[i];
    if (slot.dense) {
      TensorImpl* alias = slot.pooled.unsafeGetTensorImpl();
      const bool own = slot.shown == slot.storage.get();
      const bool kept = slot.pooled.use_count() != 1 || alias->autograd_meta() || alias->is_wrapped_number();
      if (C10_UNLIKELY(kept || (own && slot.storage.use_count() != 2) ||
              alias->unsafe_storage().unsafeGetStorageImpl() != slot.shown)) {
        if (own && (slot.pooled.use_count() != 1 || slot.storage.use_count() != 2)) keep_on_host(slot.storage.get());
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
  if (C10_UNLIKELY(refused_.defined())) refuse(refused_);
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

// The slot of a tensor that was already passed.
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

const at::Tensor& CpuCall::host(const at::Tensor& tensor, bool write) {
  // The first argument is the one computed on, so it must not be a host tensor: x[i] accepts i on the host, but not x.
  if (devices_ == kSame && tensor.is_cpu() && !write && ((host_tensors_ && device_ >= 0) || tensor.dim() == 0)) {
    if (!host_tensors_ && !scalars_checked_) check_scalar(name_, !host_storages_.empty());
    expect_memory(name_, tensor);
    if (tensor.has_storage())
      host_storages_.push_back(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    return tensor;
  }
  if (devices_ == kAny && tensor.is_cpu()) {
    expect_memory(name_, tensor);
    return tensor;
  }
  if (device_ < 0 && devices_ == kSame) {
    refused_ = tensor;
    return tensor;
  }
  refuse(tensor);
}

void CpuCall::refuse(const at::Tensor& tensor) const {
  const bool known = device_ >= 0;
  const std::string here = known ? device_at(device_).str() : identity.name;
  const char* message = row_of(name_).wrong_device;
  const bool first = !known || refused_.defined(); // the others should be where it is
  TORCH_CHECK(!message, name_, ": ", message, " (", first ? tensor.device().str() : here, "); move one with .to()");
  TORCH_CHECK(false, name_, ": Expected all tensors to be on the same device, but found at least two devices, ", here,
      " and ", tensor.device(),
      "! Move one with .to(); a CPU tensor is allowed only if it is 0-dimensional and not written to.");
}

const at::Tensor& CpuCall::alias(const at::Tensor& tensor, bool write) {
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!tensor.defined()) return tensor;
  if (C10_UNLIKELY(!has_device_keys(impl))) return host(tensor, write);
  if (C10_UNLIKELY(!host_storages_.empty()) && !write && !scalars_checked_) check_scalar_is_last(name_);
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
  slot.dense = impl->key_set().has_all(kDense);
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
    // A lazy clone: memory that is only read stays shared. A kernel may write more than its schema says (batch_norm's
    // statistics), or write through another argument. That memory becomes the clone's own, and carry_back() makes it
    // the tensor's.
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
    LendDeviceMemory here(real->device().index()); // this is where copy-on-write memory becomes the tensor's own
    slot.data = storage->mutable_data();
  }
  if (C10_UNLIKELY(!slot.data)) expect_memory(name_, *slot.original);
  slot.bytes = storage->nbytes();
  auto& data = slot.storage->_mutable_data_ptr_no_checks();
  if (C10_UNLIKELY(!data.unsafe_reset_data_and_ctx(slot.data)))
    slot.storage->set_data_ptr_noswap(c10::DataPtr(slot.data, kHost));
  slot.storage->unsafe_set_nbytes(slot.bytes);
  if (C10_UNLIKELY(storage->resizable() != slot.storage->resizable()))
    slot.storage->set_resizable(storage->resizable());
}

// Layouts with their own TensorImpl class: the same class, over aliases of its members.
void CpuCall::alias_special(Slot& slot) {
  TensorImpl* real = slot.real;
  const DispatchKeySet keys = real->key_set();
  // Slots do not move, so `slot` stays valid while the members take theirs.
  if (keys.has_any(c10::sparse_ks)) {
    auto* sparse = static_cast<at::SparseTensorImpl*>(real);
    auto made = c10::make_intrusive<at::SparseTensorImpl>(DispatchKeySet(DispatchKey::SparseCPU), real->dtype());
    take_sizes(made.get(), sparse);
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
  } else if (keys.has(identity.quantized) || keys.has(identity.nested)) {
    StorageImpl* storage = real->unsafe_storage().unsafeGetStorageImpl();
    auto* keep = new c10::Storage(real->unsafe_storage());
    c10::DataPtr data(
        const_cast<void*>(storage->data()), keep, [](void* p) { delete static_cast<c10::Storage*>(p); }, kHost);
    slot.data = data.get();
    slot.bytes = storage->nbytes();
    c10::Storage shown(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), slot.bytes, std::move(data),
        c10::GetAllocator(c10::kCPU), storage->resizable()));
    slot.shown = shown.unsafeGetStorageImpl();
    if (keys.has(identity.quantized)) {
      auto made = c10::make_intrusive<at::QTensorImpl>(std::move(shown), DispatchKeySet(DispatchKey::QuantizedCPU),
          real->dtype(), static_cast<at::QTensorImpl*>(real)->quantizer());
      made->set_sizes_and_strides(real->sizes(), real->strides(), real->storage_offset());
      slot.special = at::Tensor(std::move(made));
    } else {
      auto* nested = static_cast<at::native::NestedTensorImpl*>(real);
      slot.special = at::Tensor(c10::make_intrusive<at::native::NestedTensorImpl>(std::move(shown),
          DispatchKeySet(DispatchKey::NestedTensorCPU), real->dtype(), nested->get_nested_sizes(),
          nested->get_nested_strides(), nested->get_storage_offsets()));
      slot.special._set_conj(real->is_conj());
      slot.special._set_neg(real->is_neg());
    }
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "openreg: a tensor with dispatch keys ", keys,
        " has no representation on the device; use a strided, sparse, quantized or nested tensor");
  }
}

at::Generator CpuCall::generator(const std::optional<at::Generator>& generator) {
  TORCH_CHECK(!refused_.defined(), "Expected a '", refused_.device().type(), "' device type for generator but found '",
      identity.name, "'; make it with torch.Generator(device=...)");
  const at::Generator& used = generator && generator->defined() ? *generator : default_generator(device());
  TORCH_CHECK(on_device(used.device()) && used.device().index() == device(), "Expected a generator on ",
      device_at(device()), " but found one on ", used.device(), "; make it with torch.Generator(device=...)");
  return inner_generator(used);
}

void CpuCall::carry_back() {
  for (size_t i = base_; i < slots_.top; ++i) {
    // Memory first, by the slot that owns the alias's storage: any argument that shares it may have grown it.
    Slot& slot = *slots_.all[i];
    StorageImpl* storage = slot.storage.get();
    if (!slot.dense || slot.shown != storage) continue;
    if (C10_LIKELY(storage->data_ptr().get() == slot.data && storage->nbytes() == slot.bytes)) continue;
    StorageImpl* real = slot.real->unsafe_storage().unsafeGetStorageImpl();
    const size_t bytes = storage->nbytes();
    c10::DataPtr grown = storage->set_data_ptr(c10::DataPtr(nullptr, kHost));
    if (grown.get() != slot.data) {
      grown.unsafe_set_device(device_at(device_));
      replace_memory(real, std::move(grown));
    }
    real->set_nbytes(bytes);
  }
  for (size_t i = base_; i < slots_.top; ++i) {
    Slot& slot = *slots_.all[i];
    if (!slot.write || C10_UNLIKELY(!slot.dense)) continue;
    TensorImpl *real = slot.real, *alias = slot.pooled.unsafeGetTensorImpl();
    if (C10_UNLIKELY(alias->unsafe_storage().unsafeGetStorageImpl() != slot.shown)) {
      // The kernel gave the tensor a different storage (set_): the storage of another argument, or a new one.
      relabel(alias);
      real->set_storage_keep_dtype(alias->unsafe_storage());
    }
    if (C10_UNLIKELY(real->sizes() != alias->sizes() || real->strides() != alias->strides() ||
            real->storage_offset() != alias->storage_offset()))
      real->set_sizes_and_strides(alias->sizes(), alias->strides(), alias->storage_offset());
    if (C10_UNLIKELY(real->is_conj() != alias->is_conj())) real->_set_conj(alias->is_conj()); // linalg.solve does
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
    take_sizes(to, from);
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
    if (keys.has(identity.quantized)) {
      if (real->sizes() != alias->sizes() || real->strides() != alias->strides())
        real->set_sizes_and_strides(alias->sizes(), alias->strides(), alias->storage_offset());
      static_cast<at::QTensorImpl*>(real)->set_quantizer_(static_cast<at::QTensorImpl*>(alias)->quantizer());
    }
  }
}

// Turns a kernel's result into a device tensor, in place.
void CpuCall::relabel(TensorImpl* impl) {
  const DispatchKeySet keys = impl->key_set();
  if (!keys.has_backend(BackendComponent::CPUBit)) return;
  const c10::Device here(identity.type, device());
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
  TORCH_CHECK_NOT_IMPLEMENTED(impl->has_storage(), "openreg: this operator returns a ", impl->layout(),
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
  impl->*(&Access::key_set_) =
      ((keys - kAutocast).remove_backend(BackendComponent::CPUBit) | kBackend | DispatchKeySet(identity.autocast));
  impl->*(&Access::device_opt_) = here;
}

at::Tensor CpuCall::result(at::Tensor tensor) {
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!tensor.defined() || has_device_keys(impl)) return tensor;
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

} // namespace openreg
