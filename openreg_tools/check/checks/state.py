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

from openreg_tools.check.case import Case, Results, cotangents, pull, skip
from openreg_tools.check.checks.common import others_than, scaled
from openreg_tools.check.checks.results import perturbed
from openreg_tools.core import child
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import differs, has_numbers
from openreg_tools.core.samples import Sample, dtype_name
from openreg_tools.core.variations import of_sizes, sizes_of

# ---- generators ----

_REFUSES = (RuntimeError, NotImplementedError, TypeError, ValueError)


def generator(case: Case) -> str | None:
    """With equal generators it gives equal numbers, and it draws from no other."""
    names = [argument.name for argument in case.schema.arguments if "Generator" in str(argument.type)]
    if not names:
        skip("its schema has no Generator argument")
    for name in names:
        _generator(case, name)
    return None


def _draw(case: Case, name: str, generator: torch.Generator | None) -> list[Tensor]:
    """The numbers of a call with this generator: what it returns and writes."""
    given = case.given(case.fresh()) | {name: generator}
    with torch.no_grad():
        out = case.op(**given)
    found = tree_leaves((out, given) if case.mutable else out)
    return [x.detach().clone() for x in found if isinstance(x, Tensor)]


def _generator(case: Case, name: str) -> None:
    remedy = (
        f"draw every number from {name} if it is given: x.uniform_(generator={name}), torch.rand(…, generator={name})"
    )
    given, refusal = case.value(name), ""
    for device in [given.device] if isinstance(given, torch.Generator) else [case.device, torch.device("cpu")]:
        try:
            source = torch.Generator(device)
            torch.manual_seed(1)
            first = _draw(case, name, source.manual_seed(7))
            break
        except _REFUSES as error:
            refusal = refusal or f"it refuses a generator of {device}: {all_lines(error)}"
    else:
        skip(refusal)

    def seeded(seed: int, case: Case = case) -> list[Tensor]:
        return _draw(case, name, source.manual_seed(seed))

    def by_default(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return _draw(case, name, None)

    def follows(draw: Callable[[int], list[Tensor]]) -> bool:
        numbers = draw(7)
        return any(differs(draw(seed), numbers) for seed in (8, 9, 10))

    seeded(7)
    moved = not torch.equal(source.get_state(), torch.Generator(source.device).manual_seed(7).get_state())
    before = _global_states(case)
    again = seeded(7)
    others = [device for device, state in _global_states(case).items() if not torch.equal(state, before[device])]
    torch.manual_seed(2)
    if wrong := differs(seeded(7), first) or differs(again, first):
        where = f": it draws from the global generator of {others[0]}" if others else ""
        case.fail(f"with equal generators as {name} it gives different numbers{where} ({wrong})", remedy)
    if others:
        case.fail(f"given a generator as {name}, it also draws from the global generator of {others[0]}", remedy)
    is_used = follows(seeded)
    if is_used and not moved:
        case.fail(
            f"the state of the generator {name} is the same after the call, so the next call gives the same numbers again",
            f"draw numbers from {name} instead of reading its seed, or advance its state (set_offset, set_state)",
        )
    with contextlib.suppress(*_REFUSES):  # it may need one
        numbers = by_default(1)
        if any(differs(by_default(1), numbers) for _ in range(2)):
            case.fail(
                f"without {name}, its numbers do not follow torch.manual_seed",
                f"use the device's default generator if {name} is None: pass generator={name} on, which means it",
            )
        if is_used or moved:
            return
        if not follows(by_default):
            if not case.seeded:
                return
            for *_, sample in _varied(case):  # at a probability of 0, for example, no number matters
                with contextlib.suppress(Exception):
                    if follows(functools.partial(seeded, case=case.of_sample(sample))):
                        return
        case.fail(f"with any generator as {name} it gives the same numbers", remedy)


def _global_states(case: Case) -> dict[str, Tensor]:
    """The states of the default generators of the CPU and of the device, by device."""
    states = {"cpu": torch.get_rng_state()}
    module = getattr(torch, case.device.type, None)
    if case.device.type != "cpu" and hasattr(module, "get_rng_state"):
        states[str(case.device)] = module.get_rng_state(case.device)
    return states


# ---- caches and buffers ----

KEY = (
    "keep nothing between calls, or key the cache by all that its contents depend on: every argument, size, dtype and "
    "device"
)


@dataclasses.dataclass
class _Call:
    """One call for `state`."""

    what: str  # how it differs from the sample: "theta=7.5"
    case: Case

    def run(self, factor: float = 1) -> Results | str:
        """The outputs, and the gradients under cotangents times a factor; or the error."""
        for grad in (True, False):
            try:
                tensors = self.case.fresh(grad=grad)
                outs = list(self.case.run(*tensors))
                return Results(_copies(outs), _copies(_backward(outs, tensors, factor)))
            except Exception as error:
                raised = all_lines(error)
        return raised


def _backward(outs: list[Tensor], tensors: list[Tensor], factor: float = 1) -> list[Tensor | None]:
    if not any(x.requires_grad for x in outs):
        return []
    try:
        return pull(outs, tensors, lambda outs: [scaled(x, factor) for x in cotangents(outs)])
    except Exception:  # the check `backward` reports it
        return []


def _copies(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [x if x is None else x.detach().clone() for x in tensors]


def _calls(case: Case) -> list[_Call]:
    """The sample, the operator's other samples, and the sample with other values, sizes, arguments and dtypes."""

    def call(what: str, sample: Sample) -> _Call:
        return _Call(what, case.of_sample(sample))

    calls = [call(f"the sample ({case.sample})", case.sample)]
    calls += [call(f"({sample})", sample) for sample in case.others[:8]]
    floating = any(map(has_numbers, case.leaves))
    if floating:
        with torch.no_grad():
            calls.append(call("other values", _sample(case, [scaled(x, 0.75) for x in case.leaves])))
    for size in sizes_of(case.leaves)[:2]:
        for new in (size + 1, max(1, size // 2)):
            calls.append(call(f"size {new} instead of {size}", _sample(case, of_sizes(case.leaves, {size: new}))))
    for name, value, other, sample in itertools.islice(_varied(case), 8):
        calls.append(call(f"{name}={other!r} instead of {value!r}", sample))
    if floating:
        dtype = torch.float64 if case.leaves[0].dtype != torch.float64 else torch.float32
        name = dtype_name(dtype)
        calls.append(call(f"tensors of {name}", _sample(case, case.fresh(dtype=dtype, device="cpu"))))
    return calls


def _sample(case: Case, tensors: list[Tensor]) -> Sample:
    made = (x.detach().requires_grad_(y.requires_grad) for x, y in zip(tensors, case.leaves, strict=True))
    args, kwargs = case.arguments(made)
    return Sample(*args, **kwargs)


def _varied(case: Case) -> Iterator[tuple[str, Any, Any, Sample]]:
    """The sample with another value of each number and flag: its name, its value, and the other value."""
    for argument in case.schema.arguments:
        value = case.value(argument.name)
        for other in others_than(value) if not isinstance(value, str) else ():
            yield argument.name, value, other, case.sample_with(argument.name, other)


def state(case: Case) -> str | None:
    """A result depends on the arguments alone, not on earlier or later calls."""
    if any(isinstance(constant, torch.ScriptObject) for constant in case.constants.values()):
        skip("its sample has an object with a state of its own")
    importlib.import_module("torch._dynamo")  # A call of a custom_op imports it: once here, not in every child.
    calls = _calls(case)
    if case.device.type == "cpu":
        calls = _orders(case, calls)
    elif case.has_computed_kernel("CPU") and not any(isinstance(c, torch.device) for c in case.constants.values()):
        samples = [_on_cpu(sample) for sample in (case.sample, *case.others)]  # a child cannot use the device
        host = case.of_sample(samples[0], "cpu")
        host.others = tuple(samples[1:])
        on_host = _orders(host, _calls(host))
        alone = in_child([on_host[0]])
        calls[0].run()
        if alone and not isinstance(alone[0], str) and (wrong := _unlike(on_host[0].run(), alone[0])):
            case.fail(f"after a call on {case.device}, a call on the CPU gives {wrong}", KEY)
        calls.append(on_host[0])
    first = []
    for call in calls:
        case.trying(call.what)
        first.append(call.run())
    for call, was in reversed([*zip(calls, first, strict=True)]):
        again = call.run()
        if (wrong := _unlike(again, was)) and not _unlike(again, call.run()):  # else: see determinism
            case.fail(f"after other calls, a call with {call.what} gives {wrong}, which it gave before", KEY)
    if isinstance(first[0], str):
        skip("it refuses this sample")
    for other in calls[1:]:
        _kept(case, calls[0], other)
        if other.what == "other values":
            _changed_in_place(case, calls[0], other)
    return None


def _on_cpu(sample: Sample) -> Sample:
    args, kwargs = tree_map_only(
        Tensor, lambda x: x.detach().cpu().requires_grad_(x.requires_grad), (sample.args, sample.kwargs)
    )
    return Sample(*args, **kwargs)


def _orders(case: Case, given: list[_Call]) -> list[_Call]:
    """Compare the results of calls in both orders, each of which has a new child process.

    Returns:
        The given calls that do not end the process; the sample's is always among them.
    """
    calls = [*given, *_pairs(given)]
    order = range(len(calls))
    results = [
        dict(zip(way, in_child([calls[i] for i in way]), strict=False)) for way in (order, list(reversed(order)))
    ]
    for i in order:
        if not all(i in result for result in results) or not _unlike(*(result[i] for result in results)):
            continue
        alone, again = in_child([calls[i]]), in_child([calls[i]])
        if not alone or not again or isinstance(alone[0], str) or _unlike(alone[0], again[0]):  # see determinism
            continue
        with perturbed(0x5A):
            dirty = in_child([calls[i]])
        if not dirty or _unlike(dirty[0], alone[0]):  # it reads memory that is not its own: see poison and sizes
            continue
        for k in (k for k in order if k != i):
            pair = in_child([calls[k], calls[i]])
            if len(pair) == 2 and (wrong := _unlike(pair[1], alone[0])):
                case.fail(
                    f"after a call with {calls[k].what}, a call with {calls[i].what} gives another result: {wrong}, which a "
                    "new process gives",
                    KEY,
                )
    return [call for i, call in enumerate(given) if not i or any(i in result for result in results)]


def _pairs(calls: list[_Call]) -> list[_Call]:
    """The sample before each other call, in sizes of their own: for the usual sizes, a cache of this process may be filled."""
    sizes = sorted(sizes_of(calls[0].case.leaves), reverse=True)

    def grown(call: _Call, by: int) -> _Call:
        tensors = call.case.leaves
        for size in sizes:
            tensors = of_sizes(tensors, {size: size + by})
        return _Call(f"{call.what}, in sizes larger by {by}", call.case.of_sample(_sample(call.case, tensors)))

    others = calls[1:] if sizes else []
    return [grown(call, 7 + k) for k, other in enumerate(others) for call in (calls[0], other)]


def _unlike(got: Any, expected: Any) -> str:
    """How two results of `_Call.run` differ. Gradients count if both have some: autograd may refuse to run in a fork."""
    if isinstance(got, str) or isinstance(expected, str):
        if type(got) is type(expected):
            return ""
        return f"{got} instead of a result" if isinstance(got, str) else f"a result instead of {expected}"
    wrong = differs(got[0], expected[0])
    return wrong or (got[1] and expected[1] and differs(got[1], expected[1], "gradient")) or ""


def _kept(case: Case, call: _Call, other: _Call) -> None:
    """The results of a call stay what they are during another; and the other may come between forward and backward."""
    tensors = call.case.fresh(grad=True)
    try:
        outs = list(call.case.run(*tensors))
    except Exception:
        tensors = call.case.fresh()
        outs = list(call.case.run(*tensors))
    grads = _backward(outs, tensors)
    before = _copies(outs), _copies(grads)
    if isinstance(other.run(0.5), str):
        return
    for what, result, now, was in (
        ("call", "output", [x.detach() for x in outs], before[0]),
        ("backward", "gradient", grads, before[1]),
    ):
        if wrong := differs(now, was, result, exact=True):
            case.fail(
                f"a later {what}, with {other.what}, changes what an earlier one returned: {wrong}",
                f"return new memory from every {what}: allocate its results in it, or clone what is kept",
            )
    if not grads:
        return
    tensors, others = call.case.fresh(grad=True), other.case.fresh(grad=True)
    outs = list(call.case.run(*tensors))
    between = list(other.case.run(*others))
    crossed = _backward(outs, tensors)
    _backward(between, others)
    if wrong := differs(crossed, before[1], "gradient"):
        case.fail(
            f"if another forward, with {other.what}, comes between forward and backward, {wrong}",
            "save what backward needs with ctx.save_for_backward, not in a global or in a buffer that calls share",
        )


def _changed_in_place(case: Case, call: _Call, other: _Call) -> None:
    """A call sees that its arguments were changed in place."""
    with torch.no_grad():
        tensors = call.case.fresh()
        call.case.outputs(tensors)
        expected = other.case.outputs(other.case.fresh())
        try:
            for x, value in zip(tensors, other.case.fresh(), strict=True):
                x.copy_(value)
            got = call.case.outputs(tensors)
        except RuntimeError:  # of expanded memory
            return
    case.expect(
        got, expected, "after its arguments were changed in place,", "the same values in other tensors give",
        "key no cache by a tensor's identity or address; if you must, compare its version counter (x._version) too",
    )  # fmt: skip


def in_child(calls: Sequence[_Call], seconds: float = 30.0) -> list[Any]:
    """The results of calls in a forked child, as far as it comes: one of them may end it."""

    def work(answer: Callable[[Any], None]) -> None:
        for call in calls:
            data = io.BytesIO()
            result = call.run()
            torch.save(result if isinstance(result, str) else tuple(result), data)
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
    for what, inputs in (("separate inputs", distinct), ("shared inputs", [case.fresh()] * 4)):
        _at_once(case, [functools.partial(case.outputs, tensors) for tensors in inputs], what, "output")
    if case.has_derivative:
        calls = [functools.partial(case.gradients_of, tensors) for tensors in distinct]
        _at_once(case, calls, "separate inputs with gradients", "gradient")
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
            wrongs.append(f"on {what}, a call raised {all_lines(error)}")
        finally:
            sys.settrace(None)

    alone = [call() for call in calls]
    workers = [threading.Thread(target=work, args=given, daemon=True) for given in zip(calls, alone, strict=True)]
    for worker in workers:
        worker.start()
    until = time.monotonic() + PATIENCE
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    if any(worker.is_alive() for worker in workers):
        case.fail(f"four threads that call it on {what} do not end", "look for a lock that is acquired twice")
    if wrongs:
        case.fail(
            f"called from four threads {wrongs[0]}",
            "keep no state between calls (static buffers, module globals), or protect it with a lock",
        )
