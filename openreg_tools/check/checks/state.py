"""Checks of what a call leaves behind for the next one and for other threads: generators, caches, buffers."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from openreg_tools.check.case import Case, cotangents, differentiable, gradients, last_line
from openreg_tools.check.checks.common import differs, fail, plain, resized, scaled, sizes_of, skip
from openreg_tools.check.checks.machine import perturbed
from openreg_tools.core import child
from openreg_tools.samples import Sample

# ---- generators ----


def generator(case: Case) -> str | None:
    """With equal generators it gives equal numbers, and it draws from no other."""
    names = [each.name for each in case.schema.arguments if "Generator" in str(each.type)]
    if not names:
        skip("its schema has no Generator argument")
    for name in names:
        _generator(case, name)
    return None


def _generator(case: Case, name: str) -> None:
    remedy = (
        f"draw every number from {name} if it is given: x.uniform_(generator={name}), torch.rand(…, generator={name})"
    )

    def draw(value: torch.Generator | None, case: Case = case) -> list[Tensor]:
        args, kwargs = _with(case, name, value, case.arguments(case.fresh()))
        with torch.no_grad():
            out = case.op(*args, **kwargs)
        written = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)] if case.mutable else []
        return [x.detach().clone() for x in (*tree_leaves(out), *written) if isinstance(x, Tensor)]

    given, refusal = _given(case, name), ""
    for device in [given.device] if isinstance(given, torch.Generator) else [case.device, torch.device("cpu")]:
        try:
            source = torch.Generator(device)
            torch.manual_seed(1)
            first = draw(source.manual_seed(7))
            break
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            refusal = refusal or f"it refuses a generator of {device}: {last_line(error)}"
    else:
        skip(refusal)
    moved = not torch.equal(source.get_state(), torch.Generator(source.device).manual_seed(7).get_state())
    before = _global_states(case)
    again = draw(source.manual_seed(7))
    others = [device for device, state in _global_states(case).items() if not torch.equal(state, before[device])]
    torch.manual_seed(2)
    if wrong := differs(draw(source.manual_seed(7)), first) or differs(again, first):
        where = f": it draws from the global generator of {others[0]}" if others else ""
        fail(f"{case.name}: with equal generators as {name} it gives different numbers{where} ({wrong})", remedy)
    if others:
        fail(
            f"{case.name}: given a generator as {name}, it also draws from the global generator of {others[0]}", remedy
        )
    follows = any(differs(draw(source.manual_seed(seed)), first) for seed in (8, 9, 10))
    if follows and not moved:
        fail(
            f"{case.name}: the state of the generator {name} is the same after the call, so the next call gives the same "
            "numbers again",
            f"draw numbers from {name} instead of reading its seed, or advance its state (set_offset, set_state)",
        )

    def seeded(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return draw(None)

    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError):  # it may need one
        numbers = seeded(1)
        again = [seeded(1) for _ in range(2)]
        if any(differs(each, numbers) for each in again):
            fail(
                f"{case.name}: without {name}, its numbers do not follow torch.manual_seed",
                f"use the device's default generator if {name} is None: pass generator={name} on, which means it",
            )
        if follows or moved:
            return
        if any(differs(seeded(seed), numbers) for seed in (2, 3, 4)):
            fail(f"{case.name}: with any generator as {name} it gives the same numbers", remedy)
        if not case.seeded:
            return
        for *_, sample in _varied(case):  # at a probability of 0, for example, no number matters
            varied = Case(case.op, sample, str(case.device), None, lambda case: None)
            with contextlib.suppress(Exception):
                drawn = draw(source.manual_seed(7), varied)
                if any(differs(draw(source.manual_seed(seed), varied), drawn) for seed in (8, 9, 10)):
                    return
        fail(f"{case.name}: neither {name} nor torch.manual_seed changes its numbers", remedy)


def _given(case: Case, name: str) -> Any:
    """The sample's value of an argument; None if it is not there."""
    positional = [each.name for each in case.schema.arguments if not each.kwarg_only]
    return {**dict(zip(positional, case.sample.args, strict=False)), **case.sample.kwargs}.get(name)


def _with(case: Case, name: str, value: Any, arguments: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """The sample's arguments, or these, with another value of one of them."""
    args, kwargs = arguments or (case.sample.args, case.sample.kwargs)
    args, kwargs = list(args), dict(kwargs)
    positional = [each.name for each in case.schema.arguments if not each.kwarg_only]
    if name in positional[: len(args)]:
        args[positional.index(name)] = value
    else:
        kwargs[name] = value
    return args, kwargs


def _global_states(case: Case) -> dict[str, Tensor]:
    """The states of the default generators of the CPU and of the device, by device."""
    states = {"cpu": torch.get_rng_state()}
    module = getattr(torch, case.device.type, None)
    if case.device.type != "cpu" and hasattr(module, "get_rng_state"):
        states[str(case.device)] = module.get_rng_state(case.device)
    return states


# ---- caches and buffers ----

GRADIENT = "the gradient of differentiable argument"
KEY = (
    "keep nothing between calls, or key the cache by all that its contents depend on: every argument, size, dtype and "
    "device"
)


@dataclasses.dataclass
class _Call:
    """One call for `state`."""

    what: str  # how it differs from the sample: "theta=7.5"
    case: Case
    kind: str = ""  # "size" or "argument", if that differs

    def run(self, factor: float = 1) -> tuple[list[Tensor], list[Tensor | None]] | str:
        """The outputs, and the gradients under cotangents times a factor; or the error."""
        for grad in (True, False):
            try:
                tensors = self.case.fresh(grad=grad)
                outs = list(self.case.run(*tensors))
                return _copies(outs), _copies(self.gradients(outs, tensors, factor))
            except Exception as error:
                raised = last_line(error)
        return raised

    def gradients(self, outs: list[Tensor], tensors: list[Tensor], factor: float = 1) -> list[Tensor | None]:
        outs, leaves = [x for x in outs if x.requires_grad], [x for x in tensors if x.requires_grad]
        if not outs or not leaves:
            return []
        given = [scaled(x, factor) for x in cotangents(outs)]
        try:
            return list(torch.autograd.grad(outs, leaves, given, allow_unused=True))
        except Exception:  # the check `backward` reports it
            return []


def _copies(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [x if x is None else x.detach().clone() for x in tensors]


def _call(what: str, case: Case, sample: Sample, kind: str = "") -> _Call:
    return _Call(what, Case(case.op, sample, str(case.device), None, lambda case: None), kind)


def _calls(case: Case) -> list[_Call]:
    """The sample, the operator's other samples, and the sample with other values, sizes, arguments and dtypes."""
    calls = [_call(f"the sample ({case.sample})", case, case.sample)]
    calls += [_call(f"({sample})", case, sample) for sample in case.others[:8]]
    floating = any(map(differentiable, case.leaves))
    if floating:
        with torch.no_grad():
            others = [scaled(x, 0.75) for x in case.leaves]
        calls.append(_call("other values", case, _sample(case, others)))
    for size in sizes_of(case.leaves)[:2]:
        for new in (size + 1, max(1, size // 2)):
            sample = _sample(case, resized(case.leaves, size, new))
            calls.append(_call(f"size {new} instead of {size}", case, sample, "size"))
    for name, value, other, sample in itertools.islice(_varied(case), 8):
        calls.append(_call(f"{name}={other!r} instead of {value!r}", case, sample, "argument"))
    if floating:
        dtype = torch.float64 if case.leaves[0].dtype != torch.float64 else torch.float32
        name = str(dtype).removeprefix("torch.")
        calls.append(_call(f"tensors of {name}", case, _sample(case, case.fresh(dtype=dtype, device="cpu"))))
    return calls


def _sample(case: Case, tensors: list[Tensor]) -> Sample:
    made = (x.detach().requires_grad_(y.requires_grad) for x, y in zip(tensors, case.leaves, strict=True))
    args, kwargs = case.arguments(made)
    return Sample(*args, **kwargs)


def _pairs(calls: list[_Call]) -> list[tuple[_Call, _Call]]:
    """The sample with each other call, in sizes of their own: for the usual sizes, a cache of this process may be filled."""
    sizes = sorted(sizes_of(calls[0].case.leaves), reverse=True)

    def grown(call: _Call, by: int) -> _Call:
        tensors = call.case.leaves
        for size in sizes:
            tensors = resized(tensors, size, size + by)
        return _call(f"{call.what}, in sizes larger by {by}", call.case, _sample(call.case, tensors))

    others = [call for call in calls[1:] if call.kind != "size" and sizes]
    return [(grown(calls[0], 7 + k), grown(other, 7 + k)) for k, other in enumerate(others)]


def _varied(case: Case) -> Iterator[tuple[str, Any, Any, Sample]]:
    """The sample with another value of each number and flag: its name, its value, and the other value."""
    for each in case.schema.arguments:
        value = _given(case, each.name)
        if value is None and each.has_default_value():
            value = each.default_value
        others: list[Any] = []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = [value + 1, value - 1]
        elif isinstance(value, float):
            others = [value * 0.75 if value else 0.5]
        for other in others:
            args, kwargs = _with(case, each.name, other)
            yield each.name, value, other, Sample(*args, **kwargs)


def state(case: Case) -> str | None:
    """A result depends on the arguments alone, not on earlier or later calls."""
    if any(isinstance(each, torch.ScriptObject) for each in case.constants.values()):
        skip("its sample has an object with a state of its own")
    importlib.import_module("torch._dynamo")  # A call of a custom_op imports it: once here, not in every child.
    calls = _calls(case)
    if case.device.type == "cpu":
        calls = _orders(case, calls)
    elif case.has_computed_kernel("CPU") and not any(isinstance(c, torch.device) for c in case.constants.values()):
        samples = [_on_cpu(sample) for sample in (case.sample, *case.others)]  # a child cannot use the device
        host = Case(case.op, samples[0], "cpu", None, lambda case: None)
        host.others = tuple(samples[1:])
        on_host = _orders(host, _calls(host))
        alone = in_child([on_host[0]])
        calls[0].run()
        if alone and not isinstance(alone[0], str) and (wrong := _unlike(on_host[0].run(), alone[0])):
            fail(f"{case.name}: after a call on {case.device}, a call on the CPU gives {wrong}", KEY)
        calls.append(on_host[0])
    first = []
    for call in calls:
        case.trying(call.what)
        first.append(call.run())
    for call, was in list(zip(calls, first, strict=True))[::-1]:
        again = call.run()
        if (wrong := _unlike(again, was)) and not _unlike(again, call.run()):  # else: see determinism
            fail(f"{case.name}: after other calls, a call with {call.what} gives {wrong}, which it gave before", KEY)
    if isinstance(first[0], str):
        skip("it refuses this sample")
    for other in calls[1:]:
        _kept(case, calls[0], other)
    for other in calls[1:]:
        if other.what == "other values":
            _changed_in_place(case, calls[0], other)
    return None


def _on_cpu(sample: Sample) -> Sample:
    args, kwargs = tree_map_only(
        Tensor, lambda x: x.detach().cpu().requires_grad_(x.requires_grad), (sample.args, sample.kwargs)
    )
    return Sample(*args, **kwargs)


def _orders(case: Case, given: list[_Call]) -> list[_Call]:
    """Compare the results of calls in several orders, each of which has a new child process.

    Returns:
        The given calls that do not end the process.
    """
    pairs = _pairs(given)
    calls = given + [call for pair in pairs for call in pair]
    count = len(calls)
    first = [0, len(given) - 1] + [i for i, call in enumerate(given) if call.kind == "argument"][:4]
    first += [i for i, call in enumerate(given) if call.kind == "size"][:1]
    orders = [[start, *(i for i in range(len(given)) if i != start)] for start in dict.fromkeys(first)]
    orders += [[*range(len(given), count)], [i + 1 - 2 * (k % 2) for k, i in enumerate(range(len(given), count))]]
    results: list[dict[int, Any]] = []
    for order in orders:
        results.append(dict(zip(order, in_child([calls[i] for i in order]), strict=False)))
    for i in range(count):
        got = [each[i] for each in results if i in each]
        if not any(_unlike(one, got[0]) for one in got):
            continue
        alone, again = in_child([calls[i]]), in_child([calls[i]])
        if not alone or not again or isinstance(alone[0], str) or _unlike(alone[0], again[0]):  # see determinism
            continue
        with perturbed(0x5A):
            dirty = in_child([calls[i]])
        if not dirty or _unlike(dirty[0], alone[0]):  # it reads memory that is not its own: see poison and sizes
            continue
        for k in (k for k in range(count) if k != i):
            pair = in_child([calls[k], calls[i]])
            if len(pair) == 2 and (wrong := _unlike(pair[1], alone[0])):
                fail(
                    f"{case.name}: after a call with {calls[k].what}, a call with {calls[i].what} gives another result: "
                    f"{wrong}, which a new process gives",
                    KEY,
                )
    return [call for i, call in enumerate(given) if not i or all(i in each for each in results[:-2])]


def _unlike(got: Any, expected: Any) -> str:
    """How two results of `_Call.run` differ. Gradients count if both have some: autograd may refuse to run in a fork."""
    if isinstance(got, str) or isinstance(expected, str):
        if type(got) is type(expected):
            return ""
        return f"{got} instead of a result" if isinstance(got, str) else f"a result instead of {expected}"
    wrong = differs(got[0], expected[0])
    return wrong or (got[1] and expected[1] and differs(got[1], expected[1], GRADIENT)) or ""


def _kept(case: Case, call: _Call, other: _Call) -> None:
    """The results of a call stay what they are during another; and the other may come between forward and backward."""
    tensors = call.case.fresh(grad=True)
    try:
        outs = list(call.case.run(*tensors))
    except Exception:
        tensors = call.case.fresh()
        outs = list(call.case.run(*tensors))
    grads = call.gradients(outs, tensors)
    outs_before, grads_before = _copies(outs), _copies(grads)
    if isinstance(other.run(0.5), str):
        return
    if wrong := differs([x.detach() for x in outs], outs_before, exact=True):
        fail(
            f"{case.name}: a later call, with {other.what}, changes what an earlier one returned: {wrong}",
            "return new memory from every call: allocate the output in it, or clone what is kept",
        )
    if wrong := differs(grads, grads_before, GRADIENT, exact=True):
        fail(
            f"{case.name}: a later backward, with {other.what}, changes what an earlier one returned: {wrong}",
            "return new memory from every backward: allocate the gradient in it, or clone what is kept",
        )
    if not grads:
        return
    tensors, others = call.case.fresh(grad=True), other.case.fresh(grad=True)
    outs = list(call.case.run(*tensors))
    between = list(other.case.run(*others))
    crossed = call.gradients(outs, tensors)
    other.gradients(between, others)
    if wrong := differs(crossed, grads_before, GRADIENT):
        fail(
            f"{case.name}: if another forward, with {other.what}, comes between forward and backward, {wrong}",
            "save what backward needs with ctx.save_for_backward, not in a global or in a buffer that calls share",
        )


def _changed_in_place(case: Case, call: _Call, other: _Call) -> None:
    """A call sees that its arguments were changed in place."""
    with torch.no_grad():
        tensors = call.case.fresh()
        plain(case, tensors, call.case.run)
        expected = plain(case, other.case.fresh(), other.case.run)
        try:
            for x, value in zip(tensors, other.case.fresh(), strict=True):
                x.copy_(value)
            got = plain(case, tensors, call.case.run)
        except RuntimeError:  # of expanded memory
            return
    if wrong := differs(got, expected):
        fail(
            f"{case.name}: after its arguments were changed in place, {wrong}, which the same values in other tensors give",
            "key no cache by a tensor's identity or address; if you must, compare its version counter (x._version) too",
        )


def in_child(calls: Sequence[_Call], seconds: float = 30.0) -> list[Any]:
    """The results of calls in a forked child, as far as it comes: one of them may end it."""

    def work(answer: Callable[[Any], None]) -> None:
        for call in calls:
            data = io.BytesIO()
            torch.save(call.run(), data)
            answer(base64.b64encode(data.getvalue()).decode())

    results = []
    with contextlib.suppress(child.Ended):
        for said in child.answers(work, seconds):
            results.append(torch.load(io.BytesIO(base64.b64decode(said)), weights_only=False))
    return results


# ---- threads ----

_SILENT = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
PATIENCE = 120  # seconds that threads get to end


def threads(case: Case) -> str | None:
    """Concurrent calls from four threads give one thread's results, on separate and on shared inputs."""
    if case.seeded:
        skip("its numbers are random, and the generator is shared")
    distinct = [[scaled(x, s) for x in case.fresh()] for s in (1.0, 0.75, 1.25, 1.5)]
    grad = case.derivative.status == "pass"
    for what, inputs in (("separate inputs", distinct), ("shared inputs", [case.fresh()] * 4)):
        calls = [functools.partial(plain, case, tensors) for tensors in inputs]
        _at_once(case, calls, what, "output")
        if grad and what == "separate inputs":
            calls = [functools.partial(gradients, case.run, case.leaf(tensors), case.wanted) for tensors in inputs]
            _at_once(case, calls, f"{what} with gradients", GRADIENT)
    return None


def _yielding(times: int = 2000) -> Callable[..., Any]:
    """A trace function that lets other threads run before each bytecode of Python code outside of PyTorch."""
    left = itertools.count(times, -1)

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.startswith(_SILENT) or next(left) < 0:
            return None
        frame.f_trace_opcodes = True
        time.sleep(0)
        return trace

    return trace


def _at_once(case: Case, calls: list[Callable[[], list[Tensor | None]]], what: str, result: str) -> None:
    """Threads, each with its own call, all get what the call gives alone."""
    wrongs: list[str] = []
    start = threading.Barrier(len(calls))

    def work(call: Callable[[], list[Tensor | None]], expected: list[Tensor | None]) -> None:
        try:
            start.wait(60)
            sys.settrace(_yielding())
            until = time.monotonic() + 0.05
            for i in itertools.count():
                if wrongs or i >= 8 and time.monotonic() > until:
                    return
                if wrong := differs(call(), expected, result):
                    wrongs.append(f"on {what}, {wrong}, which one thread alone gives")
        except BaseException as error:  # a thread that raises SystemExit ends without a word
            wrongs.append(f"on {what}, a call raised {last_line(error)}")
        finally:
            sys.settrace(None)

    alone = [call() for call in calls]
    workers = [threading.Thread(target=work, args=each, daemon=True) for each in zip(calls, alone, strict=True)]
    for worker in workers:
        worker.start()
    until = time.monotonic() + PATIENCE
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    if any(worker.is_alive() for worker in workers):
        fail(f"{case.name}: four threads that call it on {what} do not end", "look for a lock that is acquired twice")
    if wrongs:
        fail(
            f"{case.name}: called from four threads {wrongs[0]}",
            "keep no state between calls (static buffers, module globals), or protect it with a lock",
        )
