"""Rung 5: streams and events."""

import time

import pytest
import torch
from conftest import same


def slow(x, n=40):
    """Gives the current stream work that takes a while."""
    for _ in range(n):
        x.uniform_()


def test_order_between_streams():
    first, second = torch.Stream("acme"), torch.Stream("acme")
    big, x = torch.empty(200_000, device="acme"), torch.zeros(3, device="acme")
    with first:
        assert torch.accelerator.current_stream() == first
        slow(big)
        x.fill_(5)
        event = first.record_event()
    assert not event.query() and not first.query(), "launching does not wait"
    with second:
        second.wait_event(event)
        y = x.clone()
    second.synchronize()
    same(y, torch.full((3,), 5.0))
    assert event.query() and torch.accelerator.current_stream() == torch.acme.default_stream()


def test_timing():
    begin, end = (torch.Event("acme", enable_timing=True) for _ in range(2))
    x = torch.empty(200_000, device="acme")
    begin.record()
    start = time.perf_counter()
    slow(x)
    end.record()
    end.synchronize()
    assert 0 < begin.elapsed_time(end) < (time.perf_counter() - start) * 1000 + 1


def test_memory_is_not_reused_while_another_stream_reads_it():
    side = torch.Stream("acme")
    big, results = torch.empty(200_000, device="acme"), []
    for value in range(5):
        x = torch.full((1000,), float(value), device="acme")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            slow(big, 5)
            results.append(x.clone())
        x.record_stream(side)
        del x
        torch.full((1000,), -1.0, device="acme")
    torch.accelerator.synchronize()
    for value, result in enumerate(results):
        same(result, torch.full((1000,), float(value)))


def test_kernel_failure_is_raised_by_synchronize():
    x = torch.ones(2, device="acme")
    y = torch.empty(2, dtype=torch.bits8, device="acme")
    y.copy_(x)  # no kernel for this dtype
    with pytest.raises(RuntimeError, match="a kernel failed: copy_: "):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    same(x, torch.ones(2))
