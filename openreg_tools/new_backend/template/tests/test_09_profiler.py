"""Rung 9: the profiler and the history of memory."""

import json

import torch
from torch.profiler import ProfilerActivity, profile


def test_profiler(tmp_path):
    x = torch.ones(1000)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1], profile_memory=True) as prof:
        x.to("acme").fill_(2).abs()
        torch.accelerator.synchronize()
    names = {event.name for event in prof.events() if event.device_type == torch.autograd.DeviceType.PrivateUse1}
    assert {"fill_", "abs", "copy host to device"} <= names
    totals = {average.key: average for average in prof.key_averages()}
    assert totals["aten::fill_"].device_time_total > 0
    assert any(average.device_memory_usage > 0 for average in totals.values())
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"fill_", "abs"} <= {event["name"] for event in events if event.get("cat") == "kernel"}


def test_memory_history():
    torch.acme.memory._record_memory_history()
    x, y = torch.empty(1000, device="acme"), torch.empty(2000, device="acme")
    address = x.data_ptr()
    del x
    snapshot = torch.acme.memory._snapshot()
    torch.acme.memory._record_memory_history(None)
    first, second, third = snapshot["device_traces"][0]
    assert [first["action"], second["action"], third["action"]] == ["alloc", "alloc", "free_completed"]
    assert first["addr"] == third["addr"] == address and first["size"] == 4000
    assert any(frame["name"] == "test_memory_history" for frame in first["frames"])
    assert [segment["address"] for segment in snapshot["segments"]] == [y.data_ptr()]
