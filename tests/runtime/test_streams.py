"""Streams, events and launch modes: work runs in its stream's order wherever it runs."""

import gc
import os
import resource
import signal
import threading
import time

import pytest
import torch
from graph_kit import turn_taken
from processes import python
from stream_kit import captured, in_threads

import openreg_ops
from openreg_ops import _C

MS = 1_000_000  # cycles: a cycle is a nanosecond
MODES = ["inline", "async", "sync"]


@pytest.fixture(params=MODES)
def mode(request):
    with torch.openreg.launch_mode(request.param):
        yield request.param
        torch.openreg.synchronize()


@pytest.mark.parametrize("options", [{}, {"interprocess": True}, {"external": True}], ids=str)
def test_a_stream_is_idle_when_an_event_behind_its_work_was_waited_for(options):
    """And the event is reached when its stream is idle."""
    event, stream, other = torch.openreg.Event(**options), torch.openreg.Stream(), torch.openreg.Stream()
    x = torch.zeros(100, device="openreg")
    torch.openreg.synchronize()
    with torch.openreg.launch_mode("async"):
        for wait, query in (
            (event.synchronize, stream.query),
            (stream.synchronize, event.query),
            (lambda: (other.wait_event(event), other.synchronize()), stream.query),
        ):
            for _ in range(50):
                with stream:
                    x.add_(1)
                    event.record()
                wait()
                assert query()


def test_no_stream_changes_nothing():
    stream = torch.openreg.Stream(device="openreg:1")
    with stream:
        torch.openreg.set_stream(None)
        assert torch.openreg.current_stream() == stream


def side_stream():
    """A stream that may use what the current stream has made."""
    stream = torch.openreg.Stream()
    stream.wait_stream(torch.openreg.current_stream())
    return stream


def test_sleep_keeps_a_stream_busy(mode):
    stream = torch.openreg.Stream()
    with stream:
        torch.openreg._sleep(300 * MS)
    assert stream.query() == (mode == "sync")
    assert torch.openreg.default_stream().query()
    stream.synchronize()
    assert stream.query()


@pytest.mark.parametrize("timing", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("external", [False, True])
def test_events_with_timing_measure(timing, blocking, external):
    start, end = (torch.openreg.Event(timing, blocking, external=external) for _ in range(2))
    start.record()
    end.record()
    end.synchronize()
    if timing:
        assert start.elapsed_time(end) >= 0
    else:
        with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
            start.elapsed_time(end)


def test_elapsed_time_is_real(mode):
    start, end = (torch.openreg.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.openreg._sleep(100 * MS)
    end.record()
    end.synchronize()
    assert 99 <= start.elapsed_time(end) < 5000


def test_elapsed_time_of_unreached_events():
    start, end = (torch.openreg.Event(enable_timing=True) for _ in range(2))
    stream = torch.openreg.Stream()
    with stream:
        start.record()
        torch.openreg._sleep(300 * MS)
        end.record()
    with pytest.raises(RuntimeError, match="[Bb]oth events must be completed"):
        start.elapsed_time(end)
    stream.synchronize()
    assert start.elapsed_time(end) >= 299


def test_async_errors_surface_at_synchronisation():
    x = torch.ones(4, device="openreg")
    with torch.openreg.launch_mode("async"):
        _C.launch_failure(0, "a kernel's own message")
        y = torch.ops.openreg.custom_abs(x)  # the host runs ahead
        with pytest.raises(RuntimeError, match="a kernel's own message(.|\n)*launched at .*device.cpp") as caught:
            torch.openreg.synchronize()
        assert "OPENREG_LAUNCH_MODE=sync" in str(caught.value)
        torch.openreg.synchronize()  # told once
        assert y.tolist() == [1, 1, 1, 1]


def test_current_stream_is_per_thread_and_device():
    stream = torch.openreg.Stream(device="openreg:0")
    seen = []
    with stream:
        assert torch.openreg.current_stream() == stream
        assert torch.openreg.current_stream("openreg:1") == torch.openreg.default_stream("openreg:1")
        in_threads(lambda: seen.append(torch.openreg.current_stream()))
    assert seen == [torch.openreg.default_stream()]


def test_threads_on_one_stream_take_turns(mode):
    """In-place updates by several threads are atomic, as on a device whose stream runs one kernel at a time."""
    x = torch.zeros(200_000, device="openreg")

    def work(scale):
        for _ in range(100):
            x.add_(scale)
            torch.ops.openreg.custom_abs_(x)

    in_threads(*(lambda scale=scale: work(scale) for scale in (1, 2, 4)))
    assert x.unique().tolist() == [700]


def test_a_thread_that_waits_for_its_turn_lets_python_go_on(mode):
    """A Python kernel has the turn and needs the interpreter; another thread has the interpreter and needs the turn."""
    running, overlaps, results = [], [], []

    def slow(x):
        overlaps.extend(running)
        running.append(threading.get_ident())
        for _ in range(50):
            time.sleep(0.001)
        running.pop()
        return x + 1

    library = torch.library.Library("turn_test", "FRAGMENT")
    library.define("slow(Tensor x) -> Tensor")
    library.impl("slow", slow, "CPU")
    with openreg_ops.fallback.share("turn_test::slow"):
        x = torch.zeros(4, device="openreg")
        threads = [threading.Thread(target=lambda: results.append(torch.ops.turn_test.slow(x))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            x.tolist()
            str(x)
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
    library._destroy()
    assert [y.tolist() for y in results] == [[1] * 4] * 3 and not overlaps


def test_item_waits_for_the_kernel_of_another_thread(mode):
    begun = threading.Event()

    def slow_(x):
        begun.set()
        time.sleep(0.05)
        return x.add_(1)

    library = torch.library.Library("item_test", "FRAGMENT")
    library.define("slow_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("slow_", slow_, "CPU")
    with openreg_ops.fallback.share("item_test::slow_"):
        x = torch.zeros((), device="openreg")
        thread = threading.Thread(target=lambda: torch.ops.item_test.slow_(x))
        thread.start()
        begun.wait()
        value = x.item()
        thread.join()
    library._destroy()
    assert value == 1


@pytest.mark.slow
@pytest.mark.processes
def test_a_wait_for_a_queue_lets_python_go_on():
    """Three parties: this thread waits for the worker, which waits for the turn of a kernel, which wants Python."""
    code = """
import threading, time, torch, openreg_ops
x = torch.randint(0, 1 << 40, (3_000_000,)).to("openreg")
y, z = torch.ones(3, device="openreg"), torch.ones(1 << 18, device="openreg")
torch.openreg.memory._record_memory_history(stacks="python")
torch.openreg.set_launch_mode("async")
thread = threading.Thread(target=lambda: x.unique(), daemon=True)
thread.start()
time.sleep(0.1)
y.add_(1)
z.untyped_storage().resize_(1 << 21)
z.untyped_storage().fill_(0)
thread.join()
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_external_streams():
    stream = torch.openreg.Stream()
    same = torch.openreg.ExternalStream(stream.native_handle)
    assert same == stream and isinstance(same, torch.openreg.Stream)
    first = torch.openreg.default_stream(1)
    assert torch.openreg.get_stream_from_external(first.native_handle, 1) == first
    for handle in (12345, None, -1, 2**70):
        with pytest.raises(ValueError, match=f"{handle} is not a stream of openreg:0"):
            torch.openreg.ExternalStream(handle)


def test_launch_mode_of_the_environment_and_errors():
    with pytest.raises(ValueError, match="expected 'inline', 'async' or 'sync', but got 'eager'"):
        torch.openreg.set_launch_mode("eager")
    assert torch.openreg.get_launch_mode() == "inline"


def test_training_is_the_same_in_every_mode():
    def train():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.GELU(), torch.nn.Linear(40, 3)).to("openreg")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(10):
            x = torch.randn(16, 20).pin_memory().to("openreg", non_blocking=True)
            loss = (
                torch.ops.openreg.rms_norm(model(x), torch.ones(3, device="openreg"))[0].square().mean()
                + model(x).square().mean()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train()
    for mode in MODES:
        with torch.openreg.launch_mode(mode):
            assert train() == expected


def test_ten_thousand_streams_and_events_leave_no_threads():
    before = threading.active_count()
    for i in range(10_000):
        stream = torch.openreg.Stream(priority=-(i % 2))
        event = stream.record_event()
        if i % 200 == 0:
            with stream:
                torch.openreg._sleep(1000)
        del event
    torch.openreg.synchronize()
    gc.collect()
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    assert names.count("openreg_stream") <= 64 and threading.active_count() <= before


@pytest.mark.parametrize("stream_id, index", [(9999, 0), (65, 0), (-1, 0), (0, 63), (0, 100)])
def test_streams_that_do_not_exist_are_refused(stream_id, index):
    kind = int(torch._C._autograd.DeviceType.PrivateUse1)
    stream = torch.Stream(stream_id=stream_id, device_index=index, device_type=kind)
    for use in (stream.query, stream.synchronize, stream.record_event):
        with pytest.raises(RuntimeError, match=f"there is no stream {stream_id} on"):
            use()


def test_an_event_recorded_again_while_another_thread_waits():
    a, b = torch.openreg.Stream(), torch.openreg.Stream()
    for _ in range(20):
        event = torch.openreg.Event()
        with a:
            torch.openreg._sleep(MS)
        event.record(a)
        thread = threading.Thread(target=event.synchronize)
        thread.start()
        event.record(b)
        thread.join()
        assert event.query()


def test_a_reused_pinned_buffer_keeps_one_use_a_stream():
    host, x = torch.empty(16).pin_memory(), torch.empty(16, device="openreg")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(300_000):
        x.copy_(host, non_blocking=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096, "KiB"


def test_a_full_queue_lets_the_host_wait():
    """As on CUDA, 1024 kernels fit. A replay counts as its nodes, up to 64."""
    x, stream = torch.zeros(1, device="openreg"), torch.openreg.Stream()
    graphs = [captured(lambda n=n: [x.add_(1) for _ in range(n)])[0] for n in (2, 200)]
    torch.openreg.synchronize()
    for launch, fit, adds in ((lambda: x.add_(1), 1024, 1), (graphs[0].replay, 512, 2), (graphs[1].replay, 16, 200)):
        launched, total = [], 2 * fit

        def run(launch=launch, launched=launched, total=total):
            with stream:
                for _ in range(total):
                    launch()
                    launched.append(1)

        thread = threading.Thread(target=run)
        with torch.openreg.launch_mode("async"):
            with turn_taken(stream):
                thread.start()
                while len(launched) < fit:
                    time.sleep(0.001)
                for _ in range(20):  # it would go on at once
                    time.sleep(0.01)
                    assert len(launched) == fit and thread.is_alive()
            thread.join()
            torch.openreg.synchronize()
        assert x.item() == adds * total
        x.zero_()


def test_what_waits_on_a_full_queue():
    """Events, waits, other streams and work inside work do not wait; Ctrl-C ends the wait of a launch."""
    x, y = torch.zeros(1, device="openreg"), torch.zeros(1, device="openreg")
    stream, other = torch.openreg.Stream(), torch.openreg.Stream()
    torch.openreg.synchronize()
    with torch.openreg.launch_mode("async"):
        with turn_taken(stream):
            with stream:
                for _ in range(1024):
                    x.add_(1)
            event = torch.openreg.Event()
            event.record(stream)
            other.wait_event(event)
            event.record(other)
            with other:
                y.add_(x)
            stream.wait_event(event)  # the streams wait for each other's earlier work, not in a circle
            assert not stream.query() and not other.query()
            timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGUSR1])
            before = signal.signal(signal.SIGUSR1, interrupt)
            timer.start()
            with stream, pytest.raises(Interrupted):
                x.add_(1)
            timer.join()
            signal.signal(signal.SIGUSR1, before)
        torch.openreg.synchronize()
    assert x.item() == y.item() == 1024


class Interrupted(Exception):
    pass


def interrupt(number, frame):
    raise Interrupted
