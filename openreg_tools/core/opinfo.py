"""Samples from PyTorch's OpInfo database, made on the CPU."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openreg_tools.core.move import Move
from openreg_tools.core.samples import Sample

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "SEED",
    "calls_of",
    "database",
    "dtypes_of",
    "first_dtype",
    "samples",
    "sparse_samples",
]

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int64", "int32", "uint8", "bool")
LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc")
SEED = 1234


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Patches for the import of OpInfo's lists, which ask which GPU there is for the dtypes that CUDA supports."""
    from torch.testing._internal import common_cuda

    names = [name for name in vars(common_cuda) if re.fullmatch(r"SM(5|6|7|8|9)\dOrLater", name)]
    before = {name: getattr(common_cuda, name) for name in names}
    vars(common_cuda).update(dict.fromkeys(names, True))
    try:
        yield
    finally:
        vars(common_cuda).update(before)


@functools.cache
def database() -> dict[str, Any]:
    """Every OpInfo of ``op_db`` and of the foreach lists, by its full name (``linalg.svd``, ``_foreach_add``)."""
    with _as_on_a_gpu():
        from torch.testing._internal import common_methods_invocations as lists

    foreach = [getattr(lists, name) for name in dir(lists) if re.fullmatch(r"foreach_\w+_op_db", name)]
    return {op.full_name: op for op in itertools.chain(lists.op_db, *foreach)}


def dtypes_of(op: Any) -> list[str]:
    """The dtypes of `DTYPES` that the CPU supports for an OpInfo."""
    supported = op.supported_dtypes("cpu")
    return [name for name in DTYPES if getattr(torch, name) in supported]


def first_dtype(op: Any) -> torch.dtype | None:
    """The dtype with which an OpInfo's inputs run that do not depend on the dtype, such as wrong ones."""
    names = dtypes_of(op)
    return getattr(torch, names[0]) if names else None


def samples(op: Any, dtype: torch.dtype, requires_grad: bool, most: int) -> list[Any]:
    """At most `most` sample inputs of an OpInfo."""
    torch.manual_seed(SEED)
    count = 20 * most if most > 1 else 1
    made = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), count))
    # Spread over the list, because neighbors tend to be similar.
    step = max(1, len(made) / most)
    return [made[int(i * step)] for i in range(min(most, len(made)))]


def sparse_samples(op: Any, layout: str, dtype: torch.dtype, most: int) -> list[Any]:
    """The samples of a sparse layout. Few of the operators that support one have samples."""
    if not getattr(op, "supports_sparse" if layout == "coo" else f"supports_sparse_{layout}"):
        return []
    torch.manual_seed(SEED)
    requires_grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    try:
        made = op.sample_inputs_sparse(getattr(torch, f"sparse_{layout}"), "cpu", dtype, requires_grad=requires_grad)
        return list(itertools.islice(made, most))
    except (NotImplementedError, unittest.SkipTest):
        return []


# ---- calls of the operators that an OpInfo runs ----


class _Recorder(TorchDispatchMode):
    """Keeps copies of the arguments of the first calls of one operator."""

    def __init__(self, wanted: Any, most: int) -> None:
        super().__init__()
        self.wanted, self.most, self.calls = wanted, most, []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is self.wanted and len(self.calls) < self.most:
            copied = Move("cpu")
            self.calls.append(Sample(*copied(args), **copied(kwargs or {})))
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import dynamo


def calls_of(operator: Any, name: str, most: int = 3) -> list[Sample]:
    """Calls of an operator of the dispatcher that the samples of OpInfo `name` make on the CPU, forward and backward."""
    op = database()[name]
    with _Recorder(operator, most) as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.int64, torch.complex64):
            if dtype not in op.supported_dtypes("cpu"):
                continue
            for sample in samples(op, dtype, op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"), 8):
                with contextlib.suppress(Exception):
                    out = op(sample.input, *sample.args, **sample.kwargs)
                    leaves = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
                    sum(x.abs().sum() for x in leaves).backward()
                if len(recorder.calls) == most:
                    return recorder.calls
    return recorder.calls
