"""torch.func's transforms and autograd's machinery on the device: the CPU's numbers, on the device."""

import threading

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

DEVICE, ONE = "openreg", "openreg:1"


def model(x, w):
    """Some of everything: a product, a reduction, an operator of ours, views and an index."""
    h = torch.ops.openreg.rms_norm(x @ w, w[0])[0] if x.device.type == "openreg" else _rms_norm(x @ w, w[0])
    return (torch.nn.functional.gelu(h)[..., :3] * x[..., 1:4]).sum(-1).tanh()


def _rms_norm(x, weight, eps=1e-6):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def inputs(device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    w = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    return x.to(device), w.to(device)


def total(x, w):
    return model(x, w).sum()


TRANSFORMS = {
    "vmap": lambda x, w: vmap(model, (0, None))(x, w),
    "vmap of two": lambda x, w: vmap(vmap(torch.dot, (None, 0)), (0, None))(x, w),
    "vmap out_dims": lambda x, w: vmap(lambda row: row * w, out_dims=1)(x),
    "vmap with randomness": lambda x, w: vmap(lambda row: row + torch.zeros_like(row).bernoulli_(1), randomness="same")(
        x
    ),
    "vmap by chunks": lambda x, w: vmap(model, (0, None), chunk_size=2)(x, w),
    "grad": lambda x, w: grad(total, argnums=(0, 1))(x, w),
    "per-sample gradients": lambda x, w: vmap(grad(total, argnums=1), (0, None))(x, w),
    "vjp": lambda x, w: vjp(model, x, w)[1](torch.ones(5, dtype=x.dtype, device=x.device)),
    "jvp": lambda x, w: jvp(model, (x, w), (torch.ones_like(x), w)),
    "jacrev": lambda x, w: jacrev(model, argnums=1)(x, w),
    "jacfwd": lambda x, w: jacfwd(model)(x, w),
    "hessian": lambda x, w: hessian(total)(x, w),
    "grad of grad": lambda x, w: grad(lambda x: grad(total)(x, w).square().sum())(x),
    "linearize": lambda x, w: linearize(lambda x: model(x, w), x)[1](torch.ones_like(x)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    expected = TRANSFORMS[name](*inputs("cpu"))
    got = TRANSFORMS[name](*inputs(ONE))
    for e, g in zip(*(y if isinstance(y, tuple) else (y,) for y in (expected, got)), strict=True):
        assert g.device == torch.device(ONE)
        torch.testing.assert_close(g.cpu(), e)


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
