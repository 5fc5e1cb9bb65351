// The runtime of the acme device: all that torch_acme knows about the hardware. Rungs 1 to 3, 5, 8 and 9.
//
// acme_cpu.cpp implements it on the CPU, so that the package runs without hardware. You replace that one file by calls
// of your driver. Document: "Facilitating New Backend Integration by PrivateUse1", which leaves this layer to the
// vendor.
//
// Each function is safe to call from any thread. Those that return acme_error return ACME_OK or the reason, and
// acme_error_message() then has the sentence.
#ifndef ACME_H
#define ACME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { ACME_OK, ACME_OUT_OF_MEMORY, ACME_INVALID, ACME_KERNEL_FAILED, ACME_FORKED } acme_error;
const char* acme_error_message(void); // of the last error of the calling thread

// ---- devices ----

int acme_device_count(void);
acme_error acme_memory_info(int device, size_t* free_bytes, size_t* total_bytes);

// ---- memory ----

// Device memory has an address on the host, but the host cannot read or write it: only kernels and copies can.
acme_error acme_malloc(int device, size_t bytes, void** pointer);
acme_error acme_free(void* pointer); // no work may use it any more
// Pinned host memory: copies to and from it do not block the host.
acme_error acme_host_malloc(size_t bytes, void** pointer);
acme_error acme_host_free(void* pointer);

typedef enum { ACME_HOST, ACME_PINNED, ACME_DEVICE } acme_memory;
acme_memory acme_memory_of(const void* pointer, int* device); // `device` may be null, and is set for ACME_DEVICE

// A handle lets another process on this machine use device memory. It is plain bytes: send it as you like.
typedef struct {
  uint64_t words[6];
} acme_ipc_handle;
acme_error acme_ipc_export(const void* pointer, acme_ipc_handle* handle);
acme_error acme_ipc_open(const acme_ipc_handle* handle, void** pointer);
acme_error acme_ipc_close(void* pointer);

// ---- streams: work on one runs in order, work on two may run at once ----

typedef struct acme_stream acme_stream;
acme_error acme_stream_create(int device, int priority, acme_stream** stream); // it lives until the process ends
acme_error acme_stream_synchronize(acme_stream* stream); // returns ACME_KERNEL_FAILED once if work on the device failed
int acme_stream_query(acme_stream* stream); // 1 if no work is left

// ---- events: a point in the order of a stream ----

typedef struct acme_event acme_event;
acme_error acme_event_create(acme_event** event);
void acme_event_destroy(acme_event* event);
acme_error acme_event_record(acme_event* event, acme_stream* stream);
acme_error acme_stream_wait(acme_stream* stream, acme_event* event); // later work on `stream` runs after the point
acme_error acme_event_synchronize(acme_event* event);
int acme_event_query(acme_event* event); // 1 if the point is reached, or none was recorded
double acme_event_elapsed(acme_event* begin, acme_event* end); // milliseconds between two reached points

// ---- work ----

// Copies between any two of device, pinned and host memory, in the order of `stream`.
acme_error acme_copy(void* to, const void* from, size_t bytes, acme_stream* stream);

// Runs `kernel` in the order of `stream`, with a copy of its arguments. It returns null, or why it failed.
typedef const char* (*acme_kernel)(const void* arguments);
acme_error acme_launch(acme_stream* stream, const char* name, acme_kernel kernel, const void* arguments, size_t bytes);
void* acme_local(const void* pointer); // in a kernel only: where it can read and write the memory at `pointer`

// ---- profiling ----

// The callback gets each piece of work twice: on the thread that launches it, and on the device's when it has run.
typedef struct {
  uint64_t launch; // a number that connects the two
  int finished; // 0: launched just now, 1: has run
  const char* name;
  int device, stream;
  size_t bytes; // of a copy, else 0
  int64_t begin, end; // nanoseconds of CLOCK_REALTIME
} acme_activity;
void acme_profile(void (*callback)(const acme_activity*)); // null stops it

#ifdef __cplusplus
}
#endif
#endif
