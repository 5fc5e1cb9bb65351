"""Shared by the tests of graphs and streams: warming up, memory at rest, and a stream that is held."""

import contextlib
import gc
import threading

import torch

import openreg_ops

DEVICE = "openreg:0"


def warmed_up(f):
    """Runs f() three times on a side stream."""
    side = torch.openreg.Stream()
    side.wait_stream(torch.openreg.current_stream())
    with side:
        for _ in range(3):
            f()
    torch.openreg.current_stream().wait_stream(side)


def settled():
    torch.openreg.synchronize()
    gc.collect()
    torch.openreg.empty_cache()


def inside(pool, x):
    return any(s["address"] <= x.data_ptr() < s["address"] + s["total_size"] for s in pool.snapshot())


@contextlib.contextmanager
def turn_taken(stream):
    """The stream's turn belongs to a kernel in Python on another thread, so that no other work can run there."""
    begun, ends = threading.Event(), threading.Event()
    library = torch.library.Library("turn_test", "FRAGMENT")
    library.define("hold_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("hold_", lambda x: (begun.set(), ends.wait(), x)[-1], "CPU")

    def hold():
        with stream:
            torch.ops.turn_test.hold_(torch.zeros((), device=DEVICE))

    try:
        with openreg_ops.fallback.share("turn_test::hold_"):
            thread = threading.Thread(target=hold)
            thread.start()
            begun.wait()
            try:
                yield
            finally:
                ends.set()
                thread.join()
    finally:
        library._destroy()
