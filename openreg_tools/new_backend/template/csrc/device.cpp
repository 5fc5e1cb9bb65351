// Devices, streams and events: the device guard and the hooks. Rungs 1 and 5.
//
// Document: "Facilitating New Backend Integration by PrivateUse1", sections "Register device guard for the new backend"
// and "Register generator for the new backend" (PyTorch's hooks have replaced its macro).
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "common.h"

namespace acme {
namespace {

// The streams of a device, each created when it is first used. Number 0 is the default stream; torch.Stream() gets the
// others in turn, and shares one when all are taken. A stream's number is its id in PyTorch.
constexpr int kStreams = 33;
struct Streams {
  std::mutex mutex;
  std::array<acme_stream*, kStreams> made{};
  std::atomic<unsigned> next{0};
};
Streams& streams_of(c10::DeviceIndex device) {
  static auto* all =
      new std::vector<Streams>(static_cast<size_t>(acme_device_count())); // leaked: threads may outlive main()
  return all->at(static_cast<size_t>(device));
}

thread_local c10::DeviceIndex thread_device = 0;
thread_local std::array<c10::StreamId, 16> thread_streams{}; // by device

c10::Stream stream_at(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

acme_event* event_of(void* event) {
  return static_cast<acme_event*>(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(acme_device_count()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; } // every dtype

  c10::Device exchangeDevice(c10::Device device) const override { return device_at(exchange_device(device.index())); }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { thread_device = device.index(); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(checked_index(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_at(checked_index(device.index()), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const auto index = checked_index(device.index());
    return stream_at(index, 1 + streams_of(index).next++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    native(stream); // raises if there is no such stream
    thread_streams.at(static_cast<size_t>(stream.device_index())) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native(stream); }
  bool queryStream(const c10::Stream& stream) const override { return acme_stream_query(native(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const auto index = checked_index(device);
    for (c10::StreamId id = 0; id < kStreams; ++id)
      if (streams_of(index).made[static_cast<size_t>(id)]) synchronize(stream_at(index, id));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "acme: an event of device ", static_cast<int>(device),
        " cannot be recorded on a stream of device ", static_cast<int>(stream.device_index()));
    acme_event* made = event_of(*event);
    if (!made) check(acme_event_create(&made), "Event");
    *event = made;
    check(acme_event_record(made, native(stream)), "Event.record");
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) check(acme_stream_wait(native(stream), event_of(event)), "Stream.wait_event");
  }
  bool queryEvent(void* event) const override { return !event || acme_event_query(event_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) check(acme_event_synchronize(event_of(event)), "Event.synchronize");
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "acme: elapsed_time() needs two recorded events; call record() on each");
    synchronizeEvent(begin);
    synchronizeEvent(end);
    return acme_event_elapsed(event_of(begin), event_of(end));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) acme_event_destroy(event_of(event));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// What PyTorch's device-independent code asks a backend.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return acme_device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return device >= 0 && device < acme_device_count(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(acme_device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kDevice); }
  bool isPinnedPtr(const void* pointer) const override { return acme_memory_of(pointer, nullptr) == ACME_PINNED; }
  at::Device getDeviceFromPtr(void* pointer) const override {
    int device = 0;
    TORCH_CHECK(
        acme_memory_of(pointer, &device) == ACME_DEVICE, "acme: ", pointer, " is not an address of device memory");
    return device_at(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr grown = allocate_on(storage.device().index(), bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes()))
      check(acme_copy(grown.get(), storage.data(), kept, native_stream(storage.device().index())), "resize_");
    storage.set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
const bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

} // namespace

c10::DeviceIndex current_device() {
  return thread_device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  return std::exchange(thread_device, checked_index(device));
}

c10::DeviceIndex checked_index(int64_t index) {
  if (index == -1) return thread_device;
  TORCH_CHECK(index >= 0 && index < acme_device_count(), "acme: there is no device acme:", index,
      "; expected an index below ", acme_device_count(),
      acme_device_count() ? "" : " (a child of fork() has no devices: start it with spawn)");
  return static_cast<c10::DeviceIndex>(index);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_at(device, thread_streams.at(static_cast<size_t>(device)));
}

acme_stream* native(c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == kDevice && stream.id() >= 0 && stream.id() < kStreams,
      "acme: there is no stream ", stream.id(), " on ", stream.device(), "; make one with torch.Stream()");
  Streams& streams = streams_of(checked_index(stream.device_index()));
  std::lock_guard lock(streams.mutex);
  acme_stream*& made = streams.made[static_cast<size_t>(stream.id())];
  if (!made) check(acme_stream_create(stream.device_index(), 0, &made), "Stream");
  return made;
}

void synchronize(c10::Stream stream) {
  check(acme_stream_synchronize(native(stream)), "a kernel failed");
}

void wait_for(c10::Stream stream, c10::Stream other) {
  if (stream == other) return;
  c10::Event event(kDevice);
  event.record(other);
  event.block(stream);
}

} // namespace acme
