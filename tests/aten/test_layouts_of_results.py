"""Results in memory that is not contiguous: the CPU's numbers in the right places, and nothing else written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from openreg_tools.conformance import layouts, sweep
from openreg_tools.core import opinfo

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
    made = [layouts.GuardedTensor.like(torch.full_like(t, 7), layout, D) for t in expected]
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
    for layout in ("permuted", "batch-swapped", "stepped"):
        made = layouts.GuardedTensor.like(X, layout, D)
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


TWO_DTYPES = [
    (torch.float32, torch.int32),
    (torch.int32, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.int64),
]


@pytest.mark.parametrize("dtypes", TWO_DTYPES, ids=str)
def test_a_result_that_is_an_input_in_another_dtype(dtypes, mode):
    """One storage seen in two dtypes: what the CPU computes or says, also where the result lies in other memory first."""
    calls = {
        "tril": torch.tril,
        "gelu": torch.ops.aten.gelu.out,
        "softmax": lambda x, out: torch.ops.aten._softmax.out(x, 1, False, out=out),
        "lu": lambda x, out: torch.linalg.lu(x, out=(torch.empty(0, device=x.device), torch.empty(0, device=x.device), out)),
        "abs": torch.abs,
        "add": lambda x, out: torch.add(x, x, out=out),
        "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
        "copy_": lambda x, out: out.copy_(x),
    }  # fmt: skip
    refused = 0
    for name, call in calls.items():
        found = []
        for device in ("cpu", D):
            out = torch.arange(16.0).view(4, 4).to(dtypes[0]).to(device).t()
            try:
                call(out.view(dtypes[1]), out=out)
                found.append(out.cpu())
            except (RuntimeError, NotImplementedError) as error:
                found.append(type(error))
        if isinstance(found[0], type):
            refused += 1
            assert found[0] is found[1], name
        else:
            torch.testing.assert_close(found[1], found[0], equal_nan=True, msg=name)
    assert refused


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


# ---- inputs that the CPU's kernels read as if they were contiguous ----

ops = torch.ops.aten


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5


A, C, V = rand(4, 6, seed=3), rand(4, 6, seed=4), [rand(6, seed=seed) for seed in range(5)]
G = C[:, :1].contiguous()
GROUPS, IMAGE, CUBE, OF_CUBE = rand(2, 6, 3), rand(1, 2, 4, 5), rand(1, 1, 4, 4, 4), rand(1, 1, 2, 2, 2, seed=1)
CONVOLUTION = dict(kernel_size=[3, 3], stride=[1, 1], padding=[0, 0])
STATISTICS = dict(weight=V[0], bias=V[1], running_mean=V[2], running_var=V[3])
BACKWARD = dict(grad_out=C, input=A, weight=V[0], running_mean=V[1], running_var=V[2], save_mean=V[3], eps=1e-5)
GROUP = dict(N=2, C=6, HxW=3, group=3)
_, GROUP_MEAN, GROUP_RSTD = torch.native_group_norm(GROUPS, V[0], V[1], 2, 6, 3, 3, 1e-5)
_, LAYER_MEAN, LAYER_RSTD = torch.native_layer_norm(A, [6], V[0], V[1], 1e-5)
LOG_PROBS, LABELS = rand(5, 2, 4).log_softmax(2), torch.tensor([1, 2, 3, 1])
LENGTHS = dict(input_lengths=[5, 5], target_lengths=[2, 2])
LOSS, ALPHA = ops._ctc_loss(LOG_PROBS, LABELS, **LENGTHS)
WEIGHT_4BIT = ops._dyn_quant_pack_4bit_weight(
    torch.arange(512, dtype=torch.uint8).view(32, 16), torch.ones(32), None, 32, 32, 32
)


def normalized(**results):
    new = dict(out=torch.empty(4, 6), save_mean=torch.empty(6), save_invstd=torch.empty(6))
    return dict(input=A, training=True, momentum=0.1, eps=1e-5, **new) | results


WEIGHT_INT4 = ops._convert_weight_to_int4pack_for_cpu(torch.arange(32 * 64, dtype=torch.int32).view(32, 64) % 16, 2)


QKV = dict(query=rand(2, 3, 4, 8), key=rand(2, 3, 4, 8), value=rand(2, 3, 4, 8))
# Bags of three indices and of one.
BAGS = dict(indices=torch.tensor([0, 4, 2, 1]), scale_grad_by_freq=False, mode=1, sparse=False)
OFFSETS = torch.tensor([0, 3])
OF_BAGS = dict(
    bag_size=torch.tensor([3, 1]), maximum_indices=torch.tensor([0, 0]), num_weights=5, per_sample_weights=None
)
BAG = torch.tensor([0, 0, 0, 1])
PRUNED = dict(
    indices=torch.tensor([0, 4, 2, 1]), offsets=OFFSETS, pruned_weights=True, per_sample_weights=rand(4),
    compressed_indices_mapping=torch.tensor([4, 1, -1, 0, 2], dtype=torch.int32),
)  # fmt: skip

# Arguments for each operator whose row in traits.cpp names contiguous inputs, by name.
INPUTS = {
    "aten::_convert_indices_from_coo_to_csr": [dict(self=torch.tensor([0, 2, 2, 3]), size=4)],
    "aten::_embedding_bag": [dict(weight=rand(5, 4), offsets=OFFSETS, **BAGS)],
    "aten::_embedding_bag_backward": [dict(grad=rand(2, 4), offsets=OFFSETS, offset2bag=BAG, **OF_BAGS, **BAGS)],
    "aten::_embedding_bag_dense_backward": [
        dict(grad=rand(2, 4), offset2bag=BAG, **OF_BAGS, **{name: BAGS[name] for name in BAGS if name != "sparse"})
    ],
    "aten::_embedding_bag_forward_only": [dict(weight=rand(5, 4), offsets=OFFSETS, **BAGS)],
    **{
        f"quantized::embedding_bag_{bits}_rowwise_offsets": [
            dict(weight=getattr(torch.ops.quantized, f"embedding_bag_{bits}_prepack")(rand(5, 8)), **PRUNED)
        ]
        for bits in ("2bit", "4bit", "byte")
    },
    "aten::_ctc_loss": [dict(log_probs=LOG_PROBS, targets=each, **LENGTHS) for each in (LABELS, LABELS.view(2, 2))],
    "aten::_ctc_loss_backward": [
        dict(grad=V[0][:2], log_probs=LOG_PROBS, targets=LABELS, neg_log_likelihood=LOSS, log_alpha=ALPHA, blank=0, **LENGTHS)
    ],
    "aten::_dyn_quant_matmul_4bit": [
        dict(inp=rand(4, 32), packed_weights=WEIGHT_4BIT, block_size=32, in_features=32, out_features=32)
    ],
    "aten::_masked_softmax": [
        dict(self=rand(2, 3, 4, 4), mask=rand(4, 4) > 0.9, dim=1, mask_type=0),
        dict(self=A, mask=C > 0.8, dim=1, mask_type=2),
    ],
    "aten::_native_batch_norm_legit.no_stats_out": [normalized(weight=V[0], bias=V[1])],
    "aten::_native_batch_norm_legit.out": [normalized(**STATISTICS)],
    "aten::_scaled_dot_product_flash_attention_for_cpu": [QKV],
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": [
        dict(
            grad_out=rand(2, 3, 4, 8), **QKV, dropout_p=0.0, is_causal=False,
            **dict(zip(("out", "logsumexp"), ops._scaled_dot_product_flash_attention_for_cpu(**QKV), strict=True)),
        )
    ],
    "aten::_slow_conv2d_backward.output_mask": [
        dict(grad_output=rand(1, 3, 2, 3), self=IMAGE, weight=rand(3, 2, 3, 3), output_mask=[True] * 3, **CONVOLUTION)
    ],
    "aten::_weight_int4pack_mm_for_cpu": [
        dict(self=rand(4, 64), mat2=WEIGHT_INT4, qGroupSize=32, qScaleAndZeros=rand(2, 32, 2))
    ],
    "aten::_weight_int8pack_mm": [
        dict(self=torch.ones(2, 32), mat2=torch.ones(32, 32, dtype=torch.int8), scales=torch.arange(32.0))
    ],
    "aten::_weight_norm_interface": [dict(v=A, g=G, dim=0)],
    "aten::_weight_norm_interface_backward": [
        dict(grad_w=C, saved_v=A, saved_g=G, saved_norms=torch._weight_norm_interface(A, G, 0)[1], dim=0)
    ],
    "aten::adaptive_max_pool3d_backward": [
        dict(grad_output=OF_CUBE, self=CUBE, indices=ops.adaptive_max_pool3d(CUBE, [2] * 3)[1])
    ],
    "aten::batch_norm_backward": [
        dict(**BACKWARD, save_var=V[4], update=train, output_mask=[True] * 3, reserve=torch.empty(0, dtype=torch.uint8))
        for train in (False, True)
    ],
    "aten::fractional_max_pool2d_backward": [
        dict(
            grad_output=OF_CUBE[0, :, 0], self=CUBE[0, :, 0], kernel_size=[2] * 2, output_size=[2] * 2,
            indices=ops.fractional_max_pool2d(CUBE[0, :, 0], [2] * 2, [2] * 2, rand(1, 1, 2) - 0.5)[1],
        )
    ],
    "aten::fractional_max_pool3d_backward": [
        dict(
            grad_output=OF_CUBE, self=CUBE, kernel_size=[2] * 3, output_size=[2] * 3,
            indices=ops.fractional_max_pool3d(CUBE, [2] * 3, [2] * 3, rand(1, 1, 3) - 0.5)[1],
        )
    ],
    "aten::native_batch_norm.out": [normalized(**STATISTICS)],
    "aten::native_batch_norm_backward": [
        dict(**BACKWARD, save_invstd=V[4], train=train, output_mask=[True] * 3) for train in (False, True)
    ],
    "aten::native_group_norm": [dict(input=GROUPS, weight=V[0], bias=V[1], eps=1e-5, **GROUP)],
    "aten::native_group_norm_backward": [
        dict(
            grad_out=GROUPS.exp(), input=GROUPS, mean=GROUP_MEAN, rstd=GROUP_RSTD, weight=V[0], output_mask=[True] * 3,
            **GROUP,
        )
    ],
    "aten::native_layer_norm_backward": [
        dict(
            grad_out=C, input=A, normalized_shape=[6], mean=LAYER_MEAN, rstd=LAYER_RSTD, weight=V[0], bias=V[1],
            output_mask=[True] * 3,
        )
    ],
    "aten::slow_conv_transpose2d.out": [
        dict(self=IMAGE, weight=rand(2, 3, 3, 3), out=torch.empty(1, 3, 6, 7), **CONVOLUTION)
    ],
    "quantized::embedding_bag_2bit_unpack": [dict(weight=torch.arange(48, dtype=torch.uint8).view(4, 12))],
    "quantized::embedding_bag_4bit_unpack": [dict(weight=torch.arange(48, dtype=torch.uint8).view(4, 12))],
}  # fmt: skip


def read_as_contiguous():
    """The arguments that rows of traits.cpp name as contiguous, by operator."""
    rows = Path(__file__, "../../../csrc/aten/traits/traits.cpp").resolve().read_text().split('\n      {"')[1:]
    found = {row.partition('"')[0]: re.search(r"\.contiguous = \{(.*?)\}", row, re.DOTALL) for row in rows}
    return {name: re.findall(r'"(\w+)"', which[1]) for name, which in found.items() if which}


def apart(x):
    """In every second element of a larger tensor."""
    around = torch.full((*x.shape, 2), 3, device=x.device).to(x.dtype)
    around[..., 0] = x
    return around[..., 0]


def reversed_in_memory(x):
    order = range(x.dim())[::-1]
    return x.permute(*order).contiguous().permute(*order)


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name, mode):
    """Each input that the table names, alone and together with the others, in two layouts."""
    (which,) = [arguments for prefix, arguments in read_as_contiguous().items() if f"{name}.".startswith(f"{prefix}.")]
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    call = getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")

    def of(arguments, device, layout=None, changed=()):
        arguments = {key: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
        return tree_leaves(call(**{key: layout(x) if key in changed else x for key, x in arguments.items()}))

    for arguments in INPUTS[name]:
        expected = of(arguments, "cpu")
        for changed in {*((key,) for key in which), tuple(which)}:
            for layout in (apart, reversed_in_memory):
                for e, a in zip(expected, of(arguments, D, layout, changed), strict=True):
                    torch.testing.assert_close(
                        a.cpu(), e, equal_nan=True, msg=lambda text, case=(changed, layout): f"{case}: {text}"
                    )


def test_the_inputs_of_every_operator_are_tried():
    assert {prefix for prefix in read_as_contiguous() for name in INPUTS if f"{name}.".startswith(f"{prefix}.")} == set(
        read_as_contiguous()
    )


@pytest.mark.parametrize("last", [("x",), ("w",), ("x", "w"), ("x", "out"), ("out",)], ids="-".join)
def test_a_transposed_convolution_writes_in_the_memory_format_of_out(last, mode):
    """The CPU's kernel writes in the memory format of its inputs."""
    tensors = {"x": torch.rand(2, 3, 4, 5), "w": torch.rand(3, 2, 3, 3), "out": torch.empty(2, 2, 6, 7)}
    expected = torch.nn.functional.conv_transpose2d(tensors["x"], tensors["w"])
    formats = {name: torch.channels_last if name in last else torch.contiguous_format for name in tensors}
    x, w, out = (tensor.to(D).contiguous(memory_format=formats[name]) for name, tensor in tensors.items())
    torch.ops.aten.slow_conv_transpose2d.out(x, w, [3, 3], None, [1, 1], [0, 0], [0, 0], [1, 1], out=out)
    torch.testing.assert_close(out.cpu(), expected)
    assert out.is_contiguous(memory_format=formats["out"])


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
    x, y, factors = x.to(D), y.to(D), [factor.to(D) for factor in factors]
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
