"""`TrainingArguments` and `Trainer` of transformers with bf16=True and fp16=True on the device.

transformers and accelerate reject both for devices that are not on their lists of vendors. These subclasses change
nothing else, and nothing on other devices. Importing them also makes the device accelerate's default.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import transformers

from openreg_ops.identity import identity
from openreg_ops.integrations import accelerate

__all__ = ["Trainer", "TrainingArguments"]


@dataclasses.dataclass
class TrainingArguments(transformers.TrainingArguments):
    """`transformers.TrainingArguments`, which also takes bf16 and bf16_full_eval on the device."""

    def _validate_args(self) -> None:
        wanted = self.bf16, self.bf16_full_eval
        if self.use_cpu or not accelerate.on_device():
            return super()._validate_args()
        for bf16, fp16 in ((self.bf16, self.fp16), (self.bf16_full_eval, self.fp16_full_eval)):
            if bf16 and fp16:
                raise ValueError("TrainingArguments: expected at most one of bf16 and fp16, but got both")
        self.bf16 = self.bf16_full_eval = False  # which make it ask CUDA and other vendors for bfloat16
        try:
            super()._validate_args()
        finally:
            self.bf16, self.bf16_full_eval = wanted

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        with accelerate.on_cpu(self.use_cpu):
            return super()._setup_devices


class Trainer(transformers.Trainer):
    """`transformers.Trainer`, which also takes `TrainingArguments(fp16=True)` on the device."""

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        made = super()._build_accelerator_args(**options)
        self._fp16 = self.args.mixed_precision == "fp16" and self.args.device.type == identity.name
        if self._fp16:
            made["mixed_precision"] = accelerate.before_fp16()
        return made

    def create_accelerator_and_postprocess(self) -> None:
        with accelerate.on_cpu(self.args.use_cpu):
            super().create_accelerator_and_postprocess()
        if self._fp16:
            accelerate.use_fp16(self.accelerator)
