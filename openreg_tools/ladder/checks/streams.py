"""Rung 5: work on a stream runs in order, and events order streams."""

from __future__ import annotations

import torch

from openreg_tools.ladder.rung import check, equal

_SECTION = "PrivateUse1: Register device guard for the new backend"


@check("csrc/device.cpp", _SECTION, "implement getStream, getNewStream and exchangeStream of the guard")
def current(device: str) -> None:
    """A stream becomes the current one, and the earlier one returns."""
    before = torch.accelerator.current_stream()
    stream = torch.Stream(device=device)
    assert stream != before, "a new stream is the current one"
    with stream:
        assert torch.accelerator.current_stream() == stream, "`with stream:` does not make it the current one"
    assert torch.accelerator.current_stream() == before, "`with stream:` does not restore the earlier stream"
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream() == stream
    torch.accelerator.set_stream(before)
    assert torch.Stream(device=device) != stream, "two new streams are equal"
    for index in range(torch.accelerator.device_count()):
        found = torch.accelerator.current_stream(index).device
        assert found.index == index, f"the current stream of device {index} is on {found}"


@check("csrc/runtime/acme_cpu.cpp", _SECTION, "run the work of a stream in the order of its launches")
def order(device: str) -> None:
    """Work on a stream runs in its order."""
    stream = torch.Stream(device=device)
    x = torch.zeros(1 << 14, device=device)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        for _ in range(50):
            x.add_(1).mul_(1)
    stream.synchronize()
    assert stream.query(), "query() is false after synchronize()"
    equal(x, torch.full((1 << 14,), 50.0), "a tensor after 50 additions on a stream")


@check("csrc/device.cpp", _SECTION, "implement record, block and queryEvent of the guard")
def events(device: str) -> None:
    """An event orders two streams."""
    first, second = torch.Stream(device=device), torch.Stream(device=device)
    for _ in range(20):
        with first:
            x = torch.zeros(1 << 16, device=device)
            for _ in range(10):
                x.add_(1)
            event = first.record_event()
        second.wait_event(event)
        with second:
            y = x * 2
        second.synchronize()
        assert event.query(), "an event for which a stream waited has not happened"
        equal(y, torch.full((1 << 16,), 20.0), "what a second stream read after waiting for the first one's event")


@check("csrc/device.cpp", _SECTION, "implement synchronizeEvent, synchronizeStream and synchronizeDevice of the guard")
def waits(device: str) -> None:
    """The host waits for an event, a stream and a device."""
    stream = torch.Stream(device=device)
    event = torch.Event(device)
    assert event.query(), "an event that was never recorded has not happened"
    with stream:
        x = torch.ones(1 << 16, device=device)
        for _ in range(20):
            x.add_(1)
    event.record(stream)
    event.synchronize()
    assert event.query(), "query() is false after synchronize()"
    torch.accelerator.synchronize()
    assert stream.query(), "a stream has work left after torch.accelerator.synchronize()"
    equal(x, torch.full((1 << 16,), 21.0), "a tensor of a side stream after synchronize()")


@check("csrc/device.cpp", _SECTION, "create events with the flag for timing, and implement elapsedTime of the guard")
def times(device: str) -> None:
    """Events measure time."""
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record()
    x = torch.ones(1 << 20, device=device)
    for _ in range(10):
        x.add_(1)
    end.record()
    end.synchronize()
    milliseconds = start.elapsed_time(end)
    assert 0 < milliseconds < 60_000, f"ten additions of 4 MiB take {milliseconds} ms"


@check(
    "csrc/device.cpp",
    _SECTION,
    "implement recordDataPtrOnStream, so that memory is not reused before the stream is done",
)
def memory(device: str) -> None:
    """record_stream keeps memory that another stream still uses."""
    side = torch.Stream(device=device)
    for number in range(20):
        x = torch.full((1 << 16,), float(number), device=device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x.clone()
            for _ in range(5):
                y = y.mul(1)
            y = y + x
        x.record_stream(side)
        del x
        z = torch.full((1 << 16,), -1.0, device=device)
        side.synchronize()
        equal(y, torch.full((1 << 16,), 2.0 * number), "what a stream read from memory that was freed meanwhile")
        del z


@check("csrc/device.cpp", _SECTION, "give autograd's threads their device and stream: it uses the guard of each thread")
def backward(device: str) -> None:
    """Backward runs on the streams of forward."""
    side = torch.Stream(device=device)
    leaf = torch.ones(1 << 14, device=device, requires_grad=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        loss = (leaf * 3).square().sum()
    torch.accelerator.current_stream().wait_stream(side)
    loss.backward()
    equal(leaf.grad, torch.full((1 << 14,), 18.0), "the gradient of a loss that a side stream computed")
