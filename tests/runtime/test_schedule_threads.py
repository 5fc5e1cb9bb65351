"""Threads of a program whose orders are tried: they wait in every way, outlive an order, deadlock, and keep Python's rules."""

import _thread
import contextlib
import faulthandler
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue

import pytest
import schedule_waits
import torch
from processes import python
from schedule_waits import threads_that_deadlock

from openreg_ops import _C

DEVICE = "openreg"
current = torch.openreg.current_stream
schedules = torch.openreg.schedules
WAITS = Path(__file__).parent / "schedule_waits.py"


@pytest.fixture(autouse=True)
def never_hangs():
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("groups", [["BLOCKED"], ["POLLED", "TIMED", "KEPT"]], ids=["blocked", "seen"])
def test_every_way_to_wait(groups):
    """None hangs or makes a difference, and where the scheduler sees the wait, a seed gives one order.

    The threads that outlive an order let the process end.
    """
    first = python(WAITS, *groups, timeout=120)
    passed = [line.split()[0] for line in first.stdout.splitlines() if " passed " in line]
    wanted = [name for group in groups for name in getattr(schedule_waits, group)]
    assert passed == wanted and first.returncode == 0, first.stdout + first.stderr
    if groups != ["BLOCKED"]:
        assert python(WAITS, *groups, timeout=120).stdout == first.stdout


def test_waits_of_every_kind_are_kept():
    """Polling, timeouts, conditions, barriers and daemons: none hangs, and none makes a difference."""

    def program():
        x, side = torch.ones(8, device=DEVICE), torch.openreg.Stream()
        event = current().record_event()
        while not event.query():
            pass
        barrier, condition, total = threading.Barrier(2), threading.Condition(), []

        def work():
            with torch.openreg.Stream() as stream:
                stream.wait_event(event)
                total.append((x * 3).cpu())
            barrier.wait()
            with condition:
                condition.notify()

        thread = threading.Thread(target=work)
        with condition:
            thread.start()
            assert not thread.join(timeout=0.01)
        barrier.wait()
        thread.join()
        assert not threading.Event().wait(0.001)
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        side.wait_stream(current())
        with side:
            x.mul_(2)
        while not side.query():
            pass
        return total, x

    report = schedules(program, seeds=60)
    assert report.passed, report


def works(seconds):
    """Use a processor without the GIL, as a thread looks that waits for a processor of a busy machine."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        hashlib.pbkdf2_hmac("sha256", b"openreg", b"order", 2000)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starts", "ends", "computes"])
def test_a_thread_that_is_slow_does_not_change_an_order(when, monkeypatch):
    slow = False

    def program():
        def work(i):
            with torch.openreg.Stream() as stream:
                x = torch.full((8,), float(i), device=DEVICE)
                if slow and when == "computes":  # for a thread that the schedule does not control
                    lock = _thread.allocate_lock()
                    lock.acquire()
                    _thread.start_new_thread(lambda: (works(0.12), lock.release()), ())
                    lock.acquire()
                return x.exp(), stream.record_event()

        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(work, range(2)))
        for _, event in parts:
            current().wait_event(event)
        return parts[0][0] + parts[1][0]

    before = schedules(program, seeds=2).fingerprints
    name = {"starts": "_bootstrap_inner", "ends": "_delete"}.get(when)
    if name:
        native = getattr(threading.Thread, name)
        monkeypatch.setattr(threading.Thread, name, lambda self: (works(0.12), native(self)))
    slow = True
    assert schedules(program, seeds=2).fingerprints == before


def test_a_thread_that_cannot_be_started(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("can't start new thread")

    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"

    def program():
        with pytest.raises(RuntimeError, match="can't start new thread"), monkeypatch.context() as patch:
            patch.setattr(threading, name, refuse)
            threading.Thread(target=lambda: None).start()
        return torch.ones(8, device=DEVICE) + 1

    assert schedules(program, seeds=4).passed


def test_a_deadlock_is_an_order_that_raises():
    all_threads = []

    def program():
        x, threads = threads_that_deadlock()
        all_threads.extend(threads)
        for thread in threads:
            thread.join()
        return x.cpu()

    difference = schedules(program, seeds=50).difference
    assert "raises RuntimeError: openreg: this order of the program's work ends in a deadlock" in difference.what
    for thread in all_threads:  # also those in the deadlock, which end on their own
        thread.join(60)
        assert not thread.is_alive()


EXITS = """
import sys; sys.path.insert(0, {folder!r})
import faulthandler, threading, torch
from schedule_waits import threads_that_deadlock
faulthandler.dump_traceback_later(60, exit=True)
print([torch.openreg.schedules(lambda: threads_that_deadlock()[0].cpu().shape, seeds=20).passed])
print(threading.active_count() > 1)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_threads_that_are_left_in_a_deadlock_let_the_process_end():
    done = python("-c", EXITS.format(folder=os.path.dirname(__file__)), timeout=90, destructors=True)
    assert done.returncode == 0 and done.stdout.splitlines() == ["[True]", "True"], done.stderr


@pytest.mark.slow
def test_a_deadlock_of_threads_that_ask(monkeypatch):
    """Cases in which a thread polls for something that never happens, which take some seconds to find."""
    monkeypatch.setitem(schedules.__globals__, "PATIENCE", 0.1)

    def program():
        x, flag = torch.zeros(1, device=DEVICE), threading.Event()
        side = torch.openreg.Stream()
        with side:
            x.add_(1)
        if int(x):
            flag.set()
        while not flag.is_set():
            time.sleep(100)

    assert "deadlock" in schedules(program, seeds=[33]).difference.what


def test_what_python_refuses():
    def program():
        thread = threading.Thread(target=lambda: None)
        with pytest.raises(RuntimeError, match="cannot join thread before it is started"):
            thread.join()
        thread.start()
        thread.join(-0.5)
        thread.join()
        thread.join(-1)
        with pytest.raises(RuntimeError, match="threads can only be started once"):
            thread.start()
        with pytest.raises(RuntimeError, match="cannot join current thread"):
            threading.current_thread().join()
        for make in (threading.Lock, threading.RLock):
            for arguments in ((True, -5), (False, 1), (True, 1e20)):
                with pytest.raises((ValueError, OverflowError)):
                    make().acquire(*arguments)
        with pytest.raises(ValueError):
            time.sleep(-1)
        return torch.ones(1, device=DEVICE)

    assert schedules(program, seeds=5).passed


def test_backward_in_threads():
    """Even in a thread that outlives an order: backward() runs on the thread that calls it."""
    ran, kept = [], {}

    def loss():
        x = torch.ones(4, device=DEVICE, requires_grad=True)
        x.register_hook(lambda grad: ran.append(threading.get_ident() == caller[0]))
        caller = [threading.get_ident()]
        (x * 2).sum().backward()
        return x.grad

    def work():
        while True:
            kept["in"].acquire()
            kept["grad"] = loss()
            kept["out"].release()

    def program():
        if not kept:
            kept.update({"in": threading.Semaphore(0), "out": threading.Semaphore(0)})
            threading.Thread(target=work, daemon=True).start()
        grads = []
        thread = threading.Thread(target=lambda: grads.append(loss()))
        thread.start()
        kept["in"].release(), kept["out"].acquire()
        thread.join()
        torch.openreg.synchronize()
        return grads, kept["grad"]

    assert schedules(program, seeds=10).passed
    assert len(ran) == 24 and all(ran)


def test_interprocess_events_of_one_process():
    """The handle names an event of this process: its record is late in some orders, and its waits ask the schedule."""

    def program(fixed):
        x, side = torch.ones(8, device=DEVICE), torch.openreg.Stream()
        event = torch.openreg.Event(interprocess=True)
        torch.openreg.synchronize()
        with side:
            x.mul_(3)
            event.record()
        opened = torch.openreg.Event.from_ipc_handle(0, event.ipc_handle())
        if fixed == "stream":
            opened.wait()
        elif fixed == "host":
            opened.synchronize()
        elif fixed == "query":
            while not opened.query():
                time.sleep(0.001)
        return x + 1

    for fixed in ("stream", "host", "query"):
        assert schedules(program, fixed, seeds=40).passed
    assert not schedules(program, "", seeds=40).passed


OTHER_PROCESS = """
import faulthandler, os, sys, torch
faulthandler.dump_traceback_later(90, exit=True)
event = torch.openreg.Event.from_ipc_handle(0, bytes.fromhex(sys.argv[1]))
for line in sys.stdin:
    torch.openreg._sleep(int(line))
    event.record()
    print("recorded", flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_interprocess_events_of_another_process():
    """A wait takes real time, which is not a deadlock, and ends if the other process does."""
    event = torch.openreg.Event(interprocess=True)
    command = [sys.executable, "-P", "-c", OTHER_PROCESS, event.ipc_handle().hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        runs = []

        def program(wait):
            runs.append(wait)  # in the order of the seed, the third one, longer than it takes to find a deadlock
            print(25 * 10**7 if runs.count(wait) == 3 else 10**7, file=other.stdin, flush=True)
            assert other.stdout.readline() == "recorded\n"
            x = torch.ones(2, device=DEVICE)
            wait()
            return x.add_(1), wait == event.wait or event.query()  # after event.wait, only the stream has waited

        def asks():
            while not event.query():
                time.sleep(0.01)

        try:
            for wait in (event.wait, event.synchronize, asks):
                assert schedules(program, wait, seeds=[33]).passed

            def unfinished():
                x = torch.ones(2, device=DEVICE)
                with pytest.raises(RuntimeError, match="ended before its stream reached it"):
                    event.synchronize()
                return x

            print(25 * 10**7, file=other.stdin, flush=True)
            assert other.stdout.readline() == "recorded\n"
            other.stdin.close()
            assert schedules(unfinished, seeds=[33]).passed
        finally:
            other.kill()


def test_one_thread_tries_orders_at_a_time():
    begun, goes_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        goes_on.wait()
        return torch.ones(1, device=DEVICE)

    thread = threading.Thread(target=schedules, args=(slow,), kwargs={"seeds": 1})
    before = _C.poison()
    thread.start()
    begun.wait()
    try:
        with pytest.raises(RuntimeError, match="schedules: another thread is trying orders"):
            schedules(lambda: torch.ones(1, device=DEVICE))
    finally:
        goes_on.set()
        thread.join()
    assert _C.poison() == before
    assert schedules(lambda: torch.ones(1, device=DEVICE), seeds=1).passed


def test_a_thread_that_launches_for_ever():
    """It is abandoned after a few thousand choices, not after a time."""
    threads, over = [], []

    def work():
        y = torch.ones(1, device=DEVICE)
        while not over:
            y.mul_(1)
            time.sleep(0.001)  # in real time, once the thread is abandoned

    def program():
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return torch.ones(1, device=DEVICE)

    try:
        report = schedules(program, seeds=1)
    finally:
        over.append(0)
        for thread in threads:
            thread.join()
    assert report.passed and 1000 < report.work < 100_000  # it launches on until the order has ended


def test_ctrl_c_at_any_time():
    """Even while an order begins or ends: nothing is left behind, and the program gets the interrupt."""
    over, ended = [], []

    def interrupts():
        while not over:
            _sleep(0.01 + 0.007 * (len(caught) % 5))
            if not over:
                os.kill(os.getpid(), signal.SIGINT)
        ended.append(0)

    def program():
        x, queue = torch.ones(1, device=DEVICE), Queue()
        thread = threading.Thread(target=lambda: queue.put(x.add_(1).cpu()), daemon=True)
        thread.start()
        return queue.get()

    caught, handler, before = [], signal.getsignal(signal.SIGINT), _C.poison()
    for _ in range(20):
        over.clear(), ended.clear()
        thread = threading.Thread(target=interrupts)
        try:
            try:
                thread.start()
                schedules(program, seeds=300)
            except KeyboardInterrupt:
                caught.append(0)
        except KeyboardInterrupt:
            pass
        # The last interrupts may come late; one in thread.join() makes Python 3.11 forget the thread.
        for _ in range(10):
            with contextlib.suppress(KeyboardInterrupt):
                over.append(0)
                while not ended:
                    _sleep(0.01)
        assert not _C.order_on() and torch.openreg.get_launch_mode() == "inline" and _C.poison() == before
        assert signal.getsignal(signal.SIGINT) is handler and time.sleep is _sleep
        assert torch.autograd.is_multithreading_enabled()
    assert caught
    assert schedules(program, seeds=1).passed


_sleep = time.sleep


class InterruptedAfterRelease:
    """The lock of a condition. Ctrl-C comes when the condition has released it, and before it waits."""

    def __init__(self, lock):
        self.lock, self.acquire, self.release = lock, lock.acquire, lock.release
        self.__enter__, self.__exit__ = lock.__enter__, lock.__exit__  # which threading.Condition calls by name

    def _release_save(self):
        self.lock.release()
        raise KeyboardInterrupt


def _waits_in_with_of_lock(lock, condition):
    with lock:
        condition.wait()


def _waits_in_with_of_condition(lock, condition):
    with condition:
        condition.wait()


def _waits_in_try(lock, condition):
    lock.acquire()
    try:
        condition.wait()
    finally:
        lock.release()


def _waits_in_a_context_of_its_own(lock, condition):
    with contextlib.ExitStack() as stack:
        lock.acquire()
        stack.callback(lambda: lock.release())
        condition.wait()


def _waits_at_a_barrier(lock, condition):
    """Another thread releases the barrier meanwhile, so that its end notifies a condition without the lock."""
    barrier = threading.Barrier(2)
    barrier._cond, condition._is_owned = condition, getattr(lock, "_is_owned", None) or lock.locked
    barrier._wait = lambda timeout: setattr(barrier, "_state", 1) or condition.wait()
    barrier.wait()


_WAITS = [
    _waits_in_with_of_lock,
    _waits_in_with_of_condition,
    _waits_in_try,
    _waits_in_a_context_of_its_own,
    _waits_at_a_barrier,
]


@pytest.mark.parametrize("waits", _WAITS)
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("kind", ["Lock", "RLock"])
def test_ctrl_c_in_pythons_own_locks(kind, where, waits):
    """Releasing the lock a second time raises an error, instead of the KeyboardInterrupt.

    A lock from outside the program is Python's own, whose methods are not in the error's frames.
    """
    outside = getattr(threading, kind)()

    def program():
        lock = outside if where == "outside" else getattr(threading, kind)()
        condition = threading.Condition(InterruptedAfterRelease(lock))
        condition._is_owned = lambda: True
        waits(lock, condition)

    with pytest.raises(KeyboardInterrupt) as raised:
        schedules(program, seeds=3)
    assert isinstance(raised.value.__cause__, RuntimeError) and not _C.order_on()


def _handles_it(suppress):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        if suppress:
            raise ValueError("of the program") from None
        raise ValueError("of the program") from interrupt


def _handles_it_in_a_thread():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_handles_it, False).result()


def _then(function):
    """A program that handles Ctrl-C by calling a function."""

    def program():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            function()

    return program


def _releases_it_twice():
    condition = threading.Condition()
    with condition:
        condition.release()


def _goes_round():
    errors = []
    for _ in range(2):
        try:
            _releases_it_twice()
        except RuntimeError as error:
            errors.append(error)
    errors[0].__context__, errors[1].__context__ = errors[1], errors[0]
    raise errors[0]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (lambda: _handles_it(False), ValueError),
        (lambda: _handles_it(True), ValueError),
        (_handles_it_in_a_thread, ValueError),
        (_then(lambda: Queue().get_nowait()), Empty),
        (_then(lambda: threading.Condition().notify_all()), RuntimeError),
        (_then(lambda: threading.Lock().release()), RuntimeError),
        (_then(_releases_it_twice), RuntimeError),
        (_goes_round, RuntimeError),
    ],
    ids=["raised", "suppressed", "in a thread", "empty", "notify", "release", "released twice", "cycle"],
)
def test_errors_of_a_program_that_handles_ctrl_c_itself(program, error):
    with pytest.raises(BaseException) as raised:  # a KeyboardInterrupt would end the tests
        schedules(program, seeds=3)
    assert raised.type is error and not _C.order_on()


def test_ctrl_c_before_the_program_is_none_of_its_own():
    def program(fixed):
        if not fixed:
            raise ValueError("of the program")
        return torch.ones(1, device=DEVICE)

    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(ValueError, match="of the program"):
            schedules(program, False, seeds=3)
        assert schedules(program, True, seeds=3).passed


def test_ctrl_c_while_an_order_ends():
    """The program has returned, and another of its threads is still at work."""

    def work():
        time.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            torch.ones(1, device=DEVICE)

    def program():
        threading.Thread(target=work).start()
        return torch.ones(1, device=DEVICE)

    before = _C.poison()
    with pytest.raises(KeyboardInterrupt):
        schedules(program, seeds=50)
    assert not _C.order_on() and _C.poison() == before
    assert schedules(lambda: torch.ones(1, device=DEVICE), seeds=1).passed


def reads_after_start():
    x, found = torch.ones(4, device=DEVICE), {}
    threading.Thread(target=lambda: found.update(v=x.sum().item())).start()
    return dict(found)


def reads_after_submit():
    x, found = torch.ones(4, device=DEVICE), {}
    with ThreadPoolExecutor(1) as executor:
        executor.submit(lambda: None).result()
        executor.submit(lambda: found.update(v=x.sum().item()))
        return dict(found)


def writes_after_start():
    x, state, found = torch.ones(4, device=DEVICE), {}, {}
    thread = threading.Thread(target=lambda: found.update(v=state.get("v", 0)))
    thread.start()
    state["v"] = 1
    thread.join()
    return found, x + 1


@pytest.mark.parametrize("program", [reads_after_start, reads_after_submit, writes_after_start])
def test_a_thread_that_starts_may_run_first(program):
    report = schedules(program, seeds=50)
    assert not report.passed and "another thread" in str(report)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_that_ends_a_thread_is_part_of_the_result(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def program(wait):
        there = torch.zeros(4, pin_memory=True)

        def work():
            there.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
            if wait:
                current().synchronize()
            assert there.sum() == 4

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    report = schedules(program, False, seeds=50)
    assert "the exceptions that end joined threads" in report.difference.what
    assert "work: AssertionError" in report.difference.what
    assert schedules(program, True, seeds=50).passed


def two_that_start_one_each():
    """One of the children always raises; which of them starts first depends on the order."""

    def raises():
        torch.ones(2, device=DEVICE).mul(2)
        raise ValueError

    def start(work):
        child = threading.Thread(target=work)
        child.start()
        child.join()

    parents = [
        threading.Thread(target=start, args=(work,)) for work in (lambda: torch.ones(2, device=DEVICE) + 1, raises)
    ]
    [parent.start() for parent in parents]
    [parent.join() for parent in parents]


def one_that_is_not_joined():
    """Whether it has raised when the program returns depends on the order."""

    def raises():
        torch.ones(2, device=DEVICE).mul(2)
        raise ValueError

    threading.Thread(target=raises, daemon=True).start()
    return torch.ones(3, device=DEVICE).mul(2).sum()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("program", [two_that_start_one_each, one_that_is_not_joined])
def test_threads_that_raise_in_every_order(program, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    assert schedules(program, seeds=50).passed
