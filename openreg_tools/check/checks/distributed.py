"""The check of DTensors, on two devices that PyTorch simulates in this process."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from openreg_tools.check.case import Case, Results, Verdict, attached, cotangents, limit, pull, refuse, skip
from openreg_tools.check.checks.common import needs_order
from openreg_tools.core.blocks import all_lines
from openreg_tools.core.compare import tolerance

RANKS = 2
DIFFERENTIATED = 2  # of how many placements gradients are checked: graphs of DTensors are slow
_REMEDY = (
    "fix the sharding strategy: of each combination that it gives, the operator must make the outputs' parts from the "
    "inputs' parts alone; leave a dimension out along which elements depend on each other, and give a sum over a sharded "
    "dimension as Partial()"
)


@contextlib.contextmanager
def _devices(kind: str) -> Iterator[Any]:
    """A mesh of simulated devices; tensors created in it have a value for each device."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        with LocalTensorMode(frozenset(range(RANKS))):
            yield init_device_mesh(kind, (RANKS,))
    finally:
        dist.destroy_process_group()


def _parts(x: Tensor, dim: int | None) -> list[Tensor]:
    return [part.clone() for part in ([x] * RANKS if dim is None else x.chunk(RANKS, dim))]


def _placed(x: Tensor, parts: Sequence[Tensor], dim: int | None, mesh: Any) -> Any:
    """x as a DTensor, sharded along a dimension, or replicated."""
    from torch.distributed._local_tensor import LocalTensor
    from torch.distributed.tensor import DTensor, Replicate, Shard

    local = LocalTensor(dict(enumerate(parts)))
    placements = [Replicate() if dim is None else Shard(dim)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def _on_each(x: Any) -> list[Tensor | None]:
    """The full tensor of a DTensor, as each device has it."""

    def one(x: Any, rank: int) -> Tensor:
        while hasattr(x, "_local_tensors"):
            x = x._local_tensors[rank]
        return x

    if x is None:
        return [None] * RANKS
    whole = x.full_tensor() if hasattr(x, "full_tensor") else x
    return [one(whole, rank) for rank in range(RANKS)]


def _ways(case: Case) -> Iterator[tuple[str, list[int | None]]]:
    """Which arguments are sharded, in words and as dimensions: each alone, and all along one dimension."""
    tensors = case.leaves
    yield "every argument replicated", [None] * len(tensors)

    def fits(x: Tensor, d: int) -> bool:
        return d < x.dim() and x.shape[d] > 0 and x.shape[d] % RANKS == 0

    for d in range(max((x.dim() for x in tensors), default=0)) if len(tensors) > 1 else ():
        yield f"every argument sharded along dimension {d}", [d if fits(x, d) else None for x in tensors]
    for i, x in enumerate(tensors[:8]):
        for d in (d for d in range(x.dim()) if fits(x, d)):
            dims = [d if i == j else None for j in range(len(tensors))]
            yield f"{case.names[i]} sharded along dimension {d}", dims


def _has_its_own(op: Any) -> bool:
    """Returns true if a strategy, or a torch_dispatch rule for DTensor, is registered for the operator itself."""
    from torch._library.simple_registry import singleton
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
    rules = singleton.find(op.name().removesuffix(".default")).torch_dispatch_rules
    return any(op in getattr(propagator, table, ()) for table in tables) or rules.find(DTensor) is not None


def dtensor(case: Case) -> str | None:
    """On DTensors, however its arguments are sharded, outputs and gradients are the same as for plain tensors."""
    needs_order(case)
    if not torch.distributed.is_available() or torch.distributed.is_initialized():
        skip(
            "it needs torch.distributed, and a process that is not in a process group: its devices are simulated in one"
        )
    if not case.leaves or not case.expected:
        skip("it takes or returns no tensor")
    try:
        from torch.distributed import _local_tensor  # noqa: F401
        from torch.testing._internal.distributed import fake_pg  # noqa: F401
    except ImportError:
        skip("this PyTorch cannot simulate devices")
    case.gradients  # noqa: B018 -- before there are simulated devices
    outs = [x.detach() for x in attached(case.run(*case.fresh(grad=True)))] if case.has_derivative else []
    given = [(c, _parts(c, None)) for c in cotangents(outs)]
    ways = [
        (way, dims, [(x, _parts(x, d), d) for x, d in zip(case.fresh(), dims, strict=True)])
        for way, dims in _ways(case)
    ]
    stays = []
    with _devices(case.device.type) as mesh:
        own = _has_its_own(case.op)
        for i, (way, dims, inputs) in enumerate(ways):
            tensors = [_placed(x, parts, d, mesh) for x, parts, d in inputs]
            by = [_placed(c, parts, None, mesh) for c, parts in given] if given and i < DIFFERENTIATED else None
            try:
                stayed = _check_way(case, way, dims, tensors, by, own)
            except Verdict as verdict:
                keywords = {argument.name for argument in case.schema.arguments if argument.kwarg_only}
                if verdict.status == "fail" and any(name.partition("[")[0] in keywords for name in case.names):
                    limit("DTensor does not redistribute a tensor that is given by keyword only")
                raise
            if stayed and any(d is not None for d in dims):
                stays.append(way.replace("dimension ", ""))
    return f"stays sharded with {', '.join(stays)}" if stays else "no sharding stays"


def _unless_simulated(error: BaseException) -> None:
    """Skip if the simulation itself raised; for example, it does not support lists among several outputs."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and "_local_tensor" in frames[-1].filename:
        skip(f"PyTorch's simulated devices cannot run it: {all_lines(error)}")


def _lacks_strategy(error: BaseException) -> bool:
    return isinstance(error, NotImplementedError) or "sharding strategy" in str(error)


def _check_way(
    case: Case, way: str, dims: Sequence[int | None], tensors: list[Any], given: list[Any] | None, own: bool
) -> bool:
    """Check one placement of the arguments, optionally with gradients; returns whether an output is sharded."""

    def unless_fault_of_others(error: Exception, what: str) -> None:
        _unless_simulated(error)
        if not own:
            refuse(f"DTensor runs the operators it is made of, and with {way} {what} raises {all_lines(error)}")

    if given is not None:
        tensors = case.leaf(tensors)
    try:
        outs = list(case.run(*tensors))
    except Exception as error:
        if _lacks_strategy(error):
            refuse(
                f"DTensor has no sharding strategy for it, so a call on DTensors raises {all_lines(error)}; register one: "
                "torch.distributed.tensor.experimental.register_sharding"
            )
        if case.mutable and any(d is not None for d in dims):
            return False  # DTensor cannot move arguments that are written to
        unless_fault_of_others(error, "one")
        case.fail(f"a call on DTensors with {way} raised {all_lines(error)}", _REMEDY)
    sharded = any(place.is_shard() for out in outs for place in getattr(out, "placements", ()))
    grads: Sequence[Any] = []
    if given is not None:
        try:
            grads = pull(outs, tensors, lambda outs: given)
        except Exception as error:
            if _lacks_strategy(error):
                case.warn(
                    f"its backward does not run on DTensors: {all_lines(error)}",
                    "register a sharding strategy for the operators that the backward calls too",
                )
            unless_fault_of_others(error, "backward")
            case.fail(f"backward on DTensors with {way} raised {all_lines(error)}", _REMEDY)
    outs, grads = ([_on_each(x) for x in results] for results in (outs, grads))
    for rank in range(RANKS):
        got = Results([out[rank] for out in outs], [grad[rank] for grad in grads])
        coarse = 2 * tolerance(*case.leaves)
        case.expect(got, case.eager, f"on DTensors with {way}", "plain tensors give", _REMEDY, coarse=coarse, grads=2)
    return sharded
