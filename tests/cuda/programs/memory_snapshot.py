"""A recorded memory history and its snapshot, as the memory visualizer reads it."""

import os
import pickle
import tempfile

import torch
from torch import nn

torch.cuda.memory._record_memory_history(max_entries=100000)


def allocate_here():
    return torch.empty(3 << 20, dtype=torch.uint8, device="cuda")


x = allocate_here()
address = x.data_ptr()
model = nn.Linear(256, 256).cuda()
model(torch.ones(4, 256, device="cuda")).sum().backward()
del x
snapshot = torch.cuda.memory._snapshot()
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "snapshot.pickle")
    torch.cuda.memory._dump_snapshot(path)
    with open(path, "rb") as file:
        dumped = pickle.load(file)
torch.cuda.memory._record_memory_history(enabled=None)
after = allocate_here()

for content in (snapshot, dumped):
    assert {"segments", "device_traces"} <= set(content)
    trace = content["device_traces"][0]
    allocated = [entry for entry in trace if entry["action"] == "alloc" and entry["addr"] == address]
    assert [entry["size"] for entry in allocated] == [3 << 20]
    names = [frame["name"] for frame in allocated[0]["frames"]]
    assert "allocate_here" in names, names
    lines = [frame["line"] for frame in allocated[0]["frames"] if frame["name"] == "allocate_here"]
    assert lines == [allocate_here.__code__.co_firstlineno + 1]
    freed = [entry["action"] for entry in trace if entry.get("addr") == address]
    assert freed[:2] == ["alloc", "free_requested"], freed
    weights = [
        block
        for segment in content["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["requested_size"] == 256 * 256 * 4
    ]
    assert len(weights) == 2  # the weight and its gradient
expected = nn.Linear(256, 256)
expected.load_state_dict(model.state_dict())
expected(torch.ones(4, 256)).sum().backward()
torch.testing.assert_close(model.weight.grad.cpu(), expected.weight.grad)
assert len(torch.cuda.memory._snapshot()["device_traces"][0]) <= len(trace)
