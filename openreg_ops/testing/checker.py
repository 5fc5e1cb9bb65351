"""The checker of custom operators: `check(op, samples)` finds what torch.library.opcheck misses.

Here are the operator, its samples, and the run; the checks themselves are in `checks`, one function each.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from openreg_ops.testing.check_report import Report, Result
from openreg_ops.tools import dispatch
from openreg_ops.tools.forms import Wrong

Operator = torch._ops.OpOverload
SEED = 4321


class Sample:
    """The arguments of one call: ``Sample(x, weight, eps=1e-6)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __repr__(self) -> str:
        shown = [_shown(value) for value in self.args]
        return ", ".join([*shown, *(f"{name}={_shown(value)}" for name, value in self.kwargs.items())])


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        strides = "" if value.layout != torch.strided or value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{dtype}{list(value.shape)}{strides}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


# ---- the operator ----


def operator(op: Any) -> Operator:
    """The operator that `op` stands for.

    Args:
        op: an `OpOverload`, an `OpOverloadPacket`, a name such as ``"mylib::foo"`` or ``"mylib::foo.out"``, what
            `torch.library.custom_op` or `triton_op` returned, or a function whose code names one
            ``torch.ops.mylib.foo``.
    Raises:
        ValueError: there is no such operator, or more than one is meant.
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
            near = f"; {namespace} has {', '.join(known[:12])}" if known else f"; no operator is in {namespace} at all"
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


def name_of(op: Operator) -> str:
    """``mylib::foo``, or ``mylib::foo.out`` for another overload than the default one."""
    return op.name().removesuffix(".default")


# ---- samples ----


def sample_of(value: Any) -> Sample:
    """A `Sample` from what a caller gave: that, an argument tuple, or an OpInfo SampleInput."""
    if isinstance(value, Sample):
        return value
    if hasattr(value, "input") and hasattr(value, "args") and hasattr(value, "kwargs"):
        return Sample(value.input, *value.args, **value.kwargs)
    if hasattr(value, "args") and hasattr(value, "kwargs"):
        return Sample(*value.args, **value.kwargs)
    if isinstance(value, (tuple, list)):
        return Sample(*value)
    if isinstance(value, Tensor):
        return Sample(value)
    raise ValueError(f"expected a sample to be a tuple of arguments or a Sample, but got {type(value).__name__}")


def _registered(op: Operator) -> Callable[[str, torch.dtype], Iterable[Any]] | None:
    """The samples that meta/ registers for an operator of ours."""
    from openreg_ops.meta.op import SAMPLES

    namespace, name = op._schema.name.split("::")
    return SAMPLES.get(name) if namespace == "openreg" and op._overloadname == "default" else None


# Shapes of the tensor arguments that are tried, by position; the last stands for all that follow.
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
    """Samples made up from the schema that the operator accepts.

    Raises:
        ValueError: it accepts none.
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
            copy = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                op(*copy[0], **copy[1])
            found.append(sample)
        except Exception as error:
            refusal = last_line(error)
        if len(found) == most:
            break
    if not found:
        raise ValueError(
            f"{name_of(op)}: no inputs that were made up from its schema are accepted (the last error was: {refusal}); "
            "give sample inputs"
        )
    return found


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


# ---- one operator and one sample ----


class Outcome(Exception):  # noqa: N818 -- it ends a check; only some of them are errors
    """How a check ends that has something to say."""

    def __init__(self, status: str, sentence: str, remedy: str = "") -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.remedy = status, sentence, remedy


def last_line(error: BaseException) -> str:
    """``Type: message`` of an exception, in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__


class Case:
    """One operator with one sample, and fresh copies of its arguments as often as a check wants them."""

    def __init__(self, op: Operator, sample: Sample, device: str, reference: Callable[..., Any] | None) -> None:
        self.op, self.sample, self.device, self.reference = op, sample, torch.device(device), reference
        self.name = name_of(op)
        self.schema = op._schema
        self.leaves = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
        wanted = [x.requires_grad for x in self.leaves]
        self.wanted = [
            differentiable(x) and (flag or not any(wanted)) for x, flag in zip(self.leaves, wanted, strict=True)
        ]
        self.seeded = torch.Tag.nondeterministic_seeded in op.tags
        self.mutable = self.schema.is_mutable
        self._source()

    def _source(self) -> None:
        """`names`, and the text of a function of the tensors alone; see `function`."""
        position, constants = itertools.count(), {}
        self.names: list[str] = []
        written: list[str] = []

        def text(value: Any, name: str, writes: bool) -> str:
            if isinstance(value, Tensor):
                self.names.append(name)
                tensor = f"t{next(position)}"
                if writes:
                    written.append(tensor)
                return tensor
            if isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in tree_leaves(value)):
                return f"[{', '.join(text(x, f'{name}[{i}]', writes) for i, x in enumerate(value))}]"
            if (
                value is None
                or isinstance(value, (bool, int, float, str))
                and repr(value) not in ("inf", "-inf", "nan")
            ):
                return repr(value)
            constants[f"c{len(constants)}"] = value
            return f"c{len(constants) - 1}"

        arguments = {argument.name: argument for argument in self.schema.arguments}
        positional = [argument for argument in self.schema.arguments if not argument.kwarg_only]
        pieces = []
        for argument, value in zip(positional, self.sample.args, strict=False):
            pieces.append(text(value, argument.name, argument.is_write))
        for name, value in self.sample.kwargs.items():
            pieces.append(f"{name}={text(value, name, name in arguments and arguments[name].is_write)}")
        returns = [str(each.type) for each in self.schema.returns]
        one = len(returns) == 1
        outs = [
            f"*{'out' if one else f'out[{i}]'}" if kind.startswith("List") else ("out" if one else f"out[{i}]")
            for i, kind in enumerate(returns)
            if "Tensor" in kind
        ]
        tensors = [f"t{i}" for i in range(len(self.names))]
        self.call_text = f"op({', '.join(pieces)})"
        self.text = f"def function({', '.join(tensors)}):\n" + "".join(f"    {t} = {t}.clone()\n" for t in written)
        self.text += f"    out = {self.call_text}\n    return ({''.join(f'{out}, ' for out in [*outs, *written])})\n"
        self.raw_text = f"def function({', '.join(tensors)}):\n    out = {self.call_text}\n"
        self.raw_text += f"    return ({''.join(f'{out}, ' for out in outs)})\n"
        more = ["out.contiguous()", "torch.zeros(out.shape, dtype=out.dtype, device=out.device)"]
        self.program_text = self.text.replace("    return ", "    outs = ")
        self.program_text += f"    return (*outs, {', '.join(f'*[{each} for out in outs]' for each in more)})\n"
        self.constants = constants
        self.written = [int(t[1:]) for t in written]

    def function(self, op: Any = None, raw: bool = False, program: bool = False) -> Callable[..., tuple[Tensor, ...]]:
        """The operator as a function of its tensors that returns a tuple of tensors.

        It writes to none of its arguments: those that the schema says it writes to are cloned, and returned too;
        `raw` leaves that out. A `program` returns the outputs, and then contiguous() and zeros of the shape and dtype of
        each, which a compiler makes of what it believes of the outputs. Every call makes new code, so that compilers keep
        nothing from another check.
        """
        text = self.raw_text if raw else self.program_text if program else self.text
        scope = {"op": op or self.op, "torch": torch, "__name__": __name__, **self.constants}
        exec(compile(text, f"<{self.name}>", "exec"), scope)
        function = scope["function"]
        if not self.seeded:
            return function

        @functools.wraps(function)
        def seeded(*tensors: Tensor) -> tuple[Tensor, ...]:
            torch.manual_seed(SEED)
            return function(*tensors)

        return seeded

    def fresh(
        self, grad: bool = False, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> list[Tensor]:
        """Copies of the tensors with their strides and the memory around them, as leaves."""
        storages: dict[int, Tensor] = {}
        with torch.no_grad():
            tensors = [_copied(x.detach(), device or self.device, storages) for x in self.leaves]
        if dtype:
            complex_dtype = dtype.to_complex()
            tensors = [x.to(complex_dtype if x.is_complex() else dtype) if differentiable(x) else x for x in tensors]
        return self.leaf(tensors) if grad else tensors

    def leaf(self, tensors: list[Tensor]) -> list[Tensor]:
        """The same, requiring a gradient where the sample wants one."""
        return [x.detach().requires_grad_(flag) for x, flag in zip(tensors, self.wanted, strict=True)]

    def arguments(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The sample's arguments with these tensors in place of its own."""
        rest = iter(tensors)
        return tree_map(lambda x: next(rest) if isinstance(x, Tensor) else x, (self.sample.args, self.sample.kwargs))

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those that the sample wants a gradient of."""
        return [x for x, flag in zip(tensors, self.wanted, strict=True) if flag]

    @functools.cached_property
    def run(self) -> Callable[..., tuple[Tensor, ...]]:
        return self.function()

    @functools.cached_property
    def expected(self) -> list[Tensor]:
        """The eager result."""
        with torch.no_grad():
            return [out.detach().clone() for out in self.run(*self.fresh())]

    @functools.cached_property
    def gradients(self) -> list[Tensor | None]:
        """The eager gradients under `cotangents`; asks for nothing if the operator has none."""
        return gradients(self.run, self.fresh(grad=True), self.wanted)

    @functools.cached_property
    def wide(self) -> torch.dtype | None:
        """float64 where the operator takes it, else None: the samples' own dtypes."""
        try:
            with torch.no_grad():
                self.run(*self.fresh(dtype=torch.float64))
            return torch.float64
        except Exception:
            return None

    @functools.cached_property
    def derivative(self) -> Outcome:
        """Whether it has a derivative: status pass, skip (nothing to differentiate), refused, or fail."""
        from openreg_ops.testing.checks.derivatives import derivative

        try:
            derivative(self)
        except Outcome as outcome:
            return outcome
        return Outcome("pass", "")

    def has_kernel(self, *keys: str) -> bool:
        """Whether one was registered at one of these keys itself."""
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(self.op.name(), key) for key in keys)

    def has_computed_kernel(self, key: str) -> bool:
        """Whether a call at this key finds one, an alias key's or a composite's included."""
        return torch._C._dispatch_has_computed_kernel_for_dispatch_key(self.op.name(), key)

    @property
    def key(self) -> str:
        """The dispatch key of the device: CPU, CUDA, PrivateUse1."""
        return torch._C._dispatch_key_for_device(self.device.type)

    @property
    def composite(self) -> bool:
        return self.has_kernel("CompositeImplicitAutograd")


def _copied(x: Tensor, device: torch.device | str, storages: dict[int, Tensor]) -> Tensor:
    """A copy with the strides and the memory around x; tensors that share memory go on sharing it."""
    if x.layout != torch.strided or x.is_quantized or x.is_nested or x.is_conj() or x.is_neg():
        return x.clone().to(device)
    storage = x.untyped_storage()
    if storage._cdata not in storages:
        count = storage.nbytes() // x.element_size()
        whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (count,), (1,))
        storages[storage._cdata] = whole.clone().to(device)
    whole = storages[storage._cdata]
    return whole.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset()).detach()


def differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def cotangents(outs: Iterable[Tensor]) -> list[Tensor]:
    """Fixed numbers of no special value, in the outputs' shapes."""
    made = []
    for out in outs:
        numbers = torch.sin(1.3 * torch.arange(out.numel(), dtype=torch.float64) + 0.7)
        made.append(numbers.reshape(out.shape).to(out.dtype).to(out.device))
    return made


def gradients(
    function: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], wanted: list[bool]
) -> list[Tensor | None]:
    """Gradients of the tensors that are wanted, through every output that has one."""
    outs = [out for out in function(*tensors) if out.requires_grad]
    leaves = [x for x, flag in zip(tensors, wanted, strict=True) if flag]
    if not outs or not leaves:
        return [None] * len(leaves)
    return list(torch.autograd.grad(outs, leaves, cotangents(outs), allow_unused=True))


# ---- the run ----


def check(
    op: Any,
    sample_inputs: Iterable[Any] | Callable[[str, torch.dtype], Iterable[Any]] | None = None,
    device: str | torch.device | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    reference: Callable[..., Any] | None = None,
    only: str | Collection[str] = (),
    skip: str | Collection[str] = (),
    known: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = lambda where: None,
) -> Report:
    """Run every check on every sample.

    Args:
        op: an operator of any library: see `operator`.
        sample_inputs: argument tuples, `Sample`s or OpInfo's SampleInputs, or a function of (device, dtype) that
            gives them. Without any: those that meta/ registers for an openreg:: operator, else made up from the schema.
        device: where to run; the samples are copied there. By default where the first sample's tensors are.
        dtype: handed to a function of samples, and used for made-up ones.
        reference: a plain function of the same arguments, called with copies on the CPU. Without one, and away from
            the CPU, the operator's own CPU kernel.
        only, skip: names of checks, or one name.
        known: checks that this operator is known to fail, each with the cause. They count as passed; one that fails
            for no sample any more fails the report. By default those that `known_failures` lists for the operator.
        progress: hears what runs next.
    Returns:
        The report; `report.raise_if_failed()` raises an AssertionError.
    Raises:
        ValueError: no such operator, check, sample or device.

    A sample's tensors that require a gradient are those that derivatives are checked for; if none does, every
    floating one is. Whatever a check changes globally is put back.
    """
    from openreg_ops.testing.checks import ANY_LAYOUT, CHECKS
    from openreg_ops.testing.known_failures import MAY_PASS, OPERATORS

    op = operator(op)
    only, skip = ([names] if isinstance(names, str) else names for names in (only, skip))
    only, skip = ([name.replace("-", "_") for name in names] for names in (only, skip))
    known = OPERATORS.get(name_of(op), {}) if known is None else known
    for name in (*only, *skip, *known):
        if name not in CHECKS:
            raise ValueError(f"there is no check {name}; there are {', '.join(CHECKS)}")
    chosen = [name for name in CHECKS if (not only or name in only) and name not in skip]
    if reference is not None and not callable(reference):
        raise ValueError(f"expected reference to be a function, but got {type(reference).__name__} {reference!r}")
    notes = []
    target = str(device) if device is not None else None
    if target:
        try:
            dispatch.usable(target)
        except Wrong as error:
            raise ValueError(str(error)) from None
    if sample_inputs is None:
        registered = _registered(op)
        target = target or _home(op, registered is not None)
        if registered:
            sample_inputs = list(registered(target, dtype))
        else:
            sample_inputs = derived(op, target, dtype)
            notes.append("These inputs were made up from the schema; sample inputs of your own say more.")
    elif callable(sample_inputs):
        target = target or "cpu"
        sample_inputs = sample_inputs(target, dtype)
    if not isinstance(sample_inputs, Iterable):
        raise ValueError(
            "expected sample_inputs to be a list of argument tuples, or a function of (device, dtype) that gives them, "
            f"but got {type(sample_inputs).__name__} {sample_inputs!r}"
        )
    samples = [sample_of(value) for value in sample_inputs]
    if not samples:
        raise ValueError(f"{name_of(op)}: sample_inputs is empty; give at least one tuple of arguments")
    if target is None:
        tensors = (x for s in samples for x in tree_leaves((s.args, s.kwargs)) if isinstance(x, Tensor))
        target = next((str(x.device) for x in tensors), "cpu")
    report = Report(
        operator=name_of(op),
        schema=str(op._schema),
        device=target,
        torch=torch.__version__,
        samples=[repr(sample) for sample in samples],
        about={name: CHECKS[name].__doc__.strip().splitlines()[0] for name in chosen},
        notes=notes,
    )
    began = time.perf_counter()
    with preserved(target):
        for i, sample in enumerate(samples):
            case = Case(op, sample, target, reference)
            refusal = _refusal(case)
            for name in chosen:
                progress(f"checking sample {i}: {name}")
                start = time.perf_counter()
                if refusal and name != "runs":
                    outcome = Outcome("skip", f"{case.name} refuses this sample")
                elif name not in ANY_LAYOUT and any(x.layout != torch.strided for x in case.leaves):
                    outcome = Outcome("skip", "it is for strided tensors")
                else:
                    with preserved(target):
                        outcome = _run_check(CHECKS[name], case)
                result = Result(name, i, outcome.status, outcome.sentence, outcome.remedy)
                result.seconds = round(time.perf_counter() - start, 4)
                if name in known and result.status == "fail":
                    result.status, result.remedy = "known", known[name]
                report.results.append(result)
    for name in known.keys() - MAY_PASS.get(report.operator, set()):
        if (row := report.row(name)) and not any(result.status == "known" for result in row):
            for result in row:
                result.status, result.remedy = "fail", "take it off the list of known failures"
                result.sentence = f"{report.operator} was known to fail this, and does not any more: {known[name]}"
    report.seconds = time.perf_counter() - began
    return report


def _home(op: Operator, ours: bool) -> str:
    """The device of an operator that came without samples: openreg for ours, else where it has a kernel."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return "openreg" if ours or (has(op.name(), "PrivateUse1") and not has(op.name(), "CPU")) else "cpu"


def _refusal(case: Case) -> str:
    try:
        case.expected  # noqa: B018 -- it runs the operator
    except Exception as error:
        return last_line(error)
    return ""


def _run_check(function: Callable[[Case], str | None], case: Case) -> Outcome:
    try:
        return Outcome("pass", function(case) or "")
    except Outcome as outcome:
        return outcome
    except Exception as error:
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
    """Puts back whatever a check, or a broken operator, changes for the whole process."""
    from openreg_ops import _C, autograd

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
        (autograd.get_fallback_mode, autograd.set_fallback_mode),
        (_C.poison, _C.set_poison),
        (functorch._is_vmap_fallback_enabled, functorch._set_vmap_fallback_enabled),
        (torch._C._debug_only_are_vmap_fallback_warnings_enabled, functorch._set_vmap_fallback_warning_enabled),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ]
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
    kinds = {kind, "openreg", accelerator.type if accelerator else kind} - {"cpu", "meta"}
    disabled = logging.root.manager.disable
    try:
        logging.disable()  # compilers log every error that a check means to meet
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for each in kinds:
                devices = range(getattr(torch, each).device_count())
                stack.enter_context(torch.random.fork_rng(devices, device_type=each))
            yield
    finally:
        logging.disable(disabled)
        for (get, put), value in zip(states, before, strict=True):
            if get() != value:
                put(value)
