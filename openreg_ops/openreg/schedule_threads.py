"""The threads of a program whose orders are tried (schedules.py): which of them goes on is the schedule's choice."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from openreg_ops import _C

__all__ = ["controlled"]

TIMED_OUT, WOKEN, OVER = range(3)  # what _C.park_thread returns

_native_lock, _native_rlock = threading.Lock, threading.RLock
_thread = threading.local()  # .native: inside PyTorch's or Python's own start of a thread


def _takes_part() -> bool:
    return not getattr(_thread, "native", False) and _C.order_thread() >= 0


class _Over(BaseException):
    """Ends a thread that still waits when the program has returned."""


class _Lock:
    """A lock whose waiters let the schedule choose who goes on."""

    def __init__(self) -> None:
        self._lock = _native_lock()
        self._waiters: list[int] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not _takes_part():
            return self._lock.acquire(blocking, timeout)
        if _C.live_threads() > 1:
            _C.pass_point("lock")
        while not self._lock.acquire(False):
            if not blocking:
                return False
            me = _C.order_thread()
            self._waiters.append(me)
            parked = _C.park_thread(timeout >= 0)
            if parked != WOKEN:
                self._waiters.remove(me)
            if parked == OVER:
                raise _Over
            if parked == TIMED_OUT:  # nothing else could happen
                return self._lock.acquire(False)
        return True

    def release(self) -> None:
        self._lock.release()
        if self._waiters and _C.order_on():
            _C.wake_thread(self._waiters.pop(0))

    def locked(self) -> bool:
        return self._lock.locked()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()
        self._waiters.clear()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class _RLock(_Lock):
    """The same, for a thread that may acquire it again."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: int | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if self._owner != me:
            if not super().acquire(blocking, timeout):
                return False
            self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        if self._owner != threading.get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            super().release()

    __enter__ = acquire

    # What threading.Condition asks of a lock that its owner may hold several times.
    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def _release_save(self) -> int:
        count, self._count = self._count, 1
        self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self.acquire()
        self._count = count


def _allocate_lock() -> Any:
    return _Lock() if _takes_part() else _native_lock()


@contextlib.contextmanager
def _natively() -> Iterator[None]:
    before, _thread.native = getattr(_thread, "native", False), True
    try:
        yield
    finally:
        _thread.native = before


def _start(thread: threading.Thread) -> None:
    if not _takes_part():
        return _native_start(thread)
    number, run, ended = _C.add_thread(), thread.run, _Lock()

    def controlled_run() -> None:
        try:
            if _C.enter_thread(number):
                run()
        except _Over:
            pass
        finally:
            ended.release()
            _C.leave_thread()

    thread.run = controlled_run  # type: ignore[method-assign]
    thread._openreg_ended = ended  # type: ignore[attr-defined]
    with _natively():
        ended.acquire()
        _native_start(thread)


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    if _takes_part() and hasattr(thread, "_openreg_ended"):
        if not thread._openreg_ended.acquire(timeout=-1 if timeout is None else timeout):
            return
        thread._openreg_ended.release()
    with _natively():
        _native_join(thread, timeout)


def _sleep(seconds: float) -> None:
    """A thread that sleeps lets others go on, and takes no time."""
    if _takes_part() and _C.live_threads() > 1:
        _C.pass_point("sleep")
    else:
        _native_sleep(seconds)


def _numbered(numbers: Iterator[int]) -> Callable[..., None]:
    """Thread.__init__, which gives threads a number in place of their address as hash: an executor has a set of them."""

    def init(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
        thread.__dict__["_openreg_hash"] = next(numbers)
        _native_init(thread, *args, **kwargs)

    return init


def _hash(thread: threading.Thread) -> int:
    return thread.__dict__.get("_openreg_hash") or object.__hash__(thread)


_native_init = threading.Thread.__init__
_native_start, _native_join, _native_sleep = threading.Thread.start, threading.Thread.join, time.sleep


@contextlib.contextmanager
def controlled() -> Iterator[None]:
    """In the body, threads that the program starts take part: with their start, their end, and their locks.

    Everything that Python's `threading`, `queue` and `concurrent.futures` make of locks follows.
    """
    replaced = [
        (threading, "Lock", _allocate_lock),
        (threading, "RLock", lambda: _RLock() if _takes_part() else _native_rlock()),
        (threading, "_allocate_lock", _allocate_lock),
        (threading.Thread, "__init__", _numbered(itertools.count(1))),
        (threading.Thread, "__hash__", _hash),
        (threading.Thread, "start", _start),
        (threading.Thread, "join", _join),
        (time, "sleep", _sleep),
        (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
