"""Copies for every pair of places, every dtype, every layout."""

import itertools

import pytest
import torch
from torch.testing import assert_close

PLACES = ["cpu", "pinned", "openreg:0", "openreg:1"]
PAIRS = list(itertools.product(PLACES, PLACES))
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int8,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def put(tensor, place):
    return tensor.pin_memory() if place == "pinned" else tensor.to(place)


def values(dtype):
    return (torch.arange(24) % 7).to(dtype).view(4, 6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source,target", PAIRS)
def test_every_pair_and_dtype(source, target, dtype):
    x = values(dtype)
    y = put(torch.zeros_like(x), target)
    y.copy_(put(x, source))
    assert y.cpu().equal(x) if not dtype.is_floating_point or dtype.itemsize > 1 else y.cpu().float().equal(x.float())


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[1:3, ::2],
    "column": lambda t: t[:, 2],
    "expanded": lambda t: t[:1].expand(4, 6),
    "empty": lambda t: t[:0],
    "scalar": lambda t: t[1, 2],
    "flipped": lambda t: t.flip(0),
    "conjugated": lambda t: t.conj(),
    "imaginary": lambda t: t.conj().imag,  # has the negative bit
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source,target", PAIRS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_every_pair_and_layout(source, target, layout, dtype):
    x = torch.randn(4, 6, dtype=dtype)
    view = LAYOUTS[layout](put(x, source))
    expected = LAYOUTS[layout](x).resolve_conj().resolve_neg()
    dense = put(torch.zeros_like(expected), target).copy_(view)
    assert_close(dense.cpu(), expected, rtol=0, atol=0)
    if layout != "expanded":  # and into the same layout, whose base must be left alone elsewhere
        base = put(torch.zeros_like(x), target)
        LAYOUTS[layout](base).copy_(view)
        reference = torch.zeros_like(x)
        LAYOUTS[layout](reference).copy_(LAYOUTS[layout](x))
        if layout != "flipped":
            assert_close(base.cpu(), reference, rtol=0, atol=0)


@pytest.mark.parametrize("source,target", PAIRS)
@pytest.mark.parametrize("to", [torch.float64, torch.int32, torch.bool, torch.complex64, torch.bfloat16], ids=str)
def test_converts_dtype(source, target, to):
    x = torch.tensor([[0.0, 1.5, -2.0]])
    y = put(torch.zeros(1, 3, dtype=to), target).copy_(put(x, source))
    assert y.cpu().equal(x.to(to))


@pytest.mark.parametrize("source,target", PAIRS)
def test_broadcasts(source, target):
    y = put(torch.zeros(2, 3), target).copy_(put(torch.tensor([1.0, 2, 3]), source))
    assert y.tolist() == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("source,target", PAIRS)
def test_non_blocking(source, target):
    x = torch.randn(1000)
    y = put(x, source).to(target, non_blocking=True) if target != "pinned" else put(put(x, source).cpu(), target)
    for device in range(2):  # a copy between devices runs on the source's
        torch.accelerator.synchronize(device)
    assert y.cpu().equal(x)


def test_overlapping_copy_is_refused_as_on_the_cpu():
    for device in ("cpu", "openreg"):
        x = torch.arange(6.0, device=device)
        with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor refer"):
            x[1:].copy_(x[:-1])
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers"):
            torch.zeros(1, device=device).expand(3).copy_(torch.arange(3.0, device=device))


def test_a_tensor_copied_to_itself_is_unchanged():
    x = torch.arange(6.0, device="openreg")
    assert x.copy_(x) is x and x.tolist() == [0, 1, 2, 3, 4, 5]


def test_wrong_shape():
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.zeros(3, device="openreg").copy_(torch.zeros(4))


def test_write_through_a_view_is_seen_in_its_base():
    base = torch.zeros(3, 4, device="openreg")
    for i, view in enumerate([base[0], base[:, 1], base.t()[2], base.view(12)[11:], base.unfold(1, 2, 2)[1, 1]]):
        view.fill_(i + 1)
    expected = torch.zeros(3, 4)
    for i, view in enumerate(
        [expected[0], expected[:, 1], expected.t()[2], expected.view(12)[11:], expected.unfold(1, 2, 2)[1, 1]]
    ):
        view.fill_(i + 1)
    assert base.cpu().equal(expected)
    base.fill_(9)
    assert view.storage_offset() == expected.unfold(1, 2, 2)[1, 1].storage_offset()


def test_gradient_flows_through_copies():
    x = torch.randn(3, requires_grad=True)
    (x.to("openreg:0") * 2).to("openreg:1").cpu().sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_pinned_memory_is_known():
    x = torch.zeros(10).pin_memory()
    assert x.is_pinned() and x[3:].is_pinned() and not torch.zeros(10).is_pinned()
    assert not torch.zeros(10, device="openreg").is_pinned()
