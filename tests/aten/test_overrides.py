"""Overridden operators: each way of overriding one, against the CPU, forward and backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def same_with_gradients(function, *inputs, rtol=1e-4, atol=1e-5):
    """Runs `function` on the CPU and on the device; compares results and the gradient of every input."""
    host = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    device = [t.detach().to("openreg").requires_grad_(t.is_floating_point()) for t in inputs]
    expected, got = function(*host), function(*device)
    assert got.is_openreg
    assert_close(got.cpu(), expected, rtol=rtol, atol=atol)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (got * weights.to("openreg")).sum().backward()
    for h, d in zip(host, device, strict=True):
        if h.requires_grad:
            assert d.grad.is_openreg
            assert_close(d.grad.cpu(), h.grad, rtol=rtol, atol=atol)


# ---- attention ----


@pytest.mark.parametrize("mask", ["bool", "float", "learned"])
def test_attention_masks(mask):
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    m = torch.randn(5, 7)
    if mask == "learned":
        same_with_gradients(F.scaled_dot_product_attention, q, k, v, m)
    else:
        m = m > -1 if mask == "bool" else m
        same_with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, m.to(q.device)), q, k, v)


def test_attention_chooses_the_cpus_flash_kernel():
    q = torch.randn(1, 2, 4, 8)
    assert (
        torch._fused_sdp_choice(q.to("openreg"), q.to("openreg"), q.to("openreg"))
        == torch._fused_sdp_choice(q, q, q)
        != 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_is_traced(dynamic):
    """Its algorithm is chosen above the backend, where tensors may be fake and modes active."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 3, 9, 8, device="openreg")
        assert F.scaled_dot_product_attention(q, q, q, is_causal=True).shape == (2, 3, 9, 8)
    torch._dynamo.reset()
    attend = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (9, 12):
        q = torch.randn(2, 3, length, 8, device="openreg", requires_grad=True)
        assert_close(attend(q, q, q), F.scaled_dot_product_attention(q, q, q))
        (got,) = torch.autograd.grad(attend(q, q, q).square().sum(), q)
        assert_close(got, torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).square().sum(), q)[0])
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to("openreg")
    x = torch.randn(2, 5, 8, device="openreg")
    assert_close(torch.compile(layer, backend="aot_eager")(x), layer(x))


# ---- convolution ----


def test_convolution_keeps_channels_last():
    module = torch.nn.Conv2d(4, 6, 3)
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    on_device = copy.deepcopy(module).to("openreg")
    assert on_device(x.to("openreg")).stride() == module(x).stride()


def test_convolution_twice_differentiable():
    x, w = (
        torch.randn(s, dtype=torch.double, device="openreg", requires_grad=True) for s in [(1, 2, 4, 4), (2, 2, 3, 3)]
    )
    assert torch.autograd.gradcheck(F.conv2d, (x, w)) and torch.autograd.gradgradcheck(F.conv2d, (x, w))


# ---- recurrent cells ----

RECURRENT = {
    "lstm": lambda: torch.nn.LSTM(5, 7, 2, bidirectional=True),
    "lstm dropout": lambda: torch.nn.LSTM(5, 7, 3, dropout=0.5),
    "lstm projection": lambda: torch.nn.LSTM(5, 7, proj_size=3),
    "lstm no bias": lambda: torch.nn.LSTM(5, 7, bias=False),
    "gru": lambda: torch.nn.GRU(5, 7, 2, bidirectional=True),
    "gru no bias": lambda: torch.nn.GRU(5, 7, bias=False),
    "rnn": lambda: torch.nn.RNN(5, 7, nonlinearity="relu"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [None, [4, 2, 1], [4, 4, 4], [1, 1, 1]], ids=["padded", "packed", "equal", "steps"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_equals_the_cpu(name, packed, dtype):
    """To the bit, outputs and gradients, where PyTorch's fused cells would round otherwise.

    PyTorch gives padded sequences, and packed ones of equal lengths, to oneDNN."""
    module, x = RECURRENT[name]().to(dtype), torch.randn(4, 3, 5).to(dtype)

    def results(device, grad):
        torch.manual_seed(0)  # of the dropout between layers
        there, leaf = copy.deepcopy(module).to(device), x.to(device).requires_grad_()
        with torch.set_grad_enabled(grad):
            out, hidden = there(torch.nn.utils.rnn.pack_padded_sequence(leaf, packed) if packed else leaf)
            found = [out.data if packed else out, *(hidden if isinstance(hidden, tuple) else [hidden])]
            if grad:
                loss = sum(y.float().square().sum() for y in found)
                found += torch.autograd.grad(loss, [leaf, *there.parameters()])
        return [y.detach().cpu() for y in found]

    for grad in (False, True):
        for e, y in zip(results("cpu", grad), results("openreg", grad), strict=True):
            assert torch.equal(y, e) and y.dtype == e.dtype and y.stride() == e.stride()


def test_cell_states_of_other_shapes_do_not_reach_onednn():
    """Its kernel reads as many numbers as the hidden states have; the decomposition broadcasts or raises."""
    weights = [p.detach() for p in torch.nn.LSTM(5, 7).to("openreg").parameters()]
    x, h, c = (torch.rand(*shape, device="openreg") for shape in ((4, 3, 5), (1, 3, 7), (1, 1, 7)))

    def lstm(c):
        return torch.lstm(x, (h, c), weights, True, 1, 0.0, False, False, False)

    assert_close(lstm(c), lstm(c.repeat(1, 3, 1)))
    with pytest.raises(RuntimeError, match="size of tensor"):
        lstm(c.repeat(1, 2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_cells_equal_the_cpu(cell, dtype):
    module = cell(5, 7).to(dtype)
    x = torch.randn(3, 5).to(dtype)
    expected, got = module(x), copy.deepcopy(module).to("openreg")(x.to("openreg"))
    for e, g in zip(*((t if isinstance(t, tuple) else (t,)) for t in (expected, got)), strict=True):
        assert torch.equal(g.cpu(), e)


def test_recurrent_under_autocast_is_lowered():
    module, x = torch.nn.LSTM(4, 5).to("openreg"), torch.randn(3, 2, 4, device="openreg")
    with torch.autocast("openreg", torch.bfloat16):
        out, hidden = module(x)
    assert {out.dtype, *(h.dtype for h in hidden)} == {torch.bfloat16}


def test_packed_batch_sizes_are_on_the_host():
    w = [torch.ones(5, size, device="openreg") for size in (3, 5)]
    with pytest.raises(
        RuntimeError, match="expected batch_sizes to be a contiguous int64 tensor of one dimension, on the"
    ):
        torch.rnn_tanh(torch.ones(3, 3, device="openreg"), torch.tensor([2, 1], device="openreg"),
                       torch.ones(1, 2, 5, device="openreg"), w, False, 1, 0.0, False, False)  # fmt: skip


# ---- a stub, an autograd override, a composite override ----


def test_abs_runs_through_the_stub():
    table = torch._C._dispatch_dump_table("aten::abs.out")
    assert "overrides/abs.cpp" in next(line for line in table.splitlines() if line.startswith("PrivateUse1"))
    from openreg_ops import _C

    x = torch.ones(3, device="openreg")
    before = _C.launch_count()
    x.abs()
    assert _C.launch_count() == before + 1


@pytest.mark.parametrize(
    "dtype",
    [*FLOATS, torch.complex64, torch.complex128, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64],
    ids=str,
)
@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[::2, 1:5],
        lambda t: t[:0],
        lambda t: t.expand(3, 5, 7),
        lambda t: t[0, 0],
    ],
    ids=["dense", "transposed", "sliced", "empty", "expanded", "scalar"],
)
def test_abs_for_every_dtype_and_layout(dtype, layout):
    x = (torch.randn(5, 7) * 10).to(dtype)
    expected, got = layout(x).abs(), layout(x.to("openreg")).abs()
    assert got.cpu().equal(expected) and got.stride() == expected.stride() and got.dtype == expected.dtype
    out = torch.empty_like(got)
    assert torch.abs(layout(x.to("openreg")), out=out) is out and out.cpu().equal(expected)


def test_abs_of_bool_is_itself_as_on_cuda():
    x = torch.tensor([True, False], device="openreg")
    assert torch.equal(x.abs(), x) and x.abs().data_ptr() != x.data_ptr() and x.abs_() is x


@pytest.mark.parametrize("mode", ["inline", "async"])
def test_abs_without_memory(mode):
    x, out = torch.arange(1000.0, device="openreg"), torch.empty(1000, device="openreg")
    x.untyped_storage().resize_(0)
    out.untyped_storage().resize_(0)
    calls = (
        x.abs, x.abs_, x.isinf, x.isfinite, x.t().abs, lambda: torch._foreach_abs([out, x]), lambda: repr(x),
        lambda: torch.abs(torch.ones(1000, device="openreg"), out=out), lambda: x.view(torch.int32).abs(),
        lambda: x.new_ones(1000).abs_().copy_(x),
    )  # fmt: skip
    with torch.openreg.launch_mode(mode):
        for call in calls:
            with pytest.raises(RuntimeError, match="^aten::.*without memory"):
                call()
    graph, stream = torch.openreg.Graph(), torch.openreg.Stream()
    with stream:
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="^aten::abs.*without memory"):
            x.abs()
        graph.capture_end()


def test_selu_overrides_autograd():
    assert (
        "overrides/selu.cpp"
        in torch._C._dispatch_dump_table("aten::selu").split("AutogradPrivateUse1")[1].splitlines()[0]
    )
    x = torch.randn(4, dtype=torch.double, device="openreg", requires_grad=True)
    assert "Selu" in type(F.selu(x).grad_fn).__name__ or "CppFunction" in type(F.selu(x).grad_fn).__name__
    assert torch.autograd.gradcheck(F.selu, x) and torch.autograd.gradgradcheck(F.selu, x)
    same_with_gradients(F.selu, torch.randn(3, 4))
    with torch.no_grad():
        assert_close(F.selu(x).cpu(), F.selu(x.cpu()))


def test_max_pool2d_gradient_and_layouts():
    x = torch.randn(2, 3, 8, 8)
    same_with_gradients(lambda x: F.max_pool2d(x, 2), x)
    cl = x.to(memory_format=torch.channels_last)
    assert F.max_pool2d(cl.to("openreg"), 2).stride() == F.max_pool2d(cl, 2).stride()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.to("openreg"), torch.ones_like(x).to("openreg"))
        assert torch.autograd.forward_ad.unpack_dual(F.max_pool2d(dual, 2)).tangent.eq(1).all()


def test_max_pool2d_makes_no_indices_without_gradients():
    x = torch.randn(1, 1, 64, 64, device="openreg")
    torch.openreg.reset_peak_memory_stats()
    before = torch.openreg.memory_allocated()
    F.max_pool2d(x, 2)
    assert torch.openreg.max_memory_allocated() - before == 32 * 32 * 4


@pytest.mark.parametrize(
    "bad",
    [
        dict(kernel_size=0),
        dict(kernel_size=2, padding=2),
        dict(kernel_size=20),
        dict(kernel_size=(1, 2, 3)),
        dict(kernel_size=2, stride=0),
        dict(kernel_size=2, stride=2**62),
    ],
    ids=str,
)
def test_max_pool2d_refuses_what_the_cpu_refuses(bad):
    x = torch.randn(1, 1, 8, 8)
    with pytest.raises(RuntimeError) as expected:
        F.max_pool2d(x, **bad)
    with pytest.raises(RuntimeError) as got:
        F.max_pool2d(x.to("openreg"), **bad)
    assert str(got.value).split("\n")[0] == str(expected.value).split("\n")[0]


def test_max_pool2d_under_fake_tensors_and_modes():
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Log(), torch.no_grad():
        F.max_pool2d(torch.ones(1, 1, 4, 4, device="openreg"), 2)
    assert any("max_pool2d" in str(func) for func in seen)
    with FakeTensorMode(), torch.no_grad():
        assert F.max_pool2d(torch.empty(2, 1, 28, 28, device="openreg"), 2).shape == (2, 1, 14, 14)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.MaxPool2d(2)).to("openreg")
    x = torch.randn(2, 1, 8, 8, device="openreg")
    with torch.no_grad():
        assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), net(x))


def test_abs_refuses_an_out_of_another_dtype_as_the_cpu_does():
    for device in ("cpu", "openreg"):
        with pytest.raises(RuntimeError, match="Found dtype Double but expected Long"):
            torch.abs(torch.tensor([-1], device=device), out=torch.empty(1, dtype=torch.float64, device=device))


# ---- dropout ----


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("train", [True, False, None])
def test_native_dropout(p, train):
    torch.manual_seed(5)
    expected = torch.native_dropout(torch.ones(64), p, train)
    torch.manual_seed(5)
    host = torch.get_rng_state()
    got = torch.native_dropout(torch.ones(64, device="openreg"), p, train)
    assert torch.get_rng_state().equal(host)
    for g, e in zip(got, expected, strict=True):
        assert g.cpu().equal(e)


def test_native_dropout_refuses_a_bad_probability():
    with pytest.raises(RuntimeError, match="native_dropout: expected a probability between 0 and 1, but got p=2"):
        torch.native_dropout(torch.ones(2, device="openreg"), 2.0, True)
    assert torch.native_dropout(torch.ones(2, device="openreg"), 2.0, False)[0].tolist() == [1, 1], "nothing is drawn"


# ---- errors of cells ----


@pytest.mark.parametrize("cell", ["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("shape", [(), (20,), (0,), (2, 3, 1)], ids=str)
def test_cells_raise_the_cpus_errors_for_other_dimensions(cell, which, shape):
    gates = {"lstm_cell": 4, "gru_cell": 3}.get(cell, 1)
    made = [torch.rand(2, 3), torch.rand(2, 5), torch.rand(gates * 5, 3), torch.rand(gates * 5, 5)]
    made[which] = torch.rand(shape)

    def error(device):
        x, h, *weights = (each.to(device) for each in made)
        try:
            getattr(torch, cell)(x, [h, h] if cell == "lstm_cell" else h, *weights)
        except (RuntimeError, IndexError) as raised:
            return type(raised)

    assert error("openreg") == error("cpu") is not None


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("batch", [0, 2])
def test_the_backward_of_a_convolution_rejects_a_gradient_of_another_shape(batch, transposed):
    x, weight = (torch.rand(1, 2, 5, 5, device="openreg"), torch.rand(2, 2, 2, 2, device="openreg"))
    side = 6 if transposed else 4
    size, expected = [batch, 2, side, side], rf"\[1, 2, {side}, {side}\]"
    arguments = [[1, 1], [0, 0], [1, 1], transposed, [0, 0], 1, [True, True, True]]
    with pytest.raises(
        RuntimeError, match=f"convolution_backward: expected a gradient of shape {expected}, .* but got"
    ):
        torch.ops.aten.convolution_backward(torch.rand(size, device="openreg"), x, weight, None, *arguments)
    with pytest.raises(RuntimeError, match="stride"):  # ATen's own error
        torch.ops.aten.convolution_backward(torch.rand(size, device="openreg"), x, weight, None, [0, 0], *arguments[1:])


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0), (1, 2, 0, 0)], ids=str)
def test_fused_attention_without_scores(sizes):
    batch, heads, length, keys = sizes
    q = torch.rand(batch, heads, length, 8, device="openreg")
    k, v = torch.rand(batch, heads, keys, 8, device="openreg"), torch.rand(batch, heads, keys, 5, device="openreg")
    op = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    out, logsumexp, *rest = op(q, k, v)
    assert torch.equal(out.cpu(), (q.cpu() @ k.cpu().mT).softmax(-1) @ v.cpu())  # zeros
    assert torch.equal(logsumexp.cpu(), (q.cpu() @ k.cpu().mT).logsumexp(-1))
    given = (torch.ones_like(out), q, k, v, None, [True, True, True, False], out, logsumexp)
    gradients = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward(
        *given, *rest[:4], 0.0, False, *rest[4:6]
    )
    for gradient, x in zip(gradients, (q, k, v), strict=False):
        assert gradient.shape == x.shape and not gradient.any()
