// AcceleratorHooksInterface: how PyTorch's device-independent code queries a backend.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>

#include <map>
#include <string>

#include "backend/allocator.h"
#include "backend/device_index.h"
#include "backend/generator.h"
#include "backend/host_allocator.h"
#include "backend/identity/identity.h"
#include "runtime/device.h"
#include "runtime/memory/memory.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

template <typename Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return device >= 0 && device < device_count(); }

  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchangeDevice(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(checked_index(device)));
  }
  // -1 means "leave it", as in torch.cuda.
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }

  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(identity.type); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    int device = device_of(pointer);
    if (device < 0) device = AdoptHostMemory::device();
    TORCH_CHECK(device >= 0, "openreg: ", pointer, " is not an address in openreg memory");
    return device_at(device);
  }
};

struct PrivateUse1Hooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

struct CUDAHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  // A program may prefer one of these; the device's linear algebra is LAPACK's.
  bool hasCuSOLVER() const override { return true; }
  bool hasMAGMA() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  at::Allocator* getCUDADeviceAllocator() const override { return c10::GetAllocator(identity.type); }
  std::string showConfig() const override { return "  - CUDA: simulated by openreg_ops\n"; }
  // There are no plans, but a program may set how many it wants to keep.
  int64_t cuFFTGetPlanCacheMaxSize(c10::DeviceIndex device) const override { return plans()[device]; }
  void cuFFTSetPlanCacheMaxSize(c10::DeviceIndex device, int64_t size) const override { plans()[device] = size; }
  static std::map<c10::DeviceIndex, int64_t>& plans() {
    static std::map<c10::DeviceIndex, int64_t> sizes = [] {
      std::map<c10::DeviceIndex, int64_t> all;
      for (int device = 0; device < device_count(); ++device) all[static_cast<c10::DeviceIndex>(device)] = 4096;
      return all;
    }();
    return sizes;
  }
  int64_t cuFFTGetPlanCacheSize(c10::DeviceIndex) const override { return 0; }
  void cuFFTClearPlanCache(c10::DeviceIndex) const override {}
  int getNumGPUs() const override { return deviceCount(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(checked_index(device)); }
};

const bool hooks_registered = [] {
  if (is_cuda())
    at::CUDAHooksRegistry()->Register("CUDAHooks",
        [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<CUDAHooks>(); });
  else at::RegisterPrivateUse1HooksInterface(new PrivateUse1Hooks);
  return true;
}();

} // namespace
} // namespace openreg
