"""Process groups called "nccl" under the name cuda: c10d's `ProcessGroupNCCL`, which creates the backend "occl"."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch

from openreg_ops import _C

__all__ = ["register"]

_TIMEOUT = datetime.timedelta(minutes=10)  # NCCL's


class NCCLConfig:
    """What NCCL may be told about its communicators, with NCCL's defaults. It has no effect."""

    def __init__(self) -> None:
        self.blocking = self.cga_cluster_size = self.min_ctas = self.max_ctas = self.split_share = -(2**31)
        self.net_name = ""


class Options:
    """What a program may set in `ProcessGroupNCCL.Options`. Only the timeout has an effect.

    Args:
        is_high_priority_stream: has no effect: collectives have a thread of their own.
    """

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = NCCLConfig()
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = _TIMEOUT


class _OfTheDevice(type):
    """Makes ``isinstance(backend, ProcessGroupNCCL)`` true for the device's backends."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _C.DistributedBackend)


def register(default_options: Callable[..., Any], backend: Callable[..., Any]) -> None:
    """Let c10d make process groups called "nccl", from Gloo's options and a backend that takes them."""
    from torch.distributed import ProcessGroup, ProcessGroupGloo, distributed_c10d

    class ProcessGroupNCCL(metaclass=_OfTheDevice):
        """The device's process group under NCCL's name. Calling this creates a `DistributedBackend`."""

        def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> _C.DistributedBackend:
            options = options or Options()
            gloo = default_options(ProcessGroupGloo, options._timeout)
            gloo.global_ranks_in_group, gloo.group_name = options.global_ranks_in_group, options.group_name
            return backend(store, rank, size, gloo)

    of_torch = ProcessGroup._register_backend

    def register_backend(group: Any, device: torch.device, kind: Any, made: Any = None) -> None:
        """Gloo of a PyTorch without CUDA cannot sum tensors of the device; our backend lets it work on their memory."""
        if device.type == "cuda" and isinstance(made, ProcessGroupGloo):
            kind, made = ProcessGroup.BackendType.CUSTOM, _C.DistributedBackend(made)
        of_torch(group, device, kind, made)

    ProcessGroup._register_backend = register_backend
    ProcessGroupNCCL.Options, ProcessGroupNCCL.NCCLConfig = Options, NCCLConfig
    _C.DistributedBackend._add_ephemeral_timeout = lambda self, timeout: None
    _C.DistributedBackend._set_default_timeout = _C.DistributedBackend.set_timeout
    torch.distributed.ProcessGroupNCCL = distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = _TIMEOUT
