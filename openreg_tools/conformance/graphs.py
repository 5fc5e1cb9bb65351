"""The check `graph` of `openreg-tools conformance`: what a replay computes must be what eager mode computes, to the bit.

`run` captures a call on memory of zeros, puts the values back, and replays; `compare` does so twice, against eager mode on
the same values and random seeds. It is for devices that ``torch.accelerator.Graph`` supports, and runs on no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import unittest.mock
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.testing import _utils as testing_utils
from torch.utils._pytree import tree_leaves

from openreg_tools.conformance.outcomes import UNINITIALIZED, Tally, same, short
from openreg_tools.conformance.outcomes import run as run_once
from openreg_tools.core import opinfo
from openreg_tools.core.blocks import first_line
from openreg_tools.core.move import Move

CHECK = "graph"
At = Callable[[str], None]

# What a device says of a call that cannot be captured.
REFUSED = "not permitted when stream is capturing"
# How a note of such a call begins. The operator that refused and its reason follow.
NOTE = "graph: "

# OpInfos whose result has a shape that depends on values. What CUDA's graphs cannot capture either.
DYNAMIC = {
    "argwhere", "bincount", "linalg.lstsq", "linalg.lstsq.grad_oriented", "masked_select", "nn.functional.one_hot",
    "nonzero", "repeat_interleave", "to_sparse", "unique", "unique_consecutive",
}  # fmt: skip


@dataclasses.dataclass
class Replayed:
    """What a program could see of a call, eager or replayed twice."""

    values: list[Any]  # the leaves of the result, after each time
    operands: list[torch.Tensor]  # after the last time
    error: Exception | None = None


def _bytes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of strided tensors, once each."""
    seen: dict[int, torch.Tensor] = {}
    for x in tensors:
        if x.layout == torch.strided and not x.is_quantized and not x.is_nested and x.untyped_storage().nbytes():
            storage = x.untyped_storage()
            seen[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
    return list(seen.values())


def _copies(leaves: list[Any]) -> list[Any]:
    return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]


def run(call: Callable[..., Any], arguments: Any, device: str, captured: bool) -> Replayed:
    """Call ``call(*args, **kwargs)`` twice in eager mode, or capture it and replay it twice.

    Args:
        arguments: ``(args, kwargs)``, tensors on the CPU.
        captured: whether to capture. The capture sees tensors of zeros; the replays see the values.
    """
    move = Move(device)
    args, kwargs = move(arguments)
    memory = _bytes(move.tensors.values())
    before = [x.clone() for x in memory]
    index = torch.device(device).index or 0
    out = Replayed([], list(move.tensors.values()))
    module = getattr(torch, torch.device(device).type)

    geometry = [(x, x.size(), x.stride(), x.storage_offset()) for x in out.operands if x.layout == torch.strided]

    def restore() -> None:
        for x, value in zip(memory, before, strict=True):
            x.copy_(value)

    def make() -> Any:
        with torch.device(device) if not out.operands else contextlib.nullcontext():  # a factory
            return call(*args, **kwargs)

    # Some OpInfos seed their random operators themselves, which a replay cannot, and put the seed back.
    with (
        warnings.catch_warnings(),
        unittest.mock.patch.object(torch, "manual_seed", lambda seed: None),
        unittest.mock.patch.object(testing_utils, "freeze_rng_state", contextlib.nullcontext),
    ):
        warnings.simplefilter("ignore")
        try:
            if captured:
                for x in memory:
                    x.zero_()
                graph, stream = torch.accelerator.Graph(), torch.Stream(device=torch.device(module.__name__[6:], index))
                stream.wait_stream(torch.accelerator.current_stream(index))
                with stream:
                    graph.capture_begin()
                    try:
                        result = make()
                    finally:
                        try:
                            graph.capture_end()
                        except torch.AcceleratorError as error:
                            if REFUSED not in str(error):
                                raise
            restore()
            for time in range(2):
                module.manual_seed(opinfo.SEED + time)
                if captured:
                    graph.replay()
                else:
                    for x, size, stride, offset in geometry:  # operators such as transpose_() change it with each call
                        if (x.size(), x.stride(), x.storage_offset()) != (size, stride, offset):
                            x.as_strided_(size, stride, offset)
                    result = make()
                torch.accelerator.synchronize(index)
                out.values.append(_copies(tree_leaves(result)))
        except Exception as error:
            out.error = error
    return out


def compare(tally: Tally, index: int, what: str, call: Callable[..., Any], arguments: Any, device: str) -> None:
    """Run eagerly and as a graph, and note each difference. A call that cannot be captured is a note, not a failure."""
    expected = run(call, arguments, device, captured=False)
    if expected.error is None and not any(isinstance(x, torch.Tensor) for each in expected.values for x in each):
        return  # a value on the host, such as the result of item()
    judge(tally, index, what, expected, run(call, arguments, device, captured=True))


def judge(tally: Tally, index: int, what: str, expected: Replayed, actual: Replayed) -> None:
    """Note each difference between eager mode and a graph."""

    def fail(kind: str, message: str) -> None:
        tally.fail("graph", kind, index, f"{what}: {message}")

    tally.ran["graph"] += 1
    theirs, ours = (each and first_line(each) for each in (expected.error, actual.error))
    if actual.error is not None and REFUSED in str(actual.error):
        tally.notes[f"{NOTE}{_cause(str(actual.error))}"] += 1
        return
    if expected.error is not None or actual.error is not None:
        if type(expected.error) is not type(actual.error):
            fail(
                "error" if theirs is None else "no error" if ours is None else "error type",
                f"eager: {theirs}; graph: {ours}",
            )
        return
    pairs = list(zip(expected.operands, actual.operands, strict=True))
    for time, (e, a) in enumerate(zip(expected.values, actual.values, strict=True)):
        if len(e) != len(a):
            return fail("structure", "a different number of results")
        pairs += zip(e, a, strict=True)
        for x, y in pairs:
            if isinstance(x, torch.Tensor) and not same(x, y):
                return fail("value", f"replay {time} gave {short(y)}, eager {short(x)}")


def _cause(message: str) -> str:
    """The operator that refused and its reason: ``aten::nonzero: the shape of its result depends on values ...``."""
    said = message[message.index(REFUSED) + len(REFUSED) :].strip(" :.\n")
    return re.sub(r"^(\S+) at [^:]+:\d+: ", r"\1: ", said).partition(". ")[0]


@functools.cache
def supported(device: str) -> bool:
    """Returns true if ``torch.accelerator.Graph`` captures on this device."""
    kind = torch.device(device).type
    if not hasattr(torch.accelerator, "Graph") or kind != getattr(
        torch.accelerator.current_accelerator(), "type", None
    ):
        return False
    try:
        torch.accelerator.Graph()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def check(op: Any, dtype: torch.dtype, device: str, samples: int, tally: Tally, at: At = lambda _: None) -> None:
    """`compare` for the samples of an OpInfo, functional and in place, and `check_numbers`.

    `tally` counts only the samples: not each number can be captured.
    """
    if op.name in UNINITIALIZED:
        return
    for i, sample in enumerate(opinfo.samples(op, dtype, False, samples)):
        arguments = ((sample.input, *sample.args), sample.kwargs)
        forms = {"valid": op.op, "in place": None if sample.broadcasts_input else op.get_inplace()}
        for what, function in forms.items():
            if function is not None:
                at(f"{CHECK}, sample {i}, {what}")
                compare(tally, i, what, function, arguments, device)
    numbers = Tally()
    check_numbers(op, dtype, device, numbers, at)
    tally.failures += numbers.failures


NUMBERS = (3, -1.5, 0.5 + 2j)


def with_number(value: Any, number: complex) -> Any:
    """`number` in place of a tensor or a number, or of each in a list; the value itself where there is none.

    An integer stays if `number` is one: it may be a dimension or a mode.
    """
    match value:
        case bool():
            return value
        case int():
            return value if isinstance(number, int) else number
        case float() | complex() | torch.Tensor() | [torch.Tensor(), *_]:
            return number
        case [*items] if items and all(type(x) in (int, float, complex) for x in items):
            return [with_number(x, number) for x in items]
    return value


def check_numbers(op: Any, dtype: torch.dtype, device: str, tally: Tally, at: At = lambda _: None) -> None:
    """`compare` with an integer, a float and a complex number beside the tensors: a number may promote their dtype.

    Each number takes the place of each argument after the first, and of all of them, in the functional, the in-place and
    the out= form. The samples are the first one and the first one with numbers.
    """
    made = [each for each in opinfo.samples(op, dtype, False, 6) if isinstance(each.input, (torch.Tensor, list))]
    numeric = [
        each for each in made if any(type(x) in (int, float, complex) for x in (*each.args, *each.kwargs.values()))
    ]
    for i, sample in enumerate({id(each): each for each in (*made[:1], *numeric[:1])}.values()):
        given = dict(enumerate(sample.args)) | sample.kwargs
        choices = [*([place] for place in given), *([list(given)] if len(given) > 1 else [])]
        for places, number in itertools.product(choices, NUMBERS):
            changed = dict(given)
            for k, place in enumerate(places):
                changed[place] = with_number(given[place], number + 4 * k)  # a range, for clamp
            if all(changed[place] is given[place] for place in places):
                continue
            args = [sample.input, *(changed[k] for k in range(len(sample.args)))]
            kwargs = {name: changed[name] for name in sample.kwargs}
            what = f"{number} as argument {', '.join(map(str, places))}"
            forms = {what: (op.op, {}), f"{what}, in place": (op.get_inplace(), {})}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = run_once(lambda _, args=args, kwargs=kwargs: op.op(*args, **kwargs), "cpu").value
            if op.supports_out and isinstance(result, torch.Tensor) and "out" not in kwargs:
                forms[f"{what}, out="] = op.op, {"out": torch.zeros_like(result)}
            for form, (function, more) in forms.items():
                if function is not None:
                    at(f"{CHECK}, {form}")
                    compare(tally, i, form, function, (args, kwargs | more), device)


def check_module(info: Any, dtype: torch.dtype, device: str, tally: Tally, at: At = lambda _: None) -> None:
    """`compare` for forward and backward of a module in training mode, with its parameters and buffers as arguments."""
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=True)
    for i, sample in enumerate(inputs):
        if sample.forward_input is None:
            continue
        at(f"{CHECK}, sample {i}")
        torch.manual_seed(0)
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(dtype)
        if any(map(torch.nn.parameter.is_lazy, module.parameters())):
            continue  # it has no parameters before its first call
        module.flatten_parameters = lambda: None  # of recurrent modules; it asks for the addresses of their parameters
        parameters = {name: x.detach() for name, x in module.named_parameters()}
        buffers = {name: x.detach() for name, x in module.named_buffers()}

        def step(parameters: Any, buffers: Any, args: Any, kwargs: Any, module: Any = module) -> list[Any]:
            leaves = {name: x.requires_grad_() for name, x in parameters.items()}
            out = torch.func.functional_call(module, {**leaves, **buffers}, args, kwargs)
            wanted = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
            found = [x.detach() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            if not wanted or not leaves:
                return found
            total = sum(x.sum() if not x.is_complex() else x.abs().sum() for x in wanted)
            return [*found, *torch.autograd.grad(total, list(leaves.values()), allow_unused=True)]

        arguments = (parameters, buffers, sample.forward_input.args, sample.forward_input.kwargs)
        compare(tally, i, "forward and backward", step, (arguments, {}), device)


# Optimizers whose step needs values on the host, and why.
HOST_STEPS = {
    "Adafactor": "the step count is on the host",
    "Adagrad": "the step count is on the host",
    "LBFGS": "the step reads losses on the host",
    "SparseAdam": "it takes sparse gradients",
}


def _train(info: Any, options: dict[str, Any], dtype: torch.dtype, device: str, captured: bool) -> Replayed:
    """A training step in eager mode, and then twice: in eager mode, or captured and replayed."""
    torch.manual_seed(0)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items() if k != "params"}
    for name in ("betas", "etas"):
        if isinstance(options.get(name), tuple):
            options[name] = tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in options[name])
    layers = torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    model = torch.nn.Sequential(*layers).to(device, dtype)
    matrices = info.optim_cls.__name__ == "Muon"  # which takes them only
    parameters = [p for p in model.parameters() if p.dim() == 2 or not matrices]
    batches = [torch.randn(8, 5, dtype=dtype) for _ in range(3)]
    out = Replayed([], list(model.parameters()))

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    try:
        optimizer = info.optim_cls(parameters, **options)
        x = batches[0].to(device)
        stream = torch.Stream(device=device)
        stream.wait_stream(torch.accelerator.current_stream(x.device.index))
        with stream:
            loss = step()
        torch.accelerator.current_stream(x.device.index).wait_stream(stream)
        graph = torch.accelerator.Graph() if captured else None
        if graph is not None:
            with stream, graph:
                loss = step()
        for batch in batches[1:]:
            x.copy_(batch)
            if graph is not None:
                graph.replay()
            else:
                loss = step()
            out.values.append(_copies([loss, *out.operands]))
    except Exception as error:
        out.error = error
    return out


def check_optimizer(
    info: Any,
    flags: dict[str, bool],
    dtype: torch.dtype,
    device: str,
    tally: Tally,
    at: At = lambda _: None,
) -> None:
    """Run `_train` in both ways with each sample of options, and with ``capturable=True`` if the optimizer has it.

    Args:
        flags: of the implementation, as ``{"foreach": True}``.
    """
    if info.optim_cls.__name__ in HOST_STEPS:
        return
    for i, sample in enumerate(info.optim_inputs_func(device="cpu")):
        options = {**sample.kwargs, **flags}
        if info.has_capturable_arg:
            options["capturable"] = True
        values = (x for option in options.values() for x in (option if isinstance(option, tuple) else (option,)))
        if not info.has_capturable_arg and any(isinstance(x, torch.Tensor) for x in values):
            continue  # the host reads it in the step
        if options.get("differentiable") and (info.has_capturable_arg or any(flags.values())):
            continue
        if flags.get("fused") and isinstance(options.get("lr"), torch.Tensor) and options["lr"].dim():
            continue
        at(f"{CHECK}, sample {i}")
        expected, actual = (_train(info, options, dtype, device, captured) for captured in (False, True))
        judge(tally, i, f"{sample.desc} {flags}", expected, actual)
