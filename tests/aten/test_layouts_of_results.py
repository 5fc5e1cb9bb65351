"""Results in memory that is not contiguous: the CPU's numbers in the right places, and nothing else written."""

from __future__ import annotations

import pytest
import torch

from openreg_tools.conformance import layouts, opinfo, sweep

pytestmark = pytest.mark.conformance

D = "openreg"


@pytest.fixture(params=["inline", "async", "sync"])
def mode(request):
    with torch.openreg.launch_mode(request.param):
        yield request.param
        torch.openreg.synchronize()


LU = torch.linalg.lu_factor(torch.rand(4, 4, 3, 3, generator=torch.Generator().manual_seed(1)))
X = torch.rand(4, 4, 3, 3, generator=torch.Generator().manual_seed(2))
CALLS = {
    "tril": lambda move, out: torch.tril(move(X), 1, out=out[0]),
    "triu": lambda move, out: torch.triu(move(X), out=out[0]),
    "lu_unpack": lambda move, out: torch.lu_unpack(*move(tuple(LU)), out=out),
    "linalg.lu": lambda move, out: torch.linalg.lu(move(X), out=out),
    "softmax": lambda move, out: torch.ops.aten._softmax.out(move(X), 1, False, out=out[0]),
    "gelu": lambda move, out: torch.ops.aten.gelu.out(move(X), out=out[0]),
    "avg_pool3d": lambda move, out: torch._C._nn.avg_pool3d(move(X), 2, 1, out=out[0]),
    "add": lambda move, out: torch.add(move(X), move(X), out=out[0]),
    "mm": lambda move, out: torch.mm(move(X[0, 0]), move(X[1, 0]), out=out[0]),
}


def on_the_cpu(call):
    """What the call gives in contiguous memory that it resizes."""
    out = tuple(torch.empty(0) for _ in range({"lu_unpack": 3, "linalg.lu": 3}.get(call, 1)))
    CALLS[call](lambda x: x, out)
    return out


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_out(call, layout, mode):
    expected = on_the_cpu(call)
    made = [layouts.Guarded.like(torch.full_like(t, 7), layout, D) for t in expected]
    if None in made:
        return  # a matrix has no batch
    outs = tuple(each.view for each in made)
    if layout == "expanded":
        with pytest.raises(RuntimeError, match="single memory location"):
            CALLS[call](lambda x: torch.utils._pytree.tree_map(lambda t: t.to(D), x), outs)
            torch.openreg.synchronize()
            pytest.fail("expanded memory was written to")
        return
    CALLS[call](lambda x: torch.utils._pytree.tree_map(lambda t: t.to(D), x), outs)
    for each, wanted in zip(made, expected, strict=True):
        assert torch.allclose(each.view.cpu(), wanted, rtol=1e-6, atol=1e-6) and each.overrun() is None
        assert each.view.data_ptr() == each.address


@pytest.mark.parametrize("name", ["tril_", "triu_"])
def test_in_place(name, mode):
    for layout in ("reversed", "transposed batch", "sliced"):
        made = layouts.Guarded.like(X, layout, D)
        assert getattr(made.view, name)() is made.view
        assert torch.equal(made.view.cpu(), getattr(X.clone(), name)()) and made.overrun() is None


def test_a_result_that_is_an_input(mode):
    x = X.permute(3, 2, 1, 0).to(D)
    expected = torch.tril(x.cpu())
    assert torch.tril(x, out=x) is x and torch.equal(x.cpu(), expected)
    half = X.to(D)[:, ::2]
    torch.triu(half, out=half)
    assert torch.equal(half.cpu(), torch.triu(X[:, ::2]))
    square = torch.arange(32.0, device=D).view(4, 8)[:, ::2]
    expected = torch.tril(square.t().clone())
    assert torch.equal(torch.tril(square.t(), out=square), expected)  # the same memory, of other strides
    dense = X.to(D)
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor refer to"):
        torch.tril(dense, out=dense.permute(3, 2, 1, 0).permute(3, 2, 0, 1))


def test_a_result_of_another_size_is_resized_with_the_warning(mode):
    out = torch.empty(2, 3, device=D).t()
    with pytest.warns(UserWarning, match="was resized since it had shape"):
        assert torch.tril(X.to(D), out=out) is out
    assert out.is_contiguous() and torch.equal(out.cpu(), torch.tril(X))


def test_a_refused_call_leaves_the_result_alone(mode):
    out = torch.full((4, 3), 7.0, device=D).t()
    with pytest.raises(RuntimeError):
        torch.tril(torch.ones(3, device=D), out=out)
    with pytest.raises(RuntimeError, match="[Ee]xpected .*dtype|can't be cast|Float"):
        torch.linalg.lu(
            torch.ones(4, 4, device=D), out=tuple(torch.zeros(4, 4, dtype=torch.int64, device=D).t() for _ in range(3))
        )
    assert (out == 7).all()


def test_a_loss_into_one_element_of_a_buffer(mode):
    x, y = torch.rand(6, device=D), torch.rand(6, device=D)
    buffer = torch.zeros(12, device=D)
    torch.ops.aten.soft_margin_loss.out(x, y, out=buffer[3])
    assert torch.allclose(buffer[3].cpu(), torch.nn.functional.soft_margin_loss(x.cpu(), y.cpu()))
    assert buffer.count_nonzero() == 1
    one = torch.zeros(4, 4, device=D)[::4, ::4]
    torch.stack([torch.full((1,), 5.0, device=D)], 1, out=one)
    assert one.item() == 5


def test_two_results_in_the_same_memory():
    a = torch.tensor([[4.0, 1], [2, 3]], device=D)
    both = torch.zeros(2, 4, device=D)[:, ::2]
    torch.linalg.lu(a, out=(torch.empty(2, 2, device=D), both, both))
    expected = torch.zeros(2, 2, device=D)
    torch.linalg.lu(a, out=(torch.empty(2, 2, device=D), expected, expected))
    assert torch.equal(both, expected)


SAMPLE = (
    "addcmul cat clamp cumsum diag_embed fft.fft gather index_select kthvalue linalg.lu linalg.qr linalg.solve lu_unpack "
    "masked_select matmul max.reduction_with_dim nn.functional.adaptive_max_pool3d nn.functional.avg_pool3d "
    "nn.functional.fractional_max_pool2d nn.functional.gelu nn.functional.logsigmoid nn.functional.max_pool3d "
    "nn.functional.max_unpool2d nn.functional.nll_loss nn.functional.pad.replicate nn.functional.pad.reflect narrow_copy "
    "normal sort softmax stack std_mean take topk triu tril"
).split()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_sweep(name):
    op = opinfo.database()[name]
    report = sweep.check(op, torch.float32, D, 3, ("layouts",))
    assert report.ran["layouts"] and not report.failures, report.failures[:3]


def test_a_sample_of_the_sweep_in_async_mode():
    with torch.openreg.launch_mode("async"):
        for name in ("tril", "linalg.lu", "softmax", "nn.functional.gelu", "add", "sort"):
            report = sweep.check(opinfo.database()[name], torch.float32, D, 2, ("layouts",))
            assert report.ran["layouts"] and not report.failures, (name, report.failures[:3])


# ---- the check sees ----


def find(device_side):
    """What the check says of an operator whose out= form does `device_side` on the device."""
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

    def call(x, *, out=None):
        if out is None:
            return x + 1
        return device_side(x, out) if x.device.type == D else torch.add(x, 1, out=out)

    def samples(op, device, dtype, requires_grad, **_):
        yield SampleInput(torch.arange(12.0, dtype=dtype, device=device).reshape(2, 2, 3))

    op = OpInfo("wrong", op=call, dtypes=(torch.float32,), sample_inputs_func=samples, supports_out=True)
    return {failure.kind for failure in sweep.check(op, torch.float32, D, checks=("layouts",)).failures}


def test_the_check_sees():
    assert not find(lambda x, out: torch.add(x, 1, out=out))

    def as_if_contiguous(x, out):
        flat = out.as_strided((out.numel(),), (1,), out.storage_offset())
        torch.add(x.flatten(), 1, out=flat)
        return out

    assert find(as_if_contiguous) >= {"value", "guard"}
    assert find(lambda x, out: out.set_((x + 1).expand_as(out))) == {"layout", "no error"}
    assert find(lambda x, out: out.copy_(x + 1) if out.is_contiguous() else 1 / 0) == {"error", "error type"}


# ---- inputs that the CPU's kernels read as if they were contiguous ----

A = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) + 0.5
C = torch.rand(4, 6, 1, generator=torch.Generator().manual_seed(4)).squeeze(-1) + 0.5
V = [A[i].clone() for i in range(4)] + [C[i].clone() for i in range(2)]
INDICES = torch.nn.functional.adaptive_max_pool3d(A.view(1, 1, 4, 6, 1), (2, 3, 1), return_indices=True)[1]
INPUTS = {
    "_masked_softmax": lambda lay: torch._masked_softmax(lay(A), lay(C > 0.8), 1, 2),
    "_native_batch_norm_legit.out": lambda lay: torch.ops.aten._native_batch_norm_legit.no_stats_out(
        lay(A), V[0].to(lay.device), V[1].to(lay.device), True, 0.1, 1e-5,
        out=torch.empty(4, 6, device=lay.device), save_mean=torch.empty(6, device=lay.device),
        save_invstd=torch.empty(6, device=lay.device),
    ),
    "_weight_norm_interface": lambda lay: torch._weight_norm_interface(lay(A), lay(V[0][:4, None]), 0),
    "adaptive_max_pool3d_backward": lambda lay: torch.ops.aten.adaptive_max_pool3d_backward(
        torch.ones(1, 1, 2, 3, 1, device=lay.device), A.view(1, 1, 4, 6, 1).to(lay.device), lay(INDICES)
    ),
    "native_batch_norm_backward": lambda lay: torch.ops.aten.native_batch_norm_backward(
        lay(A), lay(C), *(lay(each) for each in V[:5]), False, 1e-5, [True, True, True]
    ),
    "_dyn_quant_matmul_4bit": lambda lay: torch.ops.aten._dyn_quant_matmul_4bit(
        lay(torch.rand(4, 32, generator=torch.Generator().manual_seed(5))),
        torch.ops.aten._dyn_quant_pack_4bit_weight(
            torch.arange(32 * 16, dtype=torch.uint8).view(32, 16), torch.ones(32), None, 32, 32, 32
        ).to(lay.device), 32, 32, 32,
    ),
}  # fmt: skip


class Laid:
    """Puts a tensor on a device, there in every second element of a larger one."""

    def __init__(self, device, step):
        self.device, self.step = device, step

    def __call__(self, x):
        around = torch.full((*x.shape, self.step), 3, device=self.device).to(x.dtype)
        around[..., 0] = x.to(self.device)
        return around[..., 0]


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name, mode):
    expected, actual = INPUTS[name](Laid("cpu", 1)), INPUTS[name](Laid(D, 2))
    for e, a in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (expected, actual)), strict=True):
        torch.testing.assert_close(a.cpu(), e)


@pytest.mark.parametrize("last", [("x",), ("w",), ("x", "w"), ("x", "out"), ("out",)], ids="-".join)
def test_a_transposed_convolution_writes_in_the_memory_format_of_out(last, mode):
    """The CPU's kernel writes in the memory format of its inputs."""
    tensors = {"x": torch.rand(2, 3, 4, 5), "w": torch.rand(3, 2, 3, 3), "out": torch.empty(2, 2, 6, 7)}
    expected = torch.nn.functional.conv_transpose2d(tensors["x"], tensors["w"])
    formats = {name: torch.channels_last if name in last else torch.contiguous_format for name in tensors}
    x, w, out = (each.to(D).contiguous(memory_format=formats[name]) for name, each in tensors.items())
    torch.ops.aten.slow_conv_transpose2d.out(x, w, [3, 3], None, [1, 1], [0, 0], [0, 0], [1, 1], out=out)
    torch.testing.assert_close(out.cpu(), expected)
    assert out.is_contiguous(memory_format=formats["out"])


def test_fft_fftfreq_into_a_slice():
    out = torch.zeros(8, device=D)
    torch.fft.fftfreq(4, out=out[::2])
    assert out.tolist() == [0, 0, 0.25, 0, -0.5, 0, -0.25, 0]


SOLVERS = {
    "solve_ex": lambda x, y, _, **given: torch.linalg.solve_ex(x, y, **given),
    "solve_triangular": lambda x, y, _, **given: torch.linalg.solve_triangular(x, y, upper=True, **given),
    "lu_solve": lambda _, y, factors, **given: torch.linalg.lu_solve(*factors, y, **given),
    "lu_solve adjoint": lambda _, y, factors, **given: torch.linalg.lu_solve(*factors, y, adjoint=True, **given),
}


@pytest.mark.parametrize("way", ["inline", "async", "graph"])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("name", SOLVERS)
def test_out_tensors_get_the_lazy_conjugation_that_the_kernel_gives_them(name, left, way):
    x, y = torch.randn(3, 3, dtype=torch.complex64), torch.randn(3, 3, dtype=torch.complex64)
    factors = torch.linalg.lu_factor(x)
    expected = SOLVERS[name](x, y, factors, left=left)
    is_pair = isinstance(expected, tuple)
    expected = expected[0] if is_pair else expected
    x, y, factors = x.to(D), y.to(D), [each.to(D) for each in factors]
    out = torch.zeros(3, 3, dtype=torch.complex64, device=D)
    given = (out, torch.empty((), dtype=torch.int32, device=D)) if is_pair else out
    if way == "graph":
        graph = torch.openreg.Graph()
        with torch.openreg.graph(graph):
            SOLVERS[name](x, y, factors, left=left, out=given)
            after = out + 1
        graph.replay()
    else:
        with torch.openreg.launch_mode(way):
            SOLVERS[name](x, y, factors, left=left, out=given)
            after = out + 1
    torch.testing.assert_close(out.cpu().resolve_conj(), expected.resolve_conj())
    torch.testing.assert_close(after.cpu(), expected + 1)
