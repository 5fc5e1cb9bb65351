#include "backend/ipc.h"

#include <c10/util/Exception.h>

#include <cstring>

#include "backend/allocator.h"
#include "backend/identity/identity.h"
#include "backend/profiler.h"
#include "runtime/memory/contents.h"
#include "runtime/memory/ipc_memory.h"
#include "runtime/memory/memory.h"
#include "runtime/process/fork.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

void free_shared(void* shared) {
  report_free(static_cast<Shared*>(shared)->pointer);
  close_shared(static_cast<Shared*>(shared));
}

template <class Make>
c10::DataPtr shared_memory(c10::DeviceIndex device, Make&& make) {
  try {
    Shared* shared = make(current_stream(device));
    report_allocation(shared->pointer);
    return {shared->pointer, shared, &free_shared, device_at(device)};
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

// In place, so that existing addresses stay valid.
void share_in_place(c10::StorageImpl* impl, c10::DeviceIndex device) {
  void* pages = impl->mutable_data();
  const size_t bytes = impl->nbytes();
  try {
    Shared* shared = run(current_stream(device), [&] { return share_pages(pages, bytes, device); });
    c10::DataPtr before = impl->set_data_ptr({pages, shared, &free_shared, device_at(device)});
    before.release_context(); // the memory is the shared one's now
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

void share_by_copy(c10::StorageImpl* impl, c10::DeviceIndex device) {
  const size_t bytes = impl->nbytes();
  c10::DataPtr shared = shared_memory(device, [bytes](Stream stream) { return new_shared(stream, bytes); });
  run(
      current_stream(device), [&] { std::memcpy(shared.get(), impl->data(), bytes); },
      Site("Memcpy DtoD (Device -> Device)", Site::kCopy, bytes));
  replace_memory(impl, std::move(shared));
}

} // namespace

int share_storage(const c10::Storage& storage) {
  TORCH_CHECK(on_device(storage.device()) && storage.nbytes(), "share_storage: expected a storage on ", identity.name,
      " that is not empty, but got ", storage.nbytes(), " bytes on ", storage.device());
  check_not_forked();
  const c10::DeviceIndex device = storage.device().index();
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const auto deleter = impl->data_ptr().get_deleter();
  synchronize_device(device); // another stream may be at work on it
  if (deleter != &free_shared) {
    const bool own_pages = deleter == device_allocator()->raw_deleter() && storage.nbytes() > kMemoryPage / 2;
    own_pages ? share_in_place(impl, device) : share_by_copy(impl, device);
    impl->set_resizable(false);
  }
  return static_cast<Shared*>(impl->data_ptr().get_context())->file;
}

c10::Storage open_storage(int file, size_t bytes, int64_t index) {
  const c10::DeviceIndex device = checked_index(index);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
      shared_memory(device, [&](Stream stream) { return open_shared(stream, bytes, file); }), device_allocator(),
      /*resizable=*/false));
}

} // namespace openreg
