"""Rung 5: streams and events."""

import pytest
import torch
from conftest import same


def slow(x, n=40):
    """Gives the current stream work that takes a while."""
    for _ in range(n):
        x.uniform_()


def test_order_between_streams():
    first, second, begin = torch.Stream("acme"), torch.Stream("acme"), torch.Event("acme", enable_timing=True)
    big, x = torch.empty(200_000, device="acme"), torch.zeros(3, device="acme")
    with first:
        assert torch.accelerator.current_stream() == first
        begin.record()
        slow(big)
        x.fill_(5)
        end = first.record_event(torch.Event("acme", enable_timing=True))
    assert not end.query() and not first.query(), "launching does not wait"
    with second:
        second.wait_event(end)
        y = x.clone()
    second.synchronize()
    same(y, torch.full((3,), 5.0))
    assert end.query() and begin.elapsed_time(end) > 0
    assert torch.accelerator.current_stream() == torch.acme.default_stream()


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
    for value, result in zip(range(5), results, strict=True):
        same(result, torch.full((1000,), float(value)))


def test_kernel_failure_is_raised_by_synchronize():
    torch.empty(2, dtype=torch.bits8, device="acme").copy_(torch.ones(2, device="acme"))  # no kernel for this dtype
    with pytest.raises(RuntimeError, match="a kernel failed: copy_: "):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
