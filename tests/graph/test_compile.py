"""torch.compile with default options: generated kernels against eager mode, forward and backward."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from graphs import calls, kernels, on, run_and_get_code, source
from torch._inductor import config
from torch.testing import assert_close

import openreg_ops
from openreg_ops import _C

pytestmark = pytest.mark.compiles


def assert_compiles(function, *args):
    """The compiled function gives eager's results, without a fallback to the CPU."""
    expected = function(*args)
    with openreg_ops.fallback.policy("error"):
        assert_close(torch.compile(function, fullgraph=True)(*args), expected)


def rand(*shape, grad=True, **options):
    return torch.randn(*shape, device="openreg", **options).requires_grad_(grad)


CASES = {
    "softmax and reduction": (lambda x, y: torch.softmax(torch.relu(x * 2 + y), -1).sum(0), (64, 33), (33,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (64,), w, b), (32, 64), (64,), (64,)),
    "linear and gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), (32, 64), (16, 64), (16,)),
    "convolution": (lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)), (2, 3, 8, 8), (4, 3, 3, 3), (4,)),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), (2, 3, 16, 8), (2, 3, 16, 8)),
}


@pytest.mark.slow
def test_forward_and_backward():
    """Eager's results and gradients, of all cases in one graph, without a fallback to the CPU."""
    args = {name: [rand(*shape) for shape in shapes] for name, (_, *shapes) in CASES.items()}
    leaves = [x for given in args.values() for x in given]

    def every(args):
        return {name: CASES[name][0](*given) for name, given in args.items()}

    runs = []
    for function in (every, torch.compile(every, fullgraph=True)):
        with openreg_ops.fallback.policy("error"):
            results = function(args)
            gradients = iter(
                torch.autograd.grad([*results.values()], leaves, [y.detach().cos() for y in results.values()])
            )
        runs.append((results, {name: [next(gradients) for _ in given] for name, given in args.items()}))
    assert_close(runs[1][0], runs[0][0])
    assert_close(runs[1][1], runs[0][1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_other_operators():
    """Embedding, sort, scan, scatter, complex numbers (which run eager kernels), half types and mutation."""
    index = torch.randint(10, (20,), device="openreg")

    def function(x, half, z):
        sums = torch.zeros(10, 8, device=x.device).index_add(0, index, x)
        return (
            F.embedding(index, x).sum(-1) + torch.sort(x[:, 0])[0] + torch.cumsum(x[:, 1], 0),
            sums.sin(),
            torch.softmax(half * half, -1) + half.sigmoid(),
            (z * z.conj()).abs() + 1,
        )

    z = torch.randn(8, dtype=torch.cfloat, device="openreg")
    assert_compiles(function, rand(20, 8, grad=False), rand(8, 40, grad=False, dtype=torch.bfloat16), z)

    def mutate(x):
        x.add_(1)
        return x * 2

    x = rand(5, grad=False)
    y = x.clone()
    assert_close(torch.compile(mutate)(x), mutate(y))
    assert_close(x, y)


@pytest.mark.slow
def test_control_flow():
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,))

    for x in (torch.ones(5, device="openreg"), -torch.ones(5, device="openreg")):
        assert_compiles(function, x)

    def loop(x):
        return torch._higher_order_ops.while_loop(lambda x: x.sum() < 100, lambda x: (x * 2,), (x,))[0]

    assert_close(torch.compile(loop, fullgraph=True)(x + 2), x + 33)  # 1, doubled until five of them are 100


@pytest.mark.slow
def test_autocast_around_and_inside_control_flow():
    def function(x):
        with torch.autocast("openreg", dtype=torch.bfloat16):
            return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x * 2, (x,))

    x = torch.ones(4, 4, device="openreg")
    graph = torch.compile(function, fullgraph=True)
    assert_close(graph(x), torch.full_like(x, 4, dtype=torch.bfloat16))
    assert_close(graph(-x), torch.full_like(x, 8, dtype=torch.bfloat16))


@pytest.mark.slow
def test_one_kernel_for_one_fused_group(device="openreg:1"):
    """Zero operators of ATen and one kernel: a chain, a softmax, a normalisation; a matrix product is ATen's."""
    x, weight = torch.randn(32, 64, device=device), torch.randn(64, 64, device=device)
    for function, expected in (
        (lambda x: (x * 2 + 1).relu().tanh() - x, (1, [])),
        (lambda x: torch.softmax(x, -1) * 3, (1, [])),
        (lambda x: F.layer_norm(x + 1, (64,)), (1, [])),
        (lambda x: F.gelu(x @ weight), (1, ["extern_kernels.mm"])),
    ):
        result, code = run_and_get_code(torch.compile(function, fullgraph=True), x)
        assert_close(result, function(x))
        assert calls(code) == expected and len(kernels(code)) == 1 and result.device == x.device


def test_kernels_go_through_launch():
    x = torch.randn(100, device="openreg")
    graph = torch.compile(lambda x: x.sin() + 1)
    graph(x)
    before = _C.launch_count()
    graph(x)
    assert _C.launch_count() == before + 1


def test_a_cpu_scalar_is_read_at_the_call():
    graph = torch.compile(lambda x, s: x * s + 1)
    x, scalar = torch.ones(4, device="openreg"), torch.tensor(3.0)
    graph(x, scalar)
    with torch.openreg.launch_mode("async"):
        torch.openreg._sleep(20_000_000)
        y = graph(x, scalar)
        scalar.fill_(100)
        assert y.tolist() == [4.0] * 4


@pytest.mark.slow
def test_integer_division_by_zero_raises():
    graph = torch.compile(lambda x, y: x // y)
    x = torch.arange(20, device="openreg")
    assert_close(graph(x, x + 1), x // (x + 1))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        graph(x, x)
    with torch.openreg.launch_mode("async"), pytest.raises(torch.AcceleratorError, match="ZeroDivisionError"):
        graph(x, x)
        torch.openreg.synchronize()


@pytest.mark.slow
def test_a_division_by_zero_is_its_own_devices():
    """Kernels of two devices run at once; Note [Integer division] in codegen.py."""
    x = torch.arange(1, 300_001, device="openreg:0")
    zeros, other = torch.zeros_like(x), x.to("openreg:1")
    divide = torch.compile(lambda x, y: x // y)
    divide(x, x), divide(other, other)
    with torch.openreg.launch_mode("async"):
        for _ in range(30):
            divide(x, zeros)
            for _ in range(3):
                divide(other, other)
            with pytest.raises(torch.AcceleratorError, match="ZeroDivisionError"):
                torch.openreg.synchronize(0)
            torch.openreg.synchronize(1)


@pytest.mark.slow
def test_only_kernels_that_divide_take_turns():
    """Only kernels that divide touch the state that all kernels of the process share, even in one C++ file."""
    x = torch.arange(1, 10, device="openreg")
    for function, divides in ((lambda x: x * 2, False), (lambda x: x // x, True), (lambda x: x % x, True)):
        (code,) = source(function, x)
        assert ("lock_guard" in code, "inductor_cpu_integer_div_error_flag" in code) == (divides, divides)

    def several(x):
        return torch.sort(x // x)[0] % x

    with config.patch(cpp_wrapper=True):
        assert_close(torch.compile(several, fullgraph=True)(x), several(x))


def test_random_numbers():
    """From the device's generator: reproducible under a seed, and the CPU's does not move."""
    graph = torch.compile(lambda x: F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(1000, device=x.device))
    x = torch.ones(1000, device="openreg")
    graph(x)
    state = torch.get_rng_state()
    torch.openreg.manual_seed(1)
    first, second = graph(x), graph(x)
    torch.openreg.manual_seed(1)
    assert graph(x).equal(first) and not first.equal(second)
    assert torch.get_rng_state().equal(state)


@pytest.mark.slow
def test_a_model_trains_as_in_eager_mode():
    """Convolution, batch norm, pooling, a linear layer, dropout off; SGD compiled too. Losses and weights agree."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    ).to("openreg")
    twin = copy.deepcopy(model)
    x, target = on("openreg", (torch.randn(16, 3, 8, 8), torch.randint(5, (16,))))
    losses = []
    for net, compile in ((model, lambda f: f), (twin, torch.compile)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        loss_of, step = compile(lambda x, t, net=net: F.cross_entropy(net(x), t)), compile(optimizer.step)
        run = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = loss_of(x, target)
            loss.backward()
            step()
            run.append(loss.item())
        losses.append(run)
    assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    assert losses[0][-1] < losses[0][0]
    assert_close(dict(twin.named_buffers()), dict(model.named_buffers()), rtol=1e-3, atol=1e-4)
