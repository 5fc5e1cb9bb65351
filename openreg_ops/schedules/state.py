"""What `schedules` controls while it tries orders: the process, its ranks, and the state that every order starts from."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from openreg_ops import _C
from openreg_ops.device.random import get_rng_state_all, set_rng_state_all
from openreg_ops.schedules.report import raised

__all__ = ["Interrupts", "Ranks", "State", "alone", "without_collector"]

_exploring = threading.Lock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In the body, no other thread tries orders, and new memory is filled with NaN.

    Otherwise an order that reads too early could find the correct result of an earlier order.
    """
    if _C.order_thread() >= 0:
        raise RuntimeError(
            "schedules: a program whose orders are being tried calls it again; call it outside the program"
        )
    if not _exploring.acquire(blocking=False):
        raise RuntimeError(
            "schedules: another thread is trying orders, and a process can try the orders of only one program at a time; "
            "call it after the other call has returned"
        )
    before = _C.poison()
    try:  # collecting takes so long that Ctrl-C may come meanwhile
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


class Interrupts:
    """Delays Ctrl-C while an order begins and ends, so that the order leaves nothing behind."""

    def __init__(self) -> None:
        self.handler: Any = None  # of the program, while it waits
        self.came: Any = None
        self.handled = sys.exception()  # by the caller: it is behind each error, too

    def wait(self) -> None:
        """Delay Ctrl-C from now on. A second call has no effect."""
        if self.handler is None and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self.handler = handler
                signal.signal(signal.SIGINT, lambda *arguments: setattr(self, "came", arguments))

    def handle(self) -> None:
        """Let the program handle Ctrl-C again, including one that was delayed."""
        if self.handler is not None:
            handler, self.handler = self.handler, None
            signal.signal(signal.SIGINT, handler)
            if self.came:
                came, self.came = self.came, None
                handler(*came)

    def behind(self, error: BaseException | None) -> bool:
        """Whether Ctrl-C came in the middle of Python's own locks and queues, so that they raised an error instead."""
        seen: list[BaseException | None] = [self.handled]
        while error and not any(error is each for each in seen) and _of_locks(error):
            seen.append(error)
            error = error.__context__
        interrupt = isinstance(error, KeyboardInterrupt) and error is not self.handled
        return interrupt and _in_locks(error)


# What Python's locks say if one is released twice, and what a condition says then.
_RELEASED = ("release unlocked lock", "cannot release un-acquired lock")
_NOT_HELD = "cannot notify on un-acquired lock"
_LOCKS = ("threading", "queue", "openreg_ops.schedules.threads")  # the last one's locks replace Python's


def _in_locks(error: BaseException) -> bool:
    """Whether an error has passed through Python's locks and queues."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") in _LOCKS for frame, _line in frames)


def _of_locks(error: BaseException) -> bool:
    if type(error) is not RuntimeError:
        return False
    return str(error) in _RELEASED or (str(error) == _NOT_HELD and _in_locks(error))


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
        return next((f"on rank {i}, {each}" if self.size > 1 else each for i, each in enumerate(every) if each), None)

    def raise_first(self, error: Exception | None) -> None:
        if error is None:
            if what := self.first(None):
                raise RuntimeError(f"schedules: the program fails in its own order {what}")
            return
        if self.size > 1:
            with contextlib.suppress(RuntimeError):  # of ranks that wait for a call that this one has not made
                self.first(raised(error))
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
