/* The device's C interface: everything that a program built separately from openreg_ops may rely on.
 *
 * libopenreg_ops.so is the simulated accelerator. It needs neither PyTorch nor Python, and exports one function,
 * openreg_get_interface(), which returns a table of functions:
 *
 *     const char* error;
 *     const openreg_interface* openreg = openreg_get_interface(OPENREG_MAJOR, OPENREG_MINOR, &error);
 *     openreg_stream stream = openreg->current_stream(0);
 *     void* memory;
 *     if (openreg->allocate(stream, 4096, &memory)) fprintf(stderr, "%s\n", openreg->last_error());
 *
 * Versions: within one major version, functions are only added, at the end of the table, and the structs do not change.
 * A program built with this header works with every library of the same major version and this minor version or later.
 *
 * Threads: every function may be called from any thread. As in CUDA, each thread has its own current device and
 * streams.
 */
#ifndef OPENREG_C_API_H
#define OPENREG_C_API_H

#include <stddef.h>
#include <stdint.h>

#define OPENREG_MAJOR 1
#define OPENREG_MINOR 0

#ifdef __cplusplus
extern "C" {
#endif

/* Functions that can fail return one of these. last_error() returns the message, on the same thread. */
enum {
  OPENREG_OK = 0,
  OPENREG_ERROR_ARGUMENT = 1, /* a device, stream or pointer that does not exist; the message says which */
  OPENREG_ERROR_MEMORY = 2,   /* the device cannot hold an allocation; nothing has changed */
  OPENREG_ERROR_DEVICE = 3,   /* work that was queued earlier has failed, or the device is lost */
  OPENREG_ERROR_OTHER = 4     /* whatever the work itself threw, or the program's signal handler did in a wait */
};
typedef int32_t openreg_status;

/* A stream can be named without being created: stream 0 of a device is its default stream. */
typedef struct openreg_stream {
  int32_t device;
  int64_t id;
} openreg_stream;

enum { OPENREG_KERNEL = 0, OPENREG_COPY = 1, OPENREG_WAIT = 2 };

/* Where work is launched, and its name in profiles, errors and injected faults. The strings are not copied: use
 * literals.
 */
typedef struct openreg_site {
  const char* name;     /* NULL: as `function` */
  const char* function; /* __func__, or as std::source_location has it */
  const char* file;     /* NULL: unknown */
  uint32_t line;
  int32_t kind;         /* of work: OPENREG_KERNEL, OPENREG_COPY (the fault "copy" strikes it) */
  size_t bytes;         /* of a copy */
} openreg_site;

/* Work: a function, called as run(context). It may run after launch() has returned, on another thread, and more than
 * once. It may touch device memory only while it runs. It returns NULL on success, or a message that says what went
 * wrong and stays valid until the next call on its thread; a function written in C++ may throw instead.
 *
 * Work must not wait for the stream that it was launched on. If it runs from the stream's queue, synchronize_stream(),
 * synchronize_device(), run(), and synchronize_event() and elapsed_time() with an event that was recorded there fail
 * with OPENREG_ERROR_OTHER. (CUDA forbids its host functions all calls of this kind.)
 *
 * keep: called during launch() if the work is queued; returns the context to queue, such as a copy.
 * drop: called once, when the context that keep() returned is no longer needed.
 * Without them, both NULL, the context itself is queued, and must live until the stream has run the work. Work that is
 * captured into a graph lives as long as the graph, and each replay runs it again. */
typedef struct openreg_work {
  const char* (*run)(void* context);
  void* (*keep)(void* context);
  void (*drop)(void* context);
} openreg_work;

typedef struct openreg_event openreg_event;

typedef struct openreg_interface {
  uint32_t major, minor;

  /* ---- errors ---- */

  /* The message of the last call on this thread that did not return OPENREG_OK. Valid until the next such call. */
  const char* (*last_error)(void);
  /* Throws the same error as a C++ exception: PyTorch's own type for it if PyTorch is loaded, or the exception that the
   * work threw. Call it only from C++, and once. */
  void (*throw_error)(void);

  /* ---- devices ---- */

  int32_t (*device_count)(void);
  int32_t (*current_device)(void);
  openreg_status (*set_device)(int32_t device);
  openreg_status (*synchronize_device)(int32_t device);

  /* ---- streams ---- */

  /* The calling thread's current stream on this device. For a device that does not exist, a stream that rejects every
   * launch.
   */
  openreg_stream (*current_stream)(int32_t device);
  openreg_status (*set_stream)(openreg_stream stream);
  /* One of the device's 64 streams, round robin. The priority is 0 or -1; a lower number is more urgent. */
  openreg_status (*new_stream)(int32_t device, int32_t priority, openreg_stream* out);
  openreg_status (*query_stream)(openreg_stream stream, int32_t* idle);
  openreg_status (*synchronize_stream)(openreg_stream stream);

  /* ---- work ---- */

  /* Runs work in the stream's order, now or later, depending on the launch mode. */
  openreg_status (*launch)(openreg_stream stream, const openreg_site* site, const openreg_work* work, void* context);
  /* Runs work in the stream's order, before the call returns. */
  openreg_status (*run)(openreg_stream stream, const openreg_site* site, const openreg_work* work, void* context);
  /* Like launch(), for work so long that the host should continue meanwhile even in inline mode. */
  openreg_status (*enqueue)(openreg_stream stream, const openreg_site* site, const openreg_work* work, void* context);
  /* Copies between host and device, within a device, or between two devices, in the order of `stream`, like launch().
   * Host memory must live until the stream has run the copy. */
  openreg_status (*copy)(void* to, const void* from, size_t bytes, openreg_stream stream);

  /* ---- memory ---- */

  /* Allocates 64-byte aligned memory for work on `stream`; at least one byte. */
  openreg_status (*allocate)(openreg_stream stream, size_t bytes, void** out);
  /* Frees memory from allocate(). Work that has already been launched on its stream may still use it. NULL is allowed.
   */
  openreg_status (*deallocate)(void* memory);
  /* Declares that the work given to `stream`, of the same device, so far uses the memory too; it is not reused before
   * that work has run.
   */
  openreg_status (*record_stream)(void* memory, openreg_stream stream);
  /* The device whose memory has this address, or -1. */
  int32_t (*device_of)(const void* address);

  /* ---- events ---- */

  openreg_status (*create_event)(int32_t device, int32_t timed, openreg_event** out);
  void (*destroy_event)(openreg_event* event);
  openreg_status (*record_event)(openreg_event* event, openreg_stream stream);
  /* Work launched on `stream` from now on waits for the event. */
  openreg_status (*wait_event)(openreg_event* event, openreg_stream stream);
  openreg_status (*query_event)(openreg_event* event, int32_t* reached);
  openreg_status (*synchronize_event)(openreg_event* event);
  /* Milliseconds between two timed events that have been recorded; waits for both. */
  openreg_status (*elapsed_time)(openreg_event* start, openreg_event* end, double* milliseconds);

  /* ---- faults, for tests of recovery ---- */

  /* Arms a fault, named as in torch.openreg.faults.inject(): "allocation", "kernel", "copy", "lost", "kernel_latency"
   * or "copy_latency". It skips `after` operations of its kind on the device (-1: on any device) and then strikes
   * `times` of them (0: all that follow). Pass the number to disarm_fault(). */
  openreg_status (*arm_fault)(
      const char* fault, int32_t device, uint64_t after, uint64_t times, int64_t nanoseconds, int32_t* number);
  /* Returns how often it struck. */
  uint64_t (*disarm_fault)(int32_t number);
  /* Makes a lost device work again. */
  openreg_status (*reset_device)(int32_t device);
} openreg_interface;

/* Returns the table. If the library has another major version, or an older minor version, than the caller asked for,
 * returns NULL, and *error says so. */
const openreg_interface* openreg_get_interface(uint32_t major, uint32_t minor, const char** error);

#ifdef __cplusplus
}
#endif
#endif
