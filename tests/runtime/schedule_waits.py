"""Correct programs whose threads wait in every way that Python has, for test_schedule_threads.py.

As a program, ``schedule_waits.py GROUP …`` tries the orders of the programs of groups, and prints each that passes.
"""

import asyncio
import concurrent.futures
import faulthandler
import functools
import multiprocessing
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time

import torch

DEVICE = "openreg"
BLOCKED, POLLED, TIMED, KEPT = {}, {}, {}, {}  # programs, by how their threads wait


def into(group):
    return lambda function: group.setdefault(function.__name__, function)


def in_thread(work, *args):
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def ones():
    return torch.ones(4, device=DEVICE)


# ---- in what the scheduler does not see ----


@into(BLOCKED)
def host_reads_a_pipe():
    x, (read, write) = ones(), os.pipe()
    thread = in_thread(lambda: (x.add_(1), torch.openreg.synchronize(), os.write(write, b"x")))
    os.read(read, 1)
    thread.join()
    return x


@into(BLOCKED)
def thread_reads_a_pipe():
    x, (read, write) = ones(), os.pipe()
    thread = in_thread(os.read, read, 1)
    x.add_(1)
    os.write(write, b"x")
    thread.join()
    return x


@into(BLOCKED)
def sockets():
    x, (one, other) = ones(), socket.socketpair()
    thread = in_thread(lambda: one.sendall(bytes(x.add_(1).int().tolist())))
    select.select([other], [], [])
    seen = other.recv(10)
    thread.join()
    return x, seen


@into(BLOCKED)
def queue_of_processes():
    items = multiprocessing.get_context("spawn").Queue()
    x = ones()
    thread = in_thread(lambda: items.put(x.add_(1).tolist()))
    seen = items.get()
    thread.join()
    items.close()
    return seen


@into(BLOCKED)
def lock_of_processes():
    x, lock = ones(), multiprocessing.get_context("spawn").Lock()

    def work(i):
        with lock:
            x.add_(i)
            torch.openreg.current_stream().synchronize()

    threads = [in_thread(work, i) for i in range(3)]
    for thread in threads:
        thread.join()
    return x


@into(BLOCKED)
def data_loader():
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
    return [batch.to(DEVICE) * 2 for (batch,) in loader]


@into(BLOCKED)
def data_loader_that_pins():
    """Its thread polls and blocks in a pipe; the program waits for it with a timeout."""
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    loader = torch.utils.data.DataLoader(data, num_workers=1, pin_memory=True, multiprocessing_context="fork")
    return [batch.to(DEVICE) * 2 for (batch,) in loader]


@into(BLOCKED)
def asyncio_to_thread():
    async def main():
        return await asyncio.gather(*[asyncio.to_thread(lambda i=i: (ones() * i).cpu()) for i in range(2)])

    return asyncio.run(main())


@into(BLOCKED)
def another_process_that_is_asked():
    x = ones()
    with subprocess.Popen(["sleep", "0.3"]) as process:
        while process.poll() is None:
            time.sleep(0.01)
    return x + 1


@into(BLOCKED)
def another_process():
    x = ones()
    thread = in_thread(lambda: x.add_(1).cpu())
    subprocess.run(["sleep", "0.1"], check=True)
    thread.join()
    return x


_lock, _queue = threading.Lock(), queue.SimpleQueue()


@into(BLOCKED)
def lock_from_outside():
    x = ones()

    def work():
        with _lock:
            x.add_(1).sum().item()

    threads = [in_thread(work) for _ in range(2)]
    for thread in threads:
        thread.join()
    return x


@into(BLOCKED)
def queue_from_outside():
    x = ones()
    thread = in_thread(lambda: _queue.put(x.add_(1).sum().item()))
    seen = _queue.get()
    thread.join()
    return seen


@functools.cache
def warm_pool():
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(int).result()
    return pool


@into(BLOCKED)
def pool_from_outside():
    def work():
        _native_sleep(0.25)
        return 5

    x = ones()
    future = warm_pool().submit(work)
    x.add_(1)
    return x * future.result(timeout=30), x * warm_pool().submit(int).result()


_native_sleep = time.sleep


@into(BLOCKED)
def host_reads_memory_until_it_changes():
    flag = torch.zeros(1, pin_memory=True)
    seen = flag.numpy()
    one = ones()[:1]
    torch.openreg.synchronize()
    flag.copy_(one, non_blocking=True)  # late with seed 33
    while not seen[0]:
        pass
    return seen.tolist()


# ---- in a loop that asks ----


def polled(name, ask):
    """Three threads: one asks until another, which works in several steps, is done; the third works too."""

    def program():
        x, y = ones(), ones()
        state = {"flag": threading.Event(), "queue": queue.Queue(), "simple": queue.SimpleQueue(), "list": [],
                 "lock": threading.Lock(), "condition": threading.Condition(), "future": concurrent.futures.Future(),
                 "event": torch.openreg.Event(), "stream": torch.openreg.Stream(), "semaphore": threading.Semaphore(0)}  # fmt: skip
        state["lock"].acquire()

        def work():
            for _ in range(3):
                with state["stream"]:
                    x.add_(1)
                time.sleep(0.001)
            state["stream"].synchronize()
            state["queue"].put(1), state["simple"].put(1), state["list"].append(1), state["flag"].set()
            state["lock"].release(), state["semaphore"].release(), state["future"].set_result(1)

        def more():
            for _ in range(3):
                y.mul_(2)

        torch.openreg.synchronize()
        state["thread"] = in_thread(work)
        other = in_thread(more)
        state["event"].record()
        ask(**state)
        state["thread"].join(), other.join()
        return x, y

    POLLED[name] = program


def until(condition):
    while not condition():
        time.sleep(0.001)


def spins(condition):
    while not condition():
        pass


def tries(get, error):
    while True:
        try:
            return get()
        except error:
            pass


for _how in (until, spins):
    for _name, _ask in {
        "thread_is_alive": lambda thread, how, **_: how(lambda: not thread.is_alive()),
        "flag": lambda flag, how, **_: how(flag.is_set),
        "event_query": lambda event, how, **_: how(event.query),
        "stream_query": lambda stream, how, **_: how(stream.query),
        "queue_empty": lambda queue, how, **_: how(lambda: not queue.empty()),
        "future_done": lambda future, how, **_: how(future.done),
        "lock_acquire": lambda lock, how, **_: how(lambda: lock.acquire(blocking=False)),
        "lock_locked": lambda lock, how, **_: how(lambda: not lock.locked()),
        "semaphore": lambda semaphore, how, **_: how(lambda: semaphore.acquire(blocking=False)),
        "join": lambda thread, how, **_: how(lambda: thread.join(0.001) or not thread.is_alive()),
        "flag_wait": lambda flag, how, **_: how(lambda: flag.wait(0.001)),
    }.items():
        polled(f"{_name}_{_how.__name__}", functools.partial(_ask, how=_how))
polled("list_until", lambda list, **_: until(lambda: list))
polled("queue_get_nowait", lambda queue, **_: tries(queue.get_nowait, _empty))
polled("simple_get_nowait", lambda simple, **_: tries(simple.get_nowait, _empty))
polled("queue_get_with_timeout", lambda queue, **_: tries(lambda: queue.get(timeout=0.001), _empty))
polled("future_with_timeout", lambda future, **_: tries(lambda: future.result(timeout=0.001), TimeoutError))
_empty = queue.Empty


@into(POLLED)
def two_that_ask():
    x, flags = ones(), [threading.Event() for _ in range(3)]

    def work(i):
        while not flags[i].is_set():
            time.sleep(0.001)
        x.add_(1)
        torch.openreg.synchronize()
        flags[i + 1].set()

    threads = [in_thread(work, i) for i in range(2)]
    flags[0].set()
    until(flags[2].is_set)
    for thread in threads:
        thread.join()
    return x


@into(POLLED)
def launches_until_told():
    x, y, flag = ones(), ones(), threading.Event()

    def work():
        while not flag.is_set():
            y.mul_(1)

    thread = in_thread(work)
    for _ in range(3):
        x.add_(1)
    flag.set()
    thread.join()
    return x


@into(POLLED)
def launches_until_an_event():
    x, side = ones(), torch.openreg.Stream()
    side.wait_stream(torch.openreg.current_stream())
    with side:
        y = x * 2
    while not side.query():
        x.mul_(1)
    torch.openreg.synchronize()
    return x, y


@into(POLLED)
def a_daemon_that_only_sleeps():
    def work():
        while not over:
            time.sleep(0.01)

    in_thread(work)
    return ones()


over = []


# ---- with a timeout, or until a time ----


@into(TIMED)
def long_timeouts():
    x, flag = ones(), threading.Event()
    thread = in_thread(flag.wait)
    begun = time.monotonic()
    gone = [flag.wait(100), thread.join(100), threading.Lock().acquire(timeout=100)]
    try:
        queue.Queue().get(timeout=100)
    except queue.Empty:
        gone.append("empty")
    time.sleep(100)
    x.add_(1)
    assert 400 < time.monotonic() - begun < 410
    flag.set()
    thread.join()
    return x, gone


@into(TIMED)
def until_a_time():
    x, end = ones(), time.time() + 50
    while time.time() < end:
        time.sleep(0.5)
    return x + 1


@into(TIMED)
def two_timeouts():
    x, flags = ones(), [threading.Event(), threading.Event()]

    def work():
        flags[1].wait(0.1)
        x.add_(1)
        flags[0].set()

    thread = in_thread(work)
    while not flags[0].wait(0.1):
        pass
    thread.join()
    return x


@into(TIMED)
def timeout_that_is_longer():
    """The other thread meanwhile sleeps and waits with a shorter timeout."""
    x, flag = ones(), threading.Event()

    def work():
        for _ in range(10):
            time.sleep(0.01)
        assert not threading.Event().wait(1)
        x.add_(1).cpu()
        flag.set()

    thread = in_thread(work)
    assert flag.wait(5)
    thread.join()
    return x


@into(TIMED)
def sleeps_of_several_threads():
    """They pass at once, so a timeout that is longer than each does not pass before."""
    x, y, done, in_time = ones(), ones(), threading.Barrier(4), []

    def work():
        begun = time.monotonic()
        for _ in range(10):
            y.mul_(1)
            time.sleep(10)
        done.wait()
        in_time.append(100 <= time.monotonic() - begun < 150)

    threads = [in_thread(work) for _ in range(3)]
    done.wait(timeout=200)
    for thread in threads:
        thread.join()
    assert in_time == [True] * 3
    return x


@into(TIMED)
def timeout_among_threads_that_ask():
    x, flag = ones(), threading.Event()
    thread = in_thread(until, flag.is_set)
    assert not threading.Event().wait(0.1)
    flag.set()
    thread.join()
    return x + 1


# ---- in threads that outlive an order ----


@functools.cache
def kept_pool():
    return concurrent.futures.ThreadPoolExecutor(2)


@into(KEPT)
def executor_that_is_kept():
    def work(i):
        with torch.openreg.Stream() as stream:
            y = ones() * i
            stream.synchronize()
        return y

    return list(kept_pool().map(work, range(4)))


_jobs = {}


@into(KEPT)
def worker_that_is_kept():
    if not _jobs:
        _jobs["in"], _jobs["out"] = queue.Queue(), queue.Queue()

        def work():
            while True:
                x = _jobs["in"].get()
                _jobs["out"].put(x.add_(1).cpu())

        threading.Thread(target=work).start()  # which does not end with the process by itself
    _jobs["in"].put(ones())
    return _jobs["out"].get()


# ---- for ever ----


def threads_that_deadlock():
    """Two threads that take two locks in different orders."""
    one, other, x = threading.Lock(), threading.Lock(), torch.ones(2, device=DEVICE)

    def work(first, second):
        with first:
            x.add_(1)
            with second:
                x.add_(1)

    threads = [threading.Thread(target=work, args=locks) for locks in ((one, other), (other, one))]
    for thread in threads:
        thread.start()
    return x, threads


SEEDS = {"BLOCKED": [0, 33], "POLLED": [0, 1, 2, 3, 32, 33], "TIMED": [0, 1, 2, 33], "KEPT": [0, 1, 2, 3, 32, 33]}


def main(*groups):
    for group in groups:
        for name, program in globals()[group].items():
            faulthandler.dump_traceback_later(60, exit=True)
            begun = time.monotonic()
            print(name, end=" ", flush=True)
            report = torch.openreg.schedules(program, seeds=SEEDS[group])
            print("passed" if report.passed else report, *report.fingerprints.values(), flush=True)
            print(f"{time.monotonic() - begun:.2f} s", file=sys.stderr, flush=True)
    over.append(1)
    faulthandler.dump_traceback_later(20, exit=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
