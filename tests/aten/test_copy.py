"""Copies for every pair of places, every dtype, every layout."""

import itertools

import pytest
import torch
from torch import nn
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
    "negative": torch._neg_view,
    "imaginary": lambda t: t.conj().imag,  # has the negative bit
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source,target", PAIRS)
@pytest.mark.parametrize("non_blocking", [False, True])
def test_every_pair_and_layout(source, target, layout, non_blocking):
    """Lazy bits are resolved, also if the bytes of the source and the target have the same layout."""
    x = torch.randn(4, 6, dtype=torch.complex64)
    view = LAYOUTS[layout](put(x, source))
    expected = LAYOUTS[layout](x).resolve_conj().resolve_neg()
    dense = put(torch.zeros_like(expected), target).copy_(view, non_blocking=non_blocking)
    for device in range(2):  # a copy between devices runs on the source's stream
        torch.accelerator.synchronize(device)
    assert_close(dense.cpu(), expected, rtol=0, atol=0)
    if layout != "expanded":  # and into the same layout; the rest of its base must not change
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
    for device in range(2):  # a copy between devices runs on the source's stream
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


@pytest.mark.parametrize("size", [4, 40_000], ids=["small", "large"])
def test_a_lazy_clone_on_another_device_gets_its_own_memory_there(size):
    x, ones = torch.zeros(size, device="openreg:1"), torch.ones(size, device="openreg:1")
    clone, before = torch._lazy_clone(x), torch.openreg.memory_allocated(0)
    clone.copy_(ones)
    clone.copy_(ones, non_blocking=True)
    assert torch.openreg.memory_allocated(0) == before  # although device 0 is current
    assert_close(clone.cpu(), ones.cpu())
    assert_close(x.cpu(), torch.zeros(size))


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("which", ["from", "to"])
def test_memory_that_was_freed_is_an_error(which, non_blocking):
    x, y = torch.ones(4, device="openreg"), torch.zeros(4, device="openreg")
    (x if which == "from" else y).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        y.copy_(x, non_blocking=non_blocking)


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


# ---- pageable memory ----


def mapped(x: torch.Tensor, tmp_path) -> torch.Tensor:
    y = torch.from_file(str(tmp_path / "file"), shared=True, size=x.numel(), dtype=x.dtype).view(x.shape)
    return y.copy_(x)


# Host tensors with the values 0 to 23, derived from others in every way that matters to a copy.
HOST = {
    "contiguous": lambda x, path: x.clone(),
    "transposed": lambda x, path: x.t().contiguous().t(),
    "sliced": lambda x, path: torch.stack([x, x], 2)[..., 1],
    "a view": lambda x, path: torch.cat([x, x])[4:],
    "int32": lambda x, path: x.int(),
    "complex64": lambda x, path: x.to(torch.complex64),
    "conjugate": lambda x, path: torch.complex(x, x).conj(),
    "negative": lambda x, path: torch.complex(x, -x).conj().imag,
    "shared memory": lambda x, path: x.clone().share_memory_(),
    "a file": mapped,
    "requires grad": lambda x, path: x.clone().requires_grad_(),
}


@pytest.fixture(params=["inline", "async", "sync"])
def mode(request):
    with torch.openreg.launch_mode(request.param), torch.openreg.Stream() as stream:
        yield request.param
        stream.synchronize()


def ways_in(host: torch.Tensor):
    """Copy a host tensor to the device in each way, then change it; returns the results."""
    like = torch.empty_like(host, device="openreg", requires_grad=False)
    yield host.to("openreg", non_blocking=True)
    yield host.to("openreg", torch.complex128, non_blocking=True)
    yield like.copy_(host.detach(), non_blocking=True)
    yield torch.empty(2, *host.shape, dtype=host.dtype, device="openreg").copy_(host.detach(), non_blocking=True)[1]
    yield torch.empty(*host.shape, 2, dtype=host.dtype, device="openreg")[..., 0].copy_(
        host.detach(), non_blocking=True
    )
    if host.is_contiguous() and not host.is_conj() and not host.is_neg():
        yield host.new_empty(0, device="openreg").set_(
            torch.UntypedStorage(host.untyped_storage().nbytes(), device="openreg").copy_(host.untyped_storage(), True),
            host.storage_offset(),
            host.shape,
        )


@pytest.mark.parametrize("kind", HOST)
def test_pageable_memory_may_change_when_a_copy_from_it_returns(kind, mode, tmp_path):
    x = torch.arange(24.0).view(4, 6)
    host = HOST[kind](x, tmp_path)
    original = host.detach().clone()
    expected = original.to(torch.complex128)
    torch.openreg._sleep(20_000_000)
    copies = []
    for y in ways_in(host):
        with torch.no_grad():
            host.zero_()
        copies.append(y)
        with torch.no_grad():
            host.copy_(original)
    assert len(copies) >= 5
    for y in copies:
        assert y.cpu().to(torch.complex128).equal(expected)


@pytest.mark.parametrize("kind", HOST)
def test_a_copy_to_pageable_memory_has_arrived_when_it_returns(kind, mode, tmp_path):
    x = torch.arange(24.0).view(4, 6)
    host = HOST[kind](torch.zeros(4, 6), tmp_path).detach()
    source = (-HOST[kind](x, tmp_path).detach()).to("openreg", torch.complex64).real.contiguous()
    torch.openreg._sleep(20_000_000)
    y = torch.ops.openreg.custom_abs(source)  # behind the sleep
    assert not host.is_pinned()
    host.copy_(y.to(host.dtype) if kind == "negative" else y, non_blocking=True)
    assert torch.view_as_real(host.resolve_conj())[..., 0].equal(x) if host.is_complex() else host.float().equal(x)


def test_pageable_parts_of_other_objects(mode):
    torch.openreg._sleep(20_000_000)
    module = nn.Linear(3, 2)
    weight = module.weight.detach().clone()
    before = module.weight.data
    module.to("openreg", non_blocking=True)
    before.zero_()
    sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    there = sparse.to("openreg", non_blocking=True)
    sparse._values().zero_()
    empty, number = torch.empty(0, 3), torch.tensor(5.0)
    empty_there, number_there = empty.to("openreg", non_blocking=True), number.to("openreg", non_blocking=True)
    number.zero_()
    expanded = torch.tensor([1.0, 2.0]).expand(3, 2)
    expanded_there = expanded.to("openreg", non_blocking=True)
    expanded[0].zero_()
    assert module.weight.cpu().equal(weight)
    assert there.cpu().to_dense().tolist() == [[0, 2], [3, 0]]
    assert empty_there.shape == (0, 3) and number_there.item() == 5
    assert expanded_there.tolist() == [[1, 2]] * 3


def test_the_host_runs_ahead_of_copies_from_pageable_memory():
    stream = torch.openreg.Stream()
    with stream:
        torch.openreg._sleep(2_000_000_000)
        x = torch.ones(4).to("openreg", non_blocking=True)
        x.copy_(torch.full((4,), 2), non_blocking=True)
        assert not stream.query()
        many = [torch.full((8 << 20,), float(i)).to("openreg", non_blocking=True) for i in range(3)]  # of 32 MiB
        assert stream.query()  # the third did not fit in the buffer, and waited
        assert x.tolist() == [2] * 4 and [y.mean().item() for y in many] == [0, 1, 2]
        torch.openreg._sleep(1_000_000_000)
        many[0].copy_(torch.full((8 << 20,), 3.0), non_blocking=True)
        assert not stream.query()  # the buffer is free again
        assert many[0].mean().item() == 3


def test_an_error_of_a_queued_copy_is_raised_at_its_line(mode):
    torch.openreg._sleep(20_000_000)
    x = torch.zeros(3, device="openreg")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size"):
            x.copy_(torch.zeros(4), non_blocking=True)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers"):
            x[:1].expand(3).copy_(torch.zeros(3), non_blocking=True)


def test_pinned_memory_is_read_when_the_copy_runs():
    stream = torch.openreg.Stream()
    with stream:
        torch.openreg._sleep(300_000_000)
        host = torch.ones(8, pin_memory=True)
        x = host[2:6].to("openreg", non_blocking=True)
        host.numpy()[:] = 3  # unseen by the sanitizer
        stream.synchronize()
        assert x.tolist() == [3, 3, 3, 3]


def test_an_injected_latency_delays_copies_of_pageable_memory():
    stream = torch.openreg.Stream()
    with stream, torch.openreg.faults.inject("copy_latency", seconds=1) as fault:
        host = torch.ones(4)
        x = host.to("openreg", non_blocking=True)
        assert not stream.query()
        host.zero_()
        host.copy_(x, non_blocking=True)
        assert stream.query() and host.tolist() == [1, 1, 1, 1]
        assert fault.stop() == 2
