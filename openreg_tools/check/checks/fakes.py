"""Checks of the fake kernel, and of torch.compile, which relies on it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

from openreg_tools.check.case import FAKE, Case, Outcome, gradients, last_line, small
from openreg_tools.check.checks.common import (
    differs,
    dtype_name,
    fail,
    is_symbolic,
    layouts_of,
    needs_literals,
    needs_tensors,
    plain,
    reference_of,
    resized,
    sizes_of,
    skip,
    storage_of,
    warn,
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No logs of compilers, and no suppressed errors."""
    import torch._dynamo as dynamo

    with dynamo.config.patch(suppress_errors=False, verbose=False):
        yield


def program(case: Case) -> Callable[..., tuple[Tensor, ...]]:
    return case.function(program=all(out.layout == torch.strided for out in case.expected))


def unlike_eager(case: Case, outs: Sequence[Tensor]) -> str:
    """The difference between the outputs of a compiled `program` and the eager ones."""
    expected = list(program(case)(*case.fresh()))
    if len(outs) != len(expected):
        return f"there are {len(outs)} outputs instead of {len(expected)}"
    count = len(case.expected)
    for i, what in enumerate(("output", "contiguous() of output", "zeros like output")):
        actual, eager = (list(x[i * count : (i + 1) * count]) for x in (outs, expected))
        if wrong := differs(actual, eager, what) or strides_differ(actual, eager, what):
            return wrong
    return ""


def compiled(case: Case, dynamic: bool, function: Any = None) -> Callable[..., tuple[Tensor, ...]]:
    return torch.compile(function or case.function(), backend="aot_eager", fullgraph=True, dynamic=dynamic)


def compile(case: Case) -> str | None:  # noqa: A001 -- a check's name is its function's
    """Compiled outputs, their strides, and gradients are the eager ones, for static and dynamic shapes."""
    needs_tensors(case)
    needs_literals(case)
    remedy = "fix the fake kernel or the derivative: compile trusts both without running the kernel"
    if case.seeded:
        skip("its numbers are random")
    grad = case.derivative.status == "pass"
    with quiet():
        for dynamic in (False, True):
            shapes = "dynamic" if dynamic else "static"
            function = compiled(case, dynamic, program(case))
            try:
                outs = function(*case.fresh(grad=grad))
            except Exception as error:
                fail(f"{case.name}: torch.compile with {shapes} shapes raised {last_line(error)}", remedy)
            if wrong := unlike_eager(case, outs):
                fail(f"{case.name}: under torch.compile with {shapes} shapes {wrong}, which eager gives", remedy)
            if grad:
                got, expected = (gradients(f, case.fresh(grad=True), case.wanted) for f in (function, program(case)))
                if wrong := differs(got, expected, "the gradient of differentiable argument"):
                    fail(f"{case.name}: under torch.compile with {shapes} shapes {wrong}, which eager gives", remedy)
        if case.derivative.status == "refused":
            try:
                gradients(compiled(case, False), case.fresh(grad=True), case.wanted)
            except Exception:
                return None
            lost(case, "torch.compile")
    return None


def lost(case: Case, where: str) -> NoReturn:
    fail(
        f"{case.name}: eager mode refuses the gradient with an error, but under {where} there is neither error nor gradient",
        "refuse in a kernel at the Autograd key, which transforms and compilers see too",
    )


def strides_differ(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> str:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a.layout == e.layout == torch.strided and strides_of(a) != strides_of(e):
            return f"{what} {i} has strides {tuple(a.stride())} instead of {tuple(e.stride())}"
    return ""


def strides_of(x: Tensor) -> tuple[int, ...]:
    """The strides that matter: a dimension with one element may have any stride."""
    return tuple(stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1) if x.numel() else ()


def fake_mode(case: Case, **options: Any) -> FakeTensorMode:
    """A mode whose data-dependent sizes are symbols. Its cache cannot compare objects."""
    # For the operators of some namespaces, such as torchaudio, the fallback calls the kernel with zeros.
    fallback = case.op.namespace in ("aten", "prims")
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_fallback_kernels=fallback, **options)
    mode.cache_enabled = mode.cache_enabled and not case.objects
    return mode


def run_fake(
    case: Case, tensors: Sequence[Tensor], mode: FakeTensorMode | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Fake inputs and the fake kernel's outputs."""
    mode = mode or fake_mode(case, static_shapes=True)
    case.trying(FAKE)
    try:
        with mode, enable_python_dispatcher(), torch.no_grad():
            fakes = [mode.from_tensor(x) for x in tensors]
            return fakes, list(case.run(*fakes))
    except UnsupportedOperatorException as error:
        if error.func is not case.op:
            raise
        fail(
            f"{case.name}: it has no fake kernel, which compilers and exporters call",
            "register one (torch.library.register_fake), or a kernel at the Meta key",
        )
    finally:
        case.trying("")


def unlike_fake(case: Case, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> str:
    """How outputs differ from what the fake kernel says for these inputs, if it is right for the sample."""
    wrong = _unlike(outs, run_fake(case, tensors)[1])
    return "" if wrong and _unlike(case.expected, run_fake(case, case.fresh())[1]) else wrong  # see fake_layouts


def _unlike(outs: Sequence[Tensor], fake: Sequence[Tensor]) -> str:
    for i, (real, said) in enumerate(zip(outs, fake, strict=True)):
        if _known(real.shape, said.shape) != _known(said.shape, said.shape):
            return f"output {i} has shape {list(real.shape)} instead of {list(said.shape)}"
        if real.dtype != said.dtype:
            return f"output {i} is {dtype_name(real)} instead of {dtype_name(said)}"
    return ""


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
        inputs = ", ".join(
            f"{n} {list(x.shape)} of strides {x.stride()}" for n, x in zip(case.names, tensors, strict=True)
        )
        where = f"for inputs in {layout} layout ({inputs})"
        try:
            fakes, fake = run_fake(case, tensors)
        except Outcome:
            raise
        except Exception as error:
            if [x.shape for x in tensors] != [x.shape for x in case.leaves]:
                continue  # see fake_errors
            fail(
                f"{case.name}: {where} the fake kernel raised {last_line(error)}",
                "register a fake kernel (torch.library.register_fake) that accepts what the kernel accepts",
            )
        if len(fake) != len(outs):
            fail(f"{case.name}: {where} the fake kernel gives {len(fake)} outputs, the kernel {len(outs)}", _ALLOCATE)
        for i, (real, said) in enumerate(zip(outs, fake, strict=True)):
            for what, a, b in (
                ("shape", _known(real.shape, said.shape), _known(said.shape, said.shape)),
                ("dtype", dtype_name(real), dtype_name(said)),
                ("device", str(real.device), str(said.device)),
                ("layout", str(real.layout), str(said.layout)),
            ):
                if a != b:
                    fail(f"{case.name}: {where} output {i} has {what} {a}, but the fake kernel says {b}", _ALLOCATE)
            known = all(isinstance(n, int) for n in (*said.shape, *said.stride()))
            if real.layout == torch.strided and known and strides_of(real) != strides_of(said):
                fail(
                    f"{case.name}: {where} output {i} has strides {tuple(real.stride())}, but the fake kernel says "
                    f"{tuple(said.stride())}",
                    _ALLOCATE,
                )
            for x, f, name in zip(tensors, fakes, case.names, strict=True):
                if (
                    known
                    and real.numel()
                    and (storage_of(real) == storage_of(x)) != (storage_of(said) == storage_of(f))
                ):
                    fail(
                        f"{case.name}: {where} output {i} {'shares' if storage_of(real) == storage_of(x) else 'does not share'} "
                        f"the memory of {name}, but the fake kernel says otherwise",
                        "return a view in the fake kernel exactly where the kernel does",
                    )
    return f"in {', '.join(tried)} layout"


def _mixes(case: Case) -> Iterator[tuple[str, set[int]]]:
    """Which floating-point arguments get another dtype: all, all but one or two, only one or two; a list is one
    argument."""
    arguments: dict[str, set[int]] = {}
    for i, (name, x) in enumerate(zip(case.names, case.leaves, strict=True)):
        if x.is_floating_point() and not small(x):
            arguments.setdefault(name.partition("[")[0], set()).add(i)
    count = len(arguments)
    for size in dict.fromkeys(size for few in range(3) for size in (count - few, few) if size > 0):
        for chosen in itertools.combinations(arguments, size):
            yield ", ".join(chosen), set().union(*(arguments[name] for name in chosen))


def fake_dtypes(case: Case) -> str | None:
    """The fake kernel, and the operator's CPU kernel, give the dtypes of the kernel in float16, bfloat16, float64 and mixes."""
    needs_tensors(case)
    if not any(x.is_floating_point() and not small(x) for x in case.leaves):
        skip("no floating tensor argument")
    host = None if case.reference else reference_of(case)
    taken = 0
    for dtype, (names, chosen) in itertools.product((torch.float16, torch.bfloat16, torch.float64), _mixes(case)):

        def given(chosen: set[int] = chosen, dtype: torch.dtype = dtype, **options: Any) -> list[Tensor]:
            return [x.to(dtype) if i in chosen else x for i, x in enumerate(case.fresh(**options))]

        try:
            outs = plain(case, given())
        except Exception:  # not every operator supports the others
            continue
        taken += 1
        said = f"given {str(dtype).removeprefix('torch.')} {names}"
        try:
            fake = run_fake(case, given())[1]
        except Outcome:
            raise
        except Exception as error:
            fail(
                f"{case.name}: {said} the kernel runs, but the fake kernel raised {last_line(error)}",
                "reject in the fake kernel only what the kernel rejects",
            )
        others = {"the fake kernel says": fake}
        with contextlib.suppress(Exception):  # the check `reference` tests whether it runs there
            others["the CPU kernel gives"] = plain(case, given(device="cpu"), host) if host else outs
        for who, other in others.items():
            for i, (a, b) in enumerate(zip(outs, other, strict=True)):
                if a.dtype != b.dtype:
                    fail(
                        f"{case.name}: {said} output {i} is {dtype_name(a)}, but {who} {dtype_name(b)}",
                        "compute the dtype of an output from the dtypes of the arguments by the same rule in every kernel, real "
                        "and fake",
                    )
    return f"{taken} choices of dtypes taken"


def _known(sizes: Sequence[int], said: Sequence[Any]) -> list[int | None]:
    """The sizes that the fake kernel knows; it cannot know data-dependent ones."""
    if len(sizes) != len(said):
        return list(sizes)
    return [n if isinstance(s, int) else None for n, s in zip(sizes, said, strict=True)]


def _symbolic(case: Case, tensors: Sequence[Tensor]) -> tuple[FakeTensorMode, list[Tensor], list[list[Any]]]:
    """Fake tensors whose sizes are all symbols, and the symbols."""
    from torch._dynamo.source import ConstantSource

    mode = fake_mode(case)
    fakes = []
    for i, x in enumerate(tensors):
        context = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in x.shape],
            constraint_sizes=[None] * x.dim(),
        )
        fakes.append(mode.from_tensor(x, source=ConstantSource(f"t{i}"), symbolic_context=context))
    symbols = [[size.node.expr if isinstance(size, torch.SymInt) else None for size in f.shape] for f in fakes]
    return mode, fakes, symbols


def fake_dynamic(case: Case) -> str | None:
    """The fake kernel, and the backward, keep sizes symbolic."""
    if not case.schema.returns:
        needs_tensors(case)
    tensors = case.fresh()
    if any(x.layout != torch.strided for x in tensors) or not sizes_of(tensors):
        skip("no strided tensor of more than one element")
    mode, fakes, symbols = _symbolic(case, tensors)
    with mode, enable_python_dispatcher(), torch.no_grad():
        outs = list(case.run(*fakes))
    for i, (real, said) in enumerate(zip(case.expected, outs, strict=True)):
        sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in said.shape]
        if len(sizes) != real.dim() or any(n not in (None, m) for n, m in zip(sizes, real.shape, strict=True)):
            fail(
                f"{case.name}: with dynamic sizes the fake kernel says that output {i} has shape {sizes} instead of "
                f"{list(real.shape)}",
                "compute output shapes from x.shape alone",
            )
    for name, d, size in _fixed(case, mode, tensors, symbols):
        fail(
            f"{case.name}: the fake kernel fixes dimension {d} of {name} to {size}, and the kernel takes other sizes; "
            "every new size compiles again, and export with a dynamic dimension fails",
            "do not turn sizes into Python numbers in the fake kernel (int(), //, if): use them as they are, and "
            "check them with torch._check",
        )
    if case.derivative.status != "pass":
        return None
    taken = _Ints()
    try:
        with mode, enable_python_dispatcher(), taken:
            gradients(case.run, case.leaf(fakes), case.wanted)
    except Exception:
        return "without its backward"  # compile runs it
    for name, d, size in _fixed(case, mode, tensors, symbols, grad=True):
        again = f"{case.name}: its backward fixes dimension {d} of {name} to {size}, although it takes other sizes; every new "
        again += "size compiles again"
        if int(size) in taken.by:
            fail(
                f"{again}: {taken.by[int(size)]} takes the size as an int", "write SymInt in its schema instead of int"
            )
        warn(again, "in setup_context and backward, use sizes as they are: no int(), and no Python loop over a size")
    return "with its backward"


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


def _fixed(
    case: Case, mode: FakeTensorMode, tensors: list[Tensor], symbols: list[list[Any]], grad: bool = False
) -> Iterator[tuple[str, int, int]]:
    """The dimensions whose symbols became numbers, although the operator accepts other sizes."""
    for name, x, each in zip(case.names, tensors, symbols, strict=True):
        for d, symbol in enumerate(each):
            found = mode.shape_env.replacements.get(symbol) if symbol is not None else None
            if found is None or not found.is_number:
                continue
            # Not if it accepts no other size, or if the size is the number of outputs.
            try:
                other = resized(case.fresh(), x.shape[d], x.shape[d] + 1)
                outs = plain(case, other)
                if grad:
                    gradients(case.run, case.leaf(other), case.wanted)
            except Exception:
                continue
            if len(outs) == len(case.expected):
                yield name, d, found


def fake_errors(case: Case) -> str | None:
    """The fake kernel rejects what the kernel rejects, with the same messages."""
    needs_tensors(case)
    notes, agreed = [], 0
    for what, tensors in _wrong_inputs(case):
        real = fake = None
        case.trying(what)
        try:
            plain(case, tensors)
        except Exception as error:
            real = error
        try:
            run_fake(case, tensors)
        except Outcome:
            raise
        except Exception as error:
            fake = error
        if fake and not real:
            fail(
                f"{case.name}: given {what} the kernel runs, but the fake kernel raised {last_line(fake)}",
                "reject in the fake kernel what the kernel rejects, and nothing else; if the kernel cannot compute with such "
                "inputs, check them there too",
            )
        if real and not fake:
            notes.append(f"given {what} the kernel raised {last_line(real)}, and the fake kernel takes it")
        elif real and fake and _sentence(real) != _sentence(fake):
            notes.append(f"given {what} the kernel says {last_line(real)!r}, and the fake kernel {last_line(fake)!r}")
        else:
            agreed += real is not None
    if notes:
        warn(
            f"{case.name}: {notes[0]}" + (f" (and {len(notes) - 1} more such)" if len(notes) > 1 else ""),
            "check the arguments in the fake kernel as the kernel does, with the same messages (torch._check), so "
            "that a compiled program fails at compile time, with the message of eager mode",
        )
    return f"{agreed} refusals agree"


def _sentence(error: BaseException) -> str:
    """The first line, without what a compiler adds around it."""
    return (str(error).strip().splitlines() or [""])[0]


def _wrong_inputs(case: Case) -> Iterator[tuple[str, list[Tensor]]]:
    count = len(case.leaves)
    for i, name in enumerate(case.names):
        x = case.leaves[i]
        if x.dim() and x.layout == torch.strided:
            for d in {0, x.dim() - 1}:
                tensors = case.fresh()
                tensors[i] = resized([tensors[i].movedim(d, 0)], -1, 0)[0]
                tensors[i] = torch.cat([tensors[i], tensors[i][:1]]).movedim(0, d)
                if count > 1:
                    yield f"{name} of shape {list(tensors[i].shape)}", tensors
            tensors = case.fresh()
            tensors[i] = tensors[i].unsqueeze(0).repeat(2, *[1] * x.dim())
            yield f"{name} of shape {list(tensors[i].shape)}", tensors
            tensors = case.fresh()
            tensors[i] = tensors[i].flatten()[0].clone() if x.numel() else tensors[i]
            yield f"a zero-dimensional {name}", tensors
        for dtype in (torch.int64, torch.float64, torch.bfloat16):
            if dtype != x.dtype and (count > 1 or dtype == torch.int64):
                tensors = case.fresh()
                tensors[i] = tensors[i].to(dtype)
                yield f"{name} of {str(dtype).removeprefix('torch.')}", tensors
        if count > 1 and case.device.type != "cpu" and x.dim():
            tensors = case.fresh()
            tensors[i] = tensors[i].cpu()
            yield f"a {name} on cpu", tensors
