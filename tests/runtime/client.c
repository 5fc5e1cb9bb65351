/* The device from C, with neither PyTorch nor Python: every function of openreg/c_api.h. */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef HEADER
#define HEADER <openreg/c_api.h>
#endif
#include HEADER

static int wrong = 0;

#define EXPECT(condition)                                                      \
  do {                                                                         \
    if (!(condition)) {                                                        \
      ++wrong;                                                                 \
      fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
    }                                                                          \
  } while (0)

static const openreg_interface* device;

/* The call fails with this status and a message that has these words. */
static void fails(openreg_status got, openreg_status expected, const char* words) {
  EXPECT(got == expected);
  if (got == OPENREG_OK) return;
  EXPECT(strstr(device->last_error(), words) != NULL);
  if (!strstr(device->last_error(), words)) fprintf(stderr, "  expected \"%s\" in \"%s\"\n", words, device->last_error());
}
#define OK(call)                                                                                    \
  do {                                                                                              \
    const openreg_status status = (call);                                                           \
    EXPECT(status == OPENREG_OK);                                                                   \
    if (status) fprintf(stderr, "  %s\n", device->last_error());                                    \
  } while (0)

struct Double {
  double* data;
  size_t n;
};
static int kept = 0, dropped = 0;

static const char* run_double(void* context) {
  const struct Double* const work = context;
  for (size_t i = 0; i < work->n; ++i) work->data[i] *= 2;
  return NULL;
}
static void* keep_double(void* context) {
  struct Double* const copy = malloc(sizeof *copy);
  *copy = *(struct Double*)context;
  ++kept;
  return copy;
}
static void drop_double(void* context) {
  ++dropped;
  free(context);
}
static const char* run_wrong(void* context) {
  (void)context;
  return "the kernel met a NaN";
}


/* Work that calls the device again. */
struct Nested {
  double* data;
  openreg_stream stream;
  openreg_status launched, freed, waited;
  char said[400];
};
static const char* run_nested(void* context) {
  struct Nested* const nested = context;
  static const openreg_site inner = {"inner", "run_nested", NULL, 0, OPENREG_KERNEL, 0};
  static const openreg_work twice = {run_double, keep_double, drop_double};
  struct Double work = {nested->data, 1};
  void* memory;
  nested->launched = device->launch(nested->stream, &inner, &twice, &work);
  nested->freed = device->allocate(nested->stream, 64, &memory);
  if (!nested->freed) nested->freed = device->deallocate(memory);
  nested->waited = device->synchronize_stream(nested->stream);
  if (nested->waited) snprintf(nested->said, sizeof nested->said, "%s", device->last_error());
  return NULL;
}

/* Work that waits for events of its own stream, recorded by itself and by the host, and of another stream. */
struct Waiting {
  openreg_stream own, other;
  openreg_event *mine, *hosts, *others;
  openreg_status waited[4];
  char said[400];
};
static const char* run_waiting(void* context) {
  struct Waiting* const waiting = context;
  double milliseconds;
  device->record_event(waiting->mine, waiting->own);
  waiting->waited[0] = device->synchronize_event(waiting->mine);
  if (waiting->waited[0]) snprintf(waiting->said, sizeof waiting->said, "%s", device->last_error());
  waiting->waited[1] = device->elapsed_time(waiting->mine, waiting->mine, &milliseconds);
  waiting->waited[2] = device->synchronize_event(waiting->hosts);
  device->record_event(waiting->others, waiting->other);
  waiting->waited[3] = device->synchronize_event(waiting->others);
  return NULL;
}

int main(void) {
  const char* const mode = getenv("OPENREG_LAUNCH_MODE");
  const int sync = mode && !strcmp(mode, "sync"); /* an error is told at its line, and nothing is ever queued */
  const char* error = NULL;
  EXPECT(openreg_get_interface(OPENREG_MAJOR + 1, 0, &error) == NULL && strstr(error, "install a newer openreg_ops"));
  EXPECT(openreg_get_interface(OPENREG_MAJOR, 1000, &error) == NULL && strstr(error, "1.1000"));
  EXPECT(openreg_get_interface(OPENREG_MAJOR + 1, 0, NULL) == NULL);
  device = openreg_get_interface(OPENREG_MAJOR, OPENREG_MINOR, &error);
  if (!device) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  EXPECT(device->major == OPENREG_MAJOR && device->minor + 1 > OPENREG_MINOR);

  /* devices and streams */
  EXPECT(device->device_count() == 2 && device->current_device() == 0);
  OK(device->set_device(1));
  EXPECT(device->current_device() == 1);
  OK(device->set_device(0));
  fails(device->set_device(2), OPENREG_ERROR_ARGUMENT, "there is no device 2: this process has 2");
  fails(device->set_device(-1), OPENREG_ERROR_ARGUMENT, "there is no device -1");
  const openreg_stream first = device->current_stream(0);
  EXPECT(first.device == 0 && first.id == 0);
  openreg_stream other;
  OK(device->new_stream(0, -1, &other));
  OK(device->set_stream(other));
  EXPECT(device->current_stream(0).id == other.id);
  OK(device->set_stream(first));
  const openreg_stream none = {0, 12345}, nowhere = device->current_stream(7);
  fails(device->set_stream(none), OPENREG_ERROR_ARGUMENT, "there is no stream 12345 on device 0");

  /* memory, copies and work */
  enum { N = 1000 };
  double* const host = malloc(N * sizeof *host);
  for (int i = 0; i < N; ++i) host[i] = i;
  void* memory;
  OK(device->allocate(first, N * sizeof *host, &memory));
  EXPECT(device->device_of(memory) == 0 && device->device_of(host) == -1 && (uintptr_t)memory % 64 == 0);
  OK(device->copy(memory, host, N * sizeof *host, first));
  const openreg_work twice = {run_double, keep_double, drop_double}, fail = {run_wrong, NULL, NULL};
  const openreg_site site = {"twice", __func__, __FILE__, __LINE__, OPENREG_KERNEL, 0};
  struct Double work = {memory, N};
  OK(device->launch(first, &site, &twice, &work));
  OK(device->enqueue(first, &site, &twice, &work));
  work.n = 0; /* what is queued has a copy */
  OK(device->synchronize_stream(first));
  work.n = N;
  OK(device->run(first, &site, &twice, &work));
  OK(device->copy(host, memory, N * sizeof *host, first));
  OK(device->synchronize_device(0));
  for (int i = 0; i < N; ++i) EXPECT(host[i] == 8.0 * i);
  EXPECT(kept == dropped && (kept == 0) == sync);
  fails(device->launch(none, &site, &twice, &work), OPENREG_ERROR_ARGUMENT, "there is no stream 12345");
  fails(device->launch(nowhere, &site, &twice, &work), OPENREG_ERROR_ARGUMENT, "on device 7: this process has 2 devices");
  fails(device->run(first, &site, &fail, NULL), OPENREG_ERROR_OTHER, "the kernel met a NaN");
  fails(device->copy(host, host, 8, first), OPENREG_ERROR_ARGUMENT, "expected memory of the device");
  fails(device->deallocate(host), OPENREG_ERROR_ARGUMENT, "expected memory of the device");
  fails(device->record_stream(host, first), OPENREG_ERROR_ARGUMENT, "but got a host address");
  fails(device->allocate(first, (size_t)1 << 60, &(void*){NULL}), OPENREG_ERROR_MEMORY, "out of memory");

  fails(device->launch(first, NULL, &twice, &work), OPENREG_ERROR_ARGUMENT, "expected a site, but got NULL");
  fails(device->run(first, &site, NULL, &work), OPENREG_ERROR_ARGUMENT, "expected work, but got NULL");
  fails(device->allocate(first, 8, NULL), OPENREG_ERROR_ARGUMENT, "expected a place for the address, but got NULL");
  fails(device->query_stream(first, NULL), OPENREG_ERROR_ARGUMENT, "expected a place for the answer, but got NULL");

  /* addresses: within a block, of none, of one that has been freed, past the end, NULL */
  char inside[64];
  snprintf(inside, sizeof inside, "which is byte 64 of a block that starts at %p; give that address", memory);
  fails(device->deallocate((char*)memory + 64), OPENREG_ERROR_ARGUMENT, inside);
  fails(device->record_stream((char*)memory + 64, other), OPENREG_ERROR_ARGUMENT, inside);
  fails(device->record_stream(memory, device->current_stream(1)), OPENREG_ERROR_ARGUMENT,
      "memory of device 0 cannot be kept for a stream of device 1");
  void *large, *small;
  OK(device->allocate(first, 1 << 20, &large));
  fails(device->deallocate((char*)large + 70000), OPENREG_ERROR_ARGUMENT, "which is byte 70000 of a block that starts at");
  OK(device->deallocate(large));
  fails(device->deallocate(large), OPENREG_ERROR_ARGUMENT, "where nothing is allocated; was it freed before?");
  OK(device->allocate(first, 16 << 20, &large));
  fails(device->deallocate((char*)large + (16 << 20) - 1), OPENREG_ERROR_ARGUMENT, "which is byte 16777215 of a block");
  OK(device->deallocate(large));
  OK(device->allocate(first, 8, &small));
  OK(device->deallocate(small));
  fails(device->deallocate(small), OPENREG_ERROR_ARGUMENT, "which has been freed already; free memory once");
  fails(device->copy(small, host, 8, first), OPENREG_ERROR_ARGUMENT, "copy: nothing is allocated at");
  fails(device->copy(memory, host, 1 << 20, first), OPENREG_ERROR_ARGUMENT, "copy: 1048576 bytes at");
  fails(device->copy(NULL, memory, 8, first), OPENREG_ERROR_ARGUMENT, "copy: expected two addresses, but to is NULL");
  fails(device->copy(memory, NULL, 8, first), OPENREG_ERROR_ARGUMENT, "copy: expected two addresses, but from is NULL");
  OK(device->copy(memory, NULL, 0, first));
  fails(device->allocate(first, (size_t)-1, &(void*){NULL}), OPENREG_ERROR_MEMORY, "out of memory");

  /* sites and work that are not filled in */
  const openreg_site unnamed = {NULL, NULL, NULL, 0, OPENREG_KERNEL, 0}, kind = {"odd", __func__, __FILE__, 1, 7, 0};
  const openreg_work empty = {NULL, NULL, NULL}, half = {run_double, keep_double, NULL};
  fails(device->launch(first, &unnamed, &twice, &work), OPENREG_ERROR_ARGUMENT, "a site with a name or a function");
  fails(device->launch(first, &kind, &twice, &work), OPENREG_ERROR_ARGUMENT, "OPENREG_COPY or OPENREG_WAIT, but got 7");
  fails(device->enqueue(first, &site, &empty, &work), OPENREG_ERROR_ARGUMENT, "expected work with a function run");
  fails(device->run(first, &site, &half, &work), OPENREG_ERROR_ARGUMENT, "both keep and drop, or neither");

  /* work that launches, allocates, frees, and waits for itself where it is queued */
  OK(device->synchronize_device(0));
  host[0] = 1;
  OK(device->copy(memory, host, 8, first));
  struct Nested nested = {memory, first, 9, 9, 9, ""};
  const openreg_work calls = {run_nested, NULL, NULL};
  OK(device->enqueue(first, &site, &calls, &nested));
  OK(device->synchronize_stream(first));
  EXPECT(nested.launched == OPENREG_OK && nested.freed == OPENREG_OK);
  EXPECT(nested.waited == (sync ? OPENREG_OK : OPENREG_ERROR_OTHER));
  EXPECT(sync || strstr(nested.said, "waits for that stream, and so for itself"));
  OK(device->copy(host, memory, 8, first));
  OK(device->synchronize_device(0));
  EXPECT(host[0] == 2);

  /* work that waits for itself by an event */
  struct Waiting waiting = {first, other, NULL, NULL, NULL, {9, 9, 9, 9}, ""};
  const openreg_work waits = {run_waiting, NULL, NULL};
  OK(device->create_event(0, 1, &waiting.mine));
  OK(device->create_event(0, 1, &waiting.hosts));
  OK(device->create_event(0, 1, &waiting.others));
  OK(device->record_event(waiting.hosts, first)); /* before the work, so that it has been reached */
  OK(device->enqueue(first, &site, &waits, &waiting));
  OK(device->synchronize_stream(first));
  EXPECT(waiting.waited[0] == (sync ? OPENREG_OK : OPENREG_ERROR_OTHER));
  EXPECT(sync || strstr(waiting.said, "waits for that stream, and so for itself"));
  EXPECT(waiting.waited[1] == waiting.waited[0]);
  EXPECT(waiting.waited[2] == OPENREG_OK && waiting.waited[3] == OPENREG_OK);
  OK(device->synchronize_event(waiting.mine));
  OK(device->run(first, &site, &waits, &waiting)); /* on its caller's thread, behind no work */
  EXPECT(waiting.waited[0] == OPENREG_OK && waiting.waited[3] == OPENREG_OK);
  device->destroy_event(waiting.mine);
  device->destroy_event(waiting.hosts);
  device->destroy_event(waiting.others);

  /* what fails when it is queued is told by the next wait */
  const openreg_site nowhere_known = {"without a file", NULL, NULL, 0, OPENREG_KERNEL, 0};
  if (!sync) {
    OK(device->enqueue(first, &nowhere_known, &fail, NULL));
    fails(device->synchronize_stream(first), OPENREG_ERROR_DEVICE, "launched at unknown:0");
  }
  if (sync) fails(device->enqueue(first, &site, &fail, NULL), OPENREG_ERROR_OTHER, "the kernel met a NaN");
  else {
    OK(device->enqueue(first, &site, &fail, NULL));
    fails(device->synchronize_stream(first), OPENREG_ERROR_DEVICE, "the kernel met a NaN");
  }
  OK(device->synchronize_stream(first));

  /* events */
  openreg_event *start, *end;
  OK(device->create_event(0, 1, &start));
  OK(device->create_event(0, 1, &end));
  int32_t done = 0;
  double milliseconds = -1;
  fails(device->elapsed_time(start, end, &milliseconds), OPENREG_ERROR_ARGUMENT, "which have been recorded");
  OK(device->record_event(start, first));
  OK(device->enqueue(first, &site, &twice, &work));
  OK(device->record_event(end, first));
  OK(device->wait_event(end, other));
  OK(device->record_stream(memory, other));
  OK(device->synchronize_event(end));
  OK(device->query_event(end, &done));
  EXPECT(done == 1);
  OK(device->elapsed_time(start, end, &milliseconds));
  EXPECT(milliseconds >= 0);
  OK(device->synchronize_stream(other));
  OK(device->query_stream(other, &done));
  EXPECT(done == 1);
  fails(device->record_event(NULL, first), OPENREG_ERROR_ARGUMENT, "expected an event from create_event(), but got NULL");
  fails(device->record_event(start, device->current_stream(1)), OPENREG_ERROR_ARGUMENT, "an event of device 0 cannot");
  device->destroy_event(start);
  device->destroy_event(end);
  device->destroy_event(NULL);
  const struct mallinfo2 before = mallinfo2();
  for (int i = 0; i < 1000; ++i) {
    OK(device->create_event(0, 1, &start));
    device->destroy_event(start);
  }
  EXPECT(mallinfo2().uordblks < before.uordblks + 1000); /* less than a byte for each event */

  /* faults */
  int32_t number;
  OK(device->arm_fault("kernel", 0, 0, 1, 0, &number));
  const openreg_status struck = device->launch(first, &site, &twice, &work);
  EXPECT((struck == OPENREG_OK) == !sync);
  fails(sync ? struck : device->synchronize_device(0), OPENREG_ERROR_DEVICE,
      "an injected fault made a kernel fail on openreg:0 in twice");
  EXPECT(device->disarm_fault(number) == 1);
  OK(device->arm_fault("lost", -1, 0, 1, 0, &number));
  fails(device->launch(first, &site, &twice, &work), OPENREG_ERROR_DEVICE, "is lost");
  EXPECT(device->disarm_fault(number) == 1);
  fails(device->allocate(first, 8, &(void*){NULL}), OPENREG_ERROR_DEVICE, "is lost");
  OK(device->reset_device(0));
  OK(device->launch(first, &site, &twice, &work));
  OK(device->arm_fault("copy", 0, 0, 1, 0, &number));
  char sent[8] = "openreg", got[8];
  OK(device->copy(memory, sent, 8, first));
  EXPECT(device->disarm_fault(number) == 1);
  OK(device->copy(got, memory, 8, first));
  OK(device->synchronize_device(0));
  EXPECT(memcmp(sent, got, 8) != 0);
  fails(device->arm_fault("fire", 0, 0, 1, 0, &number), OPENREG_ERROR_ARGUMENT, "but got \"fire\"");

  fails(device->arm_fault(NULL, 0, 0, 1, 0, &number), OPENREG_ERROR_ARGUMENT, "the name of a fault, but got NULL");
  fails(device->arm_fault("kernel", -2, 0, 1, 0, &number), OPENREG_ERROR_ARGUMENT, "there is no device -2");
  fails(device->arm_fault("kernel_latency", 0, 0, 1, -1, &number), OPENREG_ERROR_ARGUMENT, "at least 0, but got -1");

  OK(device->deallocate(memory));
  OK(device->deallocate(NULL));
  free(host);
  printf(wrong ? "%d wrong\n" : "all right\n", wrong);
  return wrong != 0;
}
