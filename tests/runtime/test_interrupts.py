"""Ctrl-C ends a wait and not the work: at each place where the host waits for a device. See Note [Interrupts]."""

import signal
import subprocess
import sys
import time

import pytest
from processes import python

pytestmark = pytest.mark.processes

# What is said to take 600 seconds takes longer than a test may: a wait for it has to be interrupted.
BEGIN = """
import os, signal, sys, threading, torch, openreg_ops
from openreg_ops import _C
torch.set_num_threads(1)
D, S = "openreg", 1_000_000_000

def send(number=signal.SIGINT, times=1):
    def run():
        for _ in range(times):
            threading.Event().wait(0.1)
            os.kill(os.getpid(), number)
    thread = threading.Thread(target=run)
    thread.start()
    return thread

def interrupted(wait, error=KeyboardInterrupt, number=signal.SIGINT):
    try:
        send(number)
        wait()
    except error:
        return
    raise AssertionError(f"not interrupted: {wait}")

def works():
    assert (torch.arange(4, device=D) + 1).tolist() == [1, 2, 3, 4]
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """A process that loads the device where the code says so, and ends with torch's destructors."""
    return python("-c", code, timeout=200, destructors=True, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **environment)


def check(code: str, after: str = "", **environment: str) -> None:
    done = run(code if after else BEGIN + code + "\nworks()\n_C.end_workers(True)", **environment)
    assert (done.stderr, done.stdout, done.returncode) == ("", after, 0)


def test_every_wait_can_be_interrupted():
    """The waits of the runtime, and of some operators of each kind behind queued work."""
    check(
        """
def event_synchronize():
    stream.record_event().synchronize()

def limited():  # what the stream may still use is all that there is, so another one waits for it
    index = x.device.index
    torch.openreg.set_per_process_memory_fraction((torch.openreg.memory_allocated(index) + (1 << 20)) / total, index)
    used = torch.empty(1 << 20, dtype=torch.uint8, device=x.device)
    del used
    other = torch.openreg.Stream(device=x.device)
    before = torch.openreg.memory_allocated(index)
    try:
        with other:
            torch.empty(1 << 20, dtype=torch.uint8, device=x.device)
    finally:
        assert torch.openreg.memory_allocated(index) == before
        torch.openreg.set_per_process_memory_fraction(1.0, index)

def sync_mode():
    with torch.openreg.launch_mode("sync"):
        x + 1

def sleep_in_sync_mode():
    with torch.openreg.launch_mode("sync"):
        torch.openreg._sleep(600 * S)

def delayed():
    with torch.openreg.faults.inject("kernel_latency", seconds=600), torch.openreg.Stream(device=x.device):
        x.unique()

def delayed_copy():
    with torch.openreg.faults.inject("copy_latency", seconds=600), torch.openreg.Stream(device=x.device):
        x.cpu()

total = torch.openreg.mem_get_info(0)[1]
host = torch.ones(4)
SITES = {
    "stream": lambda: stream.synchronize(),
    "event": event_synchronize,
    "device": lambda: torch.openreg.synchronize(x.device),
    "accelerator": lambda: torch.accelerator.synchronize(x.device),
    "item": lambda: x[0].item(),
    "bool": lambda: bool(x[0]),
    "tolist": lambda: x.tolist(),
    "cpu": lambda: x.cpu(),
    "print": lambda: str(x),
    "to the host": lambda: host.copy_(x),
    "to pageable memory": lambda: host.copy_(x, non_blocking=True),
    "from the host": lambda: x.copy_(host),
    "nonzero": lambda: x.nonzero(),
    "mask": lambda: x[x > 0],
    "resize": lambda: x.resize_(1000),
    "share": lambda: _C.share_storage(x.untyped_storage()),
    "memory": limited,
    "sync mode": sync_mode,
    "sleep in sync mode": sleep_in_sync_mode,
    "latency of a kernel": delayed,
    "latency of a copy": delayed_copy,
    "save": lambda: torch.save(x, "/dev/null"),
}
INLINE = {"operator": lambda: x + 1, "in place": lambda: x.add_(1)}
number = 0
for mode in ("inline", "async"):
    torch.openreg.set_launch_mode(mode)
    for name, wait in (SITES | INLINE if mode == "inline" else SITES).items():
        number += 1  # each has a device of its own: some wait for all of its streams
        torch.accelerator.set_device_index(number)
        x = torch.ones(4, device=D)
        with torch.openreg.Stream() as stream:
            torch.openreg._sleep(600 * S)
            interrupted(wait)
            assert not stream.query(), name
        torch.accelerator.set_device_index(0)
        works()
""",
        OPENREG_DEVICE_COUNT="64",
    )


def test_the_work_goes_on():
    check("""
x, y = torch.zeros(4, device=D), torch.zeros(4, device=D, requires_grad=True)
allocated = torch.openreg.memory_allocated()
done = torch.openreg.Event()
torch.openreg._sleep(4 * S)
done.record()
interrupted(lambda: x.add_(1))  # has not run
interrupted(lambda: torch.add(x, 1, out=x))
interrupted(lambda: (y * 2).sum())
interrupted(lambda: x.resize_(1 << 20))
assert not done.query()
torch.openreg.synchronize()  # waits again
assert done.query()
assert x.tolist() == [0, 0, 0, 0] and x.shape == (4,) and torch.openreg.memory_allocated() == allocated
(y * 2).sum().backward()
assert y.grad.tolist() == [2, 2, 2, 2]

torch.openreg._sleep(2 * S)
_C.launch_failure(0, "the work's own error")
interrupted(torch.openreg.synchronize)
try:
    torch.openreg.synchronize()
except RuntimeError as error:
    assert "the work's own error" in str(error)
else:
    raise AssertionError("the error was lost")
torch.openreg.synchronize()  # it is told once

def other():
    with torch.openreg.Stream() as stream:
        torch.openreg._sleep(2 * S)
        stream.synchronize()
        waited.append(stream.query())
    ended.set()

waited, ended = [], threading.Event()
threading.Thread(target=other).start()
interrupted(ended.wait)  # this thread's wait, not the other's
assert waited == []
ended.wait()
assert waited == [True]
""")


def test_handlers_run_while_the_program_waits():
    """A handler may use the device, gradients and host memory: it is not part of the waiting operator."""
    check("""
class Alarm(Exception):
    pass

def note(number, frame):
    with torch.openreg.Stream():
        (x := torch.ones(3, requires_grad=True)).sum().backward()
        (y := torch.ones(3, device=D, requires_grad=True)).mul(2).sum().backward()
        assert x.grad.tolist() == [1, 1, 1] and y.grad.tolist() == [2, 2, 2]
    before = torch.openreg.memory_allocated()
    kept.append(torch.zeros(1 << 12))
    assert kept[-1].device.type == "cpu" and torch.openreg.memory_allocated() == before
    noted.append(stream.query())

def fail(number, frame):
    raise Alarm

noted, kept = [], []
signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGALRM, fail)
x = torch.ones(4, device=D)
for mode in ("inline", "async", "sync"):
    torch.openreg.set_launch_mode(mode)
    stream = torch.openreg.Stream()
    noted.clear()
    with stream:
        thread = send(signal.SIGUSR1, 2)
        torch.openreg._sleep(S * 3 // 2)  # in sync mode the wait
        assert x.nonzero().tolist() == [[0], [1], [2], [3]]  # in the others
        assert stream.query() and noted == [False, False], (mode, noted)
        thread.join()
        if mode == "sync":
            interrupted(lambda: torch.openreg._sleep(600 * S), Alarm, signal.SIGALRM)
        else:
            torch.openreg._sleep(600 * S)
            interrupted(x.nonzero, Alarm, signal.SIGALRM)
        assert not stream.query()
""")


# A handler that is registered before the import runs after the workers have been stopped.
EARLY = """
import atexit
def late():
    try:
        print("at exit", x.sum().item(), flush=True)
    except RuntimeError as error:
        print("at exit", str(error).partition("\\n")[0], flush=True)
atexit.register(late)
"""
QUEUE = """
x = torch.zeros(1 << 20, device=D)
torch.openreg._sleep(SECONDS * S)
side = torch.openreg.Stream()
side.wait_stream(torch.openreg.current_stream())
with side:
    event = side.record_event()
x.copy_(torch.ones(1 << 20).pin_memory(), non_blocking=True)
"""
DROPPED = "at exit openreg error: queued work was dropped, because the process was interrupted"


def test_what_is_queued_is_done_when_a_process_ends():
    check(EARLY + BEGIN + QUEUE.replace("SECONDS", "1"), after="at exit 1048576.0\n")


def test_ctrl_c_ends_a_process():
    """One that does not catch it does not wait for what it has queued."""
    done = run(EARLY + BEGIN + QUEUE.replace("SECONDS", "600") + "send()\ntorch.openreg.synchronize()")
    assert done.stdout == DROPPED + "\n"
    assert done.stderr.endswith("KeyboardInterrupt\n") and done.returncode in (130, -signal.SIGINT)


def test_ctrl_c_ends_the_wait_at_the_end():
    code = EARLY + BEGIN + QUEUE.replace("SECONDS", "600") + "atexit.register(print, 'ends', flush=True)"
    program = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout.readline() == "ends\n"
        time.sleep(0.1)  # so that it waits, most of the time
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=100)
    finally:
        program.kill()
    assert out == DROPPED + "\n" and "KeyboardInterrupt" in err and "Aborted" not in err
