"""Timing with events, on two streams, as in the notes on CUDA semantics."""

import torch

device = torch.device("cuda")
stream = torch.cuda.Stream()
matrix = torch.randn(256, 256)
a = matrix.to(device)

start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
torch.cuda.synchronize()
start.record()
product = a
for _ in range(10):
    product = (product @ a) / 16
end.record()
end.synchronize()
elapsed = start.elapsed_time(end)
assert isinstance(elapsed, float) and elapsed > 0
assert start.query() and end.query()

stream.wait_event(end)
with torch.cuda.stream(stream):
    assert torch.cuda.current_stream() == stream != torch.cuda.default_stream()
    side_start = stream.record_event(torch.cuda.Event(enable_timing=True))
    doubled = product * 2
    side_end = torch.cuda.Event(enable_timing=True)
    side_end.record(stream)
torch.cuda.current_stream().wait_event(side_end)
result = doubled + 1
stream.synchronize()
assert stream.query() and side_end.query() and side_start.elapsed_time(side_end) >= 0
assert torch.cuda.current_stream() == torch.cuda.default_stream()

expected = matrix
for _ in range(10):
    expected = (expected @ matrix) / 16
torch.testing.assert_close(result.cpu(), expected * 2 + 1, rtol=1e-3, atol=1e-3)

unrecorded = torch.cuda.Event(enable_timing=True)
for wrong in (lambda: unrecorded.elapsed_time(end), lambda: torch.cuda.Event().elapsed_time(end)):
    try:
        wrong()
    except (RuntimeError, ValueError):
        continue
    raise AssertionError("measured an event that was never recorded")
low, high = torch.cuda.Stream.priority_range()
assert low >= high
urgent = torch.cuda.Stream(device="cuda:1", priority=high)
assert urgent.device == torch.device("cuda:1") and urgent.priority == high
with torch.cuda.stream(urgent):  # also makes its device current
    assert torch.cuda.current_device() == 1
    assert torch.ones(2, device="cuda").device.index == 1
assert torch.cuda.current_device() == 0
