"""Checks of the fake kernel, and of torch.compile, which relies on it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

from openreg_tools.check.case import FAKE, Case, Function, Results, Verdict, skip
from openreg_tools.check.checks.common import (
    is_symbolic,
    layouts_of,
    needs_literals,
    needs_order,
    needs_sizes,
    needs_tensors,
)
from openreg_tools.check.checks.writes import storage_of
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import is_small
from openreg_tools.core.samples import dtype_name
from openreg_tools.core.variations import SHAPES, of_sizes

# ---- calls of the fake kernel ----


@contextlib.contextmanager
def faking(mode: FakeTensorMode | None = None) -> Iterator[FakeTensorMode]:
    """Run fake kernels; sizes that depend on data are symbols."""
    mode = mode or FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with mode, enable_python_dispatcher():
        yield mode


def fake_mode(case: Case, **options: Any) -> FakeTensorMode:
    """A mode for a case. Its cache cannot compare objects."""
    # For the operators of some namespaces, such as torchaudio, the fallback calls the kernel with zeros.
    fallback = case.op.namespace in ("aten", "prims")
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_fallback_kernels=fallback, **options)
    mode.cache_enabled = mode.cache_enabled and not case.objects
    return mode


def run_fake(case: Case, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Fake inputs and the fake kernel's outputs."""
    case.trying(FAKE)
    try:
        with faking(fake_mode(case, static_shapes=True)) as mode, torch.no_grad():
            fakes = [mode.from_tensor(x) for x in tensors]
            return fakes, list(case.run(*fakes))
    except UnsupportedOperatorException as error:
        if error.func is not case.op:
            raise
        case.fail(
            "it has no fake kernel, which compilers and exporters call",
            "register one (torch.library.register_fake), or a kernel at the Meta key",
        )
    finally:
        case.trying("")


def difference(real: Tensor, fake: Tensor, memory: bool) -> tuple[str, Any, Any] | None:
    """The first property in which an output and its fake differ, with both values. The fake kernel cannot know sizes that depend on data.

    Args:
        memory: whether to compare device, layout and strides too.
    """
    known = real.dim() == fake.dim() and [
        n if isinstance(m, int) else m for n, m in zip(real.shape, fake.shape, strict=True)
    ]
    if known != list(fake.shape):
        return "shape", list(real.shape), list(fake.shape)
    if real.dtype != fake.dtype:
        return "dtype", dtype_name(real.dtype), dtype_name(fake.dtype)
    if memory:
        for what in ("device", "layout"):
            if getattr(real, what) != getattr(fake, what):
                return what, getattr(real, what), getattr(fake, what)
        if real.layout == torch.strided and all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
            if _strides_of(real) != _strides_of(fake):
                return "strides", tuple(real.stride()), tuple(fake.stride())
    return None


def _strides_of(x: Tensor) -> tuple[int, ...]:
    """The strides that matter: a dimension with one element may have any stride."""
    return tuple(stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1) if x.numel() else ()


def unlike_fake(outs: Sequence[Tensor], fake: Sequence[Tensor], memory: bool = False, name: str = "") -> str:
    """The first output that is not what the fake kernel says; `name` is that of an operator that the checked one calls."""
    of, whose = (f" of {name}", "its") if name else ("", "the")
    for i, (real, said) in enumerate(zip(outs, fake, strict=False)):
        if found := difference(real, said, memory):
            return f"output {i}{of} has {found[0]} {found[1]}, but {whose} fake kernel says {found[2]}"
    return ""


def fake_or_error(case: Case, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]] | Exception:
    """What `run_fake` gives, or the error that the fake kernel raises."""
    try:
        return run_fake(case, tensors)
    except Verdict:
        raise
    except Exception as error:
        return error


# ---- compiled ----


def compile(case: Case) -> str | None:  # noqa: A001 -- a check's name is its function's
    """Compiled outputs, their strides, and gradients are the eager ones, for static and dynamic shapes."""
    needs_tensors(case)
    needs_literals(case)
    needs_order(case)
    remedy = (
        "fix the fake kernel or the derivative, which a compiler traces: no .item(), no numpy, no attributes of ctx that the "
        "forward did not set, and a right fake kernel for each operator that the backward calls"
    )
    for dynamic in (False, True):
        where = f"torch.compile with {'dynamic' if dynamic else 'static'} shapes"
        with quiet():
            function = compiled(case, dynamic=dynamic)
            try:
                got = compiled_results(case, function)
            except Exception as error:
                case.fail(f"{where} raised {all_lines(error)}", remedy)
        case.expect(got, case.eager, f"under {where}", "eager gives", remedy)
        for i, (out, eager) in enumerate(zip(got.outs, case.run(*case.fresh()), strict=True)):
            if (found := difference(eager, out, memory=True)) and found[0] == "strides":
                case.fail(f"under {where} output {i} has strides {found[2]} instead of {found[1]}", remedy)
    if case.derivative.status == "refused":
        try:
            with quiet():
                case.gradients_of(case.fresh(), compiled(case))
        except Exception:
            return None
        lost(case, "torch.compile")
    return None


@contextlib.contextmanager
def quiet(**options: Any) -> Iterator[None]:
    """No logs of compilers, and no suppressed errors."""
    import torch._dynamo as dynamo

    with dynamo.config.patch(suppress_errors=False, verbose=False, **options):
        yield


def compiled(case: Case, dynamic: bool | None = False) -> Function:
    return torch.compile(case.function(), backend="aot_eager", fullgraph=True, dynamic=dynamic)


def compiled_results(case: Case, function: Function, mark: Any = lambda tensors: tensors) -> Results:
    """What a compiled function gives; `mark` marks its arguments."""
    outs = [out.detach() for out in function(*mark(case.fresh(grad=case.has_derivative)))]
    grads = case.gradients_of(case.fresh(), lambda *tensors: function(*mark(tensors))) if case.has_derivative else []
    return Results(outs, grads)


def lost(case: Case, where: str) -> NoReturn:
    case.fail(
        f"eager mode refuses the gradient with an error, but under {where} there is neither error nor gradient",
        "refuse in a kernel at the Autograd key, which transforms and compilers see too",
    )


# ---- layouts, dtypes, sizes ----

_ALLOCATE = (
    "allocate in the fake kernel what the kernel allocates: torch.empty_like(x) keeps the order of x's strides, "
    "x.new_empty(x.shape) is contiguous"
)


def fake_layouts(case: Case) -> str | None:
    """The fake kernel gives shape, dtype, device and strides of the kernel, in every layout of the inputs."""
    needs_tensors(case)
    tried = []
    for layout, tensors in layouts_of(case):
        try:
            with torch.no_grad():
                outs = list(case.run(*tensors))
        except Exception:
            continue
        tried.append(layout)
        inputs = (f"{n} {list(x.shape)} of strides {x.stride()}" for n, x in zip(case.names, tensors, strict=True))
        where = f"for inputs in {layout} layout ({', '.join(inputs)})"
        found = fake_or_error(case, tensors)
        if isinstance(found, Exception):
            if [x.shape for x in tensors] != [x.shape for x in case.leaves]:
                continue  # see fake_errors
            case.fail(
                f"{where} the fake kernel raised {all_lines(found)}",
                "register a fake kernel (torch.library.register_fake) that accepts what the kernel accepts",
            )
        fakes, fake = found
        if len(fake) != len(outs):
            case.fail(f"{where} the fake kernel gives {len(fake)} outputs, the kernel {len(outs)}", _ALLOCATE)
        if wrong := unlike_fake(outs, fake, memory=True):
            case.fail(f"{where} {wrong}", _ALLOCATE)
        for i, (real, said) in enumerate(zip(outs, fake, strict=True)):
            if not real.numel() or not all(isinstance(n, int) for n in said.shape):
                continue
            for x, f, name in zip(tensors, fakes, case.names, strict=True):
                shares = storage_of(real) == storage_of(x)
                if shares != (storage_of(said) == storage_of(f)):
                    case.fail(
                        f"{where} output {i} {'shares' if shares else 'does not share'} the memory of {name}, but the fake "
                        "kernel says otherwise",
                        "return a view in the fake kernel exactly where the kernel does",
                    )
    return f"in {', '.join(tried)} layout"


def _mixes(case: Case) -> Iterator[tuple[str, set[int]]]:
    """Which floating-point arguments get another dtype: all, all but one or two, only one or two; a list is one
    argument."""
    arguments: dict[str, set[int]] = {}
    for i, (name, x) in enumerate(zip(case.names, case.leaves, strict=True)):
        if x.is_floating_point() and not is_small(x):
            arguments.setdefault(name.partition("[")[0], set()).add(i)
    count = len(arguments)
    for size in dict.fromkeys(size for few in range(3) for size in (count - few, few) if size > 0):
        for chosen in itertools.combinations(arguments, size):
            yield ", ".join(chosen), set().union(*(arguments[name] for name in chosen))


def fake_dtypes(case: Case) -> str | None:
    """The fake kernel, and the operator's CPU kernel, give the dtypes of the kernel in float16, bfloat16, float64 and mixes."""
    needs_tensors(case)
    if not any(x.is_floating_point() and not is_small(x) for x in case.leaves):
        skip("no floating tensor argument")
    host = None if case.reference else case.reference_function
    taken = 0
    for dtype, (names, chosen) in itertools.product((torch.float16, torch.bfloat16, torch.float64), _mixes(case)):
        given = [x.to(dtype) if i in chosen else x for i, x in enumerate(case.fresh())]
        try:
            outs = case.outputs([x.clone() for x in given])
        except Exception:  # not every operator supports the others
            continue
        taken += 1
        said = f"given {dtype_name(dtype)} {names}"
        found = fake_or_error(case, given)
        if isinstance(found, Exception):
            case.fail(
                f"{said} the kernel runs, but the fake kernel raised {all_lines(found)}",
                "reject in the fake kernel only what the kernel rejects",
            )
        others = {"the fake kernel says": found[1]}
        with contextlib.suppress(Exception):  # the check `reference` tests whether it runs there
            others["the CPU kernel gives"] = case.outputs([x.cpu() for x in given], host) if host else outs
        for who, other in others.items():
            for i, (a, b) in enumerate(zip(outs, other, strict=True)):
                if a.dtype != b.dtype:
                    case.fail(
                        f"{said} output {i} is {dtype_name(a.dtype)}, but {who} {dtype_name(b.dtype)}",
                        "compute the dtype of an output from the dtypes of the arguments by the same rule in every kernel, real "
                        "and fake",
                    )
    return f"{taken} choices of dtypes taken"


class _Symbolic:
    """Fake tensors of a case whose sizes are all symbols."""

    def __init__(self, case: Case) -> None:
        from torch._dynamo.source import ConstantSource

        self.case, self.mode, self.fakes = case, fake_mode(case), []
        for i, x in enumerate(case.fresh()):
            context = StatelessSymbolicContext(
                dynamic_sizes=[DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in x.shape],
                constraint_sizes=[None] * x.dim(),
            )
            fake = self.mode.from_tensor(x, source=ConstantSource(f"t{i}"), symbolic_context=context)
            self.fakes.append(fake)
        self.symbols = [
            [size.node.expr if isinstance(size, torch.SymInt) else None for size in fake.shape] for fake in self.fakes
        ]

    def fixed(self) -> Iterator[tuple[str, int]]:
        """The dimensions whose symbols became numbers, although the operator accepts other sizes."""
        case = self.case
        for name, x, symbols in zip(case.names, case.leaves, self.symbols, strict=True):
            for d, symbol in enumerate(symbols):
                found = self.mode.shape_env.replacements.get(symbol) if symbol is not None else None
                if found is None or not found.is_number:
                    continue
                # An operator may accept no other size, or the size may be the number of outputs.
                with contextlib.suppress(Exception):
                    other = of_sizes(case.fresh(), {x.shape[d]: x.shape[d] + 1})
                    if len(case.results(other).outs) == len(case.expected):
                        yield f"dimension {d} of {name} to {found}", int(found)


class _Ints(TorchDispatchMode):
    """Collects the numbers that operators of other libraries than PyTorch take as an int."""

    def __init__(self) -> None:
        super().__init__()
        self.by: dict[int, str] = {}  # the operator that takes the number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_int = str(argument.type) in ("int", "List[int]") and not is_symbolic(func, argument.name)
            if func.namespace not in ("aten", "prim", "prims") and is_int:
                self.by.update(dict.fromkeys([value] if isinstance(value, int) else value, func.name()))
        return func(*args, **(kwargs or {}))


def fake_dynamic(case: Case) -> str | None:
    """The fake kernel, and the backward, keep sizes symbolic."""
    if not case.schema.returns:
        needs_tensors(case)
    needs_sizes(case)
    symbolic = _Symbolic(case)
    with faking(symbolic.mode), torch.no_grad():
        outs = list(case.run(*symbolic.fakes))
    for i, (real, said) in enumerate(zip(case.expected, outs, strict=True)):
        sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in said.shape]
        if len(sizes) != real.dim() or any(n not in (None, m) for n, m in zip(sizes, real.shape, strict=True)):
            case.fail(
                f"with dynamic sizes the fake kernel says that output {i} has shape {sizes} instead of {list(real.shape)}",
                "compute output shapes from x.shape alone",
            )
    for what, _ in symbolic.fixed():
        case.fail(
            f"the fake kernel fixes {what}, and the kernel takes other sizes; every new size compiles again, and export with "
            "a dynamic dimension fails",
            "do not turn sizes into Python numbers in the fake kernel (int(), //, if): use them as they are, and "
            "check them with torch._check",
        )
    if not case.has_derivative:
        return None
    taken = _Ints()
    try:
        with faking(symbolic.mode), taken:
            case.gradients_of(symbolic.fakes)
    except Exception:
        return "without its backward"  # compile runs it
    for what, size in symbolic.fixed():
        again = f"its backward fixes {what}, although it takes other sizes; every new size compiles again"
        if size in taken.by:
            case.fail(
                f"{again}: {taken.by[size]} takes the size as an int", "write SymInt in its schema instead of int"
            )
        case.warn(
            again, "in setup_context and backward, use sizes as they are: no int(), and no Python loop over a size"
        )
    return "with its backward"


# ---- wrong inputs ----


def fake_errors(case: Case) -> str | None:
    """The fake kernel rejects what the kernel rejects, with the same messages."""
    needs_tensors(case)
    notes, agreed = [], 0
    for what, tensors in _wrong_inputs(case):
        real = None
        case.trying(what)
        try:
            case.outputs(tensors)
        except Exception as error:
            real = error
        found = fake_or_error(case, tensors)
        fake = found if isinstance(found, Exception) else None
        if fake and not real:
            case.fail(
                f"given {what} the kernel runs, but the fake kernel raised {all_lines(fake)}",
                "reject in the fake kernel what the kernel rejects, and nothing else; if the kernel cannot compute with such "
                "inputs, check them there too",
            )
        if real and not fake:
            notes.append(f"given {what} the kernel raised {all_lines(real)}, and the fake kernel takes it")
        elif real and fake and str(real).strip().partition("\n")[0] != str(fake).strip().partition("\n")[0]:
            notes.append(f"given {what} the kernel says {all_lines(real)!r}, and the fake kernel {all_lines(fake)!r}")
        else:
            agreed += real is not None
    if notes:
        case.warn(
            notes[0] + (f" (and {len(notes) - 1} more such)" if len(notes) > 1 else ""),
            "check the arguments in the fake kernel as the kernel does, with the same messages (torch._check), so "
            "that a compiled program fails at compile time, with the message of eager mode",
        )
    return f"{agreed} refusals agree"


def _wrong_inputs(case: Case) -> Iterator[tuple[str, list[Tensor]]]:
    """The sample with one tensor of another shape, dtype or device."""
    several = len(case.leaves) > 1
    dtypes = (torch.int64, torch.float64, torch.bfloat16) if several else (torch.int64,)
    for i, (name, x) in enumerate(zip(case.names, case.leaves, strict=True)):
        changes: list[tuple[str, Any]] = []
        if x.dim() and x.numel():
            ways = (*["first longer", "last longer"] * several, "one dimension more", "0-dim")
            changes += [(f"{name} of shape {list(SHAPES[way](x).shape)}", SHAPES[way]) for way in ways]
        changes += [(f"{name} of {dtype_name(d)}", lambda x, d=d: x.to(d)) for d in dtypes if d != x.dtype]
        if several and case.device.type != "cpu" and x.dim():
            changes.append((f"a {name} on cpu", lambda x: x.cpu()))
        for what, change in changes:
            tensors = case.fresh()
            tensors[i] = change(tensors[i])
            yield what, tensors
