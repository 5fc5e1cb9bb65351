"""What `compare` knows about an operator: what its schema says, and which results have no defined values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from openreg_tools.core.compare import same_bits
from openreg_tools.core.move import is_written

__all__ = ["Facts", "facts", "is_tie"]

# The results of these operators have no content yet, or the operators only manage memory.
UNDEFINED = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "_empty_affine_quantized",
    "resize_", "resize_as_", "set_", "_unsafe_view", "_reshape_alias", "record_stream", "is_pinned", "_pin_memory",
    "_resize_output_", "_efficientzerotensor",
}  # fmt: skip
# Results that only the operator's own backward reads, as bytes that are partly never written.
SCRATCH = {
    "mkldnn_rnn_layer": 3, "_cudnn_rnn": 3, "miopen_rnn": 3, "cudnn_batch_norm": 3, "_batch_norm_with_update": 3,
    "_batch_norm_with_update_functional": 3,
}  # fmt: skip
# Namespaces whose effects are on the host or the process, where no tensor shows them.
WITHOUT_RESULTS = {"profiler", "prim", "debug_mode_ops", "mempool", "streams", "prims_debug"}
# These return the index of one of several equal elements; devices may choose differently.
CHOOSES = {"sort", "argsort", "topk", "max", "min", "argmax", "argmin", "median", "nanmedian", "kthvalue", "mode"}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the schema of an operator says."""

    name: str  # "aten::add.Tensor"
    base: str  # "add", of add_, add.out and _foreach_add too
    view: bool  # returns its argument as another view
    undefined: bool  # has no results to compare
    random: bool
    written: tuple[bool, ...]  # by argument
    names: tuple[str, ...]  # of the arguments
    aliased: tuple[bool, ...]  # by result: an argument that was written
    collective: bool
    scratch: int  # the index of a result whose bytes have no meaning, or -1

    def writes(self, position: int | str) -> bool:
        """Returns true if the operator writes to this argument, by its position or name."""
        if isinstance(position, str):
            position = self.names.index(position) if position in self.names else -1
        return self.collective or (0 <= position < len(self.written) and self.written[position])

    def name_of(self, position: int) -> str:
        """The name of a positional argument."""
        return self.names[position] if position < len(self.names) else str(position)


@functools.cache
def facts(func: OpOverload) -> Facts:
    """The facts of an operator."""
    schema = func._schema
    namespace, _, plain = schema.name.partition("::")
    view = any(result.alias_info is not None and not is_written(result) for result in schema.returns)
    written = tuple(map(is_written, schema.arguments))
    return Facts(
        func.name(),
        plain.removeprefix("_foreach_").rstrip("_") or plain,
        view and not any(written),
        plain in UNDEFINED or namespace in WITHOUT_RESULTS,
        torch.Tag.nondeterministic_seeded in func.tags,
        written,
        tuple(argument.name for argument in schema.arguments),
        tuple(map(is_written, schema.returns)),
        namespace == "c10d",  # its operators do not declare their writes
        SCRATCH.get(plain, -1),
    )


def is_tie(of: Facts, args: list[Any], kwargs: dict[str, Any], got: Tensor, want: Tensor) -> bool:
    """Returns true if results are indices that differ only in which of several equal elements they name."""
    if of.base not in CHOOSES or got.dtype != torch.int64:
        return False
    given = dict(zip(of.names, args, strict=False)) | kwargs
    x, dim = given.get("self"), given.get("dim")
    if not isinstance(x, Tensor) or x.dtype == torch.int64 or given.get("stable"):
        return False
    if dim is None and "arg" in of.base and of.base != "argsort":
        x, dim = x.flatten(), 0
    dim = -1 if dim is None else dim
    if x.dim() == 0:
        return False
    try:
        index = [i if i.dim() == x.dim() else i.unsqueeze(dim) for i in (got, want)]
        return same_bits(x.gather(dim, index[0]), x.gather(dim, index[1]))
    except (RuntimeError, IndexError):  # an index out of range
        return False
