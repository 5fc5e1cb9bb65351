"""The profiler with ProfilerActivity.CUDA: times of the GPU's work, its table, its trace, a schedule."""

import json
import os
import tempfile

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

torch.manual_seed(0)
model, x = nn.Linear(256, 256), torch.randn(64, 256)
on_gpu = nn.Linear(256, 256).cuda()
on_gpu.load_state_dict(model.state_dict())
on_gpu(x.cuda())
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True, profile_memory=True) as prof:
    with record_function("model_inference"):
        output = on_gpu(x.cuda())
        total = output.exp().sum()
    torch.cuda.synchronize()
torch.testing.assert_close(total.cpu(), model(x).exp().sum(), rtol=1e-3, atol=1e-3)

averages = prof.key_averages()
by_name = {event.key: event for event in averages}
assert by_name["model_inference"].count >= 1 and by_name["aten::addmm"].count == 1
assert by_name["aten::addmm"].cpu_time_total > 0
assert by_name["aten::addmm"].device_time_total > 0 and by_name["aten::addmm"].self_device_time_total > 0
assert by_name["aten::exp"].self_device_time_total > 0
assert sum(event.self_device_time_total for event in averages) > 0
assert by_name["aten::addmm"].self_device_memory_usage == 64 * 256 * 4
shapes = {event.key: event.input_shapes for event in prof.key_averages(group_by_input_shape=True)}
assert shapes["aten::addmm"][:3] == [[256], [64, 256], [256, 256]]
for key in ("self_cuda_time_total", "cuda_time_total", "self_device_time_total"):
    table = prof.key_averages().table(sort_by=key, row_limit=10)
    assert "Self CUDA" in table and "CUDA total" in table and "Self CUDA time total:" in table, table
assert torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities()

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "trace.json")
    prof.export_chrome_trace(path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
categories = {event.get("cat") for event in events}
assert {"cpu_op", "kernel", "user_annotation"} <= categories, categories

steps = []
with profile(
    activities=[ProfilerActivity.CUDA],
    schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
    on_trace_ready=lambda prof: steps.append(prof.step_num),
) as prof:
    for _ in range(6):
        on_gpu(x.cuda()).sum().item()
        prof.step()
assert steps == [4]
with torch.autograd.profiler.profile(use_device="cuda") as old:
    on_gpu(x.cuda())
    torch.cuda.synchronize()
assert old.key_averages().total_average().self_device_time_total > 0
