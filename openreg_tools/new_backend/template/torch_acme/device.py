"""The module ``torch.acme``: devices, streams, random numbers and mixed precision, under torch.cuda's names.

Rungs 1, 5, 6 and 7. Document: "Facilitating New Backend Integration by PrivateUse1", whose sections on autocast and on
generators list functions that PyTorch calls here.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch

from torch_acme import _C

_pid = os.getpid()


def _is_in_bad_fork() -> bool:
    """Returns true in a child of fork(), which cannot use the devices of its parent."""
    return os.getpid() != _pid and _C.device_count() == 0


def _index(device: Any = None) -> int:
    """The index of a device given as None (the current one), an index, a string or a torch.device."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "acme":
            raise ValueError(f"expected a device of type acme, but got {device}")
        device = device.index
    return _C.current_device() if device is None else device


# ---- rung 1: devices ----


def is_available() -> bool:
    return _C.device_count() > 0


def is_initialized() -> bool:
    return not _is_in_bad_fork()


def init() -> None:
    """Does nothing: the devices are ready when the package is imported."""


_lazy_init = init


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device: Any) -> None:
    _C.exchange_device(_index(device))


class device:
    """``with torch.acme.device(1):`` makes a device current; None and -1 change nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self.before = _C.exchange_device(self.idx)

    def __exit__(self, *exception: object) -> None:
        _C.exchange_device(self.before)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_device_name(device: Any = None) -> str:
    return f"acme {_index(device)}"


def get_device_properties(device: Any = None) -> Any:
    index = _index(device)
    total = torch.accelerator.get_memory_info(index)[1]
    return SimpleNamespace(name=get_device_name(index), total_memory=total, multi_processor_count=1)


set_fallback_policy = _C.set_fallback_policy  # rung 4


def fallback_counts(reset: bool = False) -> dict[str, int]:
    """How often each operator ran on the CPU, because it has no kernel here. The most frequent first."""
    return dict(sorted(_C.fallback_counts(reset).items(), key=lambda entry: -entry[1]))


# ---- rung 5: streams and events; torch.Stream and torch.Event work on every device ----


def Stream(device: Any = None, priority: int = 0, **existing: Any) -> torch.Stream:  # noqa: N802
    return (
        torch.Stream(**existing) if existing else torch.Stream(torch.device("acme", _index(device)), priority=priority)
    )


def Event(enable_timing: bool = False, **options: Any) -> torch.Event:  # noqa: N802
    return torch.Event("acme", enable_timing=enable_timing, **options)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    type_ = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(type_))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """``with torch.acme.stream(s):`` runs work on s; a torch.Stream is a context itself."""
    return stream


# ---- rung 6: random numbers ----

default_generators = tuple(_C.default_generator(index) for index in range(_C.device_count()))


def manual_seed(seed: int) -> None:
    default_generators[_C.current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> int:
    return default_generators[_C.current_device()].seed()


def initial_seed() -> int:
    return default_generators[_C.current_device()].initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    default_generators[_index(device)].set_state(new_state)


# ---- rung 7: mixed precision ----


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("acme")


def set_autocast_enabled(enabled: bool) -> None:
    torch.set_autocast_enabled("acme", enabled)


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("acme")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("acme", dtype)


# ---- rung 9: memory; torch_acme/memory.py has the history ----


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()
