"""Operators that PyTorch implements only for CUDA: the device's compositions, and reasons for what it lacks."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from openreg_ops import cuda_operators
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
    "tensors must be 2-D": lambda: torch.mm(half(2, 2), half(2, 2), out_dtype=torch.float32, out=half(4).float()),
    "self_ dim 0 must match mat1 dim 0": lambda: torch.mm(
        half(2, 2), half(2, 2), out_dtype=torch.float32, out=half(3, 2).float()
    ),
    "batch2 must be a 3D tensor": lambda: torch.bmm(half(1, 2, 2), half(2, 2), out_dtype=torch.float32),
    "self must be a 3D tensor": lambda: torch.baddbmm(
        half(2, 2), half(1, 2, 2), half(1, 2, 2), out_dtype=torch.float32
    ),
    "mat1 and mat2 must have the same dtype, but got": lambda: torch.addmm(
        half(2, 2), half(2, 2), half(2, 2).float(), out_dtype=torch.float32
    ),
    "self must have the same shape": lambda: torch.bmm(
        half(1, 2, 2), half(1, 2, 2), out_dtype=torch.float32, out=half(1, 2, 3).float()
    ),
}


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


@functools.cache
def groups():
    """A call of _scaled_grouped_mm: rows in two groups, times a matrix for each."""
    names = ("self", "mat2", "scale_a", "scale_b", "offs")
    return {name: x.to(D) for name, x in zip(names, next(grouped_cases()), strict=False)}


def in_groups(**changed):
    return lambda: aten._scaled_grouped_mm(**{**groups(), **changed})


def in_groups_v2(kind=F.ScalingType.RowWise, **changed):
    given = {**groups(), **changed}
    return lambda: F.scaled_grouped_mm(
        given["self"], given["mat2"], given["scale_a"], kind, given["scale_b"], kind, offs=given["offs"],
        contraction_dim=changed.get("contraction_dim", ()),
    )  # fmt: skip


WRONG_GROUPS = {
    "Expected mat1 to not be transposed": in_groups(self=eight_bits(16, 48).to(D).T),
    "Expected mat2 to be transposed": in_groups(mat2=eight_bits(2, 16, 32).to(D)),
    "Have to provide offsets": in_groups(offs=None),
    "Offsets have to be int32": in_groups(offs=torch.tensor([16, 48], device=D)),
    "offs has to be 1D": in_groups(offs=torch.tensor([[16], [48]], device=D, dtype=torch.int32)),
    "Bias not supported": in_groups(bias=half(32)),
    "Scale result not supported": in_groups(scale_result=half(1)),
    "Only bf16": in_groups(out_dtype=torch.float32),
    "both scales must both be float32": in_groups(scale_a=half(48)),
    "mat_a has to be 2 or 3d": in_groups(self=eight_bits(1, 1, 48, 16).to(D)),
    "mat_b has to be 2 or 3d": in_groups(mat2=eight_bits(1, 2, 32, 16).to(D).mT),
    "contraction dimension of mat_a and mat_b": in_groups(self=eight_bits(48, 32).to(D)),
    "trailing dimension of mat_a to be divisible by 16": in_groups(
        self=eight_bits(48, 32).to(D)[:, :24], mat2=eight_bits(2, 32, 32).to(D)[..., :24].mT
    ),
    "Expected mat_b shape to be divisible by 16": in_groups(mat2=eight_bits(2, 24, 16).to(D).mT),
    "matrix batch sizes have to match": in_groups(mat2=eight_bits(3, 32, 16).to(D).mT),
    "strides should be multiple of 16 bytes": in_groups(self=eight_bits(48, 24).to(D)[:, :16]),
    "Invalid strides/sizes": in_groups(self=eight_bits(48, 32).to(D)[:, ::2]),
    "scale must be a 1D tensor, but got 2D, arg 0": in_groups(scale_a=half(48, 1).float()),
    "scale must be contiguous for arg 0": in_groups(scale_a=half(96).float()[::2]),
    "scale must have the same length as mat for arg 0": in_groups(scale_a=half(47).float()),
    "scale must be a 2D tensor, but got 1D for arg 1": in_groups(scale_b=half(64).float()),
    "scale must be contiguous in the last dimension for arg 1": in_groups(scale_b=half(32, 2).float().T),
    "scale must have the same batch dimension as mat for arg 1": in_groups(scale_b=half(3, 32).float()),
    "scale must have the same first dimension as mat for arg 1": in_groups(scale_b=half(2, 31).float()),
    "Expected mat_a to be Float8_e4m3 matrix": in_groups(self=half(48, 16)),
    "Expected mat_b to be Float8_e4m3 matrix": in_groups(mat2=half(2, 32, 16).mT),
    "mxfp8_mxfp8 grouped gemm requires compile with USE_FBGEMM_GENAI": in_groups(
        **dict.fromkeys(("scale_a", "scale_b"), torch.ones(48, 4).to(D, torch.float8_e8m0fnu))
    ),
    "block-scaled grouped gemm requires": in_groups_v2(
        **dict.fromkeys(("scale_a", "scale_b"), torch.ones(48, 4).to(D, torch.float8_e8m0fnu))
    ),
    "No gemm implementation": in_groups_v2(F.ScalingType.TensorWise),
    "Curently contraction dims must be": in_groups_v2(contraction_dim=(-2, -1)),
}


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


def pack(*shape, inner=2, dtype=torch.uint8):
    return lambda: torch._convert_weight_to_int4pack(torch.zeros(shape, dtype=dtype, device=D), inner)


def multiply_packed(**changed):
    given = {"self": torch.ones(2, 64), "qScaleAndZeros": torch.ones(2, 8, 2)}
    given = {name: x.to(D, torch.bfloat16) for name, x in given.items()}
    return lambda: aten._weight_int4pack_mm(**{**given, "mat2": pack(8, 32)(), "qGroupSize": 32, **changed})


WRONG_4_BITS = {
    "expected a weight of shape [n, k / 2], but got [32]": pack(32),
    "expected a weight of torch.uint8, but got torch.int32": pack(8, 32, dtype=torch.int32),
    "expected a contiguous weight": lambda: torch._convert_weight_to_int4pack(torch.zeros(32, 8).byte().to(D).t(), 2),
    "expected innerKTiles to be 2, 4 or 8, but got 3": pack(8, 32, inner=3),
    "expected k to be a multiple of 32, innerKTiles * 16, but got 48": pack(8, 24),
    "expected a contiguous matrix of torch.bfloat16, but got torch.float16": multiply_packed(self=half(2, 64)),
    "expected mat2 from _convert_weight_to_int4pack": multiply_packed(mat2=half(1, 2, 32, 1)),
    "expected mat2 of 32 columns": multiply_packed(self=half(2, 32).bfloat16()),
    "expected qGroupSize to be 32, 64, 128 or 256, but got 48": multiply_packed(qGroupSize=48),
    "expected k to be a multiple of 128, but got 64": multiply_packed(qGroupSize=128),
    "expected qScaleAndZeros of shape [1, 8, 2] and torch.bfloat16": multiply_packed(qGroupSize=64),
}


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
        torch.batch_norm_backward_reduce(*pair, mean, invstd, weight, True, True, True)
        for pair in zip(grads, parts, strict=True)
    ]
    assert_same(sums[0][2] + sums[1][2], wide[1].grad)
    assert_same(sums[0][3] + sums[1][3], wide[2].grad)
    both = sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]
    got = [
        torch.batch_norm_backward_elemt(*pair, mean, invstd, weight, *both, counts.int())
        for pair in zip(grads, parts, strict=True)
    ]
    assert_same(torch.cat(got), wide[0].grad)
    even = torch.batch_norm_gather_stats(parts[0], mean[None], invstd[None], None, None, 0.3, 1e-3, 120)
    assert_close(even, (mean, invstd))


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


# ---- wrong arguments ----


def of(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=D)


# A right call of each operator that compares its tensors with one of them, which comes first here.
ALIKE = {
    "_thnn_fused_lstm_cell": dict(
        input_gates=of(2, 12), hidden_gates=of(2, 12), cx=of(2, 3), input_bias=of(12), hidden_bias=of(12)
    ),
    "_thnn_fused_gru_cell": dict(
        input_gates=of(2, 9), hidden_gates=of(2, 9), hx=of(2, 3), input_bias=of(9), hidden_bias=of(9)
    ),
    "_thnn_fused_lstm_cell_backward_impl": dict(
        cx=of(2, 3), cy=of(2, 3), grad_hy=of(2, 3), grad_cy=of(2, 3), workspace=of(2, 12), has_bias=True
    ),
    "_thnn_fused_gru_cell_backward": dict(grad_hy=of(2, 3), workspace=of(2, 15), has_bias=True),
}
CHANGES = {
    "of shape": lambda x: x[:1].repeat(3, *[1] * (x.dim() - 1)),
    "is on cpu": Tensor.cpu,
    "is of Double": Tensor.double,
}


# A right call of each part of a batch normalization.
CHANNELS = dict(mean=of(3), invstd=of(3), weight=of(3))
PARTS = {
    "batch_norm_stats": dict(input=of(2, 3, 4), eps=1e-3),
    "batch_norm_elemt": dict(input=of(2, 3, 4), bias=of(3), **CHANNELS, eps=1e-3),
    "batch_norm_gather_stats_with_counts": dict(
        input=of(2, 3, 4), mean=of(2, 3), invstd=of(2, 3), running_mean=of(3), running_var=of(3), momentum=0.3, eps=1e-3,
        counts=of(2),
    ),
    "batch_norm_gather_stats": dict(
        input=of(2, 3, 4), mean=of(2, 3), invstd=of(2, 3), running_mean=None, running_var=None, momentum=0.3, eps=1e-3,
        count=4,
    ),
    "batch_norm_backward_reduce": dict(
        grad_out=of(2, 3, 4), input=of(2, 3, 4), **CHANNELS, input_g=True, weight_g=True, bias_g=True
    ),
    "batch_norm_backward_elemt": dict(
        grad_out=of(2, 3, 4), input=of(2, 3, 4), **CHANNELS, sum_dy=of(3), sum_dy_xmu=of(3), count=of(2)
    ),
}  # fmt: skip
CALLS = ALIKE | PARTS


def call(op, **changed):
    return lambda: getattr(aten, op).default(**{**CALLS[op], **changed})


def wrong_arguments():
    """Each operator with one wrong argument, which the error names, and the rest of the sentence."""
    for op, given in ALIKE.items():
        like, *others = (name for name, value in given.items() if isinstance(value, Tensor))
        yield f"{op}: expected floating-point tensors, but got Int; convert", call(op, **{like: given[like].int()})
        for name in {"input_gates", "cx", "grad_hy"} & {like}:
            yield f"{op}: expected {like} of two dimensions, but got shape [2]", call(op, **{name: of(2)})
        for name, (change, wrong) in itertools.product(others, CHANGES.items()):
            shown = "the hidden state" if name in ("cx", "hx") else name
            first = "" if change.startswith("of shape") else "every tensor "
            yield f"{op}: expected {first}…{shown} {change}", call(op, **{name: wrong(given[name])})
    for op, parts in (("_thnn_fused_lstm_cell", 4), ("_thnn_fused_gru_cell", 3)):
        yield (
            f"{op}: expected input_gates of {parts} equal parts side by side, but got",
            call(op, input_gates=of(2, 11)),
        )
        yield f"{op}: expected two biases or none, but got one", call(op, input_bias=None)
        yield f"{op}: expected two biases or none, but got one", call(op, hidden_bias=None)
    for op, given in PARTS.items():
        for name, value in given.items():
            unused = op.startswith("batch_norm_gather_stats") and name == "input"
            if not isinstance(value, Tensor) or unused:
                continue
            shown = "running statistics" if name.startswith("running") else name
            yield f"{op}…: expected {shown} of real numbers, but got Bool", call(op, **{name: value.bool()})
            if value.shape == (3,) and not name.startswith("running"):
                yield (
                    f"{op}: expected {name} of 3 values, one for each channel of input, but got",
                    call(op, **{name: of(4)}),
                )
            if name == "grad_out":
                yield f"{op}: expected grad_out of the shape of input, [2, 3, 4], but got", call(op, grad_out=of(2, 3))
            if name == "input":
                yield f"{op}: expected a floating-point input, but got Int; convert it", call(op, input=value.int())
                yield f"{op}: expected an input [N, C, ...], but got one of 1 dimensions", call(op, input=of(3))
    op = "batch_norm_gather_stats_with_counts"
    for name, wrong in dict(mean=of(3), invstd=of(2, 4), counts=of(3)).items():
        yield (
            f"{op}: expected mean and invstd [processes, C] and a count for each process, but got",
            call(op, **{name: wrong}),
        )
    yield (
        "batch_norm_gather_stats: expected mean [processes, C], but got [3]",
        call("batch_norm_gather_stats", mean=of(3)),
    )
    yield "batch_norm_elemt: expected mean to be a tensor, but got None", call("batch_norm_elemt", mean=None)
    out, given = of(2, 3), PARTS["batch_norm_elemt"]
    yield (
        "batch_norm_elemt: expected out of shape [2, 3, 4], the same as input, but got",
        lambda: aten.batch_norm_elemt.out(**given, out=out),
    )
    yield (
        "batch_norm_elemt: expected out of real numbers, but got Bool",
        lambda: aten.batch_norm_elemt.out(**given, out=of(2, 3, 4).bool()),
    )
    matrix, batch = half(2, 2), half(1, 2, 2)
    products = [(torch.mm, 2, matrix), (torch.addmm, 3, matrix), (torch.bmm, 2, batch), (torch.baddbmm, 3, batch)]
    for product, count, x in products:
        options = dict(out_dtype=torch.float32, out=torch.empty_like(x))
        yield "the dtype of the provided out tensor", functools.partial(product, *[x] * count, **options)
    options = dict(out_dtype=torch.float32, out=half(1, 2, 3).float())
    yield "self must have the same shape as the output", functools.partial(torch.baddbmm, *[batch] * 3, **options)
    yield (
        "mat1 must be a matrix, got 3-D",
        functools.partial(torch.addmm, matrix, batch, matrix, out_dtype=torch.float32),
    )
    yield "Expected mat2 to be transposed", in_groups_v2(mat2=eight_bits(2, 16, 32).to(D))
    yield "mask should be torch.uint8 dtype", lambda: aten._masked_scale(of(2), of(2), 2.0)
    number = torch.tensor(2.0)
    yield (
        "scalar tensor expected to be on openreg:0 but is on cpu",
        lambda: aten._foreach_add.Tensor([of(2)] * 2, number),
    )
    yield "scalar tensor is expected to be on openreg:0", lambda: aten._foreach_add_.Tensor([of(2)] * 2, number)


WRONG = [*WRONG_PRODUCTS.items(), *WRONG_GROUPS.items(), *WRONG_4_BITS.items(), *wrong_arguments()]


@pytest.mark.parametrize("message, wrong", WRONG, ids=[f"{message}-{i}" for i, (message, _) in enumerate(WRONG)])
def test_what_cuda_refuses(message, wrong):
    kind = NotImplementedError if "requires" in message else RuntimeError
    if message in WRONG_GROUPS and not re.search("^scale |^matrix |^strides |^Invalid |requires", message):
        kind = ValueError
    with pytest.raises(kind, match=re.escape(message).replace("…", ".*")) as caught:
        wrong()
    assert caught.type is kind


@pytest.mark.parametrize("op", CALLS)
def test_a_right_call_is_accepted(op):
    call(op)()


def test_each_rule_refuses_a_call():
    """Each call of `expect` and of the checks made of it, and each error that is raised, ends one of the calls above."""
    reached = set()
    for _, wrong in WRONG:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            wrong()
        reached |= {(entry.path, entry.lineno + 1) for entry in caught.traceback}
    missed = []
    for path in Path(cuda_operators.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Expr(ast.Call(ast.Name(name))) if name.lstrip("_").startswith("expect"):
                    is_rule = name != "expect_tensor"  # PyTorch passes no undefined tensor
                case _:
                    is_rule = isinstance(node, ast.Raise) and path.stem not in ("registry", "missing")
            if is_rule and not {(path, line) for line in range(node.lineno, node.end_lineno + 1)} & reached:
                missed.append(f"{path.name}:{node.lineno}")
    assert not missed
