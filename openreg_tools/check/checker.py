"""The checker of custom operators: `check(op, samples)` finds what torch.library.opcheck misses.

This file resolves the operator and collects samples. `run` runs the checks in `checks`, each on a `Case`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools import backends
from openreg_tools.check.case import Operator, name_of
from openreg_tools.check.checks import CHECKS, SLOW
from openreg_tools.check.report import Report
from openreg_tools.check.run import Checks, in_children, in_process
from openreg_tools.core import child, from_schema, place
from openreg_tools.core.attempts import Attempt, attempts
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.device import usable
from openreg_tools.core.move import Move
from openreg_tools.core.options import Wrong, split, unknown
from openreg_tools.core.samples import Sample, sample_of

# ---- the operator ----


def operator(op: Any) -> Operator:
    """The operator that `op` stands for.

    Args:
        op: an `OpOverload`, an `OpOverloadPacket`, a name such as ``"mylib::foo"`` or ``"mylib::foo.out"``, what
            `torch.library.custom_op` or `triton_op` returned, or a function whose code names one
            ``torch.ops.mylib.foo``.
    Raises:
        ValueError: there is no such operator, or the name is ambiguous.
    """
    if isinstance(op, Operator):
        return op
    if isinstance(op, torch._ops.OpOverloadPacket):
        has_kernel = torch._C._dispatch_has_kernel
        overloads = [name for name in op.overloads() if has_kernel(getattr(op, name).name())]  # TorchScript has others
        if "default" in overloads or len(overloads) == 1:
            return getattr(op, "default" if "default" in overloads else overloads[0])
        raise ValueError(f"{op} has no default overload; name one of {', '.join(overloads)}, as in {op}.{overloads[0]}")
    if isinstance(op, torch._library.custom_ops.CustomOpDef):
        return op._opoverload
    if isinstance(op, str):
        namespace, _, rest = op.removeprefix("torch.ops.").replace("::", ".").partition(".")
        name, _, overload = rest.partition(".")
        if not name:
            raise ValueError(f"expected an operator's name such as mylib::foo, but got {op!r}")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:
            known = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith(f"{namespace}::")]
            near = unknown("operator", f"{namespace}::{name}", set(known), "")
            raise ValueError(f"{near}{'' if near.endswith('?') else '.'} Import the module that defines it first")
        if overload and overload not in packet.overloads():
            raise ValueError(f"{namespace}::{name} has no overload {overload}, only {', '.join(packet.overloads())}")
        return getattr(packet, overload) if overload else operator(packet)
    if callable(op) and hasattr(op, "__code__"):
        named = _named_operators(op)
        if len(named) == 1:
            return operator(named.pop())
        found = f"names {len(named)}: {', '.join(sorted(named))}" if named else "names none"
        raise ValueError(
            f"{op.__module__}.{op.__qualname__} is a function, and its code {found}; a function stands for an operator "
            "when its code names one as torch.ops.mylib.foo. Give the operator instead, as mylib::foo"
        )
    raise ValueError(f"expected an operator, its name, or what custom_op returned, but got {type(op).__name__} {op!r}")


def _named_operators(function: Any) -> set[str]:
    """The operators that a function's code reads as ``torch.ops.NAMESPACE.NAME``, or that it has in a closure."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    named = {name_of(value) for value in cells if isinstance(value, Operator)}
    chain: list[str] = []
    for instruction in dis.get_instructions(function.__code__):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(instruction.argval)
            if chain[:2] == ["torch", "ops"] and len(chain) == 4:
                named.add("::".join(chain[2:]))
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST"):
            chain = [instruction.argval]
    return named


def definition(op: Operator) -> dict[str, str]:
    """The file and line of each part of an operator in its library's source, as far as Python or PyTorch knows them."""
    name = op._schema.name
    if defined := torch._library.custom_ops.OPDEFS.get(name):
        parts = {"kernel": defined._init_fn, "fake kernel": defined._abstract_fn, "backward": defined._backward_fn}
        codes = {
            part: getattr(inspect.unwrap(function), "__code__", None) for part, function in parts.items() if function
        }
        return {part: f"{code.co_filename}:{code.co_firstlineno}" for part, code in codes.items() if code}
    entry = torch._library.simple_registry.singleton.find(name)
    registered = re.search("^debug: registered at (.*)$", torch._C._dispatch_dump(op.name()), re.M)
    found = {
        "kernel": registered[1] if registered else "",
        "fake kernel": entry.fake_impl.kernel.source if entry.fake_impl.kernel else "",
    }
    return {part: where for part, where in found.items() if where and not where.startswith(place.libraries())}


# ---- samples ----

_CALLS = (1, 3, 2, 5, 4, 0, *range(6, 300))  # of from_schema, in order: dimensions of different size first


def _registered(op: Operator) -> Callable[[str, torch.dtype], Iterable[Any]] | None:
    """The samples that the package of an operator registers."""
    name = op._schema.name
    return backends.of_operator(name).samples(name) if op._overloadname == "default" else None


def derived(op: Operator, device: str, dtype: torch.dtype, most: int = 3) -> list[Sample]:
    """Samples generated from the schema that the operator accepts, or that end its process, about which `runs` fails.

    Raises:
        ValueError: the operator accepts none.
    """

    def sample(k: int) -> Sample:
        """Call k of the operator, on the device."""
        made, move = from_schema.call(op.name(), k), Move(device)

        def moved(x: Any) -> Any:
            return move(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x)

        args, kwargs = tree_map(moved, (made.args, made.kwargs))
        return Sample(*args, **kwargs)

    def attempt(i: int) -> None:
        made = sample(_CALLS[i])
        with torch.no_grad(), contextlib.suppress(SystemExit, GeneratorExit):
            op(*made.args, **made.kwargs)

    def here() -> Iterator[tuple[int, Attempt]]:
        for i in range(len(_CALLS)):
            try:
                attempt(i)
            except Exception as error:
                yield i, Attempt("raised", all_lines(error))
            else:
                yield i, Attempt("returned")

    found: dict[str, Sample] = {}
    refusal = ""
    # A child, so that this process stays one where the operator has not run. It cannot use every device.
    forks = torch.device(device).type == "cpu" and hasattr(os, "fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, outcome in attempts(len(_CALLS), attempt, seconds=60) if forks else here():
            refusal = outcome.message
            if outcome.kind != "raised":
                made = sample(_CALLS[i])
                found.setdefault(repr(made), made)
            if len(found) == most:
                break
    if not found:
        raise ValueError(
            f"{name_of(op)}: it accepts none of the inputs that were generated from its schema (the last error was: {refusal}); "
            "give sample inputs"
        )
    return list(found.values())


# ---- the run ----


def check(
    op: Any,
    sample_inputs: Iterable[Any] | Callable[[str, torch.dtype], Iterable[Any]] | None = None,
    device: str | torch.device | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    reference: Callable[..., Any] | None = None,
    intended_gradient: Callable[..., Any] | None = None,
    only: str | Collection[str] = (),
    skip: str | Collection[str] = (),
    known: Mapping[str, str] | None = None,
    timeout: float = 180,
    progress: Callable[[str], None] = lambda where: None,
) -> Report:
    """Run every check on every sample.

    Args:
        op: an operator of any library: see `operator`.
        sample_inputs: argument tuples, `Sample`s or OpInfo's SampleInputs, or a function of (device, dtype) that
            returns them. By default, those that the operator's package registers, or else generated from the schema.
        device: where to run; the samples are copied there. By default, the device of the first sample's tensors.
        dtype: passed to a function of samples, and used for generated ones.
        reference: a plain function of the same arguments, called with copies on the CPU. By default, on devices other
            than the CPU, the operator's own CPU kernel.
        intended_gradient: a differentiable function of the same arguments that has the gradient that the operator should
            have, if that is not its derivative: ``lambda x: x`` for rounding with a straight-through gradient.
        only, skip: names of checks, in a list or in a text with spaces or commas between them. ``only="fast"`` means the
            checks for an editor, which take a second.
        known: checks that this operator is known to fail, each with the cause. They count as passed, and a note
            names one that fails for no sample. By default, those that the operator's package lists.
        timeout: how many seconds one check of one sample may take.
        progress: called with what runs next.
    Returns:
        The report; `report.raise_if_failed()` raises an AssertionError.
    Raises:
        ValueError: no such operator, check, sample or device.

    Derivatives are checked for a sample's tensors that require a gradient, or for every floating-point tensor if none
    does. Global state that a check changes is restored.

    The checks run in a forked child process, unless this process has used an accelerator that the samples are on: a crash
    or a hang fails one check. What the operator changes in its process, such as a list of its calls, changes there alone.

    Example:
        >>> from openreg_tools.check import check
        >>> x = torch.ones(2, 3)
        >>> report = check("openreg::swiglu", [(x, x)], only=["schema", "backward"])
        >>> report.passed
        True
    """
    if isinstance(sample_inputs, Iterable):
        sample_inputs = list(sample_inputs)
    prepared = functools.partial(
        prepare, op, sample_inputs, device, dtype=dtype, reference=reference, intended_gradient=intended_gradient, only=only,
        skip=skip, known=known,
    )  # fmt: skip
    if child.available(str(device or _home(operator(op), sample_inputs))):
        return in_children(prepared, timeout, progress)
    return in_process(prepared(), timeout, progress)


def prepare(
    op: Any,
    sample_inputs: Any,
    device: str | torch.device | None,
    *,
    dtype: torch.dtype,
    reference: Callable[..., Any] | None,
    only: str | Collection[str],
    skip: str | Collection[str],
    known: Mapping[str, str] | None = None,
    intended_gradient: Callable[..., Any] | None = None,
) -> Checks:
    """Resolve the operator and make its samples. The arguments are those of `check`."""
    op = operator(op)
    only, skip = (split([names] if isinstance(names, str) else names) for names in (only, skip))
    only, skip = ([name.replace("-", "_") for name in names] for names in (only, skip))
    if "fast" in only:
        only = [*(name for name in CHECKS if name not in SLOW), *(name for name in only if name != "fast")]
    backend = backends.of_operator(name_of(op))
    known = backend.known(name_of(op)) if known is None else known
    for name in (*only, *skip, *known):
        if name not in CHECKS:
            raise ValueError(unknown("check", name, [*CHECKS, "fast"]))
    chosen = [name for name in CHECKS if (not only or name in only) and name not in skip]
    for what, given in (("reference", reference), ("intended_gradient", intended_gradient)):
        if given is not None and not callable(given):
            raise ValueError(f"expected {what} to be a function, but got {type(given).__name__} {given!r}")
    if device is not None:
        try:
            usable(str(device))
        except Wrong as error:
            raise ValueError(str(error)) from None
    target, notes = str(device) if device is not None else _home(op, sample_inputs), []
    if sample_inputs is None:
        if registered := _registered(op):
            sample_inputs = list(registered(target, dtype))
        else:
            sample_inputs = derived(op, target, dtype)
            notes.append("These inputs were generated from the schema; your own sample inputs would test more.")
    elif callable(sample_inputs):
        sample_inputs = sample_inputs(target, dtype)
    if not isinstance(sample_inputs, Iterable):
        raise ValueError(
            "expected sample_inputs to be a list of argument tuples, or a function of (device, dtype) that returns them, "
            f"but got {type(sample_inputs).__name__} {sample_inputs!r}"
        )
    samples = [sample_of(value) for value in sample_inputs]
    if not samples:
        raise ValueError(f"{name_of(op)}: sample_inputs is empty; give at least one tuple of arguments")
    about = {name: CHECKS[name].__doc__.strip().splitlines()[0] for name in chosen}
    shown = [repr(sample) for sample in samples]
    report = Report(
        name_of(op), str(op._schema), target, torch.__version__, shown, about, notes=notes, definition=definition(op)
    )
    return Checks(report, op, samples, reference, dict(known), intended_gradient)


def _home(op: Operator, sample_inputs: Any) -> str:
    """The device of the samples; without any, the package's, else one where the operator has a kernel."""
    if callable(sample_inputs):
        return "cpu"
    if isinstance(sample_inputs, (list, tuple)):
        samples = [sample_of(value) for value in sample_inputs]
        tensors = (x for s in samples for x in tree_leaves((s.args, s.kwargs)) if isinstance(x, Tensor))
        return next((str(x.device) for x in tensors), "cpu")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if _registered(op):
        return backends.of_operator(op._schema.name).device
    elsewhere = has(op.name(), "PrivateUse1") and not has(op.name(), "CPU")
    return torch._C._get_privateuse1_backend_name() if elsewhere else "cpu"
