"""Rung 9: the profiler and the history of memory."""

import json

import torch
from torch.profiler import ProfilerActivity, profile


def test_profiler(tmp_path):
    x = torch.ones(1000)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1], profile_memory=True) as prof:
        y = x.to("acme")
        y.fill_(2).abs()
        torch.accelerator.synchronize()
    events = [event for event in prof.events() if event.device_type == torch.autograd.DeviceType.PrivateUse1]
    assert {"fill_", "abs", "copy host to device"} <= {event.name for event in events}
    totals = {average.key: average for average in prof.key_averages()}
    assert totals["aten::fill_"].device_time_total > 0
    assert any(average.device_memory_usage > 0 for average in totals.values())
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in trace if event.get("cat") == "kernel"]
    assert {"fill_", "abs"} <= {event["name"] for event in kernels}


def test_memory_history():
    torch.acme.memory._record_memory_history()
    x = torch.empty(1000, device="acme")
    address = x.data_ptr()
    y = torch.empty(2000, device="acme")
    del x
    snapshot = torch.acme.memory._snapshot()
    torch.acme.memory._record_memory_history(None)
    first, second, third = snapshot["device_traces"][0]
    assert [first["action"], second["action"], third["action"]] == ["alloc", "alloc", "free_completed"]
    assert first["addr"] == third["addr"] == address and first["size"] == 4000
    assert any(frame["name"] == "test_memory_history" for frame in first["frames"])
    assert [segment["address"] for segment in snapshot["segments"]] == [y.data_ptr()]
