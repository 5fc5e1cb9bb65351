"""Autograd on the device: several threads, several devices, and the stream of the forward pass."""

import threading

import torch

DEVICE = "openreg"


def test_threads_accumulate_into_one_leaf():
    x = torch.ones(64, device=DEVICE, requires_grad=True)
    errors = []

    def work(scale):
        try:
            for _ in range(10):
                (x * scale).sum().backward()
        except Exception as error:
            errors.append(error)

    # Accumulation by several threads is not atomic on any device: sequential on one leaf, concurrent on different
    # leaves.
    mine = [torch.ones(64, device=f"openreg:{i % 2}", requires_grad=True) for i in range(4)]
    threads = [threading.Thread(target=lambda m=m: [(m * 2).sum().backward() for _ in range(20)]) for m in mine]
    for thread in threads:
        thread.start()
    work(3)
    for thread in threads:
        thread.join()
    assert not errors and x.grad.unique().tolist() == [30]
    assert all(m.grad.unique().tolist() == [40] for m in mine)


def test_one_graph_over_three_devices():
    torch.manual_seed(0)
    a, b, c = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))

    def run(first, second, third):
        leaves = [x.clone().to(d).requires_grad_() for x, d in zip((a, b, c), (first, second, third), strict=True)]
        x, y, z = leaves
        h = (x @ x).tanh().to(second) @ y
        out = (h.to(third) * z).sum() + (h.to(first) * x).sum().to(third)
        out.backward()
        assert [leaf.grad.device for leaf in leaves] == [leaf.device for leaf in leaves]
        return [leaf.grad.cpu() for leaf in leaves]

    expected = run("cpu", "cpu", "cpu")
    for devices in (("openreg:0", "openreg:1", "cpu"), ("cpu", "openreg:1", "openreg:0")):
        torch.testing.assert_close(run(*devices), expected)


def test_backward_runs_on_the_forwards_stream():
    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    stream = torch.openreg.Stream()
    stream.wait_stream(torch.openreg.current_stream())
    streams = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            streams.append(torch.openreg.current_stream())
            return g

    with stream:
        y = Probe.apply(x)
        loss = y.sum()
        loss.backward()
    assert streams == [stream]
    torch.openreg.current_stream().wait_stream(stream)
    assert x.grad.unique().tolist() == [1]
