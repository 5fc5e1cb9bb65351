"""The operators that are known to differ from the CPU, each with a cause that a reader can check.

The one list: `python -m openreg_ops conformance` and tests/test_opinfo.py read it, and fail when an
operator in it passes. At most ten operators.
"""

from __future__ import annotations

import dataclasses

from openreg_ops.testing import opinfo


@dataclasses.dataclass(frozen=True)
class Known:
    """Why an operator differs, and in which checks and dtypes."""

    cause: str
    checks: tuple[str, ...] = opinfo.CHECKS
    dtypes: tuple[str, ...] = opinfo.DTYPES


_CHUNKED = Known(
    cause="PyTorch accumulates the chunks in float32 only where device.type is 'cpu' or 'cuda' "
    "(_resolve_auto_acc_dtype in torch/nn/modules/linear_cross_entropy_options.py), elsewhere in the input's dtype; "
    "with LinearCrossEntropyOptions(acc_policy='accurate', acc_dtype=torch.float32) the device agrees",
    checks=("forward", "backward"),
    dtypes=("float16", "bfloat16"),
)

KNOWN_FAILURES: dict[str, Known] = {
    "nn.functional.linear_cross_entropy.chunked": _CHUNKED,
    "nn.functional.linear_cross_entropy.chunked_none": _CHUNKED,
}
