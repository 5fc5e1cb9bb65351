"""Threads of a program whose orders are tried run by themselves: what they launch is ordered, and nothing hangs."""

import os
import signal
import subprocess
import sys
import threading
import time
from queue import Queue

import pytest
import torch

from openreg_ops import _C

DEVICE = "openreg"
current = torch.openreg.current_stream
schedules = torch.openreg.schedules


# ---- ways in which one thread waits for another one ----


def joined(work):
    out = []
    thread = threading.Thread(target=lambda: out.append(work()))
    thread.start()
    thread.join()
    return out[0]


def polled(work):
    out = []
    threading.Thread(target=lambda: out.append(work())).start()
    while not out:
        time.sleep(1e-4)
    return out[0]


def on_a_stream():
    """The other thread launches on a stream of its own."""
    with torch.openreg.Stream() as stream:
        return torch.arange(8, device=DEVICE) * 2, stream


def waited_for():
    """It also waits for the work, by a value, which the schedule must let run while its own thread is blocked."""
    x, stream = on_a_stream()
    with stream:
        assert x.sum().item() == 56
    return x, stream


@pytest.mark.parametrize("work", [on_a_stream, waited_for])
@pytest.mark.parametrize("way", [joined, polled])
def test_work_of_another_thread_is_ordered(way, work):
    def program(fixed):
        x, stream = way(work)
        if fixed:
            current().wait_stream(stream)
        y = x + 1
        torch.openreg.synchronize()
        return y

    assert schedules(program, True, seeds=20).passed
    assert schedules(program, work is waited_for, seeds=50).passed == (work is waited_for)


@pytest.mark.slow
def test_a_thread_that_polls_while_the_program_waits():
    def asks():
        x, stream = on_a_stream()
        event = stream.record_event()
        while not event.query():
            time.sleep(1e-3)
        return x

    assert schedules(lambda: joined(asks), seeds=1).passed


def test_backward_in_a_thread():
    def loss():
        x = torch.ones(4, device=DEVICE, requires_grad=True)
        (x * 2).sum().backward()
        torch.openreg.synchronize()
        return x.grad

    assert schedules(lambda: joined(loss), seeds=10).passed


def test_threads_that_wait_for_one_future():
    """The future is a collective's, whose thread is not one of the program's."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("occl", store=store, rank=0, world_size=1)

    def program():
        x, y = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
        work = torch.distributed.reduce_scatter_tensor(y, x, async_op=True)
        threads = [threading.Thread(target=lambda: work.get_future().wait()) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return y

    try:
        assert schedules(program, seeds=50).passed
    finally:
        torch.distributed.destroy_process_group()


def test_a_thread_from_outside_the_program():
    """It launches, records and waits while orders begin, run and end, and goes on behind them."""
    over, rounds = threading.Event(), []

    def work():
        with torch.openreg.Stream():
            x = torch.zeros(4, device=DEVICE)
            while not over.is_set():
                torch.openreg.Event().record()
                rounds.append(float(x.add_(1)[0]))

    def program(fixed):
        side, x = torch.openreg.Stream(), torch.ones(4, device=DEVICE)
        if fixed:
            side.wait_stream(current())
        with side:
            y = x + 1
        current().wait_stream(side)
        return y * 2

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert [schedules(program, fixed, seeds=20).passed for fixed in (True, False)] == [True, False]
        before = len(rounds)
        while len(rounds) == before:
            time.sleep(0.001)
    finally:
        over.set()
        thread.join()


# ---- the end of an order ----


def test_a_thread_that_launches_for_ever():
    """The order ends without it."""
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
    assert report.passed


@pytest.mark.parametrize("where", ["launching", "in a lock", "in reading the result"])
def test_ctrl_c_ends_it(where):
    """And leaves nothing behind."""
    handler, before = signal.getsignal(signal.SIGINT), _C.poison()

    def program():
        x = torch.ones(1, device=DEVICE)
        if where != "in reading the result":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        if where == "in a lock":
            Queue().get()
        while where == "launching":
            x.add_(1)
        return {1: os.kill(os.getpid(), signal.SIGINT)}

    with pytest.raises(KeyboardInterrupt):
        schedules(program, seeds=3)
    assert not _C.order_on() and torch.openreg.get_launch_mode() == "inline" and _C.poison() == before
    assert signal.getsignal(signal.SIGINT) is handler and torch.autograd.is_multithreading_enabled()
    assert schedules(lambda: torch.ones(1, device=DEVICE), seeds=1).passed


# ---- other processes, other calls ----


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
        with pytest.raises(RuntimeError, match="schedules: the orders of a program are being tried"):
            schedules(lambda: torch.ones(1, device=DEVICE))
    finally:
        goes_on.set()
        thread.join()
    assert _C.poison() == before
    assert schedules(lambda: torch.ones(1, device=DEVICE), seeds=1).passed
