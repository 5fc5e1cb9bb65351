"""Checks of accelerators: the current stream, the tensors' device, and launches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from openreg_tools import backends
from openreg_tools.check.case import Case, cotangents, differentiable, gradients, last_line
from openreg_tools.check.checks.common import differs, fail, refuse_or_fail, reversed_in, skip
from openreg_tools.samples import Sample

Values = list[Tensor | None]

DELAY = 30_000_000  # cycles for which a stream is busy before the arguments' values arrive on it


def _module(case: Case) -> Any:
    """The device's module, such as torch.cuda. Skips the check if the device has no streams."""
    kind = case.device.type
    if kind in ("cpu", "meta"):
        skip(f"{kind} has no streams")
    try:
        torch.Stream(device=case.device).wait_stream(torch.accelerator.current_stream(case.device))
    except (RuntimeError, AttributeError) as error:
        skip(f"{kind} has no streams: {last_line(error)}")
    return getattr(torch, kind, None)


def _everything(case: Case, stream: torch.Stream) -> tuple[Values, list[Any]]:
    """The outputs and gradients of calls on a stream, and the races in them. The current device stays."""
    index, races = torch.accelerator.current_device_index(), []
    with backends.of_device(case.device.type).races(races.extend):
        tensors = case.fresh()
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        with stream:
            torch.accelerator.set_device_index(index)
            with torch.no_grad():
                outs: Values = [x.clone() for x in case.run(*tensors)]
            if case.derivative.status == "pass":
                outs += [x if x is None else x.clone() for x in gradients(case.run, case.leaf(tensors), case.wanted)]
        stream.synchronize()
    return outs, races


def _late(case: Case, stream: torch.Stream) -> Values:
    """The outputs and gradients of calls on a stream that has not yet written the values of their arguments.

    Until it has, the arguments hold other values. A kernel that does not wait for the stream computes with these.
    """
    module, index = getattr(torch, case.device.type), torch.accelerator.current_device_index()

    def early(x: Tensor) -> Tensor:
        flipped = reversed_in(x)
        return flipped * 0.75 if differentiable(x) else flipped

    def delayed(values: list[Tensor], call: Callable[[list[Tensor]], Any]) -> Values:
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

    with torch.no_grad():
        outs = delayed(case.fresh(), lambda held: case.run(*held))
    if case.derivative.status != "pass":
        return outs
    tensors = case.fresh(grad=True)
    torch.accelerator.synchronize(stream.device)
    with stream:
        torch.accelerator.set_device_index(index)
        results = [x for x in case.run(*tensors) if x.requires_grad]
    given = cotangents(results)
    return outs + delayed(
        given, lambda held: torch.autograd.grad(results, case.of(tensors), held, retain_graph=True, allow_unused=True)
    )


def _differs(got: Values, expected: Values, outputs: int) -> str:
    """The first difference between outputs, or between gradients, which follow them."""
    return differs(got[:outputs], expected[:outputs]) or differs(
        got[outputs:], expected[outputs:], "the gradient of differentiable argument"
    )


def _delays(case: Case) -> bool:
    """Whether the device can be kept busy, so that a call is made before its arguments' values arrive."""
    return hasattr(getattr(torch, case.device.type, None), "_sleep") and all(
        x.layout == torch.strided for x in case.leaves
    )


def stream(case: Case) -> str | None:
    """On another stream it gives the same results as on the default one, and waits for that stream alone."""
    _module(case)
    side = torch.Stream(device=case.device)
    outputs = len(case.expected)
    default = [*case.expected, *(case.gradients if case.derivative.status == "pass" else [])]
    remedy = "launch on the current stream of the tensors' device, not on the default one"
    got, races = _everything(case, side)
    if wrong := _differs(got, default, outputs):
        fail(f"{case.name}: on another stream {wrong}, which the default stream gives", remedy)
    if races:
        then = races[0].previous_access
        where = f"stream {then.stream[1]}" if then.stream[1] else "the default stream"
        what = str(then.operator).partition("(")[0]
        fail(
            f"{case.name}: called on another stream, it runs {what} on {where}, and the caller's stream does not wait for it",
            f"{remedy}; if it needs another stream, let each wait for the other (wait_stream)",
        )
    if not _delays(case):
        return f"without delays, as torch.{case.device.type} has no _sleep"
    default = _late(case, torch.accelerator.current_stream(case.device))
    if wrong := _differs(_late(case, side), default, outputs):
        fail(f"{case.name}: on another stream it does not wait for the work before it: {wrong}", remedy)
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
        with torch.no_grad():
            outs = moved.run(*moved.fresh())
        for i, (out, expected) in enumerate(zip(outs, case.expected, strict=False)):
            if expected.device.type == there.type and out.device != there:
                fail(f"{case.name}: output {i} is on {out.device}, but the arguments are on {there}", remedy)
        got, races = _everything(moved, torch.Stream(device=there))
        delays = _delays(case) and not races  # `stream` reports races
        late = _late(moved, torch.accelerator.current_stream(there)) if delays else got
    except RuntimeError as error:
        refuse_or_fail(case, error, f"{where} it", remedy)
    if case.seeded:
        return "the device of the outputs only, as each device draws its own random numbers"
    default = [*case.expected, *(case.gradients if case.derivative.status == "pass" else [])]
    outputs = len(case.expected)
    if wrong := _differs(got, default, outputs):
        fail(f"{case.name}: {where} {wrong}, which {there.type}:{here} gives", remedy)
    if delays:
        home = _late(case, torch.accelerator.current_stream(case.device))
        if wrong := _differs(late, home, outputs):
            fail(f"{case.name}: {where} it does not wait for the stream of {there}: {wrong}", remedy)
    return None


def _moved(case: Case, device: torch.device) -> Case:
    """The same sample on another device, with the generators and devices in it."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == device.type:
            return device
        if isinstance(value, torch.Generator) and value.device.type == device.type:
            return torch.Generator(device).set_state(value.get_state())
        return value

    args, kwargs = tree_map(move, (case.sample.args, case.sample.kwargs))
    moved = Case(case.op, Sample(*args, **kwargs), str(device), case.reference, lambda case: None)
    moved.derivative = case.derivative
    return moved


def launch(case: Case) -> str | None:
    """It computes on the device's stream, not on the host while it is called."""
    _module(case)
    backend = backends.of_device(case.device.type)
    remedy = (
        "launch a kernel on the current stream (openreg::launch(), <<<…, stream>>>), which does all that reads or "
        "writes the tensors; to compute on the host, copy them with .cpu() first"
    )
    if not _delays(case):
        skip(f"torch.{case.device.type} has no _sleep, which delays the arguments")
    default = [*case.expected, *(case.gradients if case.derivative.status == "pass" else [])]
    if _everything(case, torch.Stream(device=case.device))[1]:
        skip("it works on another stream than the current one: see stream")
    late, note, said = _late(case, torch.accelerator.current_stream(case.device)), None, ""
    if wrong := _differs(late, default, len(case.expected)):
        said = f"called before its arguments' values have arrived, it does not wait for them: {wrong}"
    elif not backend.isolation:
        note = f"by delays alone: nothing watches the host's accesses to the memory of {case.device.type}"
    elif not case.command:
        note = "by delays alone: the command also watches the host's accesses, in another process"
    elif case.index == 0:  # one process watches for all samples
        command = [sys.executable, *case.command, "--only", "runs", "determinism"]
        watched = subprocess.run(
            command, env={**os.environ, **backend.isolation}, capture_output=True, text=True, check=False
        )
        if found := re.search(backend.access, watched.stderr, re.MULTILINE):
            said = f"the host {found[1]} in a call"
    if said:
        fail(f"{case.name}: its kernel computes on the host: {said}", remedy)
    return note
