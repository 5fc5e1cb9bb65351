"""The process groups called "nccl" under the name cuda: c10d finds `ProcessGroupNCCL` here, whose groups are "occl"'s."""

from __future__ import annotations

import datetime
import types
from collections.abc import Callable
from typing import Any

import torch

from openreg_ops import _C

__all__ = ["register"]

_TIMEOUT = datetime.timedelta(minutes=10)  # NCCL's


class Options:
    """What a program may set in `ProcessGroupNCCL.Options`. Only the timeout has an effect.

    Args:
        is_high_priority_stream: has no effect: collectives have a thread of their own.
    """

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = types.SimpleNamespace()
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = _TIMEOUT


class _OfTheDevice(type):
    """Makes ``isinstance(backend, ProcessGroupNCCL)`` true for the device's backends."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _C.DistributedBackend)


def register(default_options: Callable[..., Any], backend: Callable[..., Any]) -> None:
    """Let c10d make process groups called "nccl", from Gloo's options and a backend that takes them."""
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    class ProcessGroupNCCL(metaclass=_OfTheDevice):
        """The device's process group under NCCL's name. Calling this creates a `DistributedBackend`."""

        def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> _C.DistributedBackend:
            options = options or Options()
            gloo = default_options(ProcessGroupGloo, options._timeout)
            gloo.global_ranks_in_group, gloo.group_name = options.global_ranks_in_group, options.group_name
            return backend(store, rank, size, gloo)

    ProcessGroupNCCL.Options = Options
    _C.DistributedBackend._add_ephemeral_timeout = lambda self, timeout: None
    _C.DistributedBackend._set_default_timeout = _C.DistributedBackend.set_timeout
    torch.distributed.ProcessGroupNCCL = distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = _TIMEOUT
