"""Import this module before the first Accelerator: accelerate then runs on the device, also with
`Accelerator(mixed_precision="fp16")`.

It sets ACCELERATE_TORCH_DEVICE, accelerate's own switch, unless that is set already. accelerate rejects fp16 for every
device that is not on its list of vendors, so `Accelerator` here is a subclass of accelerate's; "no" and "bf16" need
only the environment variable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState

from openreg_ops.identity import identity

__all__ = ["Accelerator", "use_fp16"]

os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "openreg")
_chosen = PartialState._shared_state.get("device")
if _chosen is not None and _chosen.type != torch.device(os.environ["ACCELERATE_TORCH_DEVICE"]).type:
    raise RuntimeError(
        f"openreg_ops.integrations.accelerate: accelerate already runs on {_chosen}; import this module before the first "
        "Accelerator or TrainingArguments"
    )


def on_device() -> bool:
    """Returns true if accelerate runs on the device, or will."""
    chosen = PartialState._shared_state.get("device") or torch.device(os.environ["ACCELERATE_TORCH_DEVICE"])
    return chosen.type == identity.name


@contextlib.contextmanager
def on_cpu(wanted: bool) -> Iterator[None]:
    """Hide ACCELERATE_TORCH_DEVICE, which accelerate prefers to cpu=True, while an Accelerator is made for the CPU."""
    variable = "ACCELERATE_TORCH_DEVICE"
    hidden = os.environ.pop(variable, None) if wanted else None
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[variable] = hidden


def before_fp16() -> str:
    """The mixed_precision to create an Accelerator with, before `use_fp16` switches it to "fp16"."""
    if AcceleratorState._shared_state.get("_mixed_precision") == "fp16":  # an earlier one left it; all share it
        AcceleratorState._shared_state["_mixed_precision"] = "no"
    return "no"


def use_fp16(accelerator: accelerate.Accelerator) -> None:
    """Switch an Accelerator created with mixed_precision="no" to "fp16".

    Call it before `accelerator.prepare`. Models that it prepares then run under autocast in float16, and optimizers step
    through a `torch.amp.GradScaler`.
    """
    options = accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler is not None else {}
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler(accelerator.device.type, **options)


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, which also takes mixed_precision="fp16" on the device; arguments are by keyword."""

    def __init__(self, *, mixed_precision: str | None = None, cpu: bool = False, **options: Any) -> None:
        shared = AcceleratorState._shared_state.get("_mixed_precision")
        wanted = mixed_precision or shared or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        fp16 = str(wanted).lower() == "fp16" and on_device() and not cpu
        with on_cpu(cpu):
            super().__init__(mixed_precision=before_fp16() if fp16 else mixed_precision, cpu=cpu, **options)
        if fp16:
            use_fp16(self)
