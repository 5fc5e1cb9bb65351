"""Injected faults surface like a real accelerator's: the type of the exception, and when it is raised."""

import gc

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


@pytest.mark.parametrize("mode", ["inline", "async"])
def test_a_failing_kernel_surfaces_at_synchronisation(mode):
    x = torch.ones(1000, device=DEVICE)
    with torch.openreg.launch_mode(mode), inject("kernel") as fault:
        torch.ops.openreg.custom_abs(x)
        torch.ops.openreg.custom_abs(x)
        with pytest.raises(
            torch.AcceleratorError, match="injected fault made a kernel fail on openreg:0(.|\n)*custom_abs"
        ):
            torch.openreg.synchronize()
        torch.openreg.synchronize()
    assert fault.struck == 1


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


def test_a_lost_device_stays_lost_until_it_is_reset():
    x, other = torch.ones(10, device="openreg:0"), torch.ones(10, device="openreg:1")
    stream, event = torch.openreg.current_stream(), torch.openreg.Event(enable_timing=True)
    event.record()
    try:
        with inject("lost", "openreg:0", after=1):
            x + 1
            for touch in (
                lambda: x + 1, lambda: x.cpu(), lambda: torch.empty(3, device="openreg:0"),
                lambda: torch.openreg.synchronize(0), stream.query, stream.synchronize, event.query, event.synchronize,
                event.record, lambda: torch.openreg.Event().record(), lambda: event.elapsed_time(event),
                lambda: stream.wait_event(event), torch.openreg.Stream, torch.openreg.mem_get_info,
                lambda: torch.openreg._sleep(1),
            ):  # fmt: skip
                with pytest.raises(torch.AcceleratorError, match=r"openreg:0 is lost.*reset_device\(0\)"):
                    touch()
            assert (other + 1).sum().item() == 20
        with pytest.raises(torch.AcceleratorError, match="is lost"):
            x + 1
    finally:
        torch.openreg.reset_device(0)
    assert (x + 1).sum().item() == 20


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
    [("allocation:after=1", "OutOfMemoryError"), ("kernel:after=1;copy_latency:seconds=0.001", "AcceleratorError"),
     ("copy_latency:seconds=1e-3", ""), ("kernel:after=1,device=openreg:7", "OPENREG_FAULTS: expected faults such as"),
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


def test_two_faults_strike_on_their_own_devices():
    with (
        torch.openreg.faults.inject("allocation", device=0, after=1) as one,
        torch.openreg.faults.inject("allocation", device=1) as other,
    ):
        kept = torch.ones(3, device="openreg:0")
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(3, device="openreg:1")
        torch.ones(3, device="openreg:1")
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(3, device="openreg:0")
    assert (one.struck, other.struck) == (1, 1) and kept.tolist() == [1, 1, 1]
