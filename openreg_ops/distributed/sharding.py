"""How the operators handle DTensors, by the rules in openreg_ops/meta. Imported after torch.distributed.tensor.

A rule in `Operator.sharded` becomes an op strategy: DTensor picks the combination that moves the fewest bytes, and runs
the operator on each device's part. A function in `Operator.distributed` runs instead of the operator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops.utils import generate_redistribute_costs, is_tensor_shardable
from torch.utils._pytree import tree_leaves

from openreg_ops.meta import op
from openreg_ops.meta.op import At

_library = torch.library.Library("openreg", "FRAGMENT")


def _placement(at: At) -> Placement:
    return Replicate() if at is None else Partial() if at == op.SUM else Shard(at)


def _at(placement: Placement) -> At:
    """The name of a placement in rules; one that no rule uses keeps its own name."""
    if isinstance(placement, Replicate):
        return None
    if type(placement) is Shard:
        return placement.dim
    return op.SUM if placement == Partial() else str(placement)


def by_name(overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, in the schema's order."""
    given = dict(zip((argument.name for argument in overload._schema.arguments), args, strict=False)) | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in overload._schema.arguments}


# ---- strategies ----


class Seen:
    """A rule's view of a DTensor: its shape, and how it is placed along one dimension of the mesh."""

    def __init__(self, spec: DTensorSpec, along: int) -> None:
        self.shape, self.at = spec.shape, _at(spec.placements[along])

    def dim(self) -> int:
        return len(self.shape)


def _combinations(
    overload: torch._ops.OpOverload,
    rule: Callable[..., Iterable[Any]],
    given: dict[str, Any],
    mesh: DeviceMesh,
    along: int,
) -> Iterator[tuple[list[At], tuple[At, ...]]]:
    """The placements of inputs and outputs that the rule allows along one dimension of the mesh, all replicated first.

    Arguments that are written to, and keyword arguments, stay where they are, because DTensor does not redistribute
    them.
    """
    arguments = {argument.name: argument for argument in overload._schema.arguments}

    def see(x: Any) -> Any:
        if isinstance(x, TupleStrategy):
            return [*map(see, x.children)]
        return Seen(x.strategies[0].output_spec, along) if isinstance(x, OpStrategy) else x

    seen = {name: see(x) for name, x in given.items()}
    seen["shards"] = mesh.size(along)
    outputs = len(overload._schema.returns)
    rules = op.call_with(rule, seen)
    name = overload._schema.name.partition("::")[2]
    known = op.parameters(op.OPERATORS[name])
    for inputs, outs in itertools.chain([({}, (None,) * outputs)], rules):
        if unknown := inputs.keys() - set(known):
            raise TypeError(f"the rule of {name} places {', '.join(unknown)}, which {name} does not take")
        if len(outs) != outputs:
            raise TypeError(f"the rule of {name} places {len(outs)} outputs, but {name} returns {outputs}")
        places: list[At] = []
        stays = True
        for key, argument in arguments.items():
            here = [x for x in tree_leaves(seen[key]) if isinstance(x, Seen)]
            wanted = inputs.get(key)
            wanted = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] * len(here)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or argument.kwarg_only:
                stays = stays and all(x.at == at for x, at in zip(here, wanted, strict=True))
            places += wanted
        if stays:
            yield places, outs


def _strategy(overload: torch._ops.OpOverload, rule: Callable[..., Iterable[Any]]) -> Callable[[OpSchema], OpStrategy]:
    def strategy(schema: OpSchema) -> OpStrategy:
        mesh = schema.get_mesh_from_args()
        given = by_name(overload, schema.args_schema, schema.kwargs_schema)
        tensors = [x for x in tree_leaves(given) if isinstance(x, OpStrategy)]
        before = [x.strategies[0].output_spec for x in tensors]
        found = []
        for combined in itertools.product(
            *(list(_combinations(overload, rule, given, mesh, i)) for i in range(mesh.ndim))
        ):
            at, outs_at = zip(*combined, strict=True)
            places, outs = ([tuple(map(_placement, x)) for x in zip(*by_dim, strict=True)] for by_dim in (at, outs_at))
            inputs = [
                DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)
                for placements, spec in zip(places, before, strict=True)
            ]
            if not all(
                spec.placements == was.placements or is_tensor_shardable(spec.shape, spec)
                for spec, was in zip(inputs, before, strict=True)
            ):
                continue
            outputs = [DTensorSpec(mesh, placements) for placements in outs]
            costs = [generate_redistribute_costs(x, spec) for x, spec in zip(tensors, inputs, strict=True)]
            several = tuple(outputs) if len(outputs) > 1 else outputs[0] if outputs else None
            found.append(OpSpec(output_specs=several, input_specs=inputs, redistribute_cost=costs))
        if not found:
            arrived = ", ".join(f"{list(spec.placements)} of {list(spec.shape)}" for spec in before)
            raise RuntimeError(
                f"{overload._schema.name.partition('::')[2]}: expected placements that do not move the tensors it writes to or "
                f"keyword arguments, but got {arrived}; redistribute them first"
            )
        return OpStrategy(found)

    return strategy


# ---- functions on DTensors ----


class Shards:
    """The mesh of a call, for a function in `Operator.distributed`. Placements are lists with one entry per mesh
    dimension."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.dims = mesh, range(mesh.ndim)

    def at(self, x: Any) -> list[At]:
        """How x is placed; a plain tensor, which is a scalar, and None are replicated."""
        return [*map(_at, x.placements)] if isinstance(x, DTensor) else [None for _ in self.dims]

    def local(self, x: Any, at: Sequence[At]) -> Any:
        """This device's part of x, after moving x to these placements."""
        if not isinstance(x, DTensor):
            return x
        return x.redistribute(self.mesh, [*map(_placement, at)]).to_local()

    def join(self, x: Tensor, at: Sequence[At], shape: Sequence[int] | None = None) -> DTensor:
        """The DTensor made of the devices' parts, with this shape; without a shape, every part is the full tensor or a
        summand. Its dimensions lie in memory in the order in which those of the part do."""
        size, step, stride = torch.Size(x.shape if shape is None else shape), 1, [0] * x.dim()
        for dim in sorted(reversed(range(x.dim())), key=x.stride):
            stride[dim] = step
            step *= max(size[dim], 1)
        return DTensor.from_local(
            x, self.mesh, [*map(_placement, at)], run_check=False, shape=size, stride=tuple(stride)
        )

    def reduce(self, x: Tensor, at: Sequence[At], by: str = "sum") -> Tensor:
        """x summed over the devices along each dimension of the mesh in which `at` says SUM."""
        placements = [Partial(by) if place == op.SUM else Replicate() for place in at]
        parts = DTensor.from_local(x, self.mesh, placements, run_check=False)
        return parts.redistribute(self.mesh, [Replicate() for _ in self.dims]).to_local()

    def part(self, size: int, at: Sequence[At]) -> Tensor:
        """The indices from 0 to size that are on this device if a dimension of this size is placed this way."""
        whole = torch.arange(size, device=self.mesh.device_type)
        return self.local(DTensor.from_local(whole, self.mesh, [Replicate() for _ in self.dims], run_check=False), at)


def _in_place_of(overload: torch._ops.OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        cls: type, _function: Any, _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = by_name(overload, args, kwargs or {})
        name = overload._schema.name.partition("::")[2]
        mesh = next(x.device_mesh for x in tree_leaves(given) if isinstance(x, DTensor))
        for key, value in given.items():
            for x in tree_leaves(value):
                if isinstance(x, Tensor) and not isinstance(x, DTensor) and x.dim():
                    raise RuntimeError(
                        f"{name}: expected all tensors to be DTensors, but {key} of shape {list(x.shape)} is a plain one; "
                        "use torch.distributed.tensor.distribute_tensor"
                    )
        with torch.no_grad():
            return op.call_with(function, given | {"shards": Shards(mesh)})

    return run


def register() -> None:
    """Register every rule and function in openreg_ops.meta with DTensor."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in op.OPERATORS:
        packet = getattr(torch.ops.openreg, name)
        for overload in (getattr(packet, variant) for variant in packet.overloads()):
            if rule := op.SHARDED.get(name):
                # Every argument that is not a tensor is part of the key of DTensor's cache; register_sharding includes
                # only integers.
                keywords = [argument.name for argument in overload._schema.arguments if argument.kwarg_only]
                info = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=keywords or None, needs_pytree=True)
                propagator.register_op_strategy(overload, _strategy(overload, rule), info)
            elif function := op.DISTRIBUTED.get(name):
                run = _in_place_of(overload, function)
                torch.library.register_torch_dispatch(overload, DTensor, run, lib=_library)
