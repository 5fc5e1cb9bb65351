"""Registers the c10d backend "acmeccl" of csrc/distributed.cpp as the device's default. Rung 11."""

from typing import Any

import torch

from torch_acme import _C


def _create(group: Any, options: Any) -> Any:
    return _C.DistributedBackend(group.store, group.group_rank, group.group_size, group.timeout)


def register() -> None:
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend("acmeccl", _create, extended_api=True, devices=["acme"])
