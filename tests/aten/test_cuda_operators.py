"""Operators that PyTorch implements only for CUDA: the device's compositions, and reasons for what it lacks."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from openreg_ops.cuda_operators import KERNELS, MISSING
from openreg_ops.cuda_operators.missing import REASONS

D = "openreg"
HALVES = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


# ---- which operators ----


@functools.cache
def only_cuda() -> set[str]:
    """The operators with a kernel for dense CUDA tensors, and for no device besides accelerators."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    composite = {"CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd"}
    composite.add("CompositeExplicitAutogradNonFunctional")
    entries = {
        entry["func"].split("(")[0]: entry
        for entry in yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    }
    names = set()
    for name, entry in entries.items():
        lines = [*(entry.get("dispatch") or {}), *entries.get(entry.get("structured_delegate"), {}).get("dispatch", {})]
        keys = {key.strip() for line in lines for key in line.split(",")}
        if "CUDA" in keys and not keys & composite:
            names.add(name)
    return names


def test_each_has_a_kernel_or_a_reason():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = only_cuda()
    assert len(names) > 80
    without = {name for name in names if not has(f"aten::{name}", "PrivateUse1")}
    assert without == {name.removeprefix("aten::") for name in MISSING} & names
    apart = {"_foreach_add.Tensor", "_foreach_add_.Tensor"}  # CUDA has another rule for the number
    assert KERNELS.keys() - apart <= names - {name.removeprefix("aten::") for name in MISSING}


@pytest.mark.parametrize("reason", [reason for reason, names in REASONS.items() if only_cuda() & set(names)])
def test_the_error_says_the_reason(reason):
    x = torch.ones(2, 2, 2, 2, device=D)
    calls = {
        "cudnn_grid_sampler": lambda: aten.cudnn_grid_sampler(x, x),
        "miopen_convolution_relu": lambda: aten.miopen_convolution_relu(x, x, None, [1], [0], [1], 1),
        "_cslt_compress": lambda: aten._cslt_compress(x),
        "_triton_scaled_dot_attention": lambda: aten._triton_scaled_dot_attention(x, x, x),
        "_scaled_dot_product_flash_attention.quantized": lambda: aten._scaled_dot_product_flash_attention.quantized(
            x, x, x, None, None, None
        ),
        "_fill_mem_eff_dropout_mask_": lambda: aten._fill_mem_eff_dropout_mask_(x, 0.5, 1, 2),
        "_mixed_dtypes_linear": lambda: aten._mixed_dtypes_linear(x, x, x),
        "_philox_key_split": lambda: aten._philox_key_split(x, 2),
        "_scaled_addmm": lambda: aten._scaled_addmm.out(x, x, x, [x], [0], [0], [x], [0], [0], out=x),
        "_scaled_grouped_mm_v2.out": lambda: aten._scaled_grouped_mm_v2.out(x, x, [x], [0], [0], [x], [0], [0], out=x),
    }
    (call,) = (call for name, call in calls.items() if name in REASONS[reason])
    with pytest.raises(NotImplementedError, match=re.escape(f"has no kernel for openreg. {reason}. It was called")):
        call()


def test_the_documentation_has_the_reasons():
    page = (Path(__file__).parents[2] / "docs/limits.md").read_text()
    rows = dict(re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|$", page, flags=re.M))
    expected = {", ".join(f"`{name}`" for name in names): reason for reason, names in REASONS.items()}
    assert {names: rows.get(names) for names in expected} == expected


# ---- products of another dtype ----


def factors(dtype, layout="contiguous", batch=()):
    a, b = torch.randn(*batch, 5, 7), torch.randn(*batch, 7, 3)
    if layout == "transposed":
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    elif layout == "strided":
        a, b = (torch.stack((x, x), -1)[..., 0] for x in (a, b))
    elif layout == "empty":
        a, b = a[..., :0], b[..., :0, :]
    elif layout == "no rows":
        a = a[..., :0, :]
    return a.to(dtype), b.to(dtype)


def wide(x, out_dtype):
    return x.to(out_dtype)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "empty", "no rows"])
@pytest.mark.parametrize(
    "dtype, out_dtype",
    [*itertools.product(HALVES, [torch.float32]), *((t, t) for t in (*HALVES, torch.float64, torch.complex64))],
    ids=str,
)
def test_products_have_the_dtype_that_is_asked_for(mode, dtype, out_dtype, layout):
    for batch, product, add in (((), torch.mm, torch.addmm), ((4,), torch.bmm, torch.baddbmm)):
        a, b = factors(dtype, layout, batch)
        there = a.to(D), b.to(D)
        expected = product(wide(a, out_dtype), wide(b, out_dtype))
        found = product(*there, out_dtype=out_dtype)
        assert found.dtype == out_dtype and found.is_contiguous()
        assert_close(found.cpu(), expected)
        out = torch.full(expected.shape[:-2] + expected.shape[:-3:-1], 7, dtype=out_dtype, device=D).mT
        assert product(*there, out_dtype=out_dtype, out=out) is out
        assert_close(out.cpu(), expected)
        for added_dtype in {dtype, out_dtype}:
            c = torch.randn(expected.shape).to(added_dtype)
            numbers = {"beta": 0.5, "alpha": 2}
            expected_sum = add(wide(c, out_dtype), wide(a, out_dtype), wide(b, out_dtype), **numbers)
            assert_close(add(c.to(D), *there, out_dtype=out_dtype, **numbers).cpu(), expected_sum)
            out = torch.empty_like(expected_sum, device=D)
            assert add(c.to(D), *there, out_dtype=out_dtype, **numbers, out=out) is out
            assert_close(out.cpu(), expected_sum)
            nan = torch.full_like(c, float("nan")).to(D)
            assert_close(add(nan, *there, out_dtype=out_dtype, beta=0).cpu(), expected)


def test_the_sum_of_many_halves_is_not_rounded():
    ones = torch.ones(1, 4096, dtype=torch.float16, device=D)
    b = torch.cat((torch.full((1, 1), 2048.0), torch.ones(4095, 1))).half().to(D)
    assert torch.mm(ones, b, out_dtype=torch.float32).item() == 2048 + 4095  # which float16 does not have


def test_a_sum_broadcasts_or_is_written_in_place():
    a, b = (x.to(D) for x in factors(torch.float16))
    expected = torch.mm(a.float(), b.float())
    for shape in ((3,), (1, 3), (5, 1), ()):
        c = torch.randn(shape, device=D)
        assert_close(torch.addmm(c, a, b, out_dtype=torch.float32), expected + c)
    c = torch.randn(5, 3, device=D)
    total = expected + c
    assert torch.addmm(c, a, b, out_dtype=torch.float32, out=c) is c
    assert_close(c, total)
    with pytest.warns(UserWarning, match="was resized"):
        assert torch.addmm(total, a, b, out_dtype=torch.float32, out=torch.ones(2, device=D)).shape == (5, 3)


def half(*shape):
    return torch.ones(shape, dtype=torch.float16, device=D)


WRONG_PRODUCTS = {
    "self must be a matrix, got 3-D": lambda: torch.mm(half(2, 2, 2), half(2, 2), out_dtype=torch.float32),
    "mat2 must be a matrix, got 1-D": lambda: torch.mm(half(2, 2), half(2), out_dtype=torch.float32),
    "cannot be multiplied (2x3 and 2x2)": lambda: torch.mm(half(2, 3), half(2, 2), out_dtype=torch.float32),
    "input dtypes must be the same": lambda: torch.mm(half(2, 2), half(2, 2).bfloat16(), out_dtype=torch.float32),
    "out_dtype must be the same as input dtype or fp32": lambda: torch.mm(
        half(2, 2), half(2, 2), out_dtype=torch.bfloat16
    ),
    "fp32 for fp16/bf16 inputs": lambda: torch.bmm(half(1, 2, 2), half(1, 2, 2), out_dtype=torch.float64),
    "dtype of the provided out tensor": lambda: torch.mm(
        half(2, 2), half(2, 2), out_dtype=torch.float32, out=half(2, 2)
    ),
    "self_ dim 1 must match mat2 dim 1": lambda: torch.mm(
        half(2, 2), half(2, 2), out_dtype=torch.float32, out=torch.empty(2, 3, device=D)
    ),
    "self dtype must match either out_dtype or mat1 dtype": lambda: torch.addmm(
        half(2, 2).double(), half(2, 2), half(2, 2), out_dtype=torch.float32
    ),
    "self dtype must match either out_dtype or batch1 dtype": lambda: torch.baddbmm(
        half(1, 2, 2).bfloat16(), half(1, 2, 2), half(1, 2, 2), out_dtype=torch.float32
    ),
    "batch1 must be a 3D tensor": lambda: torch.bmm(half(2, 2), half(2, 2), out_dtype=torch.float32),
    "batch2 tensor to be: [1, 2] but got: [1, 3]": lambda: torch.bmm(
        half(1, 2, 2), half(1, 3, 2), out_dtype=torch.float32
    ),
    "batch1 and batch2 must have the same dtype": lambda: torch.bmm(
        half(1, 2, 2), half(1, 2, 2).float(), out_dtype=torch.float32
    ),
    "self must have the same shape as the output": lambda: torch.baddbmm(
        half(1, 1, 2), half(1, 2, 2), half(1, 2, 2), out_dtype=torch.float32
    ),
    "Expected all tensors to be on the same device": lambda: torch.mm(
        half(2, 2), half(2, 2).cpu(), out_dtype=torch.float32
    ),
}


@pytest.mark.parametrize("message", WRONG_PRODUCTS)
def test_what_cuda_refuses(message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        WRONG_PRODUCTS[message]()


def test_they_have_no_derivative_as_on_cuda():
    a = half(2, 2).requires_grad_()
    for y in (torch.mm(a, a.detach(), out_dtype=torch.float32), torch.bmm(a[None], a[None], out_dtype=torch.float32)):
        with pytest.raises(RuntimeError, match="derivative for aten::b?mm is not implemented"):
            y.sum().backward()


def test_autocast_does_not_change_them():
    a, b = torch.randn(4, 4, device=D), torch.randn(4, 4, device=D)
    with torch.autocast(D, dtype=torch.bfloat16):
        assert_close(torch.mm(a, b, out_dtype=torch.float32), (a.cpu() @ b.cpu()).to(D))
        found = torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    assert_close(found.cpu(), a.bfloat16().float().cpu() @ b.bfloat16().float().cpu())


def test_they_are_captured():
    a, b = half(4, 4), half(4, 4)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = torch.addmm(a, a, b, out_dtype=torch.float32)
    a.copy_(torch.randn(4, 4))
    graph.replay()
    assert_close(y, torch.addmm(a.float(), a.float(), b.float()))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_under_vmap():
    a, b = torch.randn(3, 4, 5).half().to(D), torch.randn(5, 2).half().to(D)
    found = torch.vmap(lambda x: torch.mm(x, b, out_dtype=torch.float32))(a)
    assert_close(found, torch.matmul(a.float(), b.float()))


def every_product(a, b, c):
    batch = a[None], b[None]
    return (
        torch.mm(a, b, out_dtype=torch.float32),
        torch.addmm(c, a, b, out_dtype=torch.float32, beta=0.5),
        torch.bmm(*batch, out_dtype=torch.float32),
        torch.baddbmm(c[None], *batch, out_dtype=torch.float32, alpha=2),
        torch.mm(a[:, :1], b[:1], out_dtype=torch.float32),  # which Inductor decomposes otherwise
    )


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_products_compiled(backend):
    a, b = (x.to(D) for x in factors(torch.bfloat16))
    c = torch.randn(5, 3, device=D)
    expected = every_product(a, b, c)
    for found, right in zip(torch.compile(every_product, backend=backend)(a, b, c), expected, strict=True):
        assert found.dtype == torch.float32
        assert_close(found, right)


# ---- scaled products in groups ----


def eight_bits(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


def grouped_cases():
    """The four forms: arguments, and the expected products, group by group."""
    ends = [16, 48]
    offs = torch.tensor(ends, dtype=torch.int32)
    parts = [slice(0, 16), slice(16, 48)]
    rows, columns = torch.rand(48) + 0.5, torch.rand(32) + 0.5

    def scaled(a, b, scale_a, scale_b):
        return (a.float() @ b.float()) * scale_a[:, None] * scale_b

    a, b = eight_bits(48, 16), eight_bits(2, 32, 16).mT
    by_group = torch.rand(2, 32) + 0.5
    yield a, b, rows, by_group, offs, torch.cat([scaled(a[p], b[g], rows[p], by_group[g]) for g, p in enumerate(parts)])
    a, b = eight_bits(2, 48, 16), eight_bits(48, 16).T
    by_group, sb = torch.rand(2, 48) + 0.5, torch.rand(48) + 0.5
    yield (
        a,
        b,
        by_group,
        sb,
        offs,
        torch.cat([scaled(a[g], b[:, p], by_group[g], sb[p]) for g, p in enumerate(parts)], dim=1),
    )
    a, b = eight_bits(48, 48), eight_bits(32, 48).T
    sa, sb = torch.rand(2, 48) + 0.5, torch.rand(2, 32) + 0.5
    yield (
        a,
        b,
        sa.view(-1),
        sb.view(-1),
        offs,
        torch.stack([scaled(a[:, p], b[p], sa[g], sb[g]) for g, p in enumerate(parts)]),
    )
    a, b = eight_bits(2, 48, 16), eight_bits(2, 32, 16).mT
    sa, sb = torch.stack((rows, rows)), torch.stack((columns, columns))
    yield a, b, sa, sb, None, torch.stack([scaled(a[g], b[g], sa[g], sb[g]) for g in range(2)])


def test_scaled_products_in_groups(mode):
    for a, b, scale_a, scale_b, offs, expected in grouped_cases():
        there = [None if x is None else x.to(D) for x in (a, b, scale_a, scale_b, offs)]
        assert there[1].stride() == b.stride()
        found = torch._scaled_grouped_mm(*there, out_dtype=torch.bfloat16)
        assert_close(found.cpu(), expected.bfloat16())
        rowwise = F.ScalingType.RowWise
        again = F.scaled_grouped_mm(*there[:2], there[2], rowwise, there[3], rowwise, offs=there[4])
        assert torch.equal(again, found)


def test_groups_are_captured():
    """Their sizes are read when the graph is replayed."""
    a, b, scale_a, scale_b, offs, _ = (x.to(D) for x in next(grouped_cases()))
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    offs.copy_(torch.tensor([32, 48], dtype=torch.int32))
    graph.replay()
    assert torch.equal(y, torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs))


def test_wrong_groups_are_refused():
    a, b, scale_a, scale_b, offs, _ = (x.to(D) for x in next(grouped_cases()))
    scales = scale_a, scale_b
    for message, call in {
        "Expected mat1 to not be transposed": lambda: torch._scaled_grouped_mm(a.T, b, *scales, offs),
        "Expected mat2 to be transposed": lambda: torch._scaled_grouped_mm(a, b.mT.contiguous(), *scales, offs),
        "Have to provide offsets": lambda: torch._scaled_grouped_mm(a, b, *scales),
        "Offsets have to be int32": lambda: torch._scaled_grouped_mm(a, b, *scales, offs.long()),
        "Bias not supported": lambda: torch._scaled_grouped_mm(a, b, *scales, offs, scale_a),
        "Only bf16": lambda: torch._scaled_grouped_mm(a, b, *scales, offs, out_dtype=torch.float32),
        "both scales must both be float32": lambda: torch._scaled_grouped_mm(a, b, scale_a.half(), scale_b, offs),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match="scale must have the same length as mat for arg 0"):
        torch._scaled_grouped_mm(a, b, scale_a[1:].clone(), scale_b, offs)
    blocks = torch.ones(48, 4, device=D).to(torch.float8_e8m0fnu)
    with pytest.raises(NotImplementedError, match="USE_FBGEMM_GENAI"):
        torch._scaled_grouped_mm(a, b, blocks, blocks, offs)


# ---- weights of 4 bits ----


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_weights_of_4_bits(mode, inner):
    n, k, group = 24, 256, 64
    weight = torch.randint(0, 16, (n, k))
    pairs = (weight[:, ::2] << 4 | weight[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(pairs.to(D), inner)
    assert packed.dtype == torch.int32 and packed.shape == (n // 8, k // (inner * 16), 32, inner // 2)
    scales_and_zeros = torch.randn(k // group, n, 2).bfloat16()
    scale, zero = (x.T.repeat_interleave(group, 1).float() for x in scales_and_zeros.unbind(-1))
    rounded = ((weight - 8) * scale + zero).bfloat16()
    for m in (1, 5, 0):
        x = torch.randn(m, k).bfloat16()
        found = torch._weight_int4pack_mm(x.to(D), packed, group, scales_and_zeros.to(D))
        assert found.dtype == torch.bfloat16
        assert_close(found.cpu(), (x.float() @ rounded.float().T).bfloat16())


def test_a_word_of_4_bit_weights_by_hand():
    """Thread 5 has row 1 and, of each pair of tiles, columns 2, 3, 10, 11, 18, 19, 26 and 27."""
    weight = torch.arange(32 * 8).view(8, 32).remainder(13)
    pairs = (weight[:, ::2] << 4 | weight[:, 1::2]).to(torch.uint8).to(D)
    word = torch._convert_weight_to_int4pack(pairs, 2)[0, 0, 5, 0].item() & 0xFFFFFFFF
    columns = [2, 10, 18, 26, 3, 11, 19, 27]
    assert [word >> 4 * i & 15 for i in range(8)] == weight[1, columns].tolist()


def test_wrong_4_bit_weights_are_refused():
    pairs = torch.zeros(8, 32, dtype=torch.uint8, device=D)
    for call in (
        lambda: torch._convert_weight_to_int4pack(pairs.int(), 2),
        lambda: torch._convert_weight_to_int4pack(pairs, 3),
        lambda: torch._convert_weight_to_int4pack(pairs[:, :24].contiguous(), 2),
        lambda: torch._convert_weight_to_int4pack(pairs.t(), 2),
    ):
        with pytest.raises(RuntimeError, match="_convert_weight_to_int4pack: expected"):
            call()
    packed, x = torch._convert_weight_to_int4pack(pairs, 2), torch.ones(2, 64, device=D).bfloat16()
    scales = torch.ones(2, 8, 2, device=D).bfloat16()
    for call in (
        lambda: torch._weight_int4pack_mm(x.float(), packed, 32, scales),
        lambda: torch._weight_int4pack_mm(x, packed, 48, scales),
        lambda: torch._weight_int4pack_mm(x[:, :32].contiguous(), packed, 32, scales[:1]),
        lambda: torch._weight_int4pack_mm(x, packed, 64, scales),
        lambda: torch._weight_int4pack_mm(x, packed, 32, scales.float()),
    ):
        with pytest.raises(RuntimeError, match="_weight_int4pack_mm: expected"):
            call()


# ---- attention ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_only_memory_efficient_attention(mode, dtype, causal):
    def leaves(device):
        torch.manual_seed(0)
        shapes = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 16)
        return [torch.randn(s).to(dtype).to(device).requires_grad_() for s in shapes]

    def mask(device):
        return None if causal else torch.linspace(-1, 1, 35).view(5, 7).to(dtype).to(device).requires_grad_()

    q, k, v = leaves(D)
    bias = mask(D)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        y = F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal)
    y.float().square().sum().backward()
    a, b, c = (t.detach().cpu().float().requires_grad_() for t in (q, k, v))
    on_host = None if bias is None else bias.detach().cpu().float().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(a, b, c, on_host, is_causal=causal)
    expected.square().sum().backward()
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 6e-2, "rtol": 6e-2}
    for found, right in ((y, expected), (q.grad, a.grad), (k.grad, b.grad), (v.grad, c.grad)):
        assert_close(found.detach().cpu().float(), right.detach(), **tolerance)
    if bias is not None:
        assert_close(bias.grad.cpu().float(), on_host.grad, **tolerance)


def test_the_choice_of_memory_efficient_attention():
    x = torch.randn(1, 2, 4, 8, device=D)
    choose = torch._fused_sdp_choice
    efficient, math = SDPBackend.EFFICIENT_ATTENTION.value, SDPBackend.MATH.value
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert choose(x, x, x) == efficient  # as CUDA, which prefers it to the mathematics
        assert choose(x.double(), x.double(), x.double()) == math
        assert choose(x[..., :6], x[..., :6], x[..., :6]) == math
        assert choose(x, x[:, :1], x[:, :1], enable_gqa=True) == math
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(x.double(), x.double(), x.double())
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        torch.manual_seed(1)
        dropped = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        torch.manual_seed(1)
        assert torch.equal(dropped, F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    assert not torch.equal(dropped, F.scaled_dot_product_attention(x, x, x))


def test_dense_flash_attention(mode):
    q, k, v = (torch.randn(2, 3, 6, 8).half().to(D) for _ in range(3))
    for causal in (False, True):
        out, logsumexp, *_, state, unused, _ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
        leaves = [t.cpu().float().requires_grad_() for t in (q, k, v)]
        expected = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        assert_close(out.cpu().float(), expected.detach(), atol=5e-3, rtol=5e-3)
        grad = torch.randn_like(out)
        expected.backward(grad.cpu().float())
        found = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, logsumexp, None, None, 6, 6, 0.0, causal, state, unused
        )
        for x, leaf in zip(found, leaves, strict=True):
            assert_close(x.cpu().float(), leaf.grad, atol=2e-2, rtol=2e-2)


# ---- others ----


def test_dropout_with_a_mask_of_bytes(mode):
    x = torch.ones(40, 50, device=D, requires_grad=True)
    y, mask = torch._fused_dropout(x, 0.75)
    assert mask.dtype == torch.uint8 and 0.6 < mask.float().mean() < 0.9
    assert torch.equal(y, mask / 0.75 * torch.ones_like(y))
    y.sum().backward()
    assert_close(x.grad, mask * (1 / 0.75))
    with pytest.raises(RuntimeError, match="mask should be torch.uint8"):
        torch._masked_scale(x, mask.bool(), 2.0)


def test_depthwise_convolutions():
    for dims, op in ((2, aten._conv_depthwise2d), (3, aten.conv_depthwise3d)):
        x, weight, bias = torch.randn(2, 3, *(6,) * dims), torch.randn(6, 1, *(3,) * dims), torch.randn(6)
        convolve = getattr(F, f"conv{dims}d")
        expected = convolve(x, weight, bias, 2, 1, 1, groups=3)
        found = op(x.to(D), weight.to(D), [3] * dims, bias.to(D), [2] * dims, [1] * dims, [1] * dims)
        assert_close(found.cpu(), expected)
    out = torch.empty(0, device=D)
    x, weight = torch.randn(1, 2, 4, 4, device=D), torch.randn(2, 1, 2, 2, device=D)
    assert aten._conv_depthwise2d.out(x, weight, [2, 2], None, [1, 1], [0, 0], [1, 1], out=out) is out
    assert_close(out, F.conv2d(x, weight, groups=2))


def test_the_backward_of_rms_norm():
    x, weight = torch.randn(4, 6).to(D).requires_grad_(), torch.randn(6).to(D).requires_grad_()
    y, rstd = torch._fused_rms_norm(x, [6], weight, 1e-6)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, weight), grad)
    found = aten._fused_rms_norm_backward(grad, x.detach(), [6], rstd.detach(), weight.detach(), [True, True])
    assert_close(found, expected)


# ---- batch normalization over several processes: tests/backend/test_distributed.py runs SyncBatchNorm ----


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_batch_norm_by_parts(dtype, layout):
    x, grad = (torch.randn(6, 3, 4, 5, dtype=dtype).to(memory_format=layout) + 2 for _ in range(2))
    weight, bias, running_mean, running_var = (torch.rand(3, dtype=dtype) + 0.5 for _ in range(4))
    wide = [t.to(torch.float64, copy=True).requires_grad_() for t in (x, weight, bias)]
    means, variances = (t.to(torch.float64, copy=True) for t in (running_mean, running_var))
    expected = F.batch_norm(wide[0], means, variances, *wide[1:], training=True, momentum=0.3, eps=1e-3)
    expected.backward(grad.double())

    parts, grads = (t.to("openreg").split([2, 4]) for t in (x, grad))
    weight, bias, running_mean, running_var = (t.to("openreg") for t in (weight, bias, running_mean, running_var))
    statistics = [torch.batch_norm_stats(part, 1e-3) for part in parts]
    counts = torch.tensor([40, 80], device="openreg")
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        x.to("openreg"), *map(torch.stack, zip(*statistics, strict=True)), running_mean, running_var, 0.3, 1e-3, counts
    )
    assert mean.dtype == invstd.dtype == (torch.float32 if dtype.itemsize == 2 else dtype)
    loose = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-4}

    def assert_same(got, expected):
        assert got.is_openreg
        assert_close(got.cpu().double(), expected, **loose)

    assert_same(running_mean, means)
    assert_same(running_var, variances)
    results = [torch.batch_norm_elemt(part, weight, bias, mean, invstd, 1e-3) for part in parts]
    assert all(y.dtype == dtype and y.is_contiguous(memory_format=layout) for y in results)
    assert_same(torch.cat(results), expected.detach())
    out = torch.empty_like(parts[0])
    torch.batch_norm_elemt(parts[0], weight, bias, mean, invstd, 1e-3, out=out)
    assert out.equal(results[0])
    sums = [
        torch.batch_norm_backward_reduce(*each, mean, invstd, weight, True, True, True)
        for each in zip(grads, parts, strict=True)
    ]
    assert_same(sums[0][2] + sums[1][2], wide[1].grad)
    assert_same(sums[0][3] + sums[1][3], wide[2].grad)
    both = sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]
    got = [
        torch.batch_norm_backward_elemt(*each, mean, invstd, weight, *both, counts.int())
        for each in zip(grads, parts, strict=True)
    ]
    assert_same(torch.cat(got), wide[0].grad)
    even = torch.batch_norm_gather_stats(parts[0], mean[None], invstd[None], None, None, 0.3, 1e-3, 120)
    assert_close(even, (mean, invstd))
    with pytest.raises(RuntimeError, match=r"batch_norm_stats: expected an input \[N, C, ...\], but got one of 1 dim"):
        torch.batch_norm_stats(weight, 1e-3)
    with pytest.raises(RuntimeError, match="a count for each process, but got"):
        torch.batch_norm_gather_stats_with_counts(x.to("openreg"), mean, invstd, None, None, 0.3, 1e-3, counts)


# ---- fused cells of recurrent networks ----


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_fused_cells_gradcheck(cell):
    def double(*shape):
        return torch.randn(*shape, dtype=torch.double, device="openreg", requires_grad=True)

    if cell == "lstm":
        inputs = (double(2, 12), double(2, 12), double(2, 3), double(12), double(12))
        outputs, function = slice(0, 2), torch.ops.aten._thnn_fused_lstm_cell
    else:
        inputs = (double(2, 9), double(2, 9), double(2, 3), double(9), double(9))
        outputs, function = 0, torch.ops.aten._thnn_fused_gru_cell
    assert torch.autograd.gradcheck(lambda *a: function(*a)[outputs], inputs)
