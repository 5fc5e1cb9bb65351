"""torch.utils.benchmark: Timer, Compare, and the functions that it measures."""

import torch
from torch.utils import benchmark

x = torch.randn(32, 48)
on_gpu = x.cuda()


def batched_dot_mul_sum(a, b):
    return a.mul(b).sum(-1)


def batched_dot_bmm(a, b):
    return torch.bmm(a.reshape(-1, 1, a.shape[-1]), b.reshape(-1, b.shape[-1], 1)).flatten(-3)


torch.testing.assert_close(batched_dot_mul_sum(on_gpu, on_gpu).cpu(), x.square().sum(-1), rtol=1e-4, atol=1e-4)
torch.testing.assert_close(batched_dot_bmm(on_gpu, on_gpu).cpu(), x.square().sum(-1), rtol=1e-4, atol=1e-3)
results = []
for function in (batched_dot_mul_sum, batched_dot_bmm):
    for threads in (1, 2):
        timer = benchmark.Timer(
            stmt="function(x, x)",
            globals={"function": function, "x": on_gpu},
            num_threads=threads,
            label="batched dot",
            sub_label=function.__name__,
            description="cuda",
        )
        measured = timer.blocked_autorange(min_run_time=0.05)
        assert measured.median > 0 and measured.number_per_run >= 1
        results.append(measured)
table = str(benchmark.Compare(results))
assert "batched_dot_bmm" in table and "cuda" in table

calls = []
timed = benchmark.Timer(
    stmt="calls.append(1); torch.cuda._sleep(2_000_000)", globals={"calls": calls}, setup="import torch"
).timeit(5)
assert 5 <= len(calls) <= 20
quick = benchmark.Timer(stmt="x", globals={"x": on_gpu}).timeit(5)
assert timed.mean > 10 * quick.mean  # the timer waits for the GPU
assert timed.mean > 1e-4
