"""Injected faults surface like a real accelerator's: the type of the exception, and when it is raised."""

import functools
import gc
import inspect

import pytest
import torch
from processes import python
from torch.openreg.faults import inject

import pytest_openreg_ops as plugin

DEVICE = "openreg"


def test_the_nth_allocation_fails_and_nothing_is_lost():
    gc.collect()  # what earlier tests left behind is freed before, not in between
    x = torch.ones(1000, device=DEVICE)
    before = torch.openreg.memory_allocated()
    with inject("allocation", after=1) as fault:
        y = torch.empty(1000, device=DEVICE)
        with pytest.raises(
            torch.OutOfMemoryError, match="Tried to allocate 3.91 KiB.* is allocated and .* reserved .* injected"
        ):
            torch.empty(1000, device=DEVICE)
        z = x + 1  # once only
    assert fault.struck == 1 and z.sum().item() == 2000
    del y, z
    assert torch.openreg.memory_allocated() == before


def test_memory_shrinks():
    with inject("memory", DEVICE, fraction=0.0):
        with pytest.raises(
            torch.openreg.OutOfMemoryError, match="total capacity of .* of which 0 bytes is allowed .*fault has set"
        ):
            torch.empty(10, device=DEVICE)
    assert torch.empty(10, device=DEVICE).shape == (10,)


def test_a_failed_kernel_is_no_kernel_that_is_done():
    """A host that polls gets the error, not an answer, as from ``cudaEventQuery``."""
    x = torch.ones(1000, device=DEVICE)
    start, end = (torch.openreg.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    for ask in (torch.openreg.current_stream().query, end.query, lambda: start.elapsed_time(end)):
        with torch.openreg.launch_mode("async"), inject("kernel"):
            torch.ops.openreg.custom_abs(x)
            with pytest.raises(torch.AcceleratorError, match="injected fault"):
                while not ask():
                    pass
        with pytest.raises(torch.AcceleratorError, match="injected fault"):  # a query does not consume the error
            torch.openreg.synchronize()
        torch.openreg.synchronize()


def test_a_failing_kernel_surfaces_at_item():
    x = torch.ones(1000, device=DEVICE)
    with inject("kernel"):
        y = x + 1
        with pytest.raises(torch.AcceleratorError, match="injected fault made a kernel fail on openreg:0 in aten::add"):
            y.sum().item()


def test_in_sync_mode_a_kernel_fails_at_its_line():
    x = torch.ones(1000, device=DEVICE)
    with torch.openreg.launch_mode("sync"), inject("kernel"), pytest.raises(torch.AcceleratorError, match="injected"):
        torch.ops.openreg.custom_abs(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("where", ["to", "from", "on", "non_blocking"])
def test_a_copy_is_corrupted(where, dtype):
    x = torch.ones(1000, dtype=dtype)
    y = x.to(DEVICE)
    pinned = x.pin_memory()
    with inject("copy") as fault:
        if where == "to":
            got = x.to(DEVICE)
        elif where == "from":
            got = y.cpu()
        elif where == "on":
            got = torch.empty_like(y).copy_(y)
        else:
            got = pinned.to(DEVICE, non_blocking=True)
    assert fault.struck == 1
    assert (got.cpu() != x).nonzero().tolist() == [[0]]


@pytest.mark.parametrize("source", [torch.bool, torch.float32], ids=str)
def test_a_replayed_copy_is_corrupted(source):
    x, y = torch.ones(1000, dtype=source, device=DEVICE), torch.zeros(1000, dtype=torch.bool, device=DEVICE)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y.copy_(x)
    with inject("copy") as fault:
        graph.replay()
    assert fault.struck == 1
    assert (~y.cpu()).nonzero().tolist() == [[0]]  # a byte other than 0 and 1 would read as True


class World:
    """Objects of every kind on one device, made while it works."""

    def __init__(self, index):
        self.index, self.device = index, f"openreg:{index}"
        torch.openreg.set_device(index)
        self.x, self.pinned = torch.ones(10, device=self.device), torch.ones(10, pin_memory=True)
        self.graph, self.other_graph = torch.openreg.Graph(keep_graph=True), torch.openreg.Graph()
        with torch.openreg.graph(self.graph):
            self.x + 1
        self.generator = torch.Generator(self.device)
        self.stream, self.side = torch.openreg.current_stream(), torch.openreg.Stream()
        self.start, self.event = (torch.openreg.Event(enable_timing=True) for _ in range(2))
        self.start.record(), self.event.record()
        self.shared, self.external = torch.openreg.Event(interprocess=True), torch.openreg.Event(external=True)
        self.shared.record(), self.external.record()
        torch.openreg.synchronize()


def entered(context):
    with context:
        pass


def begun(world):
    with world.side:
        world.other_graph.capture_begin()


O = torch.openreg  # noqa: E741
# What raises while the device is lost: what allocates, launches, waits or queries. The first word is the name.
LOST = {
    "Stream": lambda w: O.Stream(w.index),
    "Stream.query": lambda w: w.stream.query(),
    "Stream.synchronize": lambda w: w.stream.synchronize(),
    "Stream.record_event": lambda w: w.stream.record_event(),
    "Stream.wait_event": lambda w: w.stream.wait_event(w.event),
    "Stream.wait_event shared": lambda w: w.stream.wait_event(w.shared),
    "Stream.wait_event external": lambda w: w.stream.wait_event(w.external),
    "Stream.wait_stream": lambda w: w.side.wait_stream(w.stream),
    "Event.query": lambda w: w.event.query(),
    "Event.query shared": lambda w: w.shared.query(),
    "Event.query external": lambda w: w.external.query(),
    "Event.synchronize": lambda w: w.event.synchronize(),
    "Event.synchronize shared": lambda w: w.shared.synchronize(),
    "Event.synchronize external": lambda w: w.external.synchronize(),
    "Event.record": lambda w: w.event.record(w.stream),
    "Event.record new": lambda w: O.Event().record(w.stream),
    "Event.record shared": lambda w: w.shared.record(w.stream),
    "Event.record external": lambda w: w.external.record(w.stream),
    "Event.wait": lambda w: w.event.wait(w.side),
    "Event.elapsed_time": lambda w: w.start.elapsed_time(w.event),
    "Graph.replay": lambda w: w.graph.replay(),
    "Graph.capture_begin": begun,
    "graph": lambda w: entered(O.graph(O.Graph())),
    "make_graphed_callables": lambda w: O.make_graphed_callables(torch.relu, (w.x,)),
    "synchronize": lambda w: O.synchronize(w.index),
    "mem_get_info": lambda w: O.mem_get_info(w.index),
    "device_memory_used": lambda w: O.device_memory_used(w.index),
    "list_gpu_processes": lambda w: O.list_gpu_processes(w.index),
    "caching_allocator_alloc": lambda w: O.caching_allocator_delete(O.caching_allocator_alloc(10, w.index)),
    "_sleep": lambda w: O._sleep(1),
    # One operator of each kind.
    "Tensor.empty": lambda w: torch.empty(3, device=w.device),
    "Tensor.add": lambda w: w.x + 1,
    "Tensor.add_": lambda w: w.x.add_(1),
    "Tensor.rand": lambda w: torch.rand(3, device=w.device),
    "Tensor.uniform_ of a generator": lambda w: w.x.uniform_(generator=w.generator),
    "Tensor.item": lambda w: w.x[0].item(),
    "Tensor.cpu": lambda w: w.x.cpu(),
    "Tensor.repr": lambda w: repr(w.x),
    "Tensor.copy_ from pinned memory": lambda w: w.x.copy_(w.pinned, non_blocking=True),
    "Tensor.copy_ to pinned memory": lambda w: w.pinned.copy_(w.x, non_blocking=True),
    "Tensor.to the other device": lambda w: w.x.to(f"openreg:{1 - w.index}"),
    "Tensor.to this device": lambda w: torch.ones(3).to(w.device),
    "Tensor.custom_abs": lambda w: torch.ops.openreg.custom_abs(w.x),
    "Tensor.resize of a storage": lambda w: w.x.untyped_storage().resize_(4000),
}  # fmt: skip


def other_calls(index):
    """Calls of the public functions that need no argument other than a device. A new one is tried too."""
    cached = (name for name in O.__all__ if name.endswith("_cached"))
    slow_or_deprecated = {"utilization", "reset_max_memory_allocated", *cached}
    for name in sorted({*O.__all__} - {*LOST} - slow_or_deprecated):
        if inspect.isfunction(function := getattr(O, name)):
            parameters = inspect.signature(function).parameters
            if all(p.default is not p.empty for p in parameters.values()):
                yield name, functools.partial(function, **({"device": index} if "device" in parameters else {}))


@pytest.mark.filterwarnings("ignore:The graph is empty")
@pytest.mark.parametrize("mode", ["inline", "async"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_lost_device_stays_lost_until_it_is_reset(index, mode):
    """Each call on the device, and none on the other one; but not what waits for nothing and computes nothing."""
    worlds = [World(i) for i in (0, 1)]
    with torch.openreg.launch_mode(mode):
        try:
            with inject("lost", index, after=1), pytest.raises(torch.AcceleratorError, match="is lost"):
                worlds[index].x + 1
                worlds[index].x + 1
                torch.openreg.synchronize(index)
            for world in worlds:
                torch.openreg.set_device(world.index)
                for name, call in other_calls(world.index):
                    call()
                    assert torch.openreg.current_device() == world.index, name
                for name, call in LOST.items():
                    if world.index != index and name not in ("Graph.capture_begin", "Tensor.to the other device"):
                        call(world)
                    elif world.index == index:
                        with pytest.raises(
                            torch.AcceleratorError, match=rf"openreg:{index} is lost.*reset_device\({index}\)"
                        ):
                            call(world)
                            pytest.fail(f"{name} does not raise")
            torch.openreg.reset_device(1 - index)  # which is not the one
            with pytest.raises(torch.AcceleratorError, match="is lost"):
                worlds[index].x + 1
        finally:
            torch.openreg.reset_device(index)
        assert (worlds[index].x[:3] * 0 + 1).sum().item() == 3


@pytest.mark.parametrize("kind", ["kernel_latency", "copy_latency"])
def test_latency(kind):
    x = torch.ones(10, device=DEVICE)
    stream = torch.openreg.Stream()
    stream.wait_stream(torch.openreg.current_stream())
    start, end = (torch.openreg.Event(enable_timing=True) for _ in range(2))
    with inject(kind, seconds=0.02), stream:
        start.record()
        torch.ops.openreg.custom_abs(x) if kind == "kernel_latency" else torch.empty_like(x).copy_(x)
        end.record()
    end.synchronize()
    assert 19 <= start.elapsed_time(end) < 1000


def test_latency_of_work_that_the_host_waits_for():
    x = torch.ones(10, device=DEVICE)
    with inject("kernel_latency", seconds=0.1, times=0) as fault:
        assert torch.nonzero(x).shape == (10, 1)
        assert torch.openreg.current_stream().query()  # it came before the kernel, not after
    assert fault.struck


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(kind="fire"), "expected a kind among allocation"),
        (dict(kind="kernel", seconds=1), "expected seconds, at least 0, for a latency"),
        (dict(kind="kernel_latency"), "expected seconds, at least 0, for a latency"),
        (dict(kind="memory"), "expected fraction, from 0 to 1, for memory"),
        (dict(kind="memory", fraction=2.0), "from 0 to 1"),
        (dict(kind="copy", after=-1), "expected after and times of at least 0"),
        (dict(kind="copy", times=-1), "expected after and times of at least 0"),
        (dict(kind="memory", fraction=-0.1), "from 0 to 1"),
        (dict(kind="kernel", fraction=0.5), "expected fraction, from 0 to 1, for memory and for no other kind"),
        (dict(kind="copy_latency", seconds=-1.0), "expected seconds, at least 0"),
        (dict(kind="kernel", times=1.5), "as integers"),
        (dict(kind="kernel", after=2**63), "as integers"),
        (dict(kind="kernel", times=2**63), "as integers"),
        (dict(kind="memory", fraction=0.5, times=1), "do not apply to memory"),
        (dict(kind="memory", fraction=0.5, after=1), "do not apply to memory"),
        (dict(kind="kernel", after=1.5), "as integers"),
        (dict(kind="kernel_latency", seconds=float("inf")), "seconds of at most 1000000000, but got inf"),
        (dict(kind="kernel_latency", seconds=float("nan")), "seconds of at most 1000000000, but got nan"),
        (dict(kind="kernel_latency", seconds=1e12), "seconds of at most 1000000000"),
        (dict(kind="kernel_latency", seconds="1"), "seconds as a number, but got '1'"),
        (dict(kind="memory", fraction="a"), "fraction as a number, but got 'a'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejects(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        inject(**arguments)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "faults, expected",
    [("allocation:after=1", "OutOfMemoryError"), ("kernel:after=1;copy_latency:seconds=1e-3", "AcceleratorError"),
     ("kernel:after=1,device=openreg:7", "OPENREG_FAULTS: expected faults such as"),
     ("kernel:often=1", "but got 'kernel:often=1' ('kernel:often=1': inject.__init__() got"), ("", "")],
)  # fmt: skip
def test_environment(faults, expected):
    code = (
        "import torch, openreg_ops\n"
        "x = torch.ones(10, device='openreg'); y = torch.ones(10, device='openreg'); torch.openreg.synchronize()"
    )
    done = python("-c", code, OPENREG_FAULTS=faults)
    assert expected in done.stderr and (done.returncode != 0) == bool(expected)


def test_fixture(openreg_faults):
    fault = openreg_faults("allocation")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(10, device=DEVICE)
    assert fault.stop() == 1


@pytest.mark.parametrize("mode", ["inline", "async"])
def test_the_fixture_takes_a_failed_kernel_along(mode):
    """Like a test whose kernel fails after its last line; the next test must not get the error."""
    fixture = plugin.openreg_faults.__wrapped__()
    with torch.openreg.launch_mode(mode):
        x = torch.ones(3, device=DEVICE)
        fault = next(fixture)("kernel")
        torch.ops.openreg.custom_abs(x)
        assert next(fixture, None) is None and fault.struck == 1
        torch.openreg.synchronize()


def test_a_limit_set_while_the_memory_is_shrunk_stays():
    fraction = torch.openreg.get_per_process_memory_fraction
    try:
        for given, inside in ((0.25, 0.25), (0.75, 0.5)):
            with inject("memory", "openreg:1", fraction=0.5):
                torch.openreg.set_per_process_memory_fraction(given, 1)
                assert fraction(1) == pytest.approx(inside)  # what is not there cannot be had
            assert fraction(1) == pytest.approx(given)
    finally:
        torch.openreg.set_per_process_memory_fraction(1.0, 1)
    assert fraction(1) == 1.0


def test_overlapping_shrinks_leave_no_limit_behind():
    first, second = inject("memory", "openreg:1", fraction=0.5), inject("memory", "openreg:1", fraction=0.2)
    assert torch.openreg.get_per_process_memory_fraction(1) == pytest.approx(0.2)
    second.stop()
    assert torch.openreg.get_per_process_memory_fraction(1) == pytest.approx(0.5)
    third = inject("memory", "openreg:1", fraction=0.3)
    first.stop()
    assert torch.openreg.get_per_process_memory_fraction(1) == pytest.approx(0.3)
    third.stop()
    assert torch.openreg.get_per_process_memory_fraction(1) == 1.0


def test_a_second_stop_says_the_same():
    fault = torch.openreg.faults.inject("allocation", device=1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(3, device="openreg:1")
    assert fault.stop() == fault.stop() == fault.struck == 1
    with fault:  # which is over, and stays so
        torch.ones(3, device="openreg:1")
    assert fault.struck == 1


# ---- which of a row of calls a fault strikes, and on which device ----


def failed(kind, device):
    """Returns true if an allocation, a kernel or a copy on this device fails."""
    x = KEPT_TENSORS[device]
    try:
        if kind == "allocation":
            torch.empty(3, device=x.device)
        elif kind == "kernel":
            x.add_(1)
            torch.openreg.synchronize(device)
        else:
            return x.cpu()[0].item() != 1
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        return True
    return False


KEPT_TENSORS = {}


@pytest.mark.parametrize("device", [None, 0, 1])
@pytest.mark.parametrize("kind", ["allocation", "kernel", "copy"])
def test_a_fault_strikes_these_calls_alone(kind, device):
    """The calls alternate between the devices; `after` and `times` count those of the fault's device."""
    KEPT_TENSORS.update({i: torch.ones(3, device=f"openreg:{i}") for i in (0, 1)})
    for after in (0, 1, 2):
        for times in (0, 1, 2, None):
            for tensor in KEPT_TENSORS.values():
                tensor.fill_(1)
            with inject(kind, device, after=after, times=times) as fault:
                struck = [failed(kind, i % 2) for i in range(10)]
            counted = [i for i in range(10) if device is None or i % 2 == device]
            last = None if times == 0 else after + (1 if times is None else times)
            expected = counted[after:last]
            assert [i for i, hit in enumerate(struck) if hit] == expected, (after, times)
            assert fault.struck == len(expected)
            assert not any(failed(kind, i) for i in (0, 1)), "disarmed"


def test_no_time_at_all():
    """A latency or a sleep of zero, or below, adds nothing and does not wait."""
    x = torch.ones(3, device=DEVICE)
    with inject("kernel_latency", seconds=0) as kernels, inject("copy_latency", seconds=0.0) as copies:
        assert (x + 1).tolist() == [2, 2, 2]
    assert kernels.struck and copies.struck
    for cycles in (0, -1, -(2**63)):
        torch.openreg._sleep(cycles)
        torch.openreg.synchronize()
    with pytest.raises((OverflowError, TypeError)):
        torch.openreg._sleep(2**63)


@pytest.mark.parametrize("fraction", [0, 1, 0.0, 1.0])
def test_the_ends_of_a_fraction(fraction):
    with inject("memory", 1, fraction=fraction):
        assert torch.openreg.get_per_process_memory_fraction(1) == fraction
        if fraction:
            assert torch.ones(3, device="openreg:1").tolist() == [1, 1, 1]
        torch.ones(3, device="openreg:0")


@pytest.mark.parametrize("mode", ["inline", "async"])
def test_the_error_of_one_device_is_not_the_others(mode):
    """Nor is it taken along when the other device is waited for."""
    x = [torch.ones(3, device=f"openreg:{i}") for i in (0, 1)]
    with torch.openreg.launch_mode(mode):
        for index in (0, 1):
            with inject("kernel", index):
                x[index] + 1
            other = 1 - index
            torch.openreg.synchronize(other)
            assert (x[other] + 1).tolist() == [2, 2, 2] and torch.openreg.current_stream(other).query()
            with pytest.raises(torch.AcceleratorError, match=f"injected fault made a kernel fail on openreg:{index}"):
                torch.openreg.synchronize(index)
            torch.openreg.synchronize(index)
        with inject("kernel"):  # both, each of which has its own
            for tensor in x:
                tensor + 1
        with inject("kernel", 1):
            x[1] + 1
        for index in (0, 1):
            with pytest.raises(torch.AcceleratorError, match=f"on openreg:{index}"):
                torch.openreg.synchronize(index)
