"""What `schedules` controls while it tries orders: the process, its ranks, and the state that every order starts from."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from openreg_ops import _C
from openreg_ops.device.random import get_rng_state_all, set_rng_state_all
from openreg_ops.schedules.report import raises

__all__ = ["Ranks", "State", "alone", "without_collector"]

_exploring = threading.Lock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In the body, no other thread tries orders, and new memory is filled with NaN.

    Otherwise an order that reads too early could find the correct result of an earlier order.
    """
    if not _exploring.acquire(blocking=False):
        raise RuntimeError(
            "schedules: the orders of a program are being tried, and a process can try the orders of only one program at a "
            "time; call it outside that program, after the other call has returned"
        )
    before = _C.poison()
    try:
        _C.set_poison(True)
        gc.collect()
        yield
    finally:
        _C.set_poison(before)
        _exploring.release()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Python does not look for cycles in the body: that would free memory at times that the order does not determine."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Ranks:
    """The processes of the default group, all of which call `schedules` with the same arguments."""

    def __init__(self, **arguments: Any) -> None:
        self.rank, self.size = 0, 1
        self.order = "in the program's order"  # which they run
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for name, value in arguments.items():
            for rank, other in enumerate(self.gather(value)):
                if other != value:
                    raise ValueError(
                        f"schedules: expected the same {name} on every rank, but got {value!r} on rank {self.rank} and "
                        f"{other!r} on rank {rank}"
                    )

    def gather(self, value: Any, said: str | None = None) -> list[Any]:
        """The values of all ranks; `said`: what this one has found in its order."""
        if self.size == 1:
            return [value]
        every: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(every, value)
        except RuntimeError as error:
            found = f" On rank {self.rank}, {self.order}, {said}." if said else ""
            raise RuntimeError(
                f"schedules: the ranks do not make the same calls of torch.distributed {self.order}.{found} Call schedules "
                "on every rank, with a program that makes the same calls on all of them; see what the others raise"
            ) from error
        return every

    def first(self, what: str | None) -> str | None:
        """The first `what` of a rank that is not None, with the rank's number."""
        every = self.gather(what, what)
        return next((f"on rank {i}, {said}" if self.size > 1 else said for i, said in enumerate(every) if said), None)

    def raise_first(self, error: Exception | None) -> None:
        if error is None:
            if what := self.first(None):
                raise RuntimeError(f"schedules: the program fails in its own order {what}")
            return
        if self.size > 1:
            with contextlib.suppress(RuntimeError):  # of ranks that wait for a call that this one has not made
                self.first(raises(error))
        raise error


class State:
    """The state that a program may change and that each order starts from: generators, current device and streams.

    It also has no garbage and no cached pinned memory. The runtime does the same for device memory (begin_schedule()).
    """

    def __init__(self) -> None:
        self.python, self.host, self.devices = random.getstate(), torch.get_rng_state(), get_rng_state_all()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self.device = torch.openreg.current_device()
        self.streams = [torch.openreg.current_stream(i) for i in range(torch.openreg.device_count())]
        self.next = _C.next_streams()

    def restore(self) -> None:
        gc.collect(1)  # the objects of the last orders; to look at all would take a tenth of a second
        torch.accelerator.empty_host_cache()
        random.setstate(self.python)
        torch.set_rng_state(self.host)
        set_rng_state_all(self.devices)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for stream in self.streams:
            torch.openreg.set_stream(stream)
        torch.openreg.set_device(self.device)
        _C.set_next_streams(self.next)
