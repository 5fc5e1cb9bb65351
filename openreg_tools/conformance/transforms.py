"""Runs an OpInfo sample under torch.func's transforms, on a device and on the CPU.

Each function here is a check of `sweep`: the same transform runs on both, over copies of the same tensors, and must
give the same values or raise the same type. A transform wraps tensors, so code of the backend above the dispatcher (a
choice between algorithms, an autograd kernel) receives tensors without memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from openreg_tools.conformance.one_sample import OneSample
from openreg_tools.conformance.outcomes import HOST_ARGUMENTS
from openreg_tools.core.move import Move

CHECKS = ("vmap", "grad", "jvp", "jacrev", "vmap_grad")

ALONE = 6  # of the tensors are batched alone, because lists of tensors are long
ROWS = 8  # elements of each output whose Jacobian is computed


class SampleTensors:
    """A sample's arguments with the tensors taken out."""

    def __init__(self, one: OneSample) -> None:
        sample = one.sample
        self.leaves, self.spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        self.stay = one.op.name in HOST_ARGUMENTS  # all arguments but the first
        self.places = [i for i, leaf in enumerate(self.leaves) if is_strided(leaf) and not (self.stay and i)]
        self.tensors: list[Tensor] = [self.leaves[i] for i in self.places]
        self.differentiable = tuple(i for i, x in enumerate(self.tensors) if x.requires_grad)  # among the tensors

    def function(self, op: Callable, move: Move) -> Callable[..., Any]:
        """`op` as a function of the tensors; the other arguments are moved once."""
        rest = [leaf if i in self.places or self.stay else move(leaf) for i, leaf in enumerate(self.leaves)]

        def call(*tensors: Tensor) -> Any:
            leaves = list(rest)
            for i, tensor in zip(self.places, tensors, strict=True):
                leaves[i] = tensor
            input_, args, kwargs = tree_unflatten(leaves, self.spec)
            return op(input_, *args, **kwargs)

        return call


def is_strided(leaf: Any) -> bool:
    """Returns true for a strided tensor, even if a transform wraps it, so that it has no memory."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not (leaf.is_nested or leaf.is_quantized)


# ---- vmap ----


def in_dims(tensors: list[Tensor]) -> Iterator[tuple[int | None, ...]]:
    """The batch dimension of each tensor: first for all, last for all, for each tensor alone, and first and last mixed."""
    count = len(tensors)
    yield (0,) * count
    if any(x.dim() for x in tensors):
        yield (-1,) * count
    if count > 1:
        for i in range(min(count, ALONE)):
            for dim in (0, -1) if tensors[i].dim() else (0,):
                yield tuple(dim if i == k else None for k in range(count))


def batch(tensors: list[Tensor], dims: tuple[int | None, ...]) -> list[Tensor]:
    """Each tensor stacked with half of it; tensors that cannot be scaled are stacked with themselves."""
    return [x if dim is None else torch.stack([x, _halved(x)], dim) for x, dim in zip(tensors, dims, strict=True)]


def _halved(x: Tensor) -> Tensor:
    return x * 0.5 if x.is_floating_point() or x.is_complex() else x


class _Vmap:
    """torch.vmap with different random numbers for each sample, or the same numbers if the CPU refuses that.

    vmap refuses an in-place draw into an unbatched tensor. Which operators draw in place depends on the device: dropout
    on the CPU does, the fused one of accelerators does not. The CPU runs first and decides for both.
    """

    def __init__(self, dims: tuple[int | None, ...]) -> None:
        self.dims, self.randomness = dims, "different"

    def __call__(self, function: Callable, tensors: list[Tensor]) -> Any:
        try:
            return torch.vmap(function, self.dims, randomness=self.randomness)(*tensors)
        except RuntimeError as error:
            if "different inplace randomness" not in str(error) or not all(x.is_cpu for x in tensors):
                raise
        self.randomness = "same"
        torch.manual_seed(torch.initial_seed())
        return torch.vmap(function, self.dims, randomness="same")(*tensors)


def _mapped(one: OneSample, check: str, dims: tuple[int | None, ...], function_of: Callable[[Move], Callable]) -> None:
    """Compare torch.vmap of a function of the sample's tensors; also its gradient, if all are batched first."""
    arguments, over = SampleTensors(one), _Vmap(dims)
    batched = batch(arguments.tensors, dims)

    def call(move: Move) -> Any:
        tensors = [move(x) for x in batched]
        return over(function_of(move), tensors), tensors[0]

    if check == "vmap" and arguments.differentiable and dims == (0,) * len(dims):
        one.differentiate(call, check)
    else:
        one.comparison(check).outcomes(*one.both(call))


def vmap(one: OneSample) -> None:
    """torch.vmap with each in_dims, of the operator, its in-place form, and the operator's gradient."""
    arguments = SampleTensors(one)
    if not arguments.places:
        return
    for dims in in_dims(arguments.tensors):
        _mapped(one, "vmap", dims, functools.partial(arguments.function, one.op))
    inplace = one.op.get_inplace()
    if inplace is None or one.sample.broadcasts_input or not is_strided(one.sample.input):
        return
    for dims in {(0,) * len(arguments.places), (None, *(0,) * (len(arguments.places) - 1))} - {(None,)}:
        _mapped(one, "vmap", dims, functools.partial(arguments.function, inplace))


# ---- derivatives ----


def _weights(out: Tensor) -> Tensor:
    """Fixed numbers, none of them special, in the shape of `out`."""
    numbers = torch.sin(1.3 * torch.arange(math.prod(out.shape), dtype=torch.float64) + 0.7)
    return numbers.reshape(out.shape).to(out.dtype).to(out.device)


def _differentiable(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if is_strided(x) and (x.is_floating_point() or x.is_complex())]


def _real(out: Tensor) -> Tensor:
    return torch.view_as_real(out) if out.is_complex() else out


def loss(function: Callable) -> Callable[..., Any]:
    """A real number that depends on every element of every output."""

    def total(*tensors: Tensor) -> Any:
        outs = map(_real, _differentiable(function(*tensors)))
        return sum((out * _weights(out)).sum() for out in outs)

    return total


def _derivative(one: OneSample, check: str, transform: Callable[[Callable, tuple[Tensor, ...]], Any]) -> None:
    """`transform` of the operator with respect to all differentiable arguments, the first alone, and the last alone.

    The other tensors are constants that no transform wraps.
    """
    arguments = SampleTensors(one)
    every = arguments.differentiable
    for chosen in dict.fromkeys((every, every[:1], every[-1:])) if every else ():

        def call(move: Move, chosen: tuple = chosen) -> Any:
            tensors = [move(x) for x in arguments.tensors]
            function = arguments.function(one.op, move)

            def of_chosen(*primals: Tensor) -> list[Tensor]:
                given = dict(zip(chosen, primals, strict=True))
                return _differentiable(function(*(given.get(i, x) for i, x in enumerate(tensors))))

            return transform(of_chosen, tuple(tensors[i] for i in chosen))

        one.comparison(check).outcomes(*one.both(call))


def grad(one: OneSample, check: str = "grad") -> None:
    """torch.func.grad."""
    _derivative(one, check, lambda f, primals: torch.func.grad(loss(f), tuple(range(len(primals))))(*primals))


def jvp(one: OneSample) -> None:
    """torch.func.jvp."""
    _derivative(one, "jvp", lambda f, primals: torch.func.jvp(f, primals, tuple(map(_weights, primals))))


def jacrev(one: OneSample) -> None:
    """torch.func.jacrev of the first elements of each output: vmap over the backward."""

    def transform(function: Callable, primals: tuple[Tensor, ...]) -> Any:
        def some(*primals: Tensor) -> list[Tensor]:
            return [_real(out).reshape(-1)[:ROWS] for out in function(*primals)]

        return torch.func.jacrev(some, tuple(range(len(primals))))(*primals)

    _derivative(one, "jacrev", transform)


def vmap_grad(one: OneSample) -> None:
    """Per-sample gradients: torch.vmap of torch.func.grad, with every tensor batched, the first, and all the others."""
    arguments = SampleTensors(one)
    if not arguments.differentiable:
        return
    count = len(arguments.places)
    for dims in dict.fromkeys([(0,) * count, (0, *(None,) * (count - 1)), (None, *(0,) * (count - 1))]):
        if dims != (None,):
            _mapped(one, "vmap_grad", dims, lambda move: _gradient(arguments, one, move))


def _gradient(arguments: SampleTensors, one: OneSample, move: Move) -> Callable:
    return torch.func.grad(loss(arguments.function(one.op, move)), arguments.differentiable)
