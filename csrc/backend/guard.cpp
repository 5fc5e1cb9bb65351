// Devices, streams and events for c10's device guard.

#include "backend/guard.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>
#include <utility>

#include "backend/device_index.h"
#include "backend/identity/identity.h"
#include "backend/sync_debug.h"
#include "runtime/device.h"
#include "runtime/graph/external_event.h"
#include "runtime/graph/graph.h"
#include "runtime/memory/memory.h"
#include "runtime/process/error.h"
#include "runtime/process/fault.h"
#include "runtime/process/fork.h"
#include "runtime/process/notices.h"
#include "runtime/stream/event.h"
#include "runtime/stream/ipc_event.h"
#include "runtime/stream/stream.h"

namespace openreg {
namespace {

using c10::Device;
using c10::DeviceIndex;
using DeviceStream = c10::Stream;

DeviceStream wrap(Stream s) {
  return DeviceStream(DeviceStream::UNSAFE, device_at(s.device), s.id);
}

// Returns the answer to a query. As on CUDA, the query raises if work has failed, and so does the next wait.
bool answer(int device, bool done) {
  if (done) throw_kept_error(device, /*keep=*/true);
  return done;
}

// What open_event() creates: another process's event, from its handle, or a new event that is not recorded and is
// shared or external.
thread_local const std::string* opening_event = nullptr;
thread_local std::unique_ptr<Event> given_event; // by record_as()
thread_local Stream callback_stream{-1, 0}; // for is_callback_stream()

std::unique_ptr<Event> new_event(int device, c10::EventFlag flag) {
  std::unique_ptr<Event> event = std::move(given_event);
  const bool timed = flag == c10::EventFlag::BACKEND_DEFAULT;
  if (event) { // by record_as()
  } else if (flag != kInterprocess && opening_event) event = std::make_unique<ExternalEvent>(device, timed);
  else if (flag != kInterprocess) event = std::make_unique<Event>(device, timed);
  else if (opening_event && !opening_event->empty()) event = std::make_unique<SharedEvent>(device, *opening_event);
  else event = std::make_unique<SharedEvent>(device);
  return event;
}

// Tells the race detector. In a capture, an ordinary event gives only edges, and an external one becomes a node.
void notice_event(NoticeKind kind, NoticeKind captured, const Event& event, Stream stream) {
  if (!event.identity()) return;
  if (!detail::captures(stream)) notice(kind, event.identity(), stream);
  else if (event.external()) notice(captured, event.identity(), stream);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return identity.type; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }

  Device exchangeDevice(Device device) const override {
    const DeviceIndex index = checked_index(device);
    return device_at(exchange_device(index));
  }
  Device getDevice() const override { return device_at(current_device()); }
  void setDevice(Device device) const override { exchange_device(checked_index(device)); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) exchange_device(device.index());
  }

  // The device supports every dtype, because the kernels are the CPU's.
  c10::DeviceCapability getDeviceCapability(Device device) const override {
    checked_index(device);
    return c10::DeviceCapability();
  }

  DeviceStream getStream(Device device) const override { return wrap(current_stream(checked_index(device))); }
  DeviceStream getDefaultStream(Device device) const override { return wrap({checked_index(device), 0}); }
  // Futures call this for a callback, make the stream current, and let it wait for their events.
  DeviceStream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    const DeviceStream stream = getNewStream(device, high_priority ? -1 : 0);
    callback_stream = checked_stream(stream);
    return stream;
  }
  DeviceStream getNewStream(Device device, int priority) const override {
    const DeviceIndex index = checked_index(device);
    check_usable(index);
    return wrap(new_stream(index, priority));
  }
  DeviceStream exchangeStream(DeviceStream stream) const override {
    return wrap(exchange_stream(checked_stream(stream)));
  }
  bool queryStream(const DeviceStream& stream) const override {
    const Stream ours = checked_stream(stream);
    check_usable(ours.device);
    return answer(ours.device, query_stream(ours) && answers_query(nullptr, ours));
  }
  void synchronizeStream(const DeviceStream& stream) const override {
    synchronizes("Stream.synchronize");
    synchronize_stream(checked_stream(stream));
    notice(NoticeKind::kStreamSynchronized, nullptr, checked_stream(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    synchronize_device(checked_index(device));
    notice(NoticeKind::kDeviceSynchronized, nullptr, {checked_index(device), 0});
  }
  bool isStreamCapturing(const DeviceStream& stream) const override { return is_capturing(checked_stream(stream)); }
  // Autograd calls this for a gradient that another stream continues with.
  void recordDataPtrOnStream(const c10::DataPtr& data, const DeviceStream& stream) const override {
    record_stream(data.get(), checked_stream(stream));
  }
  // A stream has no native object; its id is the handle. As in CUDA, the default stream's handle is null.
  void* getStreamNativeHandle(const DeviceStream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }

  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    notice(NoticeKind::kEventDestroyed, event, {});
    delete static_cast<Event*>(event);
  }
  void record(void** event, const DeviceStream& stream, DeviceIndex device, c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "openreg: an event of device ",
        static_cast<int>(device), " cannot be recorded on a stream of device ", static_cast<int>(stream.device_index()),
        "; create the event on the stream's device");
    initialize();
    if (!*event) *event = new_event(stream.device_index(), flag).release();
    if (opening_event) return; // which is created but not recorded
    static_cast<Event*>(*event)->record(checked_stream(stream));
    notice_event(
        NoticeKind::kEventRecorded, NoticeKind::kRecordCaptured, *static_cast<Event*>(*event), checked_stream(stream));
  }
  void block(void* event, const DeviceStream& stream) const override {
    if (!event) return;
    static_cast<Event*>(event)->block(checked_stream(stream));
    notice_event(
        NoticeKind::kEventWaitedFor, NoticeKind::kWaitCaptured, *static_cast<Event*>(event), checked_stream(stream));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    const auto* ours = static_cast<Event*>(event);
    check_usable(ours->device());
    return answer(ours->device(), ours->query() && answers_query(ours->identity(), {}));
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    static_cast<Event*>(event)->synchronize();
    notice(NoticeKind::kEventSynchronized, static_cast<Event*>(event)->identity(), {});
  }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    TORCH_CHECK(start && end, "openreg: both events must be recorded before elapsed_time(); call record() on each");
    const auto *a = static_cast<Event*>(start), *b = static_cast<Event*>(end);
    TORCH_CHECK(a->timed() && b->timed(), "openreg: elapsed_time() needs events created with enable_timing=True");
    TORCH_CHECK(a->device() == b->device(), "openreg: elapsed_time() of events on ", device_at(a->device()), " and ",
        device_at(b->device()), "; both must be on one device");
    const double milliseconds = std::chrono::duration<double, std::milli>(b->time() - a->time()).count();
    throw_kept_error(a->device(), /*keep=*/true);
    return milliseconds;
  }
};

const c10::impl::DeviceGuardImplRegistrar registrar(identity.type, new Guard);

const bool errors_are_torchs = [] {
  set_device_error(
      [](const std::string& message) {
        throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, /*code=*/1, message);
      },
      [](const std::exception& error) { return dynamic_cast<const c10::AcceleratorError*>(&error) != nullptr; });
  return true;
}();

} // namespace

void open_event(c10::Event& event, c10::DeviceIndex device, const std::string& handle) {
  const auto before = std::exchange(opening_event, &handle);
  struct Restore {
    const std::string* before;
    ~Restore() { opening_event = before; }
  } restore{before};
  event.record(wrap({checked_index(device), 0}));
}

void record_as(std::unique_ptr<Event> event) {
  given_event = std::move(event);
}

bool is_callback_stream(Stream stream) noexcept {
  return std::exchange(callback_stream, {-1, 0}) == stream;
}

std::string event_handle(c10::Event& event) {
  if (!event.eventId()) open_event(event, checked_index(-1), "");
  auto* shared = dynamic_cast<SharedEvent*>(static_cast<Event*>(event.eventId()));
  TORCH_CHECK(shared, "ipc_handle: the event was created for this process only; create it with interprocess=True");
  return shared->handle();
}

Stream checked_stream(const c10::Stream& stream) {
  const Stream ours{stream.device_index(), stream.id()};
  TORCH_CHECK(stream.device_type() == identity.type && is_stream(ours), "openreg: there is no stream ", stream.id(),
      " on ", stream.device(), "; make one with torch.openreg.Stream()");
  return ours;
}

} // namespace openreg
