"""DTensor's random operators on the device. Imported when PyTorch imports torch/distributed/tensor/_random.py.

That file assumes that a device's generator is Philox: 16 bytes of state, of which 8 are an offset that it advances. The
device's generator is a Mersenne Twister, which advances only by drawing numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch._prims.rng_prims import run_dtensor_rng_op
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor import _random

from openreg_ops.identity import identity

CHUNK = 1 << 16  # elements drawn at once


def _further(state: torch.Tensor, count: int) -> torch.Tensor:
    """A generator's state after `count` more 32-bit numbers, rounded up to an even count.

    Takes a second or two for 500 million.
    """
    state = state.clone()
    # at::CPUGeneratorImplState: whether the second of a pair of normal numbers is kept, as double and as float.
    state[5040:5044], state[5052:5056] = 0, 0
    generator = torch.Generator("cpu").set_state(state)
    drawn = torch.empty(CHUNK, dtype=torch.float64, device="cpu")  # an element is made of two numbers
    left = (count + 1) // 2
    while left > 0:
        left -= drawn[:left].uniform_(generator=generator).numel()
    return generator.get_state()


@contextlib.contextmanager
def _moved(start: int, end: int, device: int, generator: torch.Generator | None = None) -> Iterator[None]:
    """Operators draw from `generator`, or the device's default one, beginning at `start`, and leave it at `end`.

    If `end` is 0, the generator stays where the operators leave it.
    """
    default = torch.openreg.default_generators[device]
    source = default if generator is None else generator
    if source.device.type != identity.name:
        raise RuntimeError(f"Expected a 'openreg' device type for generator but found '{source.device.type}'")
    kept, state = default.get_state(), source.get_state()
    default.set_state(_further(state, start) if end else state)
    try:
        yield
    finally:
        state = _further(state, end) if end else default.get_state()
        default.set_state(kept)
        source.set_state(state)


class Tracker(_random.OffsetBasedRNGTracker):
    """Gives each shard of a DTensor its own numbers, in the order of the shards, and leaves all ranks at the same
    state.

    A tensor that is not sharded gets the numbers that a plain tensor gets on one process.
    """

    def _compute_rng_offsets(self, spec: Any) -> tuple[int, int]:
        """Where this rank's shard begins and the last one ends, in 32-bit numbers; 0 and 0 if there is one shard."""
        coordinate = [spec.mesh._sym_get_coordinate(i) for i in range(spec.mesh.ndim)]
        index, counts = _random._calc_shard_info(coordinate, spec)
        shards = math.prod(counts)
        if shards == 1:
            return 0, 0
        size = math.prod(_random._calc_first_shard_size(spec))  # of the largest
        if (spec.tensor_meta.dtype or torch.get_default_dtype()).is_complex:
            size *= 2
        room = 2 * size + 32  # normal_ of float64 draws the most: it may draw its last 16 elements twice
        return room * self._calc_shard_linear_idx(index, counts), room * shards

    @contextlib.contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        from torch.distributed._local_tensor import maybe_enable_local_tracker

        enabled = self.distribute_region_enabled
        if (local := maybe_enable_local_tracker(self._device.type, enabled, spec, generator)) is None:
            start, end = self._compute_rng_offsets(spec) if enabled else (0, 0)
            if not _are_we_tracing():
                local = _moved(start, end, torch.openreg.current_device(), generator)
            elif not end and generator is None:
                local = contextlib.nullcontext()
            else:  # torch 2.15 gets here only with a generator
                raise RuntimeError(
                    "DTensor: a graph cannot contain a random operator on openreg shards before torch 2.15, nor "
                    "one with a Generator in any version; keep it out of the graph with torch.compiler.disable"
                )
        with local:
            yield


def register() -> None:
    """Use our tracker for a mesh of the device, and for the operator that replaces it in graphs (on 2.15 also in eager
    mode)."""
    theirs = _random.OffsetBasedRNGTracker

    def new(cls: type, device_mesh: Any, *_: Any, **__: Any) -> Any:
        return object.__new__(Tracker if cls is theirs and device_mesh.device_type == identity.name else cls)

    theirs.__new__ = staticmethod(new)

    select = torch._C.DispatchKey.BackendSelect
    elsewhere = run_dtensor_rng_op.py_kernels[select]

    def run(start: int, end: int, op: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.device.type != identity.name:
            return elsewhere(start, end, op, x, *args, **kwargs)
        with _moved(start, end, x.device.index):
            return op(x, *args, **kwargs)

    run_dtensor_rng_op.py_kernels[select] = run
