"""The checker of custom operators: `check(op, samples)` finds what torch.library.opcheck misses.

This file resolves the operator, collects samples, and runs the checks in `checks`, each on a `Case`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import itertools
import logging
import os
import re
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools import backends, dispatch
from openreg_tools.check import run
from openreg_tools.check.case import SEED, Case, Operator, Outcome, last_line, name_of
from openreg_tools.check.checks import ANY_LAYOUT, CHECKS, SLOW
from openreg_tools.check.checks.derivatives import derivative
from openreg_tools.check.report import Report, Result
from openreg_tools.core import child
from openreg_tools.core.options import Wrong, unknown
from openreg_tools.samples import Sample, sample_of

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
        overloads = [name for name in op.overloads() if _dispatched(getattr(op, name))]  # TorchScript has others
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
            known = sorted({s.name.split("::")[1] for s in _schemas() if s.name.startswith(namespace + "::")})
            near = (
                f"; {namespace} has {', '.join(known[:12])}"
                if known
                else f"; the namespace {namespace} has no operators"
            )
            raise ValueError(f"there is no operator {namespace}::{name}{near}. Import the module that defines it first")
        if overload and overload not in packet.overloads():
            raise ValueError(f"{namespace}::{name} has no overload {overload}, only {', '.join(packet.overloads())}")
        return getattr(packet, overload) if overload else operator(packet)
    if callable(op) and hasattr(op, "__code__"):
        named = _named_operators(op.__code__)
        if len(named) == 1:
            return operator(named.pop())
        found = f"names {len(named)}: {', '.join(sorted(named))}" if named else "names none"
        raise ValueError(
            f"{op.__module__}.{op.__qualname__} is a function, and its code {found}; a function stands for an operator "
            "when its code names one as torch.ops.mylib.foo. Give the operator instead, as mylib::foo"
        )
    raise ValueError(f"expected an operator, its name, or what custom_op returned, but got {type(op).__name__} {op!r}")


def _dispatched(op: Operator) -> bool:
    return torch._C._dispatch_has_kernel(op.name())


def _schemas() -> list[Any]:
    return torch._C._jit_get_all_schemas()


def _named_operators(code: Any) -> set[str]:
    """The operators that a function's code reads as ``torch.ops.NAMESPACE.NAME``."""
    named: set[str] = set()
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(instruction.argval)
            if chain[:2] == ["torch", "ops"] and len(chain) == 4:
                named.add("::".join(chain[2:]))
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST"):
            chain = [instruction.argval]
    return named


# ---- samples ----


def _registered(op: Operator) -> Callable[[str, torch.dtype], Iterable[Any]] | None:
    """The samples that the package of an operator registers."""
    name = op._schema.name
    return backends.of_operator(name).samples(name) if op._overloadname == "default" else None


# Shapes to try for the tensor arguments, by position; the last one applies to all that follow.
SHAPES = (
    [(4, 6)],
    [(4, 6), (6,)],
    [(4, 6), (6, 4)],
    [(4, 6), (4, 6), (6,)],
    [(4, 6), (6,), (6,)],
    [(2, 3, 4, 4)],
    [(2, 3, 4, 4), (3,)],
    [(3, 4, 5)],
    [(6,)],
    [(4,), (4, 6)],
    [(4, 4)],
)


def derived(op: Operator, device: str, dtype: torch.dtype, most: int = 3) -> list[Sample]:
    """Samples generated from the schema that the operator accepts.

    Raises:
        ValueError: the operator accepts none.
    """
    found: list[Sample] = []
    refusal = "its schema has arguments of unknown types"
    seen = set()
    for shapes in SHAPES:
        numbers = torch.Generator().manual_seed(SEED)
        position = itertools.count()
        try:
            args, kwargs = [], {}
            for argument in op._schema.arguments:
                value = _made_up(argument, shapes, position, numbers, device, dtype)
                if argument.kwarg_only:
                    kwargs[argument.name] = value
                else:
                    args.append(value)
            sample = Sample(*args, **kwargs)
            if repr(sample) in seen:
                continue
            seen.add(repr(sample))
            _try(op, sample, device)
            found.append(sample)
        except Exception as error:
            refusal = str(error) if isinstance(error, _Refused) else last_line(error)
        if len(found) == most:
            break
    if not found:
        raise ValueError(
            f"{name_of(op)}: it accepts none of the inputs that were generated from its schema (the last error was: {refusal}); "
            "give sample inputs"
        )
    return found


class _Refused(Exception):  # noqa: N818 -- the message of another error, in a child
    """The operator refuses a sample."""


def _try(op: Operator, sample: Sample, device: str) -> None:
    """Call the operator with a copy; in a forked child on the CPU, so that this process stays one where it has not run.

    Raises:
        Exception: the operator refuses the sample. The check `runs` reports one that ends the process or raises SystemExit.
    """

    def call() -> None:
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (sample.args, sample.kwargs))
        with warnings.catch_warnings(), torch.no_grad(), contextlib.suppress(SystemExit, GeneratorExit):
            warnings.simplefilter("ignore")
            op(*args, **kwargs)

    def said(answer: Callable[[Any], None]) -> None:
        try:
            call()
        except Exception as error:
            answer(last_line(error))

    if torch.device(device).type != "cpu" or not hasattr(os, "fork"):
        return call()
    with contextlib.suppress(child.Ended):
        for refusal in child.answers(said, 60):
            raise _Refused(refusal)


def _made_up(argument: Any, shapes: Any, position: Any, numbers: Any, device: str, dtype: torch.dtype) -> Any:
    def tensor() -> Tensor:
        shape = shapes[min(next(position), len(shapes) - 1)]
        return (torch.rand(shape, generator=numbers, dtype=torch.float64) + 0.25).to(dtype).to(device)

    kind = str(argument.type)
    if kind == "Tensor":
        return tensor()
    if argument.has_default_value():
        return argument.default_value
    if kind.startswith("Optional"):
        return tensor() if kind == "Optional[Tensor]" else None
    plain = {"int": 1, "SymInt": 1, "float": 0.5, "number": 1.5, "Scalar": 1.5, "bool": False, "str": ""}
    if kind in plain:
        return plain[kind]
    if kind == "List[Tensor]":
        return [tensor(), tensor()]
    lists = {"List[int]": [0], "List[SymInt]": [0], "List[float]": [0.5], "List[bool]": [False]}
    if kind in lists:
        return lists[kind]
    if kind in ("Device", "ScalarType", "Layout"):
        return {"Device": torch.device(device), "ScalarType": dtype, "Layout": torch.strided}[kind]
    raise ValueError(f"no value is known for {argument.name}, of type {kind}")


# ---- the run ----

# PyTorch's errors for what the package of a device does not have yet, and what that is.
_LACKING = {
    r"Could not run '(aten::[\w.]+)' with arguments from the '(?!CPU|Meta|Sparse|Quantized|Nested)\w+' backend": "{}",
    r"module 'torch\.\w+' has no attribute '(\w*rng_state|manual_seed\w*|synchronize|current_\w+|device_count)'": "{}()",
    r"register (PrivateUse1HooksInterface)": "{}",
    r"use AMP with the `\w+` backend, but .*(get_amp_supported_dtype)": "{}()",
}


def lacking(sentence: str) -> str:
    """What the package of a device lacks, according to an error of PyTorch; "" if that is not what it says."""
    found = ((re.search(pattern, sentence), text) for pattern, text in _LACKING.items())
    return next((text.format(match[1]) for match, text in found if match), "")


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
        only, skip: names of checks, or one name. ``only="fast"`` means the checks for an editor, which take a second.
        known: checks that this operator is known to fail, each with the cause. They count as passed; one that no longer
            fails for any sample fails the report. By default, those that the operator's package lists.
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
    """
    if isinstance(sample_inputs, Iterable):
        sample_inputs = list(sample_inputs)
    prepared = functools.partial(
        prepare, op, sample_inputs, device, dtype=dtype, reference=reference, intended_gradient=intended_gradient, only=only,
        skip=skip, known=known,
    )  # fmt: skip
    if child.available(str(device or _home(operator(op), sample_inputs))):
        return run.in_children(prepared, timeout, progress)
    return run.in_process(prepared(), timeout, progress)


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
    started: Callable[[Report], None] = lambda report: None,
) -> Checks:
    """Resolve the operator and make its samples. The arguments are those of `check`.

    Args:
        started: called with the report before the samples are made, which may run the operator.
    """
    op = operator(op)
    only, skip = ([names] if isinstance(names, str) else names for names in (only, skip))
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
    target = str(device) if device is not None else None
    if target:
        try:
            dispatch.usable(target)
        except Wrong as error:
            raise ValueError(str(error)) from None
    report = Report(
        operator=name_of(op),
        schema=str(op._schema),
        device=target or "",
        torch=torch.__version__,
        samples=[],
        about={name: CHECKS[name].__doc__.strip().splitlines()[0] for name in chosen},
    )
    started(report)
    target = target or _home(op, sample_inputs)
    if sample_inputs is None:
        if registered := _registered(op):
            sample_inputs = list(registered(target, dtype))
        else:
            sample_inputs = derived(op, target, dtype)
            report.notes.append("These inputs were generated from the schema; your own sample inputs would test more.")
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
    report.device, report.samples = target, [repr(sample) for sample in samples]
    may_pass = list(backend.may_pass(name_of(op)))
    return Checks(report, op, samples, reference, dict(known), may_pass, intended_gradient)


@dataclasses.dataclass
class Checks:
    """The checks of one operator, to run one by one."""

    report: Report  # without results
    op: Operator
    samples: list[Sample]
    reference: Callable[..., Any] | None
    known: dict[str, str]
    may_pass: list[str]  # of `known`
    intended_gradient: Callable[..., Any] | None = None
    trying: Callable[[str], None] = lambda inputs: None  # called with the inputs that a check tries
    command: tuple[str, ...] = ()  # that runs them, for Python; empty in a program
    _case: tuple[int, Case, str] | None = None  # the sample's number, and why the operator refuses it

    def result(self, i: int, name: str) -> Result:
        """Run one check on one sample."""
        start = time.perf_counter()
        with _interrupts() as interrupts:
            case, refusal = (self._new_case(i), "") if name in run.ALONE else self._of_sample(i)
            if refusal and name != "runs":
                outcome = Outcome("skip", f"{case.name} refuses this sample")
            elif name not in ANY_LAYOUT and any(x.layout != torch.strided for x in case.leaves):
                outcome = Outcome("skip", "it applies to strided tensors only")
            else:
                with preserved(self.report.device):
                    outcome = _run_check(CHECKS[name], case)
                if outcome.status == "fail" and name != "runs" and (part := lacking(outcome.sentence)):
                    outcome = Outcome("skip", f"the device lacks {part}")
            if interrupts:
                raise KeyboardInterrupt
        seconds = round(time.perf_counter() - start, 4)
        return Result(name, i, outcome.status, outcome.sentence, outcome.remedy, seconds)

    def rehearse(self, i: int, name: str) -> None:
        """Run one check on one sample without gradients, in a child that cannot have them."""
        case, refusal = self._of_sample(i)
        if not refusal:
            case.derivative = Outcome("skip", "")
            _run_check(CHECKS[name], case)

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        """Restores what the checks change in the process."""
        return preserved(self.report.device)

    def _of_sample(self, i: int) -> tuple[Case, str]:
        if self._case is None or self._case[0] != i:
            case = self._new_case(i)
            self._case = i, case, _refusal(case)
        return self._case[1:]

    def _new_case(self, i: int) -> Case:
        case = Case(self.op, self.samples[i], self.report.device, self.reference, derivative, self.intended_gradient)
        case.trying = self.trying
        case.index, case.others, case.command = i, (*self.samples[:i], *self.samples[i + 1 :]), self.command
        return case


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The SIGINTs that arrive: an operator may raise KeyboardInterrupt itself, or swallow that of the user's Ctrl-C."""
    arrived: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield arrived
        return

    def handler(number: int, frame: Any) -> None:
        arrived.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGINT, before)


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


# What an operator may raise. SystemExit and KeyboardInterrupt would otherwise end the tool, which then reports nothing.
_RAISED = (Exception, SystemExit, KeyboardInterrupt, GeneratorExit)


def _refusal(case: Case) -> str:
    try:
        case.expected  # noqa: B018 -- it runs the operator
    except _RAISED as error:
        return last_line(error)
    return ""


def _run_check(function: Callable[[Case], str | None], case: Case) -> Outcome:
    try:
        return Outcome("pass", function(case) or "")
    except Outcome as outcome:
        return outcome
    except _RAISED as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if "/torch/" not in f.filename), "")
        return Outcome(
            "fail",
            f"{case.name}: the check {function.__name__} ended in {last_line(error)}"
            + (f" ({where})" if where else ""),
            "the operator raised where its result was expected; see the section of this check for what it calls",
        )


@contextlib.contextmanager
def preserved(device: str) -> Iterator[None]:
    """Restores process-wide state that a check, or a broken operator, changes."""
    kind = torch.device(device).type
    functorch, fill = torch._C._functorch, torch.utils.deterministic
    states: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (lambda: fill.fill_uninitialized_memory, lambda on: setattr(fill, "fill_uninitialized_memory", on)),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch._C._get_autograd_fallback_mode, torch._C._set_autograd_fallback_mode),
        (functorch._is_vmap_fallback_enabled, functorch._set_vmap_fallback_enabled),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ]
    states += [state for backend in backends.registered() for state in backend.state()]
    for each in sorted({kind, "cpu"}):
        if torch.amp.is_autocast_available(each):
            states += [
                (
                    functools.partial(torch.is_autocast_enabled, each),
                    functools.partial(torch.set_autocast_enabled, each),
                ),
                (functools.partial(torch.get_autocast_dtype, each), functools.partial(torch.set_autocast_dtype, each)),
            ]
    before = [get() for get, _ in states]
    accelerator = torch.accelerator.current_accelerator()  # torch.manual_seed seeds it too
    kinds = {kind, *(each.device for each in backends.registered()), accelerator.type if accelerator else kind}
    disabled = logging.root.manager.disable
    try:
        logging.disable()  # compilers log every error that a check expects
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for each in kinds - {"cpu", "meta"}:
                module = getattr(torch, each, None)
                numbers = hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")
                if numbers and not getattr(module, "_is_in_bad_fork", bool)():
                    stack.enter_context(torch.random.fork_rng(range(module.device_count()), device_type=each))
            yield
    finally:
        logging.disable(disabled)
        functorch._set_vmap_fallback_warning_enabled(True)  # the default: PyTorch has no getter for it
        for (get, put), value in zip(states, before, strict=True):
            if get() != value:
                put(value)
