"""Shared by the tests of graphs: capturing, warming up, and memory at rest."""

import gc

import torch

DEVICE = "openreg:0"


def captured(f, **options):
    """Capture f(); returns the graph and f's result."""
    g = torch.openreg.Graph()
    with torch.openreg.graph(g, **options):
        out = f()
    return g, out


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
