"""Memory numbers, the snapshot, the fraction that a process may use, and out of memory."""

import pickle

import pytest
import torch

DEVICE = "openreg:0"

POOLS = ("all", "small_pool", "large_pool")


def test_summary_is_the_table_of_cuda_with_our_numbers():
    torch.openreg.reset_accumulated_memory_stats()  # CUDA's table does not fit all numbers
    x = torch.empty(1 << 20, device=DEVICE)
    text = torch.openreg.memory_summary(DEVICE)
    assert "openreg memory" in text and "CUDA" not in text.replace("CUDA OOMs", "")
    assert len({len(line) for line in text.splitlines()}) == 1, "the table is straight"
    assert "Allocated memory" in text and x.numel() == 1 << 20


def test_snapshot_holds_every_block_once():
    torch.openreg.empty_cache()
    tensors = [torch.empty(n, device=DEVICE) for n in (1, 10, 1000, 100_000, 1_000_000)]
    freed = torch.empty(3_000_000, device=DEVICE)
    del freed
    segments = torch.openreg.memory_snapshot(DEVICE)
    blocks = {block["address"]: block for segment in segments for block in segment["blocks"]}
    for x in tensors:
        block = blocks[x.data_ptr()]
        assert block["state"] == "active_allocated" and block["size"] >= x.nbytes
    for segment in segments:
        assert segment["allocated_size"] == sum(
            b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"
        )
        ends = [b["address"] + b["size"] for b in segment["blocks"]]
        assert ends[-1] <= segment["address"] + segment["total_size"]
        assert [b["address"] for b in segment["blocks"]][1:] == ends[:-1], "blocks lie end to end"
    assert sum(segment["allocated_size"] for segment in segments) == torch.openreg.memory_allocated(DEVICE)
    assert any(b["state"] == "inactive" for b in blocks.values())
    # What PyTorch's own reader of snapshots makes of it.
    from torch.cuda._memory_viz import segsum

    assert "openreg" not in segsum(pickle.loads(pickle.dumps({"segments": segments, "device_traces": []})))


def test_snapshot_shows_memory_that_waits_for_a_stream():
    stream = torch.openreg.Stream()
    x = torch.empty(1 << 18, device=DEVICE)
    address = x.data_ptr()
    with stream:
        torch.openreg._sleep(300_000_000)
    x.record_stream(stream)
    del x

    def state():
        blocks = (b for segment in torch.openreg.memory_snapshot(DEVICE) for b in segment["blocks"])
        return next((b["state"] for b in blocks if b["address"] == address), None)

    assert state() == "active_pending_free"
    other = torch.empty(1 << 18, device=DEVICE)
    assert other.data_ptr() != address
    stream.synchronize()
    torch.openreg.empty_cache()
    assert state() != "active_pending_free"


def test_fraction_limits_a_process():
    total = torch.openreg.get_device_properties(0).total_memory
    before = torch.openreg.memory_allocated(1)
    assert torch.openreg.get_per_process_memory_fraction(1) == 1.0
    try:
        torch.openreg.set_per_process_memory_fraction((before + (1 << 20)) / total, 1)
        x = torch.empty(1 << 17, device="openreg:1")
        with pytest.raises(
            torch.OutOfMemoryError, match="Tried to allocate 8.00 MiB. Device 1 has a total capacity of"
        ):
            torch.empty(1 << 21, device="openreg:1")
        assert x.numel() == 1 << 17 and torch.openreg.mem_get_info(1)[1] == total
    finally:
        torch.openreg.set_per_process_memory_fraction(1.0, 1)
    assert torch.empty(1 << 21, device="openreg:1").numel() == 1 << 21


@pytest.mark.parametrize("fraction, error", [(1, TypeError), (1.5, ValueError), (-0.1, ValueError)])
def test_fraction_rejects(fraction, error):
    with pytest.raises(error, match="set_per_process_memory_fraction"):
        torch.openreg.set_per_process_memory_fraction(fraction)


def test_statistics_tell_small_from_large():
    """Blocks up to 32 KiB share pages, larger ones are runs of pages; the two add up, and peaks stay."""
    torch.openreg.reset_peak_memory_stats()
    torch.openreg.reset_accumulated_memory_stats()

    def stat(name):
        stats = torch.openreg.memory_stats()
        return {pool: stats[name.replace("*", pool)] for pool in POOLS}

    bytes_before, blocks_before = stat("allocated_bytes.*.current"), stat("allocation.*.current")
    small = torch.empty(1000, dtype=torch.uint8, device="openreg")
    large = torch.empty(100_000, dtype=torch.uint8, device="openreg")
    grown = {pool: n - bytes_before[pool] for pool, n in stat("allocated_bytes.*.current").items()}
    assert grown == {"all": 1024 + 131072, "small_pool": 1024, "large_pool": 131072}
    assert {p: n - blocks_before[p] for p, n in stat("allocation.*.current").items()} == {
        "all": 2,
        "small_pool": 1,
        "large_pool": 1,
    }
    nested = torch.openreg.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == torch.openreg.memory_allocated()
    peak = stat("allocated_bytes.*.current")
    del small, large
    assert stat("allocated_bytes.*.current") == bytes_before
    assert all(n >= peak[pool] for pool, n in stat("allocated_bytes.*.peak").items())
    assert stat("allocated_bytes.*.freed")["large_pool"] == 131072
    for name in ("reserved_bytes.*.current", "segment.*.current", "active.*.current"):
        assert (found := stat(name))["all"] == found["small_pool"] + found["large_pool"], name
    torch.openreg.reset_accumulated_memory_stats()
    torch.openreg.reset_peak_memory_stats()
    assert stat("allocation.*.allocated") == dict.fromkeys(POOLS, 0)
    assert stat("allocated_bytes.*.peak") == stat("allocated_bytes.*.current")


def test_statistics_of_pinned_memory():
    torch.accelerator.synchronize()
    before = torch.openreg.host_memory_stats()
    x = torch.empty(5000, dtype=torch.uint8, pin_memory=True)
    during = torch.openreg.host_memory_stats()
    assert during["active_bytes.current"] - before["active_bytes.current"] == 8192
    assert during["active_requests.current"] - before["active_requests.current"] == 1
    del x
    after = torch.openreg.host_memory_stats()
    assert after["active_bytes.current"] == before["active_bytes.current"]
    assert after["allocated_bytes.current"] == during["allocated_bytes.current"] >= 8192  # kept for reuse
    assert after["num_host_alloc"] == during["num_host_alloc"]
    assert set(after) >= {"host_alloc_time.avg", "host_free_time.total", "num_host_free", "allocations.peak"}
    torch.openreg.reset_accumulated_host_memory_stats()
    torch.openreg.reset_peak_host_memory_stats()
    now = torch.openreg.host_memory_stats()
    assert now["allocations.allocated"] == 0 and now["active_bytes.peak"] == now["active_bytes.current"]
