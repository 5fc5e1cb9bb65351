"""The module ``torch.acme``: devices, streams, random numbers and mixed precision, under torch.cuda's names.

Rungs 1, 5, 6 and 7. Document: "Facilitating New Backend Integration by PrivateUse1", whose sections on autocast and on
generators list functions that PyTorch calls here.
"""

import functools
import os
import types
from typing import Any

import torch
from torch.accelerator import (  # noqa: F401
    current_stream,
    empty_cache,
    max_memory_allocated,
    memory_allocated,
    memory_reserved,
    memory_stats,
    set_stream,
    synchronize,
)

from torch_acme import _C

_pid = os.getpid()


def _index(device: Any) -> int:
    """The index of a device given as None (the current one), an index, a string or a torch.device."""
    if isinstance(device, str | torch.device):
        device = torch.device(device).index
    return _C.current_device() if device is None else device


# ---- rung 1: devices ----

device_count, current_device = _C.device_count, _C.current_device


def is_available() -> bool:
    return _C.device_count() > 0


def _is_in_bad_fork() -> bool:
    """Returns true in a child of fork(), which cannot use the devices of its parent."""
    return os.getpid() != _pid and _C.device_count() == 0


def is_initialized() -> bool:
    return not _is_in_bad_fork()


def _lazy_init() -> None:
    """Does nothing: the devices are ready when the package is imported."""


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


def get_device_properties(device: Any = None) -> Any:
    total = torch.accelerator.get_memory_info(_index(device))[1]
    return types.SimpleNamespace(name="acme", total_memory=total, multi_processor_count=1)


# ---- rung 4: the fallback ----

set_fallback_policy = _C.set_fallback_policy


def fallback_counts(reset: bool = False) -> dict[str, int]:
    """How often each operator ran on the CPU, because it has no kernel here. The most frequent first."""
    return dict(sorted(_C.fallback_counts(reset).items(), key=lambda entry: -entry[1]))


# ---- rung 5: streams and events ----

Event = functools.partial(torch.Event, "acme")


def Stream(device: Any = None, **options: Any) -> torch.Stream:  # noqa: N802
    return torch.Stream(torch.device("acme", _index(device)), **options)


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)  # c10::DeviceType::PrivateUse1


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


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    default_generators[_index(device)].set_state(new_state)


# ---- rung 7: mixed precision ----


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


# ---- rung 10: Inductor asks for these when it compiles for the device for the first time ----


def __getattr__(name: str) -> Any:
    if name in ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen"):
        from torch_acme import inductor

        return getattr(inductor, name)
    raise AttributeError(f"module 'torch.acme' has no attribute {name!r}")
