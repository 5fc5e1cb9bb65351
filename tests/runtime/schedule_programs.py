"""Programs whose streams lack one wait, for test_schedules.py; each is correct with `fixed`.

The race detector reports the lines with the comment `# race`. It does not see the programs in UNSEEN.
"""

import ctypes
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from patterns import Buckets, Offload, Prefetcher, model

DEVICE = "openreg"
N = 64
current = torch.openreg.current_stream

PROGRAMS, UNSEEN = {}, set()


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def unseen(function):
    UNSEEN.add(function.__name__)
    return program(function)


# ---- between streams ----


@program
def use_on_another_stream(fixed):
    x = torch.ones(N, device=DEVICE)
    side = torch.openreg.Stream()
    y = torch.ops.openreg.custom_abs(x)
    if fixed:
        side.wait_stream(current())
    with side:
        z = y + 1  # race
    current().wait_stream(side)
    return z


@program
def write_while_another_stream_reads(fixed):
    x = torch.ones(N, device=DEVICE)
    side = torch.openreg.Stream()
    side.wait_stream(current())
    with side:
        y = x * 2
    if fixed:
        current().wait_stream(side)
    x.zero_()  # race
    current().wait_stream(side)
    return y


@program
def wait_for_what_was_recorded_earlier(fixed):
    x = torch.ones(N, device=DEVICE)
    side, event = torch.openreg.Stream(), current().record_event()
    x.add_(1)
    if fixed:
        event.record(current())
    side.wait_event(event)
    with side:
        x.mul_(3)  # race
    current().wait_stream(side)
    return x


@program
def transitive_waits(fixed):
    a, b, c = (torch.openreg.Stream() for _ in range(3))
    with a:
        x = torch.ones(N, device=DEVICE)
    b.wait_stream(a)
    c.wait_stream(b)
    with c:
        x.add_(1)
    if fixed:
        b.wait_stream(c)
    with b:
        x.mul_(2)  # race
    b.synchronize(), c.synchronize()
    return x


@program
def wait_for_an_event_that_was_never_recorded(fixed):
    x = torch.ones(N, device=DEVICE)
    side, event = torch.openreg.Stream(), torch.openreg.Event()
    if fixed:
        event.record(current())
    side.wait_event(event)
    with side:
        x.add_(1)  # race
    current().wait_stream(side)
    return x


@program
def synchronize_the_other_device(fixed):
    x = torch.ones(4, device="openreg:1")
    torch.openreg.synchronize(1 if fixed else 0)
    side = torch.openreg.Stream(device="openreg:1")
    with side:
        x.add_(1)  # race
    torch.openreg.set_device(0)
    current(1).wait_stream(side)
    return x


@program
def copy_between_devices(fixed):
    x = torch.ones(N, device="openreg:0")
    y = x.to("openreg:1", non_blocking=True)
    side = torch.openreg.Stream(device="openreg:1")
    if fixed:
        side.wait_stream(current(1))
    with side:
        y.add_(1)  # race
    torch.openreg.set_device(0)
    current(1).wait_stream(side)
    return y


@program
def overlapping_views(fixed):
    x = torch.ones(8, 8, device=DEVICE)
    side = torch.openreg.Stream()
    side.wait_stream(current())
    x[2:5].zero_()
    if fixed:
        side.wait_stream(current())
    with side:
        x[4:].add_(1)  # race
    current().wait_stream(side)
    return x


@program
def lists_of_tensors(fixed):
    xs = [torch.ones(4, device=DEVICE) for _ in range(3)]
    side = torch.openreg.Stream()
    if fixed:
        side.wait_stream(current())
    with side:
        torch._foreach_add_(xs, 1)  # race
    current().wait_stream(side)
    return xs


@program
def backward_without_a_wait(fixed):
    w = torch.ones(N, device=DEVICE)
    x = torch.ones(N, device=DEVICE, requires_grad=True)
    loss = (x * w).sum()
    side = torch.openreg.Stream()
    side.wait_stream(current())
    if fixed:
        loss.backward()
        side.wait_stream(current())
    with side:
        w.data.mul_(2)
    if not fixed:
        loss.backward()  # race
    return x.grad


@program
def output_of_a_side_stream(fixed):
    side = torch.openreg.Stream()
    side.wait_stream(current())
    with side:
        y = torch.full((N,), 3.0, device=DEVICE)
    if fixed:
        current().wait_stream(side)
    return y


@program
def graph_replayed_on_a_stream_that_does_not_wait(fixed):
    graph, x = torch.openreg.Graph(), torch.ones(N, device=DEVICE)
    with torch.openreg.graph(graph):
        y = x * 2
    side = torch.openreg.Stream()
    x.fill_(5)
    if fixed:
        side.wait_stream(current())
    with side:
        graph.replay()  # race
    current().wait_stream(side)
    return y


# ---- memory that is used again ----


def freed_too_early(fixed, keep):
    side = torch.openreg.Stream()
    x = torch.ones(N, device=DEVICE)
    side.wait_stream(current())
    with side:
        y = torch.ops.openreg.custom_abs(x)
    keep(x, side)
    del x
    again = torch.empty(N, device=DEVICE).fill_(2)  # race
    current().wait_stream(side)
    return y, again


@program
def reuse_without_record_stream(fixed):
    return freed_too_early(fixed, lambda x, side: x.record_stream(side) if fixed else None)


@program
def reuse_without_a_wait(fixed):
    return freed_too_early(fixed, lambda x, side: current().wait_stream(side) if fixed else None)


@program
def prefetcher_without_record_stream(fixed):
    sums = []
    for (x,) in Prefetcher([[torch.full((N,), float(i)).pin_memory()] for i in range(4)], record=fixed):
        sums.append(x.square().sum())
        del x
    return torch.stack(sums)


def bucketed(wait_before, wait_after):
    buckets = Buckets(model(), wait_before, wait_after)
    buckets.backward()
    current().wait_stream(buckets.side)
    return [p.grad for p in buckets.net.parameters()]


@program
def bucket_without_a_wait_before(fixed):
    return bucketed(fixed, True)


@program
def bucket_without_a_wait_after(fixed):
    return bucketed(True, fixed)


@program
def offload_without_a_wait(fixed):
    net = model()
    with Offload(waited=fixed):
        loss = net(torch.randn(8, 16, device=DEVICE)).square().mean()
    loss.backward()  # race
    return [p.grad for p in net.parameters()]


# ---- the host ----


def copied(fixed):
    host = torch.zeros(N, pin_memory=True)
    host.copy_(torch.ones(N, device=DEVICE), non_blocking=True)
    if fixed:
        current().synchronize()
    return host


@program
def host_reads_a_copy_too_early(fixed):
    return copied(fixed).tolist()  # race


@program
def host_writes_what_a_copy_reads(fixed):
    host = torch.ones(N, pin_memory=True)
    x = host.to(DEVICE, non_blocking=True)
    if fixed:
        current().synchronize()
    host.zero_()  # race
    return x


@program
def a_new_pinned_tensor_read_too_early(fixed):
    host = torch.ones(N, device=DEVICE).to("cpu", non_blocking=True)
    if fixed:
        current().record_event().synchronize()
    return float(host.sum())  # race


# ---- collectives, of a group of one process ----


def group():
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("occl", store=store, rank=0, world_size=1)


@program
def collective_read_before_its_wait(fixed):
    group()
    y, x = torch.zeros(1, N, device=DEVICE), torch.ones(N, device=DEVICE)
    work = torch.distributed.all_gather_into_tensor(y.view(-1), x, async_op=True)
    if fixed:
        work.wait()
    z = y * 2  # race
    work.wait()
    return z


@program
def collective_whose_input_is_written_before_its_wait(fixed):
    group()
    y, x = torch.zeros(1, N, device=DEVICE), torch.ones(N, device=DEVICE)
    work = torch.distributed.all_gather_into_tensor(y.view(-1), x, async_op=True)
    if fixed:
        work.wait()
    x.zero_()  # race
    work.wait()
    return y


@program
def collective_before_a_side_streams_input(fixed):
    group()
    x, side = torch.zeros(N, device=DEVICE), torch.openreg.Stream()
    side.wait_stream(current())
    with side:
        x.add_(3)
    if fixed:
        current().wait_stream(side)
    out = [torch.zeros(N, device=DEVICE)]
    torch.distributed.all_gather(out, x)  # race
    return out


# ---- what the race detector does not see ----


@unseen
def numpy_view_made_before_the_copy(fixed):
    host = torch.zeros(N, pin_memory=True)
    view = host.numpy()
    host.copy_(torch.ones(N, device=DEVICE), non_blocking=True)
    if fixed:
        current().synchronize()
    return float(view.sum())


@unseen
def numpy_fills_the_buffer_of_a_copy(fixed):
    buffer, batches = torch.empty(N, pin_memory=True), []
    view = buffer.numpy()
    for i in range(3):
        view[:] = i
        batches.append(buffer.to(DEVICE, non_blocking=True))
        if fixed:
            current().synchronize()
    return batches


@unseen
def memory_read_by_address(fixed):
    host = copied(fixed)
    return ctypes.c_float.from_address(host.data_ptr()).value


@unseen
def sleep_in_place_of_a_wait(fixed):
    host = torch.zeros(N, pin_memory=True)
    view = host.numpy()
    host.copy_(torch.ones(N, device=DEVICE), non_blocking=True)
    current().synchronize() if fixed else time.sleep(1e-4)
    return view.tolist()


@unseen
def thread_hands_over_a_tensor(fixed):
    tensors = queue.Queue()

    def produce():
        stream = torch.openreg.Stream()
        with stream:
            x = torch.arange(N, device=DEVICE) * 2
            tensors.put((x, stream.record_event()))

    thread = threading.Thread(target=produce)
    thread.start()
    x, event = tensors.get()
    if fixed:
        current().wait_event(event)
    y = x + 1
    thread.join()
    torch.openreg.synchronize()
    return y


@unseen
def pool_of_threads_without_a_wait(fixed):
    streams = [torch.openreg.Stream() for _ in range(2)]

    def work(i):
        with streams[i]:
            return torch.full((N,), float(i), device=DEVICE).exp()

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(work, range(2)))
    if fixed:
        for stream in streams:
            current().wait_stream(stream)
    total = parts[0] + parts[1]
    torch.openreg.synchronize()
    return total


@torch.library.custom_op("schedule_programs::undeclared", mutates_args=())
def undeclared(x: torch.Tensor, hidden: int) -> torch.Tensor:
    _hidden[hidden].add_(x)
    return x.clone()


_hidden = {}


@program
def an_operator_writes_what_its_schema_does_not_say(fixed):
    _hidden[0] = total = torch.zeros(N, device=DEVICE)
    x = torch.ones(N, device=DEVICE)
    side = torch.openreg.Stream()
    side.wait_stream(current())
    with side:
        undeclared(x, 0)
    if fixed:
        current().wait_stream(side)
    y = total * 2  # race
    torch.openreg.synchronize()
    return y


@unseen
def control_flow_that_skips_the_wait(fixed):
    """Decides too early whether to wait, from the value of an earlier copy."""
    flag = torch.zeros(1, pin_memory=True)
    flags = flag.numpy()
    x = torch.ones(N, device=DEVICE)
    side = torch.openreg.Stream()
    flag.copy_(x[:1], non_blocking=True)
    if fixed:
        current().synchronize()
    y = x * 5 if flags[0] else x * 7
    side.wait_stream(current())
    torch.openreg.synchronize()
    return y
