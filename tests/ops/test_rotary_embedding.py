"""rotary_embedding and rotary_embedding_backward."""

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, random
from torch.testing import assert_close

from openreg_ops import rotary_embedding, rotary_embedding_backward

OP = torch.ops.openreg.rotary_embedding.default
BACKWARD = torch.ops.openreg.rotary_embedding_backward.default
BOTH = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def reference(x, cos, sin, interleaved=False):
    """As the product of complex numbers."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    turned = torch.complex(*pairs.unbind(-1)) * torch.complex(cos, sin)
    return torch.stack([turned.real, turned.imag], -1 if interleaved else -2).flatten(-2)


def reference_backward(grad_y, cos, sin, interleaved=False):
    return reference(grad_y, cos, -sin, interleaved)


def tables(length, half, dtype=torch.float32, device=DEVICE):
    angles = torch.arange(length)[:, None] * 10000 ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


def test_by_hand():  # a quarter turn takes (1, 2) to (-2, 1)
    x, cos, sin = kit.tensor([1.0, 2.0, 3.0, 4.0]), kit.tensor([0.0, 1.0]), kit.tensor([1.0, 0.0])
    assert rotary_embedding(x, cos, sin).tolist() == [-3.0, 2.0, 1.0, 4.0]
    assert rotary_embedding(x, cos, sin, interleaved=True).tolist() == [-2.0, 1.0, 3.0, 4.0]
    assert rotary_embedding_backward(x, cos, sin).tolist() == [3.0, 2.0, -1.0, 4.0]


@BOTH
@pytest.mark.parametrize(
    "shape", [(2,), (3, 4), (2, 3, 5, 64), (0, 4, 6), (2, 0, 8), (2, 3, 7, 70), (1, 2, 3, 2)], ids=str
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_reference(shape, dtype, interleaved):
    x, half = random(*shape, dtype=dtype), shape[-1] // 2
    cos, sin = tables(shape[-2], half, dtype) if len(shape) > 1 else (random(half, dtype=dtype) for _ in range(2))
    kit.check_against(rotary_embedding, reference, x, cos, sin, interleaved, scale=4)
    kit.check_against(rotary_embedding_backward, reference_backward, x, cos, sin, interleaved, scale=4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_without_elements(dtype):
    x, table = random(3, 0, dtype=dtype), random(3, 0, dtype=dtype)
    assert rotary_embedding(x, table, table).shape == rotary_embedding(x, table, table, True).shape == (3, 0)


@BOTH
@pytest.mark.parametrize("table", [(6,), (5, 6), (3, 1, 6), (2, 1, 5, 6), (2, 3, 5, 6), (1, 1, 1, 6)], ids=str)
def test_tables_broadcast(table, interleaved):
    kit.check_against(rotary_embedding, reference, random(2, 3, 5, 12), random(*table), random(*table), interleaved)


def test_heads_after_positions():
    """[B, S, H, D] and its transpose are read where they lie."""
    x, (cos, sin) = random(2, 5, 3, 8), tables(5, 4)
    expected = rotary_embedding(x.transpose(1, 2).contiguous(), cos, sin)
    assert torch.equal(rotary_embedding(x.transpose(1, 2), cos, sin), expected)
    assert torch.equal(rotary_embedding(x, cos.unsqueeze(-2), sin.unsqueeze(-2)), expected.transpose(1, 2))


def test_against_hugging_face():
    """Its rotate_half with tables that have the columns twice."""
    x, (cos, sin) = random(2, 3, 5, 16, device="cpu"), tables(5, 8, device="cpu")
    rotated = torch.cat([-x[..., 8:], x[..., :8]], -1)
    expected = x * torch.cat([cos, cos], -1) + rotated * torch.cat([sin, sin], -1)
    assert_close(rotary_embedding(*(tensor.to(DEVICE) for tensor in (x, cos, sin))).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@BOTH
def test_half_types_take_float32_tables(dtype, interleaved):
    x, (cos, sin) = random(3, 5, 20, dtype=dtype), tables(5, 10)
    y = rotary_embedding(x, cos, sin, interleaved)
    assert y.dtype == dtype
    expected = reference(x.cpu().double(), cos.cpu().double(), sin.cpu().double(), interleaved)
    assert_close(y.cpu().double(), expected, **kit.TOLERANCE[dtype])
    # Rounded once: no further from the exact result than half a step, which a bfloat16 product would be.
    assert_close(y.cpu(), rotary_embedding(x.float(), cos, sin, interleaved).cpu().to(dtype), rtol=0, atol=0)
    kit.check_same_metadata(OP, x, cos, sin, interleaved)


def test_turning_back_gives_x():
    x, (cos, sin) = random(3, 700, 64, dtype=torch.float64), tables(700, 32, torch.float64)
    assert_close(rotary_embedding_backward(rotary_embedding(x, cos, sin), cos, sin), x, rtol=0, atol=1e-12)


def test_x_is_kept_only_for_the_tables_gradient():
    x, (cos, sin) = random(5, 8, grad=True), tables(5, 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        rotary_embedding(x, cos, sin)
        assert kept == [cos.data_ptr(), sin.data_ptr()]
        rotary_embedding(x, cos.clone().requires_grad_(), sin)
        assert x.data_ptr() in kept


def test_rejects():
    x, cos, sin = random(2, 3, 8), random(3, 4), random(3, 4)
    for op, name, of in ((OP, "rotary_embedding", "x"), (BACKWARD, "rotary_embedding_backward", "grad_y")):
        kit.check_error(op, x.long(), cos, sin, match=f"{name}: expected {of} of float32, float64, float16 or bfloat16")
        kit.check_error(
            op, random(), cos, sin, match=f"{name}: expected {of} of at least one dimension, but got a scalar"
        )
        kit.check_error(
            op,
            x[..., 1:],
            cos,
            sin,
            match=f"expected {of} with a last dimension of even size, but got 7; rotate a part",
        )
        kit.check_error(
            op, x, x, x, match=f"of 4, half that of {of}, but got [2, 3, 8]; if the table covers both halves, pass"
        )
        kit.check_error(op, x, random(), sin, match="expected cos with a last dimension of 4, half that of")
        kit.check_error(op, x, random(2, 4), sin, match="expected cos to broadcast to [2, 3, 4], but got [2, 4]; give")
        kit.check_error(op, x, random(1, 1, 3, 4), sin, match="expected cos to broadcast to [2, 3, 4], but got [1, 1,")
        kit.check_error(op, x[:0], random(2, 3, 4), sin, match="expected cos to broadcast to [0, 3, 4]")
        kit.check_error(op, x, cos, random(4), match="expected sin of shape [3, 4], the same as cos, but got [4]")
