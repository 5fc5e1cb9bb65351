"""Settings of the process that a check, or a broken operator, changes."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from openreg_tools import backends


def _settings(devices: set[str]) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Functions that get and set each of them."""
    functorch, fill = torch._C._functorch, torch.utils.deterministic
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (lambda: fill.fill_uninitialized_memory, lambda on: setattr(fill, "fill_uninitialized_memory", on)),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch._C._get_autograd_fallback_mode, torch._C._set_autograd_fallback_mode),
        (functorch._is_vmap_fallback_enabled, functorch._set_vmap_fallback_enabled),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ]
    for device in sorted(filter(torch.amp.is_autocast_available, devices)):
        for get, put in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        ):
            found.append((functools.partial(get, device), functools.partial(put, device)))
    return found + [setting for backend in backends.registered() for setting in backend.state()]


@contextlib.contextmanager
def preserved(device: str) -> Iterator[None]:
    """Restores the settings and the states of the generators. Nothing is logged, and nothing warned of."""
    kind = torch.device(device).type
    before = [(put, get, get()) for get, put in _settings({kind, "cpu"})]
    accelerator = torch.accelerator.current_accelerator()  # torch.manual_seed seeds it too
    kinds = {kind, *(backend.device for backend in backends.registered()), accelerator.type if accelerator else kind}
    disabled = logging.root.manager.disable
    try:
        logging.disable()  # compilers log every error that a check expects
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for kind in kinds - {"cpu", "meta"}:
                module = getattr(torch, kind, None)
                numbers = hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")
                if numbers and not getattr(module, "_is_in_bad_fork", bool)():
                    stack.enter_context(torch.random.fork_rng(range(module.device_count()), device_type=kind))
            yield
    finally:
        logging.disable(disabled)
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)  # the default: PyTorch has no getter for it
        for put, get, value in before:
            if get() != value:
                put(value)
