"""The c10d backend "occl": `torch.distributed` on device tensors. Gloo works on them in place.

`init_process_group()` chooses it by default; ``"occl"``, ``"openreg:occl"`` and ``"cpu:gloo,openreg:occl"`` name it.
See Note [Distributed] in csrc/backend/distributed/process_group.h.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
from typing import Any

import torch

from openreg_ops import _C
from openreg_ops.distributed import nccl
from openreg_ops.identity import identity
from openreg_ops.torch_patches.import_hooks import after_import


def _create(group: Any, options: Any) -> _C.DistributedBackend:
    """A process group's backend; the arguments are those that c10d passes to a plugin."""
    from torch.distributed import ProcessGroup, ProcessGroupGloo

    if options is not None and not isinstance(options, ProcessGroupGloo._Options):
        raise TypeError(
            f"occl: expected pg_options of type ProcessGroupGloo._Options, but got {type(options).__name__}; "
            "leave them out for the defaults"
        )
    options = options or _default_options(ProcessGroupGloo, group.timeout)
    options.global_ranks_in_group, options.group_name = group.global_ranks_in_group, group.group_id
    backend = _backend(group.store, group.group_rank, group.group_size, options)

    # Before 2.15 torch gives a group a default backend only if it is built in or named alone, and
    # DistributedDataParallel asks for it. The group is a local variable of the caller.
    if torch.__version__ < (2, 15) and (caller := sys._getframe(1).f_locals.get("pg")) is not None:
        caller._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    return backend


def _backend(store: Any, rank: int, size: int, options: Any) -> _C.DistributedBackend:
    """The backend whose collectives Gloo runs, with Gloo's `options`."""
    from torch.distributed import ProcessGroupGloo

    engine = ProcessGroupGloo(store, rank, size, options)
    if torch.__version__ < (2, 15):  # from 2.15 on, the engine does this itself
        engine._set_sequence_number_for_group()
    return _C.DistributedBackend(engine)


def _default_options(engine: Any, timeout: datetime.timedelta) -> Any:
    """Gloo's defaults, but with one thread: two threads assign strings in the group's status without a lock, which
    corrupts memory when two collectives of a group end at the same time."""
    options = engine._Options()
    names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    options._devices = [engine.create_device(interface=name) for name in names] or [engine.create_default_device()]
    options._timeout = timeout
    options._threads = 1
    return options


def _register_monitored_barrier() -> None:
    """PyTorch's `monitored_barrier` rejects every group whose only backend is not Gloo, and otherwise calls Gloo's."""
    from torch.distributed import distributed_c10d as c10d

    of_gloo = c10d.monitored_barrier

    @functools.wraps(of_gloo)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        backend = None
        if not c10d._rank_not_in_group(group):
            with contextlib.suppress(RuntimeError):  # a group without a backend for the device
                backend = (group or c10d._get_default_group())._get_backend(torch.device(identity.name))
        if backend is None or backend.name() != "occl":
            return of_gloo(group, timeout, wait_all_ranks)
        if isinstance(timeout, float):
            timeout = datetime.timedelta(seconds=timeout)
        if timeout is not None:
            c10d._check_valid_timeout(timeout)
        options = {} if timeout is None else {"timeout": timeout}
        return backend.monitored_barrier(wait_all_ranks=wait_all_ranks, **options)

    c10d.monitored_barrier = torch.distributed.monitored_barrier = monitored_barrier


def _register_comm_hooks() -> None:
    """`DistributedDataParallel` compresses gradients to bfloat16 only if NCCL or XCCL is there; Gloo sums it, too."""
    check = torch.nn.parallel.DistributedDataParallel._check_comm_hook

    @functools.wraps(check)
    def _check_comm_hook(self: Any, hook: Any) -> None:
        if self.device_type == identity.name and getattr(hook, "__name__", "").startswith("bf16_compress_"):
            hook = functools.wraps(hook)(functools.partial(hook))
            hook.__name__ = "compress_hook"
        check(self, hook)

    torch.nn.parallel.DistributedDataParallel._check_comm_hook = _check_comm_hook


def _register_random() -> None:
    from openreg_ops.distributed import random

    random.register()


def _register_rules() -> None:
    from openreg_ops.distributed import attention, sharding

    sharding.register()
    attention.register()


def register() -> None:
    """Register "occl" with c10d as the device's default. torch has already imported c10d, but not DTensor."""
    if torch.distributed.is_available():
        _register_monitored_barrier()
        _register_comm_hooks()
        after_import("torch.distributed.tensor._random", _register_random)
        after_import("torch.distributed.tensor", _register_rules)
        if identity.name == "cuda":
            nccl.register(_default_options, _backend)
        else:
            torch.distributed.Backend.register_backend("occl", _create, extended_api=True, devices=[identity.name])
