#include "sharing.h"

#include <c10/util/Exception.h>

#include <cstring>

#include "../runtime/memory.h"
#include "../runtime/shared.h"
#include "allocator.h"

namespace openreg {
namespace {

void free_shared(void* shared) {
  close_shared(static_cast<Shared*>(shared));
}

template <class Make>
c10::DataPtr shared_memory(c10::DeviceIndex device, Make&& make) {
  try {
    Shared* shared = make(current_stream(device));
    return {shared->pointer, shared, &free_shared, c10::Device(c10::kPrivateUse1, device)};
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

} // namespace

int share_storage(const c10::Storage& storage) {
  TORCH_CHECK(storage.device().is_privateuseone() && storage.nbytes(),
      "share_storage: expected a storage on openreg that is not empty, but got ", storage.nbytes(), " bytes on ",
      storage.device());
  check_not_forked();
  const c10::DeviceIndex device = storage.device().index();
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  if (impl->data_ptr().get_deleter() != &free_shared) {
    const size_t bytes = storage.nbytes();
    c10::DataPtr shared = shared_memory(device, [bytes](Stream stream) { return new_shared(stream, bytes); });
    synchronize_device(device); // another stream may be at work on it
    run(current_stream(device), [&] { std::memcpy(shared.get(), storage.data(), bytes); });
    impl->set_data_ptr_noswap(std::move(shared));
    impl->set_resizable(false);
  } else synchronize_device(device);
  return static_cast<Shared*>(impl->data_ptr().get_context())->file;
}

c10::Storage open_storage(int file, size_t bytes, int64_t index) {
  const c10::DeviceIndex device = checked_index(index);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
      shared_memory(device, [&](Stream stream) { return open_shared(stream, bytes, file); }), device_allocator(),
      /*resizable=*/false));
}

} // namespace openreg
