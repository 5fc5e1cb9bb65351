"""Shared by the operators' meta files: `operator`, which each uses, and helpers for their references."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.jit._builtins import _register_builtin
from torch.utils._pytree import tree_leaves, tree_map

from openreg_ops import _C

_P, _R = ParamSpec("_P"), TypeVar("_R", covariant=True)
_Function = TypeVar("_Function", bound=Callable[..., Any])

_BATCHED, _VMAP_MODE = torch._C.DispatchKey.FuncTorchBatched, torch._C.DispatchKey.FuncTorchVmapMode
_VMAP = torch._C.DispatchKeySet(_BATCHED) | torch._C.DispatchKeySet(_VMAP_MODE)
_RANDOMNESS = (
    "vmap: called random operation while in randomness error mode. Please either use the 'same' or 'different' "
    "randomness flags on vmap or perform the randomness operation out of vmap"
)
_library = torch.library.Library("openreg", "IMPL")

# The public functions by operator name.
OPERATORS: dict[str, Operator[..., Any]] = {}
# Sample inputs by operator name, for openreg_ops.testing.check: (device, dtype) -> argument tuples.
SAMPLES: dict[str, Callable[[str, torch.dtype], Iterable[Any]]] = {}
# What the operators do with DTensors, by name, for openreg_ops/distributed/sharding.py.
SHARDED: dict[str, Callable[..., Iterable[Any]]] = {}
DISTRIBUTED: dict[str, Callable[..., Any]] = {}

# How a tensor is placed along one dimension of a device mesh: sharded along this dimension of the tensor, the same on
# every device (None), or SUM: it is the sum of the devices' terms.
At = int | str | None
SUM = "sum"


class Operator(Protocol[_P, _R]):
    """The result of `operator`: a plain function with these attributes."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call the operator. `reference` has its checks and its plain mathematics, for any device."""

    reference: Callable[_P, _R]

    def fake(self, kernel: _Function) -> _Function:
        """Decorate the fake kernel: what the operator returns, without data.

        It gets the operator's arguments that it declares, by name, after the operator's check has passed. Without one,
        the function's body is the fake kernel; an identity operator returns a view, and one without results nothing.
        """

    def batched(self, rule: _Function) -> _Function:
        """Decorate the batching rule, which `torch.vmap` runs instead of the operator, on every device.

        It is called with ``in_dims`` (the dimension to map over, or None, of each argument, nested for lists, mapped
        ones given by keyword last) and all of the operator's arguments, and returns the outputs and their out_dims,
        with the same structure, an int or None for each tensor; or None if the operator returns nothing; or
        NotImplemented, to map the reference, whose operators have their own rules. If it declares ``vmap``, it also gets
        the interpreter, which has `batch_size()` and `randomness()`.
        Like `torch.library.register_vmap`, but does not import functorch before it is used.
        """

    def sharded(self, rule: _Function) -> _Function:
        """Decorate the rule for DTensors: the placements of the arguments with which the operator can run on each
        device's part.

        It is called for each dimension of the mesh, gets the operator's arguments that it declares by name,
        and yields ``inputs, outputs``: a dict with the placement of each argument (an `At`; a list of them for a list
        of tensors; omitted arguments are replicated), and a tuple with the `At` of each output. You do not have to yield the
        case where all are replicated. The rule sees a tensor's ``shape``, ``dim()`` and ``at``, its present placement;
        if it declares ``shards``, it also gets the number of devices along the dimension.
        """

    def distributed(self, function: _Function) -> _Function:
        """Decorate a function that runs instead of the operator on DTensors, if a placement rule is not enough.

        It gets ``shards``, an `openreg_ops.distributed.sharding.Shards`, first, and the operator's arguments that it
        declares, by name.
        """

    def samples(self, generator: _Function) -> _Function:
        """Decorate a generator of sample inputs, argument tuples, from (device, dtype)."""


def operator(
    *,
    differentiable: bool = True,
    identity: bool = False,
    batch_first: Collection[str] | Literal[True] = (),
    inner: int | None = None,
    random: bool = False,
) -> Callable[[Callable[_P, _R]], Operator[_P, _R]]:
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
    """

    def define(function: Callable[_P, _R]) -> Operator[_P, _R]:
        name = function.__name__
        check = _C.check_of(name)
        packet = getattr(torch.ops.openreg, name)
        overloads = [name if overload == "default" else f"{name}.{overload}" for overload in packet.overloads()]
        positional, keywords = _parameters(function)
        defaults = dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
        defaults |= function.__kwdefaults__ or {}

        def bound(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
            """All arguments by name: the dispatcher leaves defaults out."""
            return {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}

        def known(by: Callable[..., Any], *more: str) -> None:
            if unknown := set(parameters(by)).difference(positional, keywords, more):
                raise TypeError(f"{by.__qualname__} takes {', '.join(unknown)}, which {name} does not")

        def fake(given: _Function) -> _Function:
            nonlocal kernel, takes
            known(given)
            kernel, takes = given, parameters(given)
            return given

        def checked(*args: Any, **kwargs: Any) -> Any:
            given = bound(args, kwargs)
            if check is not None:
                check(*(given[each] for each in (*positional, *keywords)))
            return kernel(**{each: given[each] for each in takes})

        def batched(given: _Function) -> _Function:
            nonlocal rule, takes_vmap
            rule, takes_vmap = given, "vmap" in inspect.signature(given).parameters
            return given

        def samples(generator: _Function) -> _Function:
            SAMPLES[name] = generator
            return generator

        def into(table: dict[str, Any], *more: str) -> Callable[[_Function], _Function]:
            def put(given: _Function) -> _Function:
                known(given, *more)
                table[name] = given
                return given

            return put

        def vmap(*args: Any, **kwargs: Any) -> Any:
            from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
            from torch._functorch.vmap import _add_batch_dim, unwrap_batched

            given = bound(args, kwargs)
            args, kwargs = tuple(given[each] for each in positional), {each: given[each] for each in keywords}
            interpreter = retrieve_current_functorch_interpreter()
            level = interpreter.level()
            (plain, options), (dims, option_dims) = unwrap_batched((args, kwargs), level)
            in_dims = (*dims, *(dim for dim in option_dims.values() if dim is not None))
            if random:
                torch._check(interpreter.randomness() != "error", lambda: _RANDOMNESS)
            if takes_vmap:
                options["vmap"] = interpreter
            with torch._C._ExcludeDispatchKeyGuard(_VMAP):
                if not random and all(dim is None for dim in tree_leaves(in_dims, is_leaf=lambda dim: dim is None)):
                    return public(*args, **kwargs)
                result = rule(in_dims, *plain, **options)
            if result is NotImplemented:
                return reference(*args, **kwargs)
            if result is None:
                return None
            return tree_map(lambda x, dim: x if dim is None else _add_batch_dim(x, dim, level), *result)

        rule, takes_vmap = _batch_first(packet, positional, batch_first), False
        if inner is not None:
            together = [*positional, *keywords] if batch_first is True else [*batch_first]
            if not together:
                raise TypeError(f"{name}: inner needs batch_first, which names the arguments that are sharded together")
            placed = functools.partial(_sharded_together, together, len(packet.default._schema.returns), inner)
            SHARDED[name] = _derive(function, f"_placed({together[0]})", _placed=placed)
        every = ", ".join([*positional, *(f"{each}={each}" for each in keywords)])
        looks = f"_check({', '.join([*positional, *keywords])}), " if check is not None else ""
        reference = _derive(function, f"({looks}_body({every}),)[-1]", _check=check, _body=function)
        public: Any = _derive(function, _public(packet, function))
        _register_builtin(public, f"openreg::{name}")  # else TorchScript would compile the body
        public.reference, public.fake, public.batched, public.samples = reference, fake, batched, samples
        public.sharded, public.distributed = into(SHARDED, "shards"), into(DISTRIBUTED, "shards")
        kernel = function if packet.default._schema.returns else _derive(function, "None")
        if identity:
            kernel = _derive(function, f"_alias({positional[0]})", _alias=torch.ops.aten.alias.default)
        takes = parameters(kernel)
        # register_fake asks inspect for the caller's module, which looks through all modules for a file that it has
        # not seen: a third of the time in which this package is imported.
        inspect.modulesbyfile.setdefault(function.__code__.co_filename, function.__module__)
        for overload in overloads:
            torch.library.register_fake(f"openreg::{overload}", checked, lib=_library, _stacklevel=2)
            if not identity:
                _library.impl(overload, reference, "CompositeExplicitAutograd")
                if differentiable:
                    _library.impl(overload, reference, "Autograd")
            # Every call inside vmap passes its mode; a call with a mapped argument passes FuncTorchBatched.
            _library.impl(overload, vmap, "FuncTorchVmapMode" if random else "FuncTorchBatched")
        OPERATORS[name] = public
        return public

    return define


def reference_of(name: str) -> Callable[..., Any]:
    """The reference of ``openreg::name``."""
    return OPERATORS[name].reference


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of all its parameters."""
    return [each for group in _parameters(function) for each in group]


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the positional and of the keyword-only ones."""
    code = function.__code__
    end = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[: code.co_argcount], code.co_varnames[code.co_argcount : end]


def _derive(like: Callable[..., Any], expression: str, **free: Any) -> Callable[..., Any]:
    """A function with the parameters, name and source location of `like` that returns an expression of them and `free`.

    It is compiled from text, like the methods of `dataclasses`, so a call packs no arguments.
    """
    positional, keywords = _parameters(like)
    parameters = ", ".join([*positional, *(["*", *keywords] if keywords else [])])
    function = eval(f"lambda {', '.join(free)}: lambda {parameters}: {expression}")(**free)
    at = like.__code__
    function.__code__ = function.__code__.replace(
        co_name=at.co_name, co_qualname=at.co_qualname, co_filename=at.co_filename, co_firstlineno=at.co_firstlineno
    )
    function.__defaults__, function.__kwdefaults__ = like.__defaults__, like.__kwdefaults__
    return functools.update_wrapper(function, like)


def _public(packet: Any, function: Callable[..., Any]) -> str:
    """The source of a call of the operator, which passes an empty list for a list that is None.

    If there are several overloads, it calls the one whose own arguments are given, and are tensors where the others
    take numbers.
    """
    positional, keywords = _parameters(function)
    values = {each: each for each in positional} | {each: f"{each}={each}" for each in keywords}
    for each, annotation in function.__annotations__.items():
        if str(annotation).startswith("Sequence") and str(annotation).endswith("None"):
            values[each] += " or []"

    def call(overload: str, names: Iterable[str]) -> str:
        return f"torch.ops.openreg.{function.__name__}.{overload}({', '.join(values[each] for each in names)})"

    if packet.overloads() == ["default"]:
        return call("default", values)
    types = {
        overload: {each.name: str(each.type) for each in getattr(packet, overload)._schema.arguments}
        for overload in packet.overloads()
    }
    common = types.pop("default")
    text = call("default", common)
    for overload, own in types.items():
        added = [f"{each} is not None" for each in own if each not in common]
        tensors = [f"isinstance({each}, Tensor)" for each in own if each in common and own[each] != common[each]]
        text = f"{call(overload, own)} if {' and '.join(added + tensors)} else {text}"
    return text


def _batch_first(packet: Any, names: Sequence[str], first: Collection[str] | Literal[True]) -> Callable[..., Any]:
    """The batching rule of an operator whose arguments in `first` take one more leading dimension."""
    chosen = [first is True or name in first for name in names]

    def rule(in_dims: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if any(dim is not None for dim, moves in zip(in_dims, chosen, strict=True) if not moves):
            return NotImplemented
        moved = iter(all_batch_first([*compress(in_dims, chosen)], [*compress(args, chosen)]))
        out = packet.default(*(next(moved) if moves else x for x, moves in zip(args, chosen, strict=True)), **kwargs)
        return out, tree_map(lambda _: 0, out)

    return rule


def _sharded_together(names: Iterable[str], outputs: int, inner: int, x: Any) -> Iterable[Any]:
    """The rule for DTensors of an operator with `inner`."""
    for d in range(x.dim() - inner):
        yield dict.fromkeys(names, d), (d,) * outputs


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
    """Whether a tensor has such a size."""
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
    if not any(each.is_shard(last) for each in getattr(x, "placements", ())):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate() if each.is_shard(last) else each for each in x.placements])


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
