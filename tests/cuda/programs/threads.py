"""One Python thread per GPU, each with its own current device and stream, and a blocking-call detector."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

values = torch.randn(200, 50)
expected = (values.t() @ values).trace()
results, problems = {}, []


def work(index):
    try:
        torch.cuda.set_device(index)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = values.to("cuda", non_blocking=True)
            for _ in range(5):
                results[index] = (x.t() @ x).trace()
        stream.synchronize()
        assert results[index].device.index == index == torch.cuda.current_device()
    except Exception as problem:
        problems.append(problem)


threads = [threading.Thread(target=work, args=(index,)) for index in range(torch.cuda.device_count())]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not problems and torch.cuda.current_device() == 0, problems
for result in results.values():
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-2)

model = torch.nn.Linear(50, 4).cuda()
with ThreadPoolExecutor(4) as pool:
    outputs = list(pool.map(lambda rows: model(rows.cuda()).detach(), values.split(25)))
torch.testing.assert_close(torch.cat(outputs).cpu(), model.cpu()(values).detach(), rtol=1e-3, atol=1e-4)
model.cuda()
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda rows: model(rows.cuda()).sum().backward(), values.split(100)))
torch.testing.assert_close(model.weight.grad.cpu(), values.sum(0).expand(4, 50), rtol=1e-3, atol=1e-3)

torch.cuda.set_sync_debug_mode("warn")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    total = values.cuda().sum()
    total.item()
assert any("called a synchronizing CUDA operation" in str(warning.message) for warning in caught), caught
torch.cuda.set_sync_debug_mode("error")
assert torch.cuda.get_sync_debug_mode() == 2
try:
    torch.nonzero(total)
except RuntimeError as error:
    assert "called a synchronizing CUDA operation" in str(error), error
else:
    raise AssertionError("nonzero() synchronizes")
torch.cuda.set_sync_debug_mode(0)
torch.testing.assert_close(total.cpu(), values.sum(), rtol=1e-3, atol=1e-3)
