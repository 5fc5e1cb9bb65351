"""Memory numbers, the snapshot, the fraction that a process may use, and out of memory."""

import gc
import pickle

import pytest
import torch
from processes import python
from stream_kit import in_threads

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
    gc.collect()
    torch.openreg.synchronize(DEVICE)
    torch.openreg.empty_cache()
    tensors = [torch.empty(n, device=DEVICE) for n in (1, 10, 1000, 100_000, 1_000_000)]
    freed = torch.empty(3_000_000, device=DEVICE)
    del freed
    segments = torch.openreg.memory_snapshot(device=DEVICE)
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
        blocks = (b for segment in torch.openreg.memory_snapshot(device=DEVICE) for b in segment["blocks"])
        return next((b["state"] for b in blocks if b["address"] == address), None)

    assert state() == "active_pending_free"
    other = torch.empty(1 << 18, device=DEVICE)
    assert other.data_ptr() != address
    stream.synchronize()
    torch.openreg.empty_cache()
    assert state() != "active_pending_free"


def test_memory_that_a_stream_still_uses_counts_towards_the_limit():
    """A loop that fetches ahead waits for its stream, as on CUDA; its device does not grow."""
    torch.openreg.synchronize(1)
    torch.openreg.empty_cache()
    limit = torch.openreg.memory_reserved(1) + (64 << 20)
    stream, waits = torch.openreg.Stream(1), torch.openreg.memory_stats(1)["num_alloc_retries"]
    torch.openreg.reset_peak_memory_stats(1)
    try:
        torch.openreg.set_per_process_memory_fraction(limit / torch.openreg.get_device_properties(1).total_memory, 1)
        for _ in range(4):
            x = torch.empty(40 << 20, dtype=torch.uint8, device="openreg:1")
            with stream:
                torch.openreg._sleep(100_000_000)
            x.record_stream(stream)
            used = torch.openreg.memory_allocated(1)
            del x
            stats = torch.openreg.memory_stats(1)
            assert stats["active_bytes.all.current"] == used == stats["allocated_bytes.all.current"] + (40 << 20)
        stats = torch.openreg.memory_stats(1)
        assert stats["num_alloc_retries"] - waits == 3 and stats["active.all.peak"] >= stats["active.all.current"]
        assert torch.openreg.max_memory_reserved(1) <= limit
    finally:
        torch.openreg.set_per_process_memory_fraction(1.0, 1)
        stream.synchronize()
    torch.openreg.empty_cache()  # which notices that the stream has done
    stats = torch.openreg.memory_stats(1)
    assert stats["active_bytes.all.current"] == stats["allocated_bytes.all.current"]


def test_two_threads_that_wait_for_memory_share_the_limit():
    torch.openreg.synchronize(1)
    torch.openreg.empty_cache()
    limit = torch.openreg.memory_allocated(1) + (64 << 20)
    stream, outcomes = torch.openreg.Stream(1), []
    x = torch.empty(60 << 20, dtype=torch.uint8, device="openreg:1")
    with stream:
        torch.openreg._sleep(300_000_000)
    x.record_stream(stream)
    del x

    def allocate():
        try:
            outcomes.append(torch.empty(40 << 20, dtype=torch.uint8, device="openreg:1"))
        except torch.OutOfMemoryError as error:
            outcomes.append(error)

    try:
        torch.openreg.set_per_process_memory_fraction(limit / torch.openreg.get_device_properties(1).total_memory, 1)
        in_threads(allocate, allocate)
    finally:
        torch.openreg.set_per_process_memory_fraction(1.0, 1)
    kinds = sorted(type(outcome).__name__ for outcome in outcomes)
    outcomes.clear()  # an error's traceback refers to the list, and the tensor would live until garbage is collected
    assert kinds == ["OutOfMemoryError", "Tensor"]


def test_memory_that_is_returned_is_reserved_no_more():
    """Between blocks too; and a snapshot shows what is reserved."""

    def shown():
        return sum(segment["total_size"] for segment in torch.openreg.memory_snapshot(device=DEVICE))

    torch.openreg.synchronize(DEVICE)
    torch.openreg.empty_cache()
    before = torch.openreg.memory_reserved(DEVICE)
    hole, above = (torch.empty(n << 20, dtype=torch.uint8, device=DEVICE) for n in (40, 1))
    with_both = torch.openreg.memory_reserved(DEVICE)
    assert with_both == shown() >= before + (40 << 20)
    del hole
    assert torch.openreg.memory_reserved(DEVICE) == with_both
    torch.openreg.empty_cache()
    returns = torch.openreg.memory_stats(DEVICE)["num_device_free"]
    assert torch.openreg.memory_reserved(DEVICE) == shown() <= with_both - (40 << 20)
    assert torch.openreg.mem_get_info(DEVICE)[0] == torch.openreg.mem_get_info(DEVICE)[1] - shown()
    torch.openreg.empty_cache()
    assert torch.openreg.memory_stats(DEVICE)["num_device_free"] == returns  # there was nothing to give back
    again = torch.empty(40 << 20, dtype=torch.uint8, device=DEVICE)
    assert torch.openreg.memory_reserved(DEVICE) == shown() == with_both
    del again, above


@pytest.mark.parametrize("of", ["allocated", "cached"])
def test_old_names(of):
    def old(name):
        with pytest.warns(FutureWarning, match=f"torch.openreg.{name} is"):
            return getattr(torch.openreg, name)(1)

    torch.empty(1 << 20, device="openreg:1")
    assert torch.openreg.max_memory_allocated(1) > torch.openreg.memory_allocated(1)
    assert old("memory_cached") == torch.openreg.memory_reserved(1)
    assert old("max_memory_cached") == torch.openreg.max_memory_reserved(1)
    old(f"reset_max_memory_{of}")
    assert torch.openreg.max_memory_allocated(1) == torch.openreg.memory_allocated(1)


def test_fraction_limits_a_process():
    total = torch.openreg.get_device_properties(0).total_memory
    before = torch.openreg.memory_allocated(1)
    assert torch.openreg.get_per_process_memory_fraction(1) == 1.0
    try:
        torch.openreg.set_per_process_memory_fraction((before + (1 << 20)) / total, 1)
        x = torch.empty(1 << 17, device="openreg:1")
        with pytest.raises(
            torch.OutOfMemoryError,
            match="Tried to allocate 8.00 MiB. Device 1 has a total capacity of .* is allowed .*set_per_process_memory",
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


def test_statistics_agree_with_the_snapshot():
    """While there are tensors, after they are freed, and after their memory is returned."""
    gc.collect()
    torch.openreg.synchronize(DEVICE)
    torch.openreg.empty_cache()
    tensors = [torch.empty(n, device=DEVICE) for n in [100] * 1000 + [1_000_000] * 5]

    def agree():
        stats, snapshot = torch.openreg.memory_stats(DEVICE), torch.openreg.memory_snapshot(device=DEVICE)
        for kind in ("small", "large"):
            segments = [segment for segment in snapshot if segment["segment_type"] == kind]
            active = [b for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
            assert stats[f"allocated_bytes.{kind}_pool.current"] == sum(block["size"] for block in active)
            assert stats[f"allocation.{kind}_pool.current"] == len(active)
            assert stats[f"reserved_bytes.{kind}_pool.current"] == sum(s["total_size"] for s in segments)
            if kind == "small":  # neighbors of the large pool are one segment once they are free
                assert stats["segment.small_pool.current"] == len(segments)
        return stats["segment.small_pool.current"]

    full = agree()
    tensors.clear()
    assert agree() == full > 5, "free memory is kept"
    torch.openreg.empty_cache()
    assert agree() <= full - 5


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


def test_requested_bytes_are_what_was_asked_for():
    def requested():
        stats = torch.openreg.memory_stats(DEVICE)
        return [stats[f"requested_bytes.{pool}.current"] for pool in POOLS]

    before = requested()
    small, large = torch.empty(3, device=DEVICE), torch.empty(1_000_001, dtype=torch.int8, device=DEVICE)
    assert [a - b for a, b in zip(requested(), before, strict=True)] == [12 + 1_000_001, 12, 1_000_001]
    blocks = {b["address"]: b for s in torch.openreg.memory_snapshot(device=DEVICE) for b in s["blocks"]}
    assert [blocks[x.data_ptr()]["requested_size"] for x in (small, large)] == [12, 1_000_001]
    del small, large
    assert requested() == before


@pytest.fixture
def history():
    memory = torch.openreg.memory
    yield memory
    memory._record_memory_history(None)
    assert memory._snapshot()["device_traces"] == [[], []]


def names(frames):
    return [frame["name"] for frame in frames]


def test_history_tells_who_allocated_and_freed(history, tmp_path):
    history._record_memory_history()

    def allocates():
        return torch.empty(1000, device=DEVICE)

    def frees(tensors):
        tensors.clear()

    x = allocates()
    address = x.data_ptr()
    snapshot = history._snapshot()
    block = next(b for s in snapshot["segments"] for b in s["blocks"] if b["address"] == address)
    assert "allocates" in names(block["frames"]) and block["requested_size"] == 4000
    holder = [x]
    del x
    frees(holder)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, device=DEVICE)
    trace, other_device = history._snapshot()["device_traces"]
    assert not other_device
    assert [e["action"] for e in trace] == ["alloc", "free_requested", "free_completed", "oom"]
    alloc, free, freed, oom = trace
    assert {e["addr"] for e in (alloc, free, freed)} == {address} and {e["size"] for e in trace[:3]} == {4000}
    assert "allocates" in names(alloc["frames"]) and "frees" in names(free["frames"])
    assert any(frame["filename"] == __file__ for frame in alloc["frames"])
    assert oom["size"] == 4 << 50 and 0 < oom["device_free"] <= torch.openreg.mem_get_info(DEVICE)[1]
    assert [e["time_us"] for e in trace] == sorted(e["time_us"] for e in trace)
    # What PyTorch's own reader makes of the file.
    from torch.cuda import _memory_viz

    history._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    data = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert "<script" in _memory_viz.trace_plot(data)
    text = _memory_viz.trace(data)
    assert ":3.9KiB]" in text and "del a" in text and "raise OutOfMemoryError # 4.0PiB requested" in text


def test_history_of_memory_that_waits_for_a_stream(history):
    history._record_memory_history(context=None)
    stream = torch.openreg.Stream()
    x = torch.empty(1 << 18, device=DEVICE)
    with stream:
        torch.openreg._sleep(100_000_000)
    x.record_stream(stream)
    del x

    def actions():
        return [e["action"] for e in history._snapshot(0)["device_traces"][0]]

    assert actions() == ["alloc", "free_requested"]
    stream.synchronize()
    torch.openreg.empty_cache()
    assert actions() == ["alloc", "free_requested", "free_completed"]


def test_history_keeps_what_it_is_asked_to(history):
    def record(**options):
        history._record_memory_history(clear_history=True, **options)
        kept = torch.empty(10, device=DEVICE)
        for _ in range(5):
            torch.empty(20, device=DEVICE)
        snapshot = history._snapshot()
        block = next(b for s in snapshot["segments"] for b in s["blocks"] if b["address"] == kept.data_ptr())
        return snapshot["device_traces"][0], block["frames"]

    trace, frames = record(enabled="state")
    assert trace == [] and "record" in names(frames) and any("::" in name for name in names(frames))
    trace, frames = record(context=None)
    assert len(trace) == 16 and not frames and not any(e["frames"] for e in trace)
    trace, _ = record(context="alloc")
    assert all(bool(e["frames"]) == (e["action"] == "alloc") for e in trace)
    assert len(record(max_entries=4)[0]) == 4
    trace, _ = record(skip_actions=["free_requested", "free_completed"])
    assert [e["action"] for e in trace] == ["alloc"] * 6
    trace, _ = record(stacks="python")
    assert "record" in names(trace[0]["frames"]) and not any("::" in name for e in trace for name in names(e["frames"]))


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(enabled="some"), "expected enabled among .* but got 'some'"),
        (dict(context="python"), "expected context among"),
        (dict(stacks="cpp"), "expected stacks among"),
        (dict(skip_actions=["frees"]), "an action to skip among .* but got 'frees'"),
        (dict(max_entries=-1), "max_entries, an integer from 0 to sys.maxsize, but got -1"),
        (dict(max_entries="a"), "max_entries, an integer from 0 to sys.maxsize, but got 'a'"),
    ],
)
def test_history_refuses_what_it_does_not_know(history, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        history._record_memory_history(**arguments)


def test_history_of_a_training_step_on_autograds_threads(history):
    """Allocations with and without Python, on several threads: no deadlock, and every free has its allocation."""
    history._record_memory_history(stacks="python")
    model = torch.nn.Linear(64, 64, device=DEVICE)
    for mode in ("inline", "async"):
        with torch.openreg.launch_mode(mode):
            for _ in range(3):
                model(torch.randn(8, 64, device=DEVICE)).sum().backward()
            torch.openreg.synchronize()
    trace = history._snapshot()["device_traces"][0]
    live = set()
    for entry in trace:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live.add(entry["addr"])
        elif entry["action"] == "free_completed":
            live.discard(entry["addr"])
    assert len(trace) > 50


OF_THIS_SIZE = {
    "900 TiB": (None, "try: torch.ones(1, device='openreg')\nexcept torch.OutOfMemoryError as error: print(error)"),
    "2048 gb": (2 << 40, "assert torch.ones(3, device='openreg').sum() == 3"),  # more than the machine has
    "65536k": (64 << 20, """
# Freed blocks of one size class must be able to become another's, else memory is lost to fragmentation.
for size in (32, 28, 24, 20, 7):
    keep = [torch.empty(size * 1024, dtype=torch.uint8, device='openreg') for _ in range(60 * 1024 // size)]
    del keep
torch.empty(60 << 20, dtype=torch.uint8, device='openreg')
torch.openreg.empty_cache()
assert torch.openreg.memory_reserved() == 0 == torch.openreg.memory_allocated()
"""),
    "1.5 gb": (3 << 29, ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("text", OF_THIS_SIZE)
def test_the_size_of_the_memory(text):
    size, code = OF_THIS_SIZE[text]
    show = "print(torch.openreg.mem_get_info()[1], torch.openreg.mem_get_info(1)[1])\n" if size else ""
    done = python("-c", f"import torch, openreg_ops\n{show}{code}", OPENREG_DEVICE_MEMORY=text)
    if size:
        assert (done.stdout.split(), done.stderr) == ([str(size)] * 2, "")
    else:
        sentence = "cannot reserve address space for 2 devices of 900.00 TiB; lower OPENREG_DEVICE_MEMORY"
        assert sentence in done.stdout, done.stderr


@pytest.mark.parametrize("augment", [False, True])
def test_the_accelerators_snapshot_is_the_devices(augment):
    """PyTorch's function asks only CUDA and XPU."""
    kept = torch.empty(3_000_000, device="openreg:1")
    torch.openreg.memory._record_memory_history()
    try:
        freed = torch.empty(1000, device="openreg:1")
        del freed
        for device in (None, "openreg:1"):
            snapshot = torch.accelerator.memory._snapshot(device, augment_with_fx_traces=augment)
            assert snapshot["segments"] == torch.openreg.memory._snapshot(device, augment)["segments"]
            addresses = [block["address"] for segment in snapshot["segments"] for block in segment["blocks"]]
            assert kept.data_ptr() in addresses and snapshot["device_traces"][1]
    finally:
        torch.openreg.memory._record_memory_history(None)


# ---- units ----

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNITS = {
    1: "1 bytes", 1023: "1023 bytes", KIB: "1.00 KiB", KIB + 1: "1.00 KiB", 1536: "1.50 KiB", MIB - KIB: "1023.00 KiB",
    MIB: "1.00 MiB", GIB - MIB: "1023.00 MiB", GIB: "1.00 GiB", 1023 * GIB: "1023.00 GiB", 1024 * GIB: "1.00 TiB",
    1 << 50: "1.00 PiB", 1 << 60: "1.00 EiB",
}  # fmt: skip


@pytest.mark.parametrize("size", UNITS)
def test_a_unit_begins_at_1024_of_the_one_below(size):
    with (
        torch.openreg.faults.inject("allocation", 1),
        pytest.raises(torch.OutOfMemoryError, match=rf"Tried to allocate {UNITS[size]}\."),
    ):
        torch.openreg.caching_allocator_alloc(size, 1)
