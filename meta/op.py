"""Shared by the operators' meta files: `operator`, which each uses, and helpers for their references."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.jit._builtins import _register_builtin
from torch.utils._pytree import tree_leaves, tree_map

from openreg_ops import _C

_Function = TypeVar("_Function", bound=Callable[..., Any])

_BATCHED, _VMAP_MODE = torch._C.DispatchKey.FuncTorchBatched, torch._C.DispatchKey.FuncTorchVmapMode
_VMAP = torch._C.DispatchKeySet(_BATCHED) | torch._C.DispatchKeySet(_VMAP_MODE)
_RANDOMNESS = (
    "vmap: called random operation while in randomness error mode. Please either use the 'same' or 'different' "
    "randomness flags on vmap or perform the randomness operation out of vmap"
)
_library = torch.library.Library("openreg", "IMPL")

# The public functions by operator name. Each has the attribute `reference`, and those methods of `Definition` that are
# decorators.
OPERATORS: dict[str, Any] = {}
# Sample inputs by operator name, for openreg_ops.testing.check: (device, dtype) -> argument tuples.
SAMPLES: dict[str, Callable[[str, torch.dtype], Iterable[Any]]] = {}
# What the operators do with DTensors, by name, for openreg_ops/distributed/sharding.py.
SHARDED: dict[str, Callable[..., Iterable[Any]]] = {}
DISTRIBUTED: dict[str, Callable[..., Any]] = {}

# How a tensor is placed along one dimension of a device mesh: sharded along this dimension of the tensor, the same on
# every device (None), or SUM: it is the sum of the devices' terms.
At = int | str | None
SUM = "sum"


def operator(
    *,
    differentiable: bool = True,
    identity: bool = False,
    batch_first: Collection[str] | Literal[True] = (),
    inner: int | None = None,
    random: bool = False,
    call: Callable[..., Any] | None = None,
) -> Callable[[_Function], _Function]:
    """Turn a documented function of plain PyTorch into the public function of the operator with its name.

    Callers of the name get ``torch.ops.openreg.NAME``. The function's body, after the check in csrc/ops/NAME.cpp, is
    the operator's reference: its kernel on every device without one (cpu, cuda, meta).

    Args:
        differentiable: the reference also replaces the operator when autograd is on, so its derivatives of any order
            come from the operators that it calls, and a compiler sees and fuses these.
        identity: the C++ kernels serve every device, and the function is for comparison; see Note [Identity operators]
            in csrc/ops.
        batch_first: the arguments (names, or True for all) that take one more leading dimension, to which `torch.vmap`
            moves the mapped one. If any other argument is mapped, the reference is mapped. `batched` replaces this rule.
        inner: how many of the last dimensions are computed together: 0 for an elementwise operator, 1 for one that
            computes each row alone. DTensors stay sharded along the others, in which the arguments in `batch_first` and
            all results agree. Leave it out for an operator with its own rule for DTensors.
        random: the batching rule is called even if no argument is mapped. If the interpreter's `randomness()` is "error",
            PyTorch's error is raised.
        call: calls the operator with the function's arguments, where that takes more than passing them on: it chooses
            among several overloads, or replaces None.
    """

    def define(function: _Function) -> _Function:
        definition = Definition(function, identity, batch_first, random)
        name, packet = definition.name, definition.packet
        call_operator = call or packet.default
        if inner is not None:
            SHARDED[name] = definition.sharded_together(batch_first, inner)

        @functools.wraps(function)
        def public(*args: Any, **kwargs: Any) -> Any:
            return call_operator(*args, **kwargs)

        @functools.wraps(function)
        def reference(*args: Any, **kwargs: Any) -> Any:
            definition.checked(args, kwargs)
            return function(*args, **kwargs)

        def mapped(*args: Any, **kwargs: Any) -> Any:
            return definition.vmap(reference, args, kwargs)

        # register_fake asks inspect for the caller's module, which looks through all modules for a file that it has
        # not seen: a third of the time in which this package is imported.
        inspect.modulesbyfile.setdefault(function.__code__.co_filename, function.__module__)
        for overload in packet.overloads():
            full = name if overload == "default" else f"{name}.{overload}"
            torch.library.register_fake(f"openreg::{full}", definition.run_fake, lib=_library, _stacklevel=2)
            if not identity:
                _library.impl(full, reference, "CompositeExplicitAutograd")
                if differentiable:
                    _library.impl(full, reference, "Autograd")
            # Every call inside vmap passes its mode; a call with a mapped argument passes FuncTorchBatched.
            _library.impl(full, mapped, "FuncTorchVmapMode" if random else "FuncTorchBatched")
        _register_builtin(public, f"openreg::{name}")  # else TorchScript would compile the body
        public.reference = reference
        for decorator in ("fake", "batched", "sharded", "distributed", "samples"):
            setattr(public, decorator, getattr(definition, decorator))
        OPERATORS[name] = public
        return public

    return define


class Definition:
    """What a meta file says about one operator, and what PyTorch calls with it."""

    def __init__(
        self, function: Callable[..., Any], identity: bool, batch_first: Collection[str] | Literal[True], random: bool
    ) -> None:
        self.name, self.random = function.__name__, random
        self.packet = getattr(torch.ops.openreg, self.name)
        self.signature = inspect.signature(function)
        self.check = _C.check_of(self.name)
        self.rule = self.move_to_front(batch_first)
        self.kernel: Callable[..., Any] = function  # fake
        if identity:
            self.kernel = lambda **given: torch.ops.aten.alias.default(next(iter(given.values())))
        elif not self.packet.default._schema.returns:
            self.kernel = lambda **given: None

    # ---- decorators of the meta file ----

    def fake(self, kernel: _Function) -> _Function:
        """Decorate the fake kernel: what the operator returns, without data.

        It gets the operator's arguments that it declares, by name, after the operator's check has passed. Without one,
        the function's body is the fake kernel; an identity operator returns a view, and one without results nothing.
        """
        self.expect_known(kernel)
        self.kernel = kernel
        return kernel

    def batched(self, rule: _Function) -> _Function:
        """Decorate the batching rule, which `torch.vmap` runs instead of the operator, on every device.

        It is called with ``in_dims`` (the dimension to map over, or None, of each argument, nested for lists, mapped
        ones given by keyword last) and all of the operator's arguments, and returns the outputs and their out_dims,
        with the same structure, an int or None for each tensor; or None if the operator returns nothing; or
        NotImplemented, to map the reference, whose operators have their own rules. If it declares ``vmap``, it also gets
        the interpreter, which has `batch_size()` and `randomness()`.
        Like `torch.library.register_vmap`, but does not import functorch before it is used.
        """
        self.rule = rule
        return rule

    def sharded(self, rule: _Function) -> _Function:
        """Decorate the rule for DTensors: the placements of the arguments with which the operator can run on each
        device's part.

        It is called for each dimension of the mesh, gets the operator's arguments that it declares by name,
        and yields ``inputs, outputs``: a dict with the placement of each argument (an `At`; a list of them for a list
        of tensors; omitted arguments are replicated), and a tuple with the `At` of each output. You do not have to yield
        the case where all are replicated. The rule sees a tensor's ``shape``, ``dim()`` and ``at``, its present
        placement; if it declares ``shards``, it also gets the number of devices along the dimension.
        """
        self.expect_known(rule, "shards")
        SHARDED[self.name] = rule
        return rule

    def distributed(self, function: _Function) -> _Function:
        """Decorate a function that runs instead of the operator on DTensors, if a placement rule is not enough.

        It gets ``shards``, an `openreg_ops.distributed.sharding.Shards`, and the operator's arguments that it declares,
        by name.
        """
        self.expect_known(function, "shards")
        DISTRIBUTED[self.name] = function
        return function

    def samples(self, generator: _Function) -> _Function:
        """Decorate a generator of sample inputs, argument tuples, from (device, dtype)."""
        SAMPLES[self.name] = generator
        return generator

    def expect_known(self, function: Callable[..., Any], *more: str) -> None:
        if unknown := set(parameters(function)).difference(self.signature.parameters, more):
            raise TypeError(f"{function.__qualname__} takes {', '.join(unknown)}, which {self.name} does not")

    # ---- what PyTorch calls ----

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """All arguments: the dispatcher leaves defaults out."""
        given = self.signature.bind(*args, **kwargs)
        given.apply_defaults()
        return given

    def checked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name, after the operator's check."""
        given = self.bound(args, kwargs).arguments
        if self.check is not None:
            self.check(*given.values())
        return given

    def run_fake(self, *args: Any, **kwargs: Any) -> Any:
        return call_with(self.kernel, self.checked(args, kwargs))

    def vmap(self, reference: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator inside `torch.vmap`, by the batching rule."""
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
        from torch._functorch.vmap import _add_batch_dim, unwrap_batched

        given = self.bound(args, kwargs)
        interpreter = retrieve_current_functorch_interpreter()
        level = interpreter.level()
        (plain, options), (dims, option_dims) = unwrap_batched((given.args, given.kwargs), level)
        in_dims = (*dims, *(dim for dim in option_dims.values() if dim is not None))
        if self.random:
            torch._check(interpreter.randomness() != "error", lambda: _RANDOMNESS)
        if "vmap" in parameters(self.rule):
            options["vmap"] = interpreter
        with torch._C._ExcludeDispatchKeyGuard(_VMAP):
            if not self.random and all(dim is None for dim in tree_leaves(in_dims, is_leaf=lambda dim: dim is None)):
                return OPERATORS[self.name](*given.args, **given.kwargs)
            result = self.rule(in_dims, *plain, **options)
        if result is NotImplemented:
            return reference(*args, **kwargs)
        if result is None:
            return None
        return tree_map(lambda x, dim: x if dim is None else _add_batch_dim(x, dim, level), *result)

    # ---- rules that follow from `batch_first` and `inner` ----

    def move_to_front(self, batch_first: Collection[str] | Literal[True]) -> Callable[..., Any]:
        """The batching rule of an operator whose arguments in `batch_first` take one more leading dimension."""
        names = [
            parameter.name
            for parameter in self.signature.parameters.values()
            if parameter.kind is not parameter.KEYWORD_ONLY
        ]
        chosen = [batch_first is True or name in batch_first for name in names]

        def rule(in_dims: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            if any(dim is not None for dim, moves in zip(in_dims, chosen, strict=True) if not moves):
                return NotImplemented
            moved = iter(all_batch_first([*compress(in_dims, chosen)], [*compress(args, chosen)]))
            out = self.packet.default(
                *(next(moved) if moves else x for x, moves in zip(args, chosen, strict=True)), **kwargs
            )
            return out, tree_map(lambda _: 0, out)

        return rule

    def sharded_together(self, batch_first: Collection[str] | Literal[True], inner: int) -> Callable[..., Any]:
        """The rule for DTensors of an operator with `inner`: the arguments in `batch_first` and all results are sharded
        along one dimension."""
        names = [*self.signature.parameters] if batch_first is True else [*batch_first]
        if not names:
            raise TypeError(
                f"{self.name}: inner needs batch_first, which names the arguments that are sharded together"
            )
        outputs = len(self.packet.default._schema.returns)

        def rule(**given: Any) -> Iterable[Any]:
            for d in range(given[names[0]].dim() - inner):
                yield dict.fromkeys(names, d), (d,) * outputs

        return rule


def reference_of(name: str) -> Callable[..., Any]:
    """The reference of ``openreg::name``."""
    return OPERATORS[name].reference


@functools.cache
def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's parameters; "**" stands for ``**kwargs``."""
    found = inspect.signature(function).parameters.values()
    return tuple("**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in found)


def call_with(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a function with the arguments that it declares; with all of them, if it takes ``**kwargs``."""
    takes = parameters(function)
    return function(**given) if "**" in takes else function(**{name: given.get(name) for name in takes})


def all_batch_first(in_dims: Sequence[int | None], inputs: Sequence[Any], size: int | None = None) -> list[Any]:
    """The tensors with the mapped dimension first in each: moved there, or expanded if it has none; other values
    unchanged. `size` is the size of the mapped dimension, for inputs of which none may have one."""
    pairs = list(zip(inputs, in_dims, strict=True))
    size = next((x.shape[dim] for x, dim in pairs if dim is not None), size)
    return [
        x if not isinstance(x, Tensor) else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in pairs
    ]


def memory_order(x: Tensor) -> list[int]:
    """The dimensions of x, the slowest in memory first; those that cannot be compared, because sizes are unknown, keep
    their order."""
    strides, order = x.stride(), list(range(x.dim()))
    if all(isinstance(stride, int) for stride in strides):
        return sorted(order, key=strides.__getitem__, reverse=True)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    for end in range(len(order) - 1, 0, -1):
        for i in range(end):
            if guard_or_false(strides[order[i]] < strides[order[i + 1]]):
                order[i], order[i + 1] = order[i + 1], order[i]
    return order


# Versions of PyTorch operators that do not read "unbacked" sizes, which are known only when the program runs.


def unbacked(*tensors: Tensor) -> bool:
    """Returns true if a tensor has such a size."""
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for x in tensors for size in x.shape)


def logsumexp(x: Tensor) -> Tensor:
    """x.logsumexp(-1)."""
    if not unbacked(x):
        return x.logsumexp(-1)
    top = x.detach().amax(-1, keepdim=True)
    top = torch.where(top.isinf(), 0, top)
    return (x - top).exp().sum(-1).log() + top.squeeze(-1)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two matrices. The derivative of mm reads strides; the derivative of bmm does not."""
    return torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0) if unbacked(a, b) else a @ b


def whole_rows(x: Tensor) -> Tensor:
    """x; a DTensor with its last dimension unsharded, because PyTorch computes wrong gradients for slices of a sharded
    one."""
    last = x.dim() - 1
    if not any(placement.is_shard(last) for placement in getattr(x, "placements", ())):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(
        placements=[Replicate() if placement.is_shard(last) else placement for placement in x.placements]
    )


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that kernels compute and accumulate in: float32 for the half types, else `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def alike(tensors: int, *rest: Any) -> Callable[[str, torch.dtype], Iterable[Any]]:
    """The samples of an elementwise operator: this many tensors of one shape, then the rest."""

    def samples(device: str, dtype: torch.dtype) -> Iterable[Any]:
        for shape in ((4, 6), (5,), (2, 3, 4, 4)):
            yield *normal(device, dtype, *[shape] * tensors), *rest

    return samples


def normal(device: str, dtype: torch.dtype, *shapes: Sequence[int]) -> tuple[Tensor, ...]:
    """Samples of these shapes, normally distributed."""
    return tuple(torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
