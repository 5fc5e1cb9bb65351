// A stand-in for the acme hardware on the CPU. You replace this file by your driver. Rungs 1 to 3, 5, 8 and 9.
//
// Memory: each device is a file in memory, mapped twice. The addresses that tensors carry lie in a range without access,
// so the host crashes if it touches them, as it would with real hardware. Kernels get the other mapping by acme_local().
// To put the memory elsewhere, change only the section "memory": map_device(), acme_local() and acme_ipc_open().
//
// Streams: each has a thread that runs its work in order. One lock guards everything except running kernels.
//
// C that is also C++, because PyTorch's build system compiles every file as C++.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "acme.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_DEVICES = 16, MAX_REGIONS = 1024, ALIGNMENT = 512, PAGE = 4096, NAME = 64, MESSAGE = 256 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER; // some work has run
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int used, forked; // a child of fork() has no threads of its parent, so it cannot use the devices
static __thread char message[MESSAGE];

const char* acme_error_message(void) { return message; }

static acme_error fail(acme_error code, const char* text) {
  snprintf(message, sizeof message, "%s", text);
  return code;
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static long from_environment(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && atol(text) > 0 ? atol(text) : otherwise;
}

// ---- memory ----

struct block { // a part of a device's memory; the blocks of a device cover it in order
  size_t offset, size;
  int used;
  struct block* next;
};

struct region { // the memory of a device of this process, or of another process
  char *address, *local; // without access, and with access
  size_t size;
  int device, file;
  uint64_t id; // of the device's memory on this machine
  struct block* blocks;
  char failure[MESSAGE]; // of the first kernel that failed since the last synchronization
};
static struct region regions[MAX_REGIONS]; // the first ones are this process's devices
static int device_total, region_total;

static struct region* map_device(int file, size_t size, int device, uint64_t id) {
  struct region* region = &regions[region_total];
  if (region_total == MAX_REGIONS) return NULL;
  void* address = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* local = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (address == MAP_FAILED || local == MAP_FAILED) return NULL;
  region->address = (char*)address;
  region->local = (char*)local;
  region->size = size;
  region->device = device;
  region->file = file;
  region->id = id;
  __atomic_add_fetch(&region_total, 1, __ATOMIC_RELEASE); // acme_local() reads it without the lock
  return region;
}

static void after_fork(void) { forked = used; }

static void initialize(void) {
  long count = from_environment("ACME_DEVICE_COUNT", 2);
  const size_t size = (size_t)from_environment("ACME_DEVICE_MEMORY", 4096) << 20; // in MiB
  for (int device = 0; device < count && device < MAX_DEVICES; ++device) {
    const int file = memfd_create("acme", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size)) break;
    struct region* region = map_device(file, size, device, (uint64_t)now() * 16 + (uint64_t)device);
    if (!region) break;
    region->blocks = (struct block*)calloc(1, sizeof(struct block));
    region->blocks->size = size;
    ++device_total;
  }
  used = 1;
  pthread_atfork(NULL, NULL, after_fork);
}

static acme_error usable(int device) {
  if (forked) return fail(ACME_FORKED, "a child of fork() cannot use the devices of its parent; start it with spawn");
  pthread_once(&once, initialize);
  return device < 0 || device >= device_total ? fail(ACME_INVALID, "there is no such device") : ACME_OK;
}

int acme_device_count(void) { return usable(0) == ACME_FORKED ? 0 : device_total; }

static struct region* region_of(const void* pointer) {
  const int total = __atomic_load_n(&region_total, __ATOMIC_ACQUIRE);
  for (int i = 0; i < total; ++i)
    if ((size_t)((const char*)pointer - regions[i].address) < regions[i].size) return &regions[i];
  return NULL;
}

void* acme_local(const void* pointer) {
  struct region* region = region_of(pointer);
  return region ? region->local + ((const char*)pointer - region->address) : (void*)pointer;
}

acme_error acme_memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
  const acme_error error = usable(device);
  if (error) return error;
  pthread_mutex_lock(&lock);
  *free_bytes = 0;
  *total_bytes = regions[device].size;
  for (struct block* block = regions[device].blocks; block; block = block->next)
    if (!block->used) *free_bytes += block->size;
  pthread_mutex_unlock(&lock);
  return ACME_OK;
}

acme_error acme_malloc(int device, size_t bytes, void** pointer) {
  const acme_error error = usable(device);
  if (error) return error;
  const size_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  pthread_mutex_lock(&lock);
  struct block* block = regions[device].blocks;
  while (block && (block->used || block->size < size)) block = block->next; // first fit
  if (block && block->size > size) {
    struct block* rest = (struct block*)malloc(sizeof *rest);
    rest->offset = block->offset + size;
    rest->size = block->size - size;
    rest->used = 0;
    rest->next = block->next;
    block->size = size;
    block->next = rest;
  }
  if (block) block->used = 1;
  pthread_mutex_unlock(&lock);
  if (!block) return fail(ACME_OUT_OF_MEMORY, "the device has no block of free memory that is large enough");
  *pointer = regions[device].address + block->offset;
  return ACME_OK;
}

acme_error acme_free(void* pointer) {
  struct region* region = region_of(pointer);
  if (forked) return ACME_OK; // another thread of the parent may have had the lock
  if (!region) return fail(ACME_INVALID, "this is not an address of device memory");
  pthread_mutex_lock(&lock);
  struct block *block = region->blocks, *before = NULL;
  for (; block && region->address + block->offset != pointer; block = block->next) before = block;
  if (block) {
    const size_t first = (block->offset + PAGE - 1) / PAGE * PAGE, last = (block->offset + block->size) / PAGE * PAGE;
    if (last > first)
      fallocate(region->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)first, (off_t)(last - first));
    block->used = 0;
    if (!before || before->used) before = block;
    while (before->next && !before->next->used) { // merge it with its free neighbors
      struct block* next = before->next;
      before->size += next->size;
      before->next = next->next;
      free(next);
    }
  }
  pthread_mutex_unlock(&lock);
  return block ? ACME_OK : fail(ACME_INVALID, "no block of device memory begins at this address");
}

// Pinned memory is ordinary memory that acme_memory_of() recognizes.
static struct pinned {
  char* address;
  size_t size;
  struct pinned* next;
}* all_pinned;

acme_error acme_host_malloc(size_t bytes, void** pointer) {
  if (usable(0)) return ACME_FORKED;
  struct pinned* pinned = (struct pinned*)malloc(sizeof *pinned);
  if (posix_memalign(pointer, PAGE, bytes)) return fail(ACME_OUT_OF_MEMORY, "the host has no memory left");
  pinned->address = (char*)*pointer;
  pinned->size = bytes;
  pthread_mutex_lock(&lock);
  pinned->next = all_pinned;
  all_pinned = pinned;
  pthread_mutex_unlock(&lock);
  return ACME_OK;
}

acme_error acme_host_free(void* pointer) {
  if (forked) return ACME_OK;
  pthread_mutex_lock(&lock);
  for (struct pinned** link = &all_pinned; *link; link = &(*link)->next)
    if ((*link)->address == pointer) {
      struct pinned* found = *link;
      *link = found->next;
      free(found->address);
      free(found);
      break;
    }
  pthread_mutex_unlock(&lock);
  return ACME_OK;
}

acme_memory acme_memory_of(const void* pointer, int* device) {
  struct region* region = region_of(pointer);
  if (region && device) *device = region->device;
  if (region) return ACME_DEVICE;
  if (forked) return ACME_HOST;
  pthread_mutex_lock(&lock);
  struct pinned* pinned = all_pinned;
  while (pinned && (size_t)((const char*)pointer - pinned->address) >= pinned->size) pinned = pinned->next;
  pthread_mutex_unlock(&lock);
  return pinned ? ACME_PINNED : ACME_HOST;
}

// Other processes open the file of the device through /proc, which needs the same user.
acme_error acme_ipc_export(const void* pointer, acme_ipc_handle* handle) {
  struct region* region = region_of(pointer);
  if (!region || region - regions >= device_total) return fail(ACME_INVALID, "only memory of this process can be shared");
  memset(handle, 0, sizeof *handle);
  handle->words[0] = region->id;
  handle->words[1] = (uint64_t)getpid();
  handle->words[2] = (uint64_t)region->file;
  handle->words[3] = (uint64_t)region->device;
  handle->words[4] = region->size;
  handle->words[5] = (uint64_t)((const char*)pointer - region->address);
  return ACME_OK;
}

acme_error acme_ipc_open(const acme_ipc_handle* handle, void** pointer) {
  const acme_error error = usable((int)handle->words[3]);
  if (error) return error;
  pthread_mutex_lock(&lock);
  struct region* region = NULL;
  for (int i = 0; i < region_total; ++i)
    if (regions[i].id == handle->words[0]) region = &regions[i];
  if (!region) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)handle->words[1], (int)handle->words[2]);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file >= 0) region = map_device(file, handle->words[4], (int)handle->words[3], handle->words[0]);
  }
  pthread_mutex_unlock(&lock);
  if (!region) return fail(ACME_INVALID, "the process that shared this memory has ended, or belongs to another user");
  *pointer = region->address + handle->words[5];
  return ACME_OK;
}

// The mapping serves all memory of that device, so it stays.
acme_error acme_ipc_close(void* pointer) { return region_of(pointer) ? ACME_OK : ACME_INVALID; }

// ---- streams and events ----

struct point { // where an event was recorded; events and queued items share it
  int references, reached;
  int64_t time;
};
struct acme_event {
  struct point* point;
};

struct item { // of a stream's queue: a kernel, or a point to reach or to wait for
  struct item* next;
  acme_kernel kernel;
  void* arguments;
  struct point *record, *wait;
  acme_activity activity;
  char name[NAME];
};

struct acme_stream {
  int device, number, busy;
  pthread_cond_t wake;
  struct item *first, *last;
};
static int stream_total;
static uint64_t launch_total;
static void (*profiler)(const acme_activity*);

void acme_profile(void (*callback)(const acme_activity*)) { __atomic_store_n(&profiler, callback, __ATOMIC_RELEASE); }

static void report(acme_activity* activity, int finished) {
  void (*callback)(const acme_activity*) = __atomic_load_n(&profiler, __ATOMIC_ACQUIRE);
  activity->finished = finished;
  if (callback && activity->launch) callback(activity);
}

static void release(struct point* point) { // with the lock
  if (point && --point->references == 0) free(point);
}

static void* run_stream(void* argument) {
  struct acme_stream* stream = (struct acme_stream*)argument;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!stream->first) pthread_cond_wait(&stream->wake, &lock);
    struct item* item = stream->first;
    stream->first = item->next;
    if (item->wait)
      while (!item->wait->reached) pthread_cond_wait(&progress, &lock);
    if (item->kernel) {
      pthread_mutex_unlock(&lock);
      item->activity.begin = now();
      const char* failure = item->kernel(item->arguments);
      item->activity.end = now();
      report(&item->activity, 1);
      pthread_mutex_lock(&lock);
      char* kept = regions[stream->device].failure;
      if (failure && !*kept) snprintf(kept, MESSAGE, "%s: %s", item->name, failure);
    }
    if (item->record) {
      item->record->time = now();
      item->record->reached = 1;
    }
    release(item->record);
    release(item->wait);
    free(item->arguments);
    free(item);
    stream->busy = stream->first != NULL;
    pthread_cond_broadcast(&progress);
  }
  return NULL;
}

acme_error acme_stream_create(int device, int priority, acme_stream** stream) {
  const acme_error error = usable(device);
  pthread_t thread;
  (void)priority; // the operating system shares the processors
  if (error) return error;
  acme_stream* created = (acme_stream*)calloc(1, sizeof *created);
  created->device = device;
  created->number = __atomic_fetch_add(&stream_total, 1, __ATOMIC_RELAXED);
  pthread_cond_init(&created->wake, NULL);
  if (pthread_create(&thread, NULL, run_stream, created)) return fail(ACME_INVALID, "cannot start a thread");
  pthread_detach(thread);
  *stream = created;
  return ACME_OK;
}

static void enqueue(acme_stream* stream, struct item* item) { // with the lock
  if (stream->first) stream->last->next = item;
  else stream->first = item;
  stream->last = item;
  stream->busy = 1;
  pthread_cond_signal(&stream->wake);
}

static acme_error submit(acme_stream* stream, const char* name, acme_kernel kernel, const void* arguments, size_t size,
    size_t bytes) {
  const acme_error error = usable(stream->device);
  if (error) return error;
  struct item* item = (struct item*)calloc(1, sizeof *item);
  item->kernel = kernel;
  item->arguments = malloc(size + 1);
  memcpy(item->arguments, arguments, size);
  snprintf(item->name, NAME, "%s", name);
  item->activity.name = item->name;
  item->activity.device = stream->device;
  item->activity.stream = stream->number;
  item->activity.bytes = bytes;
  if (__atomic_load_n(&profiler, __ATOMIC_ACQUIRE)) {
    item->activity.launch = __atomic_add_fetch(&launch_total, 1, __ATOMIC_RELAXED);
    item->activity.begin = item->activity.end = now();
    report(&item->activity, 0);
  }
  pthread_mutex_lock(&lock);
  enqueue(stream, item);
  pthread_mutex_unlock(&lock);
  return ACME_OK;
}

acme_error acme_launch(acme_stream* stream, const char* name, acme_kernel kernel, const void* arguments, size_t bytes) {
  return submit(stream, name, kernel, arguments, bytes, 0);
}

struct copy {
  void* to;
  const void* from;
  size_t bytes;
};

static const char* run_copy(const void* arguments) {
  const struct copy* copy = (const struct copy*)arguments;
  memmove(acme_local(copy->to), acme_local(copy->from), copy->bytes);
  return NULL;
}

acme_error acme_copy(void* to, const void* from, size_t bytes, acme_stream* stream) {
  const struct copy copy = {to, from, bytes};
  const int reads = acme_memory_of(from, NULL) == ACME_DEVICE, writes = acme_memory_of(to, NULL) == ACME_DEVICE;
  const char* name = reads && writes ? "copy device to device" : writes ? "copy host to device" : "copy device to host";
  return submit(stream, name, run_copy, &copy, sizeof copy, bytes);
}

static acme_error failure_of(int device) { // with the lock
  char* kept = regions[device].failure;
  if (!*kept) return ACME_OK;
  fail(ACME_KERNEL_FAILED, kept);
  *kept = 0;
  return ACME_KERNEL_FAILED;
}

acme_error acme_stream_synchronize(acme_stream* stream) {
  acme_error error = usable(stream->device);
  if (error) return error;
  pthread_mutex_lock(&lock);
  while (stream->busy) pthread_cond_wait(&progress, &lock);
  error = failure_of(stream->device);
  pthread_mutex_unlock(&lock);
  return error;
}

int acme_stream_query(acme_stream* stream) {
  pthread_mutex_lock(&lock);
  const int idle = !stream->busy;
  pthread_mutex_unlock(&lock);
  return idle;
}

acme_error acme_event_create(acme_event** event) {
  *event = (acme_event*)calloc(1, sizeof **event);
  return ACME_OK;
}

void acme_event_destroy(acme_event* event) {
  if (forked) return;
  pthread_mutex_lock(&lock);
  release(event->point);
  pthread_mutex_unlock(&lock);
  free(event);
}

acme_error acme_event_record(acme_event* event, acme_stream* stream) {
  const acme_error error = usable(stream->device);
  if (error) return error;
  struct item* item = (struct item*)calloc(1, sizeof *item);
  struct point* point = (struct point*)calloc(1, sizeof *point);
  point->references = 2; // of the event and of the item
  item->record = point;
  pthread_mutex_lock(&lock);
  release(event->point);
  event->point = point;
  enqueue(stream, item);
  pthread_mutex_unlock(&lock);
  return ACME_OK;
}

acme_error acme_stream_wait(acme_stream* stream, acme_event* event) {
  const acme_error error = usable(stream->device);
  if (error) return error;
  pthread_mutex_lock(&lock);
  if (event->point && !event->point->reached) {
    struct item* item = (struct item*)calloc(1, sizeof *item);
    item->wait = event->point;
    ++item->wait->references;
    enqueue(stream, item);
  }
  pthread_mutex_unlock(&lock);
  return ACME_OK;
}

acme_error acme_event_synchronize(acme_event* event) {
  if (usable(0)) return ACME_FORKED;
  pthread_mutex_lock(&lock);
  struct point* point = event->point;
  if (point) ++point->references;
  while (point && !point->reached) pthread_cond_wait(&progress, &lock);
  release(point);
  pthread_mutex_unlock(&lock);
  return ACME_OK;
}

int acme_event_query(acme_event* event) {
  pthread_mutex_lock(&lock);
  const int reached = !event->point || event->point->reached;
  pthread_mutex_unlock(&lock);
  return reached;
}

double acme_event_elapsed(acme_event* begin, acme_event* end) {
  pthread_mutex_lock(&lock);
  const double elapsed = begin->point && end->point ? (double)(end->point->time - begin->point->time) * 1e-6 : 0;
  pthread_mutex_unlock(&lock);
  return elapsed;
}
