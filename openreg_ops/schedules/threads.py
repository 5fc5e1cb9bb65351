"""Puts the threads of a program whose orders are tried (explore.py) under the schedule's control."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from openreg_ops import _C

__all__ = ["controlled", "others"]

SLICE = 0.5  # seconds after which a thread that outlives its order checks whether the process ends

_native_lock, _native_rlock = threading.Lock, threading.RLock


class _Local(threading.local):
    native = False  # inside Python's own start of a thread
    adopted = False  # takes part in an order that did not start it


_thread = _Local()


def others() -> bool:
    """Whether the process has threads that no order started. They may wake threads that take part in an order."""
    me = threading.current_thread()
    return any(
        each is not me and each.is_alive() and not hasattr(each, "_openreg_ended") for each in threading.enumerate()
    )


def _takes_part() -> bool:
    return not _thread.native and _C.order_thread() >= 0


def _enter(place: Any, adopted: bool = False) -> None:
    """Make the calling thread take part from now on."""
    _thread.adopted = adopted
    torch.autograd.set_multithreading_enabled(False)  # backward() runs here, not on threads that nothing orders
    _C.enter_thread(place)


class _Over(BaseException):
    """Ends a thread that still waits after a deadlock, or when the process ends."""


class _Waiter:
    """A thread that waits for a lock: under the schedule's control, or without it after the order has ended."""

    def __init__(self) -> None:
        self.place = _C.this_thread()
        self.joins: Any = None  # its place in a later order, to which the thread that wakes it belongs
        self.woken = _native_lock()
        self.woken.acquire()

    def wake(self) -> None:
        if not _C.wake_thread(self.place) and _takes_part():
            self.joins = _C.add_thread()
        self.woken.release()

    def wait(self, waiters: list[_Waiter], timeout: float) -> bool:
        """Whether another thread has taken it out of the waiters and woken it, before the timeout."""
        try:
            parked = _C.park_thread(timeout)
        except BaseException:  # Ctrl-C, or a deadlock
            if self in waiters:
                waiters.remove(self)
            elif waiters:
                waiters.pop(0).wake()
            raise
        if parked == "deadlocked" and not _thread.adopted:
            raise _Over
        if parked in ("over", "deadlocked"):
            self.outlive(timeout)
        return self.leave(waiters)

    def outlive(self, timeout: float) -> None:
        """Wait without a schedule, because the order has ended."""
        thread, until = threading.current_thread(), time.monotonic() + timeout
        torch.autograd.set_multithreading_enabled(True)
        while timeout < 0 or time.monotonic() < until:
            if self.woken.acquire(True, SLICE if timeout < 0 else max(0, min(SLICE, until - time.monotonic()))):
                self.woken.release()
                break
            if not thread.daemon and not threading.main_thread().is_alive():
                raise _Over

    def leave(self, waiters: list[_Waiter]) -> bool:
        if self in waiters:  # only one thread at a time changes the list, because it holds the GIL
            waiters.remove(self)
            return False
        self.woken.acquire()  # released by the thread that took it out
        if self.joins:
            _enter(self.joins, adopted=True)
        return True


class _Lock:
    """A lock for which the schedule chooses the waiter that continues."""

    def __init__(self) -> None:
        self._lock = _native_lock()
        self._waiters: list[_Waiter] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not _takes_part():
            return self._lock.acquire(blocking, timeout)
        _native_lock().acquire(blocking, timeout)  # raises for arguments that Python rejects
        if _C.live_threads() > 1:
            _C.try_point("lock")
        while not self._lock.acquire(False):
            if not blocking:
                return False
            waiter = _Waiter()
            self._waiters.append(waiter)
            if self._lock.acquire(False):  # a thread that does not take part released it in the meantime
                waiter.leave(self._waiters)
                return True
            if not waiter.wait(self._waiters, timeout):
                return self._lock.acquire(False)
        return True

    def release(self) -> None:
        if self.hand_over() and _takes_part():
            _C.try_point("release")  # the thread that waited may continue first

    def hand_over(self) -> bool:
        """Release the lock and continue; returns whether a thread waited."""
        self._lock.release()
        if not self._waiters:
            return False
        self._waiters.pop(0).wake()
        return True

    def locked(self) -> bool:
        if self._lock.locked() and _takes_part():
            _C.ask_point("locked")
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

    # The methods that threading.Condition calls on a reentrant lock.
    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def _release_save(self) -> int:
        count, self._count = self._count, 1
        self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        interrupt = None
        while not self._is_owned():  # even after Ctrl-C, because the caller releases the lock
            try:
                self.acquire()
            except KeyboardInterrupt as raised:
                interrupt = raised
        self._count = count
        if interrupt:
            raise interrupt


def _allocate_lock() -> Any:
    return _Lock() if _takes_part() else _native_lock()


@contextlib.contextmanager
def _natively() -> Iterator[None]:
    before, _thread.native = _thread.native, True
    try:
        yield
    finally:
        _thread.native = before


def _start(thread: threading.Thread) -> None:
    if not _takes_part() or thread.ident is not None or not getattr(thread, "_initialized", False):
        return _native_start(thread)  # raises for a second start
    place, run, ended = _C.add_thread(), thread.run, _Lock()

    does = getattr(getattr(thread, "_target", None), "__qualname__", type(thread).__qualname__)

    def controlled_run() -> None:
        try:
            _enter(place)
            _C.pass_point("begin")  # so that the order shows when, although the thread may queue no work
            run()
        except _Over:
            pass
        except Exception as error:
            thread._openreg_raised = f"{does}: {type(error).__qualname__}"  # type: ignore[attr-defined]
            raise
        finally:
            ended.hand_over()
            _C.leave_thread()

    thread.run = controlled_run  # type: ignore[method-assign]
    thread._openreg_ended = ended  # type: ignore[attr-defined]
    with _natively():
        ended.acquire()
        try:
            _native_start(thread)
        except RuntimeError:  # the operating system has no thread left
            _C.drop_thread(place)
            raise
    _C.try_point("start")  # the new thread may run first


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    ended = getattr(thread, "_openreg_ended", None)
    if ended and _takes_part() and thread is not threading.current_thread():
        if not (ended.acquire() if timeout is None else ended.acquire(timeout=max(0, timeout))):
            return
        ended.release()
        if timeout is None and (raised := thread.__dict__.pop("_openreg_raised", None)):
            _raised.append(raised)
    with _natively():
        _native_join(thread, timeout)


def _is_alive(thread: threading.Thread) -> bool:
    ended = getattr(thread, "_openreg_ended", None)
    if not ended or not _takes_part() or thread is threading.current_thread():
        return _native_is_alive(thread)
    return ended.locked()


def _is_set(event: threading.Event) -> bool:
    if not _native_is_set(event) and _takes_part():
        _C.ask_point("is_set")
    return _native_is_set(event)


class _Clock:
    """The time in an order, including the waits and sleeps that were skipped."""

    def __init__(self, native: Callable[[], float]) -> None:
        self.native = native

    def __call__(self) -> float:
        return self.native() + (_C.skipped_seconds() if _takes_part() else 0)


def _sleep(seconds: float) -> None:
    if not _takes_part() or not seconds >= 0:
        return _native_sleep(seconds)
    if _C.ask_point("sleep", seconds):
        _native_sleep(min(seconds, 1e-3))  # no other thread can continue; it may be waiting for another process


def _numbered(numbers: Iterator[int]) -> Callable[..., None]:
    """A Thread.__init__ that makes a number the thread's hash instead of its address, because executors keep sets of
    threads."""

    def init(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
        thread.__dict__["_openreg_hash"] = next(numbers)
        _native_init(thread, *args, **kwargs)

    return init


def _hash(thread: threading.Thread) -> int:
    return thread.__dict__.get("_openreg_hash") or object.__hash__(thread)


_native_init, _native_start, _native_join = threading.Thread.__init__, threading.Thread.start, threading.Thread.join
_native_is_alive, _native_is_set, _native_sleep = threading.Thread.is_alive, threading.Event.is_set, time.sleep


_raised: list[str] = []  # what each thread that was joined ran, and the exception that ended it


@contextlib.contextmanager
def controlled() -> Iterator[list[str]]:
    """In the body, the schedule controls how threads that the program starts start, end, lock and sleep.

    This covers everything that Python's `threading`, `queue` and `concurrent.futures` build on locks. Yields the
    exceptions that ended threads, of those that the program joined: whether others have ended depends on the order.
    """
    _raised.clear()
    threading.Thread.__hash__ = _hash  # type: ignore[method-assign]  # stays: a thread may still start when an order ends
    monotonic = _Clock(time.monotonic)
    replaced = [
        (threading, "Lock", _allocate_lock),
        (threading, "RLock", lambda: _RLock() if _takes_part() else _native_rlock()),
        (threading, "_allocate_lock", _allocate_lock),
        (threading.Thread, "__init__", _numbered(itertools.count(1))),
        (threading.Thread, "start", _start),
        (threading.Thread, "join", _join),
        (threading.Thread, "is_alive", _is_alive),
        (threading.Event, "is_set", _is_set),
        (time, "sleep", _sleep),
        (time, "monotonic", monotonic),
        (time, "time", _Clock(time.time)),
        (time, "perf_counter", _Clock(time.perf_counter)),
        (threading, "_time", monotonic),
        (queue, "time", monotonic),
        (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield _raised
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
