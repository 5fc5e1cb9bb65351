// A stand-in for the acme hardware on the CPU. You replace this file by calls of your driver. Rungs 1 to 3, 5, 8 and 9.
//
// Memory: each device is a file in memory, mapped twice. The addresses that tensors carry lie in a range without
// access, so the host crashes if it touches them, as it would with real hardware. Kernels and copies get the other
// mapping by acme_local(), on the thread of their stream. To put the memory elsewhere, change new_memory(),
// map_device(), acme_local(), acme_free() and acme_ipc_open(). What acme_local() makes for one kernel,
// acme_stream::run() can release after it.
//
// Streams: each has a thread that runs its work in order. One lock guards everything except running kernels.
#include "acme.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

// The memory of a device of this process or, once another process has sent a handle, of that process.
struct Region {
  char *address, *local; // without access, and with access
  size_t size;
  int device, file;
  uint64_t id; // of this memory on this machine
  std::map<size_t, size_t> used; // offset and size of each allocation
};

struct State {
  std::mutex mutex;
  std::condition_variable progress; // some work has run
  std::map<const char*, size_t> pinned; // address and size
  std::string failure; // of the first kernel that failed since the last synchronization
  std::vector<Region> regions = std::vector<Region>(1024); // first this process's devices
  std::atomic<int> region_total{0}, device_total{0}, stream_total{0};
  std::atomic<uint64_t> launch_total{0};
  std::atomic<void (*)(const acme_activity*)> profiler{nullptr};
  bool forked = false; // a child of fork() has no threads of its parent, so it cannot use the devices

  Region& region(int index) { return regions[static_cast<size_t>(index)]; }
};
State& state() {
  static auto* instance = new State; // leaked, because the threads of streams live until the process ends
  return *instance;
}

thread_local std::string message;

acme_error fail(acme_error code, std::string text) {
  message = std::move(text);
  return code;
}

int64_t now() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

// The memory of a device. Its pages come from the system when they are first written.
int new_memory(size_t size) {
  const int file = memfd_create("acme", MFD_CLOEXEC);
  return file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0 ? file : -1;
}

Region* map_device(int file, size_t size, int device, uint64_t id) {
  void* address = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* local = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (address == MAP_FAILED || local == MAP_FAILED) return nullptr;
  Region& region = state().region(state().region_total);
  region = {static_cast<char*>(address), static_cast<char*>(local), size, device, file, id, {}};
  ++state().region_total; // last, because region_of() takes no lock
  return &region;
}

Region* region_of(const void* pointer) {
  for (int i = 0; i < state().region_total; ++i) {
    Region& region = state().region(i);
    if (static_cast<size_t>(static_cast<const char*>(pointer) - region.address) < region.size) return &region;
  }
  return nullptr;
}

// Makes the devices at the first call. Returns an error if this process cannot use `device`.
acme_error usable(int device) {
  State& s = state();
  static std::once_flag once;
  if (s.forked) return fail(ACME_FORKED, "a child of fork() cannot use the devices of its parent; start it with spawn");
  std::call_once(once, [&] {
    const char *count = std::getenv("ACME_DEVICE_COUNT"), *mebibytes = std::getenv("ACME_DEVICE_MEMORY");
    const size_t size = static_cast<size_t>(mebibytes ? std::atoi(mebibytes) : 4096) << 20;
    for (int wanted = count ? std::atoi(count) : 2; s.device_total < wanted; ++s.device_total) {
      const int file = new_memory(size);
      const uint64_t id = static_cast<uint64_t>(now()) * 16 + static_cast<uint64_t>(s.device_total);
      if (file < 0 || !map_device(file, size, s.device_total, id)) break;
    }
    pthread_atfork(nullptr, nullptr, [] { state().forked = true; });
  });
  return device < 0 || device >= s.device_total ? fail(ACME_INVALID, "there is no such device") : ACME_OK;
}

} // namespace

const char* acme_error_message() {
  return message.c_str();
}

int acme_device_count() {
  return usable(0) == ACME_FORKED ? 0 : state().device_total.load();
}

// ---- memory ----

void* acme_local(const void* pointer) {
  const Region* region = region_of(pointer);
  char* address = static_cast<char*>(const_cast<void*>(pointer));
  return region ? region->local + (address - region->address) : address;
}

acme_error acme_memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
  if (const acme_error error = usable(device)) return error;
  const std::lock_guard lock(state().mutex);
  *free_bytes = *total_bytes = state().region(device).size;
  for (const auto& [offset, size] : state().region(device).used) *free_bytes -= size;
  return ACME_OK;
}

acme_error acme_malloc(int device, size_t bytes, void** pointer) {
  if (const acme_error error = usable(device)) return error;
  const std::lock_guard lock(state().mutex);
  Region& region = state().region(device);
  const size_t wanted = (bytes + 4095) / 4096 * 4096;
  size_t offset = 0; // of the first gap that is large enough
  for (const auto& [start, size] : region.used) {
    if (start - offset >= wanted) break;
    offset = start + size;
  }
  if (wanted > region.size - offset) return fail(ACME_OUT_OF_MEMORY, "the device has no gap of free memory that large");
  region.used[offset] = wanted;
  *pointer = region.address + offset;
  return ACME_OK;
}

acme_error acme_free(void* pointer) {
  if (state().forked) return ACME_OK; // another thread of the parent may have had the lock
  const std::lock_guard lock(state().mutex);
  Region* region = region_of(pointer);
  if (!region) return fail(ACME_INVALID, "this is not an address of device memory");
  const auto used = region->used.extract(static_cast<size_t>(static_cast<char*>(pointer) - region->address));
  if (!used) return fail(ACME_INVALID, "no device memory begins at this address");
  const auto offset = static_cast<off_t>(used.key()), size = static_cast<off_t>(used.mapped());
  fallocate(region->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, size);
  return ACME_OK;
}

// Pinned memory is ordinary memory that acme_memory_of() recognizes.
acme_error acme_host_malloc(size_t bytes, void** pointer) {
  if (const acme_error error = usable(0)) return error;
  if (posix_memalign(pointer, 4096, bytes)) return fail(ACME_OUT_OF_MEMORY, "the host has no memory left");
  const std::lock_guard lock(state().mutex);
  state().pinned[static_cast<char*>(*pointer)] = bytes;
  return ACME_OK;
}

acme_error acme_host_free(void* pointer) {
  if (state().forked) return ACME_OK;
  const std::lock_guard lock(state().mutex);
  state().pinned.erase(static_cast<char*>(pointer));
  std::free(pointer);
  return ACME_OK;
}

acme_memory acme_memory_of(const void* pointer, int* device) {
  const Region* region = region_of(pointer);
  if (region && device) *device = region->device;
  if (region || state().forked) return region ? ACME_DEVICE : ACME_HOST;
  const std::lock_guard lock(state().mutex);
  auto block = state().pinned.upper_bound(static_cast<const char*>(pointer));
  if (block == state().pinned.begin()) return ACME_HOST;
  --block;
  return static_cast<const char*>(pointer) < block->first + block->second ? ACME_PINNED : ACME_HOST;
}

// Other processes open the file of the device through /proc, which needs the same user.
acme_error acme_ipc_export(const void* pointer, acme_ipc_handle* handle) {
  const Region* region = region_of(pointer);
  if (!region) return fail(ACME_INVALID, "this is not an address of device memory");
  const auto offset = static_cast<uint64_t>(static_cast<const char*>(pointer) - region->address);
  *handle = {{region->id, static_cast<uint64_t>(getpid()), static_cast<uint64_t>(region->file),
      static_cast<uint64_t>(region->device), region->size, offset}};
  return ACME_OK;
}

acme_error acme_ipc_open(const acme_ipc_handle* handle, void** pointer) {
  const auto& [id, process, number, device, size, offset] = handle->words;
  if (const acme_error error = usable(static_cast<int>(device))) return error;
  const std::lock_guard lock(state().mutex);
  Region* region = nullptr;
  for (int i = 0; i < state().region_total; ++i)
    if (state().region(i).id == id) region = &state().region(i);
  if (!region) {
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file >= 0) region = map_device(file, size, static_cast<int>(device), id);
  }
  if (!region) return fail(ACME_INVALID, "the process that shared this memory has ended, or belongs to another user");
  *pointer = region->address + offset;
  return ACME_OK;
}

// The mapping serves all memory of that device, so it stays.
acme_error acme_ipc_close(void*) {
  return ACME_OK;
}

// ---- streams and events ----

struct Point { // where an event was recorded
  bool reached = false;
  int64_t time = 0;
};
struct acme_event {
  std::shared_ptr<Point> point = std::make_shared<Point>(Point{true, 0});
};

struct Item { // of a queue: a kernel, or a point to reach or to wait for
  acme_kernel kernel = nullptr;
  std::vector<char> arguments;
  std::string name;
  acme_activity activity{};
  std::shared_ptr<Point> record, wait;
};

struct acme_stream {
  int device, number;
  std::deque<Item> queue; // the first is running
  std::condition_variable wake;

  acme_error enqueue(Item item) {
    if (const acme_error error = usable(device)) return error;
    const std::lock_guard lock(state().mutex);
    queue.push_back(std::move(item));
    wake.notify_one();
    return ACME_OK;
  }
  void run() {
    for (std::unique_lock lock(state().mutex);; queue.pop_front(), state().progress.notify_all()) {
      wake.wait(lock, [&] { return !queue.empty(); });
      Item& item = queue.front();
      if (item.wait) state().progress.wait(lock, [&] { return item.wait->reached; });
      if (item.kernel) {
        lock.unlock();
        item.activity.begin = now();
        const char* failure = item.kernel(item.arguments.data());
        item.activity.end = now();
        report(item, 1);
        lock.lock();
        if (failure && state().failure.empty()) state().failure = item.name + ": " + failure;
      }
      if (item.record) *item.record = {true, now()};
    }
  }
  static void report(Item& item, int finished) {
    item.activity.name = item.name.c_str();
    item.activity.finished = finished;
    if (const auto callback = state().profiler.load(); callback && item.activity.launch) callback(&item.activity);
  }
  acme_error submit(const char* name, acme_kernel kernel, const void* arguments, size_t size, size_t copied) {
    const auto* first = static_cast<const char*>(arguments);
    Item item{kernel, {first, first + size}, name, {}, nullptr, nullptr};
    if (state().profiler) item.activity = {++state().launch_total, 0, name, device, number, copied, now(), now()};
    report(item, 0);
    return enqueue(std::move(item));
  }
};

acme_error acme_stream_create(int device, int, acme_stream** stream) {
  if (const acme_error error = usable(device)) return error;
  *stream = new acme_stream{device, state().stream_total++, {}, {}};
  std::thread(&acme_stream::run, *stream).detach();
  return ACME_OK;
}

acme_error acme_stream_synchronize(acme_stream* stream) {
  if (const acme_error error = usable(stream->device)) return error;
  std::unique_lock lock(state().mutex);
  state().progress.wait(lock, [&] { return stream->queue.empty(); });
  std::string failure = std::exchange(state().failure, {});
  return failure.empty() ? ACME_OK : fail(ACME_KERNEL_FAILED, std::move(failure));
}

int acme_stream_query(acme_stream* stream) {
  const std::lock_guard lock(state().mutex);
  return stream->queue.empty();
}

acme_error acme_event_create(acme_event** event) {
  *event = new acme_event;
  return ACME_OK;
}

void acme_event_destroy(acme_event* event) {
  delete event; // queued items keep its point
}

acme_error acme_event_record(acme_event* event, acme_stream* stream) {
  event->point = std::make_shared<Point>();
  return stream->enqueue({nullptr, {}, {}, {}, event->point, nullptr});
}

acme_error acme_stream_wait(acme_stream* stream, acme_event* event) {
  return stream->enqueue({nullptr, {}, {}, {}, nullptr, event->point});
}

acme_error acme_event_synchronize(acme_event* event) {
  if (const acme_error error = usable(0)) return error;
  std::unique_lock lock(state().mutex);
  state().progress.wait(lock, [point = event->point] { return point->reached; });
  return ACME_OK;
}

int acme_event_query(acme_event* event) {
  const std::lock_guard lock(state().mutex);
  return event->point->reached;
}

double acme_event_elapsed(acme_event* begin, acme_event* end) {
  const std::lock_guard lock(state().mutex);
  return static_cast<double>(end->point->time - begin->point->time) * 1e-6;
}

// ---- work ----

acme_error acme_launch(acme_stream* stream, const char* name, acme_kernel kernel, const void* arguments, size_t bytes) {
  return stream->submit(name, kernel, arguments, bytes, 0);
}

acme_error acme_copy(void* to, const void* from, size_t bytes, acme_stream* stream) {
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  } const copy{to, from, bytes};
  const acme_kernel kernel = [](const void* arguments) -> const char* {
    const auto& copy = *static_cast<const Copy*>(arguments);
    std::memmove(acme_local(copy.to), acme_local(copy.from), copy.bytes);
    return nullptr;
  };
  const bool reads = region_of(from), writes = region_of(to);
  const char* name = reads && writes ? "copy device to device" : writes ? "copy host to device" : "copy device to host";
  return stream->submit(name, kernel, &copy, sizeof copy, bytes);
}

void acme_profile(void (*callback)(const acme_activity*)) {
  state().profiler = callback;
}
