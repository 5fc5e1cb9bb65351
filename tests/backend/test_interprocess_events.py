"""Events shared by several processes: `torch.openreg.Event(interprocess=True)`."""

import os

import pytest
import torch
import torch.multiprocessing as mp

MS = 1_000_000  # nanoseconds


def opened(event):
    return torch.openreg.Event.from_ipc_handle(event.device.index or 0, event.ipc_handle())


def test_both_ends_see_each_record(mode):
    event = torch.openreg.Event(interprocess=True)
    other = opened(event)
    assert isinstance(event, torch.openreg.Event) and isinstance(other, torch.openreg.Event)
    assert event.query() and other.query() and len(event.ipc_handle()) == 64  # not recorded yet
    for recorder, reader in ((event, other), (other, event)) * 200:  # more records than slots
        recorder.record()
        reader.synchronize()
        assert recorder.query() and reader.query()
    torch.openreg._sleep(200 * MS)
    event.record()
    assert not event.query() and not other.query()
    other.synchronize()
    assert event.query()


def test_a_stream_waits(mode):
    event = torch.openreg.Event(interprocess=True)
    source, target = torch.openreg.Stream(), torch.openreg.Stream()
    x = torch.zeros(3, device="openreg")
    other = opened(event)
    torch.openreg.synchronize()
    with source:
        torch.openreg._sleep(200 * MS)
        x.fill_(7)
        event.record()
    with target:
        target.wait_event(other)
        y = x + 1
    target.synchronize()
    assert y.tolist() == [8, 8, 8]


def test_the_device_is_that_of_the_first_record():
    event = torch.openreg.Event(interprocess=True)
    event.record(torch.openreg.default_stream(1))
    assert event.device == torch.device("openreg:1")
    with pytest.raises(RuntimeError, match="an event of device 1 cannot be recorded on a stream of device 0"):
        event.record(torch.openreg.default_stream(0))
    with torch.openreg.device(1):
        other = torch.openreg.Event(interprocess=True)
        other.ipc_handle()
    assert other.device == torch.device("openreg:1")


def test_refusals():
    with pytest.raises(ValueError, match="expected enable_timing=False with interprocess=True"):
        torch.openreg.Event(enable_timing=True, interprocess=True)
    with pytest.raises(ValueError, match="expected external=False with interprocess=True"):
        torch.openreg.Event(external=True, interprocess=True)
    with pytest.raises(ValueError, match="expected a handle of 64 bytes, but got 3"):
        torch.openreg.Event.from_ipc_handle(0, b"abc")
    with pytest.raises(ValueError, match="are not a handle of an openreg event"):
        torch.openreg.Event.from_ipc_handle(0, bytes(64))
    with pytest.raises(RuntimeError, match="invalid device ordinal 9"):
        torch.openreg.Event.from_ipc_handle(9, torch.openreg.Event(interprocess=True).ipc_handle())
    event = torch.openreg.Event(interprocess=True)
    handle = event.ipc_handle()
    del event
    with pytest.raises(ValueError, match=f"process {os.getpid()} no longer has the event"):
        torch.openreg.Event.from_ipc_handle(0, handle)


def use(pipe, event, x):
    torch.openreg.set_launch_mode("async")
    pipe.send("opened")
    pipe.recv()  # it is recorded, behind a sleep
    event.wait()
    y = x + 1
    pipe.send(y.tolist())
    pipe.recv()
    torch.openreg._sleep(600_000 * MS)
    event.record()
    pipe.send("recorded")
    pipe.recv()
    os._exit(1)


@pytest.mark.slow
@pytest.mark.processes
def test_another_process():
    event, x = torch.openreg.Event(interprocess=True), torch.zeros(3, device="openreg")
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=use, args=(theirs, event, x))
    process.start()
    try:
        assert pipe.poll(100) and pipe.recv() == "opened"
        with torch.openreg.launch_mode("async"):
            torch.openreg._sleep(300 * MS)
            x.fill_(7)
            event.record()
        pipe.send("recorded")
        assert pipe.poll(100) and pipe.recv() == [8, 8, 8]

        pipe.send("go on")
        assert pipe.poll(100) and pipe.recv() == "recorded"
        assert not event.query()
        pipe.send("end, and do not reach it")
        sentence = f"process {process.pid} recorded an event and ended before its stream reached it"
        with pytest.raises(RuntimeError, match=sentence):
            event.synchronize()
        event.wait()
        with pytest.raises(torch.AcceleratorError, match=sentence):
            torch.openreg.synchronize()
        event.record()  # by this process, which goes on
        event.synchronize()
    finally:
        process.kill()
        process.join()
