"""Checks of accelerators: the current stream, and the tensors' device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from openreg_tools import backends
from openreg_tools.check.case import Case, Results, attached, cotangents, skip
from openreg_tools.check.checks.common import refuse_or_fail
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import has_numbers
from openreg_tools.core.samples import Sample
from openreg_tools.core.variations import reversed_in

DELAY = 30_000_000  # cycles for which a stream is busy before the arguments' values arrive on it


def _module(case: Case) -> Any:
    """The device's module, such as torch.cuda. Skips the check if the device has no streams."""
    kind = case.device.type
    if kind in ("cpu", "meta"):
        skip(f"{kind} has no streams")
    try:
        torch.Stream(device=case.device).wait_stream(torch.accelerator.current_stream(case.device))
    except (RuntimeError, AttributeError) as error:
        skip(f"{kind} has no streams: {all_lines(error)}")
    return getattr(torch, kind, None)


def _on_stream(case: Case, stream: torch.Stream) -> tuple[Results, list[Any]]:
    """The results of calls on a stream, and the races in them. The current device stays."""
    index, races = torch.accelerator.current_device_index(), []
    with backends.of_device(case.device.type).races(races.extend):
        tensors = case.fresh()
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream:
            torch.accelerator.set_device_index(index)
            results = case.results(tensors)
        stream.synchronize()
    return results, races


def _late(case: Case, stream: torch.Stream) -> Results:
    """The results of calls on a stream that has not yet written the values of their arguments.

    Until it has, the arguments hold other values. A kernel that does not wait for the stream computes with these.
    """
    module, index = getattr(torch, case.device.type), torch.accelerator.current_device_index()

    def early(x: Tensor) -> Tensor:
        flipped = reversed_in(x)
        return flipped * 0.75 if has_numbers(x) else flipped

    def delayed(values: list[Tensor], call: Callable[[list[Tensor]], Sequence[Tensor | None]]) -> list[Tensor | None]:
        for cycles in (DELAY, 4 * DELAY, 16 * DELAY):
            held = [early(x) for x in values]
            torch.accelerator.synchronize(stream.device)
            with stream, backends.of_device(case.device.type).queued():
                torch.accelerator.set_device_index(stream.device.index)
                module._sleep(cycles)
                arrived = stream.record_event()
                torch.accelerator.set_device_index(index)
                with torch.no_grad():
                    for x, value in zip(held, values, strict=True):
                        x.copy_(value, non_blocking=True)
                in_time = not arrived.query()
                outs = [x if x is None else x.detach().clone() for x in call(held)]
                torch.accelerator.synchronize(stream.device)
            if in_time:
                break
        return outs

    outs = delayed(case.fresh(), case.outputs)
    if not case.has_derivative:
        return Results(outs, [])

    tensors = case.fresh(grad=True)
    torch.accelerator.synchronize(stream.device)
    with stream:
        torch.accelerator.set_device_index(index)
        results = attached(case.run(*tensors))
    leaves = case.of(tensors)
    grads = delayed(
        cotangents(results),
        lambda held: torch.autograd.grad(results, leaves, held, retain_graph=True, allow_unused=True),
    )
    return Results(outs, grads)


def _delays(case: Case) -> bool:
    """Returns true if the device can be kept busy, so that a call is made before its arguments' values arrive."""
    return hasattr(getattr(torch, case.device.type, None), "_sleep")


def stream(case: Case) -> str | None:
    """On another stream it gives the same results, waits for that stream alone, and computes on it, not on the host."""
    _module(case)
    side = torch.Stream(device=case.device)
    remedy = "launch on the current stream of the tensors' device, not on the default one"
    got, races = _on_stream(case, side)
    case.expect(got, case.eager, "on another stream", "the default stream gives", remedy)
    if races:
        then = races[0].previous_access
        where = f"stream {then.stream[1]}" if then.stream[1] else "the default stream"
        what = str(then.operator).partition("(")[0]
        case.fail(
            f"called on another stream, it runs {what} on {where}, and the caller's stream does not wait for it",
            f"{remedy}; if it needs another stream, let each wait for the other (wait_stream)",
        )
    if not _delays(case):
        return f"without delays, as torch.{case.device.type} has no _sleep"
    late = _late(case, torch.accelerator.current_stream(case.device))
    if wrong := case.unlike(late, case.eager):
        case.fail(
            "its kernel computes on the host: called before its arguments' values have arrived, it does not wait for them: "
            f"{wrong}",
            "launch a kernel on the current stream (openreg::launch(), <<<…, stream>>>), which does all that reads or "
            "writes the tensors; to compute on the host, copy them with .cpu() first",
        )
    if wrong := case.unlike(_late(case, side), late):
        case.fail(f"on another stream it does not wait for the work before it: {wrong}", remedy)
    return None


def devices(case: Case) -> str | None:
    """On a device that is not the current one it gives the same results, on that device."""
    module = _module(case)
    count = module.device_count() if hasattr(module, "device_count") else 1
    if count < 2:
        skip(f"there is one {case.device.type} device")
    here = torch.accelerator.current_device_index()
    there = torch.device(case.device.type, (here + 1) % count)
    moved = _moved(case, there)
    where = f"on {there}, while {there.type}:{here} is the current device,"
    remedy = (
        f"use the device of the arguments: device=x.device, not device={there.type!r}; a C++ operator needs a "
        "DeviceGuard, and the current stream of that device"
    )
    try:
        for i, (out, expected) in enumerate(zip(moved.outputs(moved.fresh()), case.expected, strict=False)):
            if expected.device.type == there.type and out.device != there:
                case.fail(f"output {i} is on {out.device}, but the arguments are on {there}", remedy)
        got, races = _on_stream(moved, torch.Stream(device=there))
        delays = _delays(case) and not races  # `stream` reports races
        late = _late(moved, torch.accelerator.current_stream(there)) if delays else got
    except RuntimeError as error:
        refuse_or_fail(case, error, f"{where} it", remedy)
    if case.seeded:
        return "the device of the outputs only, as each device draws its own random numbers"
    case.expect(got, case.eager, where, f"{there.type}:{here} gives", remedy)
    if delays and (wrong := case.unlike(late, _late(case, torch.accelerator.current_stream(case.device)))):
        case.fail(f"{where} it does not wait for the stream of {there}: {wrong}", remedy)
    return None


def _moved(case: Case, device: torch.device) -> Case:
    """The same sample on another device, with the generators and devices in it."""
    args, kwargs = tree_map(
        lambda x: device if isinstance(x, torch.device) and x.type == device.type else x,
        (case.sample.args, case.sample.kwargs),
    )
    moved = case.of_sample(Sample(*args, **kwargs), device)
    moved.derivative, moved.wanted = case.derivative, case.wanted
    return moved
