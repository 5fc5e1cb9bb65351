"""Rung 9: the profiler shows what the device did, and memory snapshots show what was allocated where."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from openreg_tools.ladder.rung import check

_TOOLS = "Accelerator: Environment Variables"


def _step(device: str) -> None:
    x = torch.randn(64, 64, device=device)
    (x @ x).relu().sum().item()


@check(
    "csrc/profiler.cpp", _TOOLS, "register a libkineto::IActivityProfiler, so that PrivateUse1 is a supported activity"
)
def supported(device: str) -> None:
    """The profiler supports the device."""
    found = torch.profiler.supported_activities()
    assert ProfilerActivity.PrivateUse1 in found, f"torch.profiler.supported_activities() is {found}"


@check(
    "csrc/profiler.cpp", _TOOLS, "turn the driver's activity records into GenericTraceActivity, with their times in ns"
)
def kernels(device: str) -> None:
    """Kernels appear with their time on the device."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiled:
        with record_function("step"):
            _step(device)
        torch.accelerator.synchronize()
    averages = profiled.key_averages()
    assert any(row.key == "step" for row in averages), "record_function does not appear"
    assert any(row.key.startswith("aten::") for row in averages), "operators do not appear"
    on_device = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.PrivateUse1]
    assert on_device, "no event of the device appears among the profiler's events"
    assert sum(event.time_range.elapsed_us() for event in on_device) > 0, "the device's events take no time"


@check("csrc/profiler.cpp", _TOOLS, "give each record the correlation id of its launch, so that it joins its operator")
def traces(device: str) -> None:
    """The exported trace has the kernels."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiled:
        _step(device)
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kinds = {event.get("cat") for event in events if event.get("ph") == "X"}
    assert kinds & {"kernel", "privateuse1_runtime", "gpu_memcpy", "privateuse1_driver"}, f"the trace has only {kinds}"


@check("csrc/memory.cpp", _TOOLS, "call c10::reportMemoryUsageToProfiler in the allocator")
def memory(device: str) -> None:
    """profile_memory shows the device's memory."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        x = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        del x
    found = sum(abs(event.self_device_memory_usage) for event in profiled.events())
    assert found >= 1 << 20, "an allocation of 1 MiB does not appear under profile_memory=True"


@check("torch_acme/memory.py", _TOOLS, "record allocations, and return them from memory._snapshot()")
def history(device: str) -> None:
    """Memory snapshots show live and past blocks."""
    memory = torch.get_device_module(device).memory
    memory._record_memory_history()
    try:
        x = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        y = torch.empty(1 << 19, dtype=torch.uint8, device=device)
        del y
        snapshot = memory._snapshot()
    finally:
        memory._record_memory_history(enabled=None)
    sizes = [block["size"] for segment in snapshot["segments"] for block in segment["blocks"]
             if block["state"] == "active_allocated"]  # fmt: skip
    assert any(size >= x.nbytes for size in sizes), "a live block of 1 MiB is not in the snapshot"
    actions = {entry["action"] for trace in snapshot["device_traces"] for entry in trace}
    assert "alloc" in actions and actions & {"free_requested", "free", "free_completed"}, (
        f"the trace has only {actions}"
    )
