"""`torch.openreg._gpu_trace`: the callbacks of `torch.cuda._gpu_trace`, in a process of their own, which keeps them."""

import json

from processes import python

PROGRAM = """
import json, threading, torch
from torch.openreg import _gpu_trace as trace
log = []
for name in ("event_creation", "event_deletion", "event_record", "event_wait", "memory_allocation",
             "memory_deallocation", "stream_creation", "device_synchronization", "stream_synchronization",
             "event_synchronization"):
    getattr(trace, f"register_callback_for_{name}")(lambda *given, name=name: log.append([name, *given]))
x = torch.ones(3, device="openreg")
torch._C._activate_gpu_trace()
parts = {}
def part(name, call):
    log.clear()
    keep = call()
    parts[name] = [list(each) for each in log], keep if isinstance(keep, int) else None
def allocate():
    return x.neg().data_ptr()
part("allocate", allocate)
part("stream", lambda: globals().update(stream=torch.openreg.Stream()))
part("again", lambda: [torch.openreg.Stream() for _ in range(40)] and None)
part("record", lambda: globals().update(event=stream.record_event()))
part("wait", lambda: event.wait())
part("event", lambda: event.synchronize())
part("synchronize", lambda: stream.synchronize())
part("device", lambda: torch.openreg.synchronize(1))
part("item", lambda: x.sum().item() and None)
def delete():
    global event
    del event
part("delete", delete)
def worker():
    with torch.openreg.launch_mode("async"):
        (x * 2).sum()
        torch.openreg.current_stream().synchronize()
def thread():
    t = threading.Thread(target=worker); t.start(); t.join()
part("thread", thread)
trace.register_callback_for_memory_allocation(lambda address: 1 / 0)
y = x + 1  # logged, not raised
assert y.tolist() == [2, 2, 2]
print(json.dumps(parts))
"""


def test_callbacks():
    done = python("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)
    log = {name: entries for name, (entries, _) in parts.items()}
    address = parts["allocate"][1]
    assert log["allocate"] == [["memory_allocation", address], ["memory_deallocation", address]]
    [[created, stream]] = log["stream"]
    assert created == "stream_creation" and stream > 0
    assert len(log["again"]) == 31 and len({stream for _, stream in log["again"]}) == 31  # of the 32 in the pool
    (made, event), recorded = log["record"]
    assert made == "event_creation" and recorded == ["event_record", event, stream]
    assert log["wait"] == [["event_wait", event, 0]]
    assert log["event"] == [["event_synchronization", event]]
    assert log["synchronize"] == [["stream_synchronization", stream]]
    assert log["device"] == [["device_synchronization"]]
    assert [name for name, *_ in log["item"]] == ["memory_allocation", "stream_synchronization", "memory_deallocation"]
    assert log["delete"] == [["event_deletion", event]]
    assert [name for name, *_ in log["thread"]].count("memory_allocation") == 2
    assert "division by zero" in done.stderr


def test_an_exception_passes_where_its_tensors_are_freed():
    """The callback for the memory of a temporary runs while the exception is on its way."""
    code = """
import torch
freed = []
torch.openreg._gpu_trace.register_callback_for_memory_deallocation(freed.append)
torch._C._activate_gpu_trace()
try:
    torch.add(torch.ones(3, device="openreg"), 1, out=torch.ones(1, device="openreg").expand(3))
except RuntimeError as error:
    assert "single memory location" in str(error) and freed
    print("raised")
"""
    done = python("-c", code)
    assert done.stdout == "raised\n", done.stderr
