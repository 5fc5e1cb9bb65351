// What travels with a tensor when it is saved, and memory that processes share. Rung 8.
//
// Document: "Facilitating New Backend Integration by PrivateUse1", section "Register serialization/deserialization
// functions for new backend metadata".
#include <torch/csrc/jit/serialization/pickler_helper.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <unordered_map>

#include "common.h"

namespace acme {
namespace {

// Facts about a tensor that your kernels need, such as its format in memory. Python reads and writes them with
// torch._utils.get_tensor_metadata() and set_tensor_metadata().
struct Metadata final : c10::BackendMeta {
  explicit Metadata(std::unordered_map<std::string, bool> facts) : facts(std::move(facts)) {}
  const std::unordered_map<std::string, bool> facts;
};

void save(const at::Tensor& tensor, std::unordered_map<std::string, bool>& facts) {
  if (const auto* of = dynamic_cast<const Metadata*>(tensor.unsafeGetTensorImpl()->get_backend_meta()))
    facts = of->facts;
}

void load(const at::Tensor& tensor, std::unordered_map<std::string, bool>& facts) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Metadata>(facts));
}

const bool registered = (torch::jit::TensorBackendMetaRegistry(kDevice, &save, &load), true);

// Memory of another process. Closing `file`, one end of a pipe, tells that process that we no longer need it.
struct Opened {
  void* pointer;
  int file;
};

void close_memory(void* context) {
  const std::unique_ptr<Opened> opened(static_cast<Opened*>(context));
  acme_ipc_close(opened->pointer);
  close(opened->file);
}

} // namespace

std::string share_memory(const c10::Storage& storage) {
  const c10::DeviceIndex device = storage.device().index();
  synchronize(current_stream(device)); // the other process has streams of its own
  acme_ipc_handle handle{};
  if (storage.nbytes()) check(acme_ipc_export(storage.data(), &handle), "share_memory");
  return {reinterpret_cast<const char*>(&handle), sizeof handle};
}

c10::Storage open_memory(const std::string& bytes, size_t size, int64_t device, int file) {
  acme_ipc_handle handle;
  TORCH_CHECK(bytes.size() == sizeof handle, "open_memory: expected the bytes that share_memory() returned");
  std::memcpy(&handle, bytes.data(), sizeof handle);
  void* pointer = nullptr;
  if (size) check(acme_ipc_open(&handle, &pointer), "open_memory");
  c10::DataPtr data(pointer, new Opened{pointer, file}, &close_memory, device_at(checked_index(device)));
  return {c10::Storage::use_byte_size_t(), size, std::move(data), device_allocator(), /*resizable=*/false};
}

} // namespace acme
