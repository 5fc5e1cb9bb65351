"""Checks for every openreg:: operator. A test file names its operator, its inputs and its reference."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from openreg_ops.identity import identity
from openreg_tools.check import run as runs
from openreg_tools.check.checker import prepare
from openreg_tools.check.report import Report
from openreg_tools.core.samples import sample_of

NAME = identity.name  # `OPENREG_DEVICE=cuda pytest tests/ops` runs these tests under that name
DEVICE, OTHER = f"{NAME}:0", f"{NAME}:1"
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# What rounding once to the dtype costs, and a sum of some hundreds of terms in the dtype it is made in.
TOLERANCE = {
    torch.float64: dict(rtol=1e-10, atol=1e-10),
    torch.float32: dict(rtol=1e-5, atol=1e-5),
    torch.float16: dict(rtol=2e-3, atol=2e-3),
    torch.bfloat16: dict(rtol=1.6e-2, atol=1.6e-2),
}


def tensor(values: Any, **options: Any) -> Tensor:
    """A device tensor of these values."""
    return torch.tensor(values, device=DEVICE, **options)


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = DEVICE, grad: bool = False) -> Tensor:
    """Normally distributed numbers, the same on every device."""
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device).requires_grad_(grad)


# ---- layouts: the shape is kept, the strides are not ----


def _permuted(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.dim() > 1 else x.clone()


def _padded(x: Tensor) -> Tensor:
    if x.dim() == 0:
        return torch.stack([x, x, x])[1]
    return torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]]


def _stepped(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 1]


def _expanded(x: Tensor) -> Tensor:
    """Every row, or element, is the first one."""
    return x[:1].expand_as(x) if x.dim() else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "permuted": _permuted,
    "padded": _padded,
    "stepped": _stepped,
    "expanded": _expanded,
}


# ---- running ----


def leaves(out: Any) -> list[Tensor]:
    """The tensors of a result, those in lists too; a None has none."""
    return [x for x in tree_leaves(out) if x is not None]


def tensors(inputs: Any) -> list[Tensor]:
    return [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]


def split(op: Callable[..., Any], sample: Any) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """The operator as a function of the sample's tensors alone, which returns a tuple of tensors; and these.

    An operator that writes to tensors gets copies, which the function returns too.
    """
    sample = sample_of(sample)
    values, spec = tree_flatten((sample.args, sample.kwargs))
    where = [i for i, x in enumerate(values) if isinstance(x, Tensor)]
    given = [values[i] for i in where]
    values = [None if isinstance(x, Tensor) else x for x in values]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        filled = list(values)
        if mutable := isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable:
            tensors = tuple(x.clone() for x in tensors)
        for i, x in zip(where, tensors, strict=True):
            filled[i] = x
        args, kwargs = tree_unflatten(filled, spec)
        outs = leaves(op(*args, **kwargs))
        return tuple([*outs, *tensors] if mutable else outs)

    return function, given


def cotangents(outs: Sequence[Tensor]) -> list[Tensor]:
    """Fixed, ordinary numbers in the outputs' shapes."""
    return [
        torch.sin(1.3 * torch.arange(out.numel(), dtype=torch.float64) + 0.7).reshape(out.shape).to(out) for out in outs
    ]


def run(
    function: Callable[..., Any], *inputs: Any, grads: bool = True, partial: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the floating inputs, which become leaves that keep their strides.

    `partial` is for a function that has outputs without a gradient, or inputs that get none: these count as zero.
    """
    inputs = tuple(
        x.detach().requires_grad_(grads and (x.is_floating_point() or x.is_complex())) if isinstance(x, Tensor) else x
        for x in inputs
    )
    outs = leaves(function(*inputs))
    if not grads:
        return outs, []
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    attached = [out for out in outs if out.requires_grad or not partial]
    return outs, list(torch.autograd.grad(attached, wanted, cotangents(attached), materialize_grads=partial))


def check_against(
    function: Callable[..., Any], reference: Callable[..., Any], *inputs: Any, scale: float = 1, grads: bool = True
) -> None:
    """Outputs and gradients of `function` equal the outputs and gradients of `reference` in float64 on the CPU.

    The shapes, and the gradients' dtypes, are compared exactly; `scale` widens the tolerance.
    """
    wide = tuple(x.detach().cpu().double() if isinstance(x, Tensor) else x for x in inputs)
    dtype = next(x.dtype for x in inputs if isinstance(x, Tensor))
    tolerance = {name: scale * value for name, value in TOLERANCE[dtype].items()}
    if grads:
        outs, got = run(function, *inputs)
        expected_outs, expected = run(reference, *wide)
        pairs = [*zip(outs, expected_outs, strict=True), *zip(got, expected, strict=True)]
        assert all(x.dtype == dtype for x in got)
    else:
        pairs = list(zip(leaves(function(*inputs)), leaves(reference(*wide)), strict=True))
    for actual, expected in pairs:
        assert_close(actual.cpu().double(), expected, equal_nan=True, **tolerance)


# ---- what every operator must survive ----


def check(op: str, samples: Any = None, device: str | None = None, only: Any = (), skip: Any = ()) -> Report:
    """The checker's report, from this process: its own has to import the compiler for each call."""
    prepared = prepare(op, samples, device, dtype=torch.float32, reference=None, only=only, skip=skip)
    return runs.in_process(prepared, 180, lambda where: None)


def check_gradients(
    function: Callable[..., Any], *inputs: Any, twice: bool = True, forward_mode: bool = True, fast: bool = False
) -> None:
    """First and second derivatives agree with finite differences, on the device, in float64, in both modes.

    `fast` compares one random direction in place of whole Jacobians.
    """
    floats = [x for x in tensors(inputs) if x.is_floating_point()]
    assert all(x.dtype == torch.float64 and x.requires_grad and x.device.type == NAME for x in floats)

    def real(*inputs: Any) -> tuple[Tensor, ...]:
        return tuple(out for out in leaves(function(*inputs)) if out.is_floating_point())

    options = dict(check_batched_grad=True, fast_mode=fast)
    with no_vmap_fallback():
        assert torch.autograd.gradcheck(real, inputs, check_forward_ad=forward_mode, **options)
        if twice:
            assert torch.autograd.gradgradcheck(real, inputs, **options)


@contextlib.contextmanager
def no_vmap_fallback():
    """Fail if vmap would run an operator sample by sample because it has no batching rule."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)


def check_transforms(function: Callable[..., Any], *inputs: Any, grads: bool = True) -> None:
    """torch.func on the device: vmap over any of the tensors gives the same result as a loop, and so does vmap of grad.

    Each input tensor gets a mapped dimension, in turn and all at once, at the front and at the back.
    """
    tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    floats = tuple(i for i in tensors if inputs[i].is_floating_point())

    def loss(*arguments: Any) -> Tensor:
        return sum((out.sin().sum() for out in leaves(function(*arguments)) if out.is_floating_point()), start=0.0)

    def gradients(*arguments: Any) -> list[Tensor]:
        return list(torch.func.grad(loss, argnums=floats)(*arguments))

    for mapped in [*[{i} for i in tensors], set(tensors)]:
        for dim in (0, -1):
            samples = [
                tuple(x.roll(k) if i in mapped else x for i, x in enumerate(inputs)) for k in range(3)
            ]  # fmt: skip
            batched = [torch.stack([s[i] for s in samples], dim) if i in mapped else x for i, x in enumerate(inputs)]
            in_dims = tuple(dim if i in mapped else None for i in range(len(inputs)))
            for transformed in (function, gradients) if grads else (function,):
                expected = [torch.stack(outs) for outs in zip(*(leaves(transformed(*s)) for s in samples), strict=True)]
                with no_vmap_fallback():
                    actual = leaves(torch.vmap(transformed, in_dims=in_dims)(*batched))
                tolerance = TOLERANCE[inputs[tensors[0]].dtype] if inputs[tensors[0]].is_floating_point() else {}
                for one, loop in zip(actual, expected, strict=True):
                    assert_close(one, loop, equal_nan=True, **tolerance)
    if grads:  # reverse over reverse, forward over reverse, reverse over forward
        i = floats[0]
        outer = [
            transform(transform_too(loss, argnums=i), argnums=i)(*inputs)
            for transform, transform_too in [
                (torch.func.jacrev, torch.func.grad),
                (torch.func.jacrev, torch.func.jacrev),  # its backward runs after the inner transform
                (torch.func.jacfwd, torch.func.grad),
                (torch.func.jacrev, torch.func.jacfwd),
            ]
        ]
        host = [x.cpu() if isinstance(x, Tensor) else x for x in inputs]
        expected = torch.func.hessian(loss, argnums=i)(*host)
        for derivative in outer:
            assert_close(derivative.cpu(), expected, **TOLERANCE[inputs[tensors[0]].dtype])
        # After the transforms have ended nothing is recorded, so what a backward computes requires no gradient.
        plain = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        gradient, pull = torch.func.vjp(
            lambda x: torch.func.grad(loss, argnums=i)(*plain[:i], x, *plain[i + 1 :]), plain[i]
        )
        assert not pull(torch.ones_like(gradient))[0].requires_grad


def check_compiled(
    function: Callable[..., Any],
    *inputs: Any,
    grads: bool = True,
    partial: bool = False,
    dynamic: Sequence[bool] = (False, True),
) -> set[Any]:
    """torch.compile with fullgraph gives the eager outputs and gradients, for each of these values of `dynamic`.

    Returns what the graphs of forward and backward call.
    """
    targets: set[Any] = set()

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph)

    for sizes in dynamic:
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=sizes)
        if grads:
            (outs, got), (expected_outs, expected) = (run(f, *inputs, partial=partial) for f in (compiled, function))
        else:
            (outs, got), (expected_outs, expected) = ((leaves(f(*inputs)), []) for f in (compiled, function))
        for actual, eager in zip([*outs, *got], [*expected_outs, *expected], strict=True):
            assert_close(actual, eager, equal_nan=True)
        # A compiled backward may lay out its gradients in any way, on every device.
        assert [x.stride() for x in outs] == [x.stride() for x in expected_outs]
    return targets


def check_same_metadata(function: Callable[..., Any], *inputs: Any) -> None:
    """Shape, strides, dtype and device under FakeTensorMode are the kernel's; on meta, all but the device."""
    expected = [describe(out) for out in leaves(function(*inputs))]
    with FakeTensorMode(allow_non_fake_inputs=False) as mode, torch.no_grad():
        fake = tree_map_only(Tensor, mode.from_tensor, inputs)
        assert [describe(out) for out in leaves(function(*fake))] == expected
        with torch.inference_mode():
            assert [describe(out) for out in leaves(function(*fake))] == expected
    meta = tree_map_only(Tensor, lambda x: x.to("meta"), inputs)
    if all(a.stride() == b.stride() for a, b in zip(*map(tensors, (inputs, meta)), strict=True)):
        for out, (shape, strides, dtype, _) in zip(leaves(function(*meta)), expected, strict=True):
            assert (out.shape, out.dtype) == (shape, dtype)
            # A dimension of one element may have any stride.
            assert all(a == b for a, b, size in zip(out.stride(), strides, shape, strict=True) if size != 1)


def describe(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.device


def with_threads(function: Callable[[], Any], counts: Sequence[int] = (1, 2, 3)) -> list[Any]:
    """What `function` returns under each number of threads."""
    threads = torch.get_num_threads()
    results = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(function())
    finally:
        torch.set_num_threads(threads)
    return results


def results(function: Callable[..., Any], *inputs: Any, grads: bool = True, partial: bool = False) -> list[Tensor]:
    """Outputs and, if asked for, gradients."""
    return list(itertools.chain(*run(function, *inputs, partial=partial))) if grads else leaves(function(*inputs))


def check_other_devices(
    function: Callable[..., Any], *inputs: Any, grads: bool = True, compiled: bool = True, partial: bool = False
) -> None:
    """On the CPU (eager, compiled, in inference mode), the reference gives the device's result; meta gives shapes."""
    host = tuple(x.detach().cpu() if isinstance(x, Tensor) else x for x in inputs)
    dtype = next(x.dtype for x in inputs if isinstance(x, Tensor) and x.is_floating_point())
    torch._dynamo.reset()
    in_graph = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    expected, outs = results(function, *inputs, grads=grads, partial=partial), len(leaves(function(*inputs)))
    for call in (function, in_graph) if compiled else (function,):
        for i, (actual, device) in enumerate(
            zip(results(call, *host, grads=grads, partial=partial), expected, strict=True)
        ):
            assert actual.is_cpu and actual.dtype == device.dtype
            # The reference's operators may lay out a gradient in any way.
            assert i >= outs or actual.stride() == device.stride()
            assert_close(actual, device.cpu(), equal_nan=True, **TOLERANCE[dtype])
    with torch.inference_mode():
        for actual, device in zip(leaves(function(*host)), leaves(function(*inputs)), strict=True):
            assert actual.is_cpu
            assert_close(actual, device.cpu(), equal_nan=True, **TOLERANCE[dtype])
    meta = tuple(x.to("meta") if isinstance(x, Tensor) else x for x in host)
    for actual, device in zip(results(function, *meta, grads=grads, partial=partial), expected, strict=True):
        assert actual.is_meta and actual.shape == device.shape and actual.dtype == device.dtype


def check_error(function: Callable[..., Any], *inputs: Any, match: str, error: type[Exception] = RuntimeError) -> None:
    """The kernel, the fake kernel and the reference reject these inputs with the same message."""
    sentences = {}

    def refuse(where: str, arguments: Sequence[Any]) -> None:
        with pytest.raises(error) as caught:
            function(*arguments)
        sentences[where] = str(caught.value)

    refuse("device", inputs)
    with torch.inference_mode():
        refuse("device, inference mode", inputs)
    with FakeTensorMode() as mode:
        refuse("fake", tree_map_only(Tensor, mode.from_tensor, inputs))
    if len({x.device for x in tensors(inputs)}) == 1:
        for where in ("cpu", "meta"):
            moved = tree_map_only(Tensor, lambda x, where=where: x.to(where), inputs)
            refuse(where, moved)
            with torch.inference_mode():
                refuse(where + ", inference mode", moved)
    assert set(sentences.values()) == {sentences["device"]}, sentences
    assert match in sentences["device"]
