"""torch.profiler on the device: what ran, on which stream, when, launched by which operator; ranges; memory."""

import json

import pytest
import torch
from stream_kit import in_threads
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from openreg_ops import _C

MS = 1_000_000  # cycles: a cycle is a nanosecond
BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


@pytest.fixture(autouse=True)
def unpoisoned(poisoned):
    """Without the kernels that fill new memory."""
    _C.set_poison(False)


@pytest.fixture(params=["inline", "async", "sync"])
def mode(request):
    with torch.openreg.launch_mode(request.param):
        yield request.param
        torch.openreg.synchronize()


def on_device(prof, annotations=False):
    """What ran on the devices, in the order of its start; ranges and waits for events are annotations."""
    found = [event for event in prof.events() if event.device_type == DeviceType.PrivateUse1]
    found.sort(key=lambda event: event.time_range.start)
    return [event for event in found if event.is_user_annotation == annotations]


def on_host(prof, name):
    return [e for e in prof.events() if e.device_type == DeviceType.CPU and e.name == name]


def names(events):
    return [event.name for event in events]


def trace_of(prof, tmp_path):
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def step():
    x = torch.ones(64, 64).to("openreg")
    return torch.ops.openreg.custom_abs(x @ x).cpu()


STEP = [
    "Memcpy HtoD (Pageable -> Device)",
    "aten::mm kernel",
    "openreg::abs_into kernel",
    "Memcpy DtoH (Device -> Pageable)",
]


def test_kernels_and_copies(mode):
    """What ran in its order; the operator that launched it; the call that launched it, which has its number."""
    with profile(activities=BOTH) as prof:
        step()
    events = on_device(prof)
    assert names(events) == STEP
    assert {(event.device_index, event.device_resource_id) for event in events} == {(0, 0)}
    for event, following in zip(events, events[1:], strict=False):
        assert event.time_range.end <= following.time_range.start
    kernel = events[1]
    (operator,), (matmul,) = on_host(prof, "aten::mm"), on_host(prof, "aten::matmul")
    assert operator.kernels == [(kernel.name, 0, kernel.device_time)]
    assert operator.self_device_time_total == kernel.device_time > 0
    assert matmul.device_time_total == kernel.device_time and matmul.self_device_time_total == 0
    work = {event.id: event for event in events}
    launches = [*on_host(prof, "openregLaunchKernel"), *on_host(prof, "openregMemcpyAsync")]
    calls = {call.id: call for call in launches}
    assert len(work) == 4 and calls.keys() == work.keys()
    for number, call in calls.items():
        assert call.time_range.start <= work[number].time_range.start
        assert (call.name == "openregMemcpyAsync") == work[number].name.startswith("Memcpy")


def test_one_activity():
    with profile(activities=[ProfilerActivity.PrivateUse1]) as prof:
        step()
    assert names(on_device(prof)) == STEP
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step()
    assert on_device(prof) == [] and on_host(prof, "openregLaunchKernel") == []
    assert len(on_host(prof, "aten::mm")) == 1


def test_a_profile_holds_what_ran_in_it(mode):
    for _ in range(2):
        step()
        with profile(activities=BOTH) as prof:
            torch.ones(3, device="openreg").neg_()
        assert names(on_device(prof)) == ["aten::fill_ kernel", "aten::neg_ kernel"]


def test_streams_and_times(mode):
    stream, other = torch.openreg.Stream(), torch.openreg.Stream(device="openreg:1")
    x = torch.ones(8, device="openreg")
    torch.openreg.synchronize()
    with profile(activities=BOTH) as prof:
        with stream:
            torch.openreg._sleep(20 * MS)
            x + 1
        with other:
            torch.ones(3, device="openreg:1")
    sleep, add = (event for event in on_device(prof) if event.device_index == 0)
    assert names([sleep, add]) == ["sleep kernel", "aten::add kernel"]
    assert sleep.device_resource_id == add.device_resource_id == stream.stream_id
    assert sleep.device_time >= 20_000 and add.time_range.start >= sleep.time_range.end
    (fill,) = (event for event in on_device(prof) if event.device_index == 1)
    assert fill.device_resource_id == other.stream_id


def test_what_is_queued_at_the_end_is_part_of_it():
    stream = torch.openreg.Stream(device="openreg:1")
    with profile(activities=BOTH) as prof, stream:
        torch.openreg._sleep(20 * MS)
    assert names(on_device(prof)) == ["sleep kernel"] and on_device(prof)[0].device_time >= 20_000


def test_waits_are_no_work():
    a, b = torch.openreg.Stream(), torch.openreg.Stream()
    with profile(activities=BOTH) as prof:
        with a:
            torch.openreg._sleep(20 * MS)
        b.wait_stream(a)
        b.synchronize()
    assert names(on_device(prof)) == ["sleep kernel"]
    (wait,) = on_device(prof, annotations=True)
    assert (wait.name, wait.device_resource_id) == ("wait for an event", b.stream_id)
    assert on_host(prof, "openregStreamWaitEvent") and on_host(prof, "openregStreamSynchronize")
    sums = {row.key: row.self_device_time_total for row in prof.key_averages() if not row.is_user_annotation}
    assert sum(sums.values()) == sums["sleep kernel"] >= 20_000


def test_copies_say_how_many_bytes(mode, tmp_path):
    x = torch.ones(1000, pin_memory=True)
    with profile(activities=BOTH) as prof:
        y = x.to("openreg", non_blocking=True)
        y.to("openreg:1")
        y.clone()
        x.copy_(y)
    copies = [event for event in trace_of(prof, tmp_path) if event.get("cat") == "gpu_memcpy"]
    assert sorted(copy["name"] for copy in copies) == [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy DtoH (Device -> Pinned)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy PtoP (Device -> Device)",
    ]
    assert {copy["args"]["bytes"] for copy in copies} == {4000}


@pytest.mark.parametrize("mode", ["inline", "async"])
def test_backward(mode):
    layer = torch.nn.Linear(4, 3, device="openreg")
    x = torch.ones(2, 4, device="openreg")
    with torch.openreg.launch_mode(mode), profile(activities=BOTH) as prof:
        layer(x).sum().backward()
    (backward,) = on_host(prof, "autograd::engine::evaluate_function: AddmmBackward0")
    assert "aten::mm kernel" in names(on_device(prof)) and backward.device_time_total > 0
    assert (backward.thread == on_host(prof, "aten::addmm")[0].thread) == (mode == "inline")


def test_generated_kernels():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x + 1).exp() * 2)
    x = torch.ones(64, device="openreg")
    compiled(x)
    with profile(activities=BOTH) as prof:
        compiled(x)
    (kernel,) = on_device(prof)
    (graph,) = (event for event in prof.events() if event.name.startswith("## Call CompiledFxGraph"))
    assert kernel.name == "cpp_fused_add_exp_mul_0 kernel" and graph.self_device_time_total == kernel.device_time


def test_table():
    with profile(activities=BOTH, record_shapes=True) as prof:
        step()
    table = prof.key_averages().table(sort_by="self_device_time_total")
    assert "Self OPENREG" in table and "OPENREG total" in table and "Self OPENREG time total" in table
    rows = {row.key: row for row in prof.key_averages()}
    assert rows["aten::mm"].count == rows["aten::mm kernel"].count == 1
    assert rows["aten::mm"].self_device_time_total == rows["aten::mm kernel"].self_device_time_total > 0
    (mm,) = (row for row in prof.key_averages(group_by_input_shape=True) if row.key == "aten::mm")
    assert mm.input_shapes == [[64, 64], [64, 64]]


def test_chrome_trace(tmp_path):
    stream = torch.openreg.Stream(device="openreg:1")
    with profile(activities=BOTH) as prof:
        step()
        with stream:
            torch.openreg._sleep(MS)
    events = trace_of(prof, tmp_path)
    kernels = {event["name"]: event for event in events if event.get("cat") == "kernel"}
    sleep, mm = kernels["sleep kernel"], kernels["aten::mm kernel"]
    assert (sleep["pid"], sleep["tid"]) == (1, stream.stream_id) and sleep["dur"] >= 1000
    assert (mm["pid"], mm["tid"]) == (0, 0)
    (operator,) = (e for e in events if e.get("cat") == "cpu_op" and e["name"] == "aten::mm")
    assert mm["args"]["External id"] == operator["args"]["External id"]
    arrows = {e["ph"]: e for e in events if e.get("cat") == "ac2g" and e["id"] == mm["args"]["correlation"]}
    assert arrows.keys() == {"s", "f"} and arrows["f"]["pid"] == 0 and arrows["s"]["tid"] == operator["tid"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes[1, stream.stream_id] == f"stream {stream.stream_id}" and lanes[0, 0] == "default stream"
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes[0] == "openreg:0" and processes[1] == "openreg:1"


def test_a_kernel_that_fails_is_seen():
    x, index = torch.ones(3, device="openreg"), torch.tensor([7], device="openreg")
    with profile(activities=BOTH) as prof, pytest.raises(IndexError):
        x.index_select(0, index)
    assert names(on_device(prof)) == ["aten::index_select kernel"]


# ---- ranges ----


def test_ranges_are_on_the_device_too(mode):
    with profile(activities=BOTH) as prof:
        with record_function("outer"):
            torch.ones(3, device="openreg")
            with torch.openreg.nvtx.range("inner {}", 1):
                torch.openreg._sleep(MS)
        torch.openreg.nvtx.range_push("alone")
        torch.openreg.nvtx.mark("moment")
        torch.openreg.nvtx.range_pop()
    ranges = {event.name: event.time_range for event in on_device(prof, annotations=True)}
    fill, sleep = (event.time_range for event in on_device(prof))
    assert ranges.keys() == {"outer", "inner 1"}
    assert (ranges["outer"].start, ranges["outer"].end) == (fill.start, sleep.end)
    assert (ranges["inner 1"].start, ranges["inner 1"].end) == (sleep.start, sleep.end)
    assert len(on_host(prof, "alone")) == len(on_host(prof, "moment")) == len(on_host(prof, "inner 1")) == 1


def test_emitted_ranges():
    x = torch.ones(2, 3, device="openreg", requires_grad=True)
    with torch.openreg.nvtx.emit_ranges(record_shapes=True):
        with torch.openreg.nvtx.emit_ranges(enabled=False):
            pass
        with pytest.raises(RuntimeError, match="emit_ranges is not reentrant"):
            torch.openreg.nvtx.emit_ranges().__enter__()
        with profile(activities=[ProfilerActivity.PrivateUse1]) as prof:
            x.mul(2).sum().backward()
    found = names(on_device(prof, annotations=True))
    (forward,) = (name for name in found if name.startswith("aten::mul, seq = ") and "op_id" in name)
    assert forward.endswith("sizes = [[2, 3], []]")
    sequence = forward.split(", ")[1]
    assert any(name.startswith(f"MulBackward0, {sequence},") for name in found)
    with profile(activities=[ProfilerActivity.PrivateUse1]) as prof:
        x.detach().mul(2)
    assert on_device(prof, annotations=True) == []
    with torch.openreg.nvtx.emit_ranges():  # it is entered again
        pass


# ---- memory ----


def test_memory(mode):
    with profile(activities=BOTH, profile_memory=True) as prof:
        with record_function("keeps"):
            x = torch.empty(1 << 20, dtype=torch.uint8, device="openreg:1")
        with record_function("drops"):
            del x
    usage = {event.name: event.device_memory_usage for event in prof.events() if event.name in ("keeps", "drops")}
    assert usage == {"keeps": 1 << 20, "drops": -(1 << 20)}


def test_memory_in_the_trace(tmp_path):
    base = torch.openreg.memory_allocated(1)
    with profile(activities=BOTH, profile_memory=True, record_shapes=True, with_stack=True) as prof:
        x = torch.empty(1 << 20, dtype=torch.uint8, device="openreg:1")
        del x
    records = [
        event["args"]
        for event in trace_of(prof, tmp_path)
        if event["name"] == "[memory]" and event["args"]["Device Type"] == int(DeviceType.PrivateUse1)
    ]
    assert [(r["Device Id"], r["Bytes"], r["Total Allocated"] - base) for r in records] == [
        (1, 1 << 20, 1 << 20),
        (1, -(1 << 20), 0),
    ]


def test_out_of_memory():
    with profile(activities=BOTH, profile_memory=True) as prof, pytest.raises(torch.OutOfMemoryError):
        torch.empty(_C.device_memory() + 1, dtype=torch.uint8, device="openreg")
    assert len(on_host(prof, "[OutOfMemory]")) == 1


# ---- without Kineto ----


def test_the_profiler_without_kineto():
    with torch.autograd.profiler.profile(use_device="openreg") as prof:
        torch.ones(3, device="openreg")
        torch.openreg._sleep(20 * MS)
        torch.openreg.synchronize()
    (fill,) = (row for row in prof.key_averages() if row.key == "aten::fill_")
    assert fill.device_time_total > 0


@pytest.mark.parametrize("device", [0, 1])
def test_nvtx(mode, device):
    """Ranges that overlap, and that another thread ends; a range covers the work that any thread launched in it."""
    nvtx = torch.openreg.nvtx
    x = torch.ones(3, device=f"openreg:{device}")
    torch.openreg.synchronize(device)
    with profile(activities=BOTH) as prof:
        first = nvtx.range_start("first")
        x * 2
        second = nvtx.range_start("second")
        in_threads(lambda: (x + 1, nvtx.range_end(first)))
        x - 1
        nvtx.range_end(second)
        nvtx.range_start("open")
        assert nvtx.range_push("outer") == 0 and nvtx.range_push("inner") == 1
        assert nvtx.range_pop() == 1 and nvtx.range_pop() == 0
        torch.openreg.synchronize(device)
    [one], [two] = on_host(prof, "first"), on_host(prof, "second")
    assert one.time_range.start <= two.time_range.start <= one.time_range.end <= two.time_range.end
    assert not on_host(prof, "open") and on_host(prof, "outer") and on_host(prof, "inner")
    mul, add, sub = on_device(prof)
    ranges = {event.name: event for event in on_device(prof, annotations=True)}
    for name, begin, end in (("first", mul, add), ("second", add, sub)):
        assert ranges[name].device_index == device
        assert ranges[name].time_range.start == pytest.approx(begin.time_range.start, abs=0.01)
        assert ranges[name].time_range.end == pytest.approx(end.time_range.end, abs=0.01)


def test_nvtx_refuses():
    started = torch.openreg.nvtx.range_start("once")
    torch.openreg.nvtx.range_end(started)
    with pytest.raises(RuntimeError, match=f"range_end: no range {started} is open"):
        torch.openreg.nvtx.range_end(started)
    sentence = r"range_pop: this thread has no open range; call range_push\(name\) first"
    with pytest.raises(RuntimeError, match=sentence):
        torch.openreg.nvtx.range_pop()
