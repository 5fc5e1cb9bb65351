"""kv_cache_update_ and kv_cache_update: rows into slots, through any strides, or nothing at all."""

import functools
import itertools
import random

import kit
import pytest
import torch
from kit import DEVICE, LAYOUTS, NAME
from torch.testing import assert_close

from openreg_ops import kv_cache_update, kv_cache_update_

OP = torch.ops.openreg.kv_cache_update.default
INPLACE = torch.ops.openreg.kv_cache_update_.default
DTYPES = (*kit.FLOATS, torch.uint8, torch.int64, torch.bool, torch.complex128, torch.float8_e4m3fn)


def reference(k_cache, v_cache, k, v, slots):
    new = k_cache.clone(), v_cache.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            new[0][slot], new[1][slot] = k[i], v[i]
    return new


def updated(k_cache, v_cache, *inputs):
    """What kv_cache_update_ leaves in the caches, with the layout it found."""
    kv_cache_update_(k_cache, v_cache, *inputs)
    return k_cache, v_cache


def both_forms(k_cache, v_cache, *inputs):
    """kv_cache_update and kv_cache_update_ give the same; the first leaves its arguments alone."""
    before = k_cache.clone(), v_cache.clone()
    new = kv_cache_update(k_cache, v_cache, *inputs)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])
    updated(k_cache, v_cache, *inputs)
    assert torch.equal(k_cache, new[0]) and torch.equal(v_cache, new[1])
    return new


def values(*shape, dtype=torch.float32, device=DEVICE):
    x = (100 * torch.rand(shape)).to(dtype) if dtype != torch.bool else torch.rand(shape) > 0.5
    return x.to(device)


def inputs_of(num_slots=8, tokens=5, row=(2, 3), v_row=None, dtype=torch.float32, slots=None, device=DEVICE):
    if slots is None:
        slots = torch.randperm(num_slots)[:tokens]
        slots[1::3] = -1 - slots[1::3]
    slots = torch.as_tensor(slots)
    v_row = row if v_row is None else v_row
    return (
        *(values(num_slots, *shape, dtype=dtype, device=device) for shape in (row, v_row)),
        *(values(len(slots), *shape, dtype=dtype, device=device) for shape in (row, v_row)),
        slots.to(device),
    )


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_by_hand(where):
    k_cache, v_cache = torch.zeros(4, 1, 1, device=where), torch.zeros(4, 1, 1, device=where)
    k, v = (torch.tensor(rows, device=where).view(3, 1, 1) for rows in ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]))
    slots = torch.tensor([2, -1, 0], device=where)
    new = kv_cache_update(k_cache, v_cache, k, v, slots)
    assert not k_cache.any() and not v_cache.any()
    assert kv_cache_update_(k_cache, v_cache, k, v, slots) is None
    for keys, values in (new, (k_cache, v_cache)):
        assert keys.flatten().tolist() == [3, 0, 1, 0] and values.flatten().tolist() == [30, 0, 10, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_every_dtype(dtype, index):
    *rest, slots = inputs_of(dtype=dtype)
    expected = reference(*(x.cpu() for x in rest), slots.cpu())
    for new, plain in zip(both_forms(*rest, slots.to(index)), expected, strict=True):
        assert new.dtype == dtype and new.is_contiguous()
        assert torch.equal(new.cpu().view(torch.uint8), plain.view(torch.uint8))


@pytest.mark.parametrize(
    "shape",
    [(8, 5, (2, 3), None), (1, 1, (1, 1), None), (8, 0, (2, 3), None), (0, 0, (2, 3), None), (8, 5, (0, 3), None)]
    + [(8, 5, (), None), (8, 8, (4,), None), (6, 4, (2, 3), (5,)), (6, 4, (2, 3), ()), (9, 4, (2, 3, 2, 2), None)]
    + [(300, 200, (8, 64), None)],
    ids=str,
)
def test_shapes(shape):
    inputs = inputs_of(*shape)
    assert_close([x.cpu() for x in both_forms(*inputs)], list(reference(*(x.cpu() for x in inputs))), rtol=0, atol=0)


def test_all_skipped_and_padding():
    inputs = inputs_of(slots=[-1, -(2**63), -5])
    before = inputs[0].clone()
    assert torch.equal(both_forms(*inputs)[0], before)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_writes_through_strides(layout):
    k_cache, v_cache, k, v, slots = inputs_of(row=(4, 6))
    expected = reference(k_cache.cpu(), v_cache.cpu(), k.cpu(), v.cpu(), slots.cpu())
    views = [LAYOUTS[layout](x) for x in (k_cache, v_cache, k, v, slots)]
    kept = [x.clone() for x in (k_cache, v_cache)]
    strides = [x.stride() for x in views]
    assert_close([x.cpu() for x in both_forms(*views)], list(expected), rtol=0, atol=0)
    assert [x.stride() for x in views] == strides
    if layout != "contiguous":
        assert torch.equal(k_cache, kept[0]) and torch.equal(v_cache, kept[1]), "the base of another copy changed"


@pytest.mark.parametrize("dim", [0, 1], ids=["one after the other", "interleaved"])
def test_one_tensor_holds_both_caches(dim):
    """Interleaved, [slots, 2, heads, head_dim], is vLLM's layout: they lie among each other and share nothing."""
    cache = values(2, 12, 2, 5) if dim == 0 else values(12, 2, 2, 5)
    inputs = values(3, 2, 5), values(3, 2, 5), kit.tensor([7, 0, 11])
    expected = reference(*cache.cpu().unbind(dim), *(x.cpu() for x in inputs))
    kv_cache_update_(*cache.unbind(dim), *inputs)
    assert torch.equal(cache.cpu(), torch.stack(expected, dim))


def test_values_from_the_cache_itself():
    """Moving slots within a cache: everything is read before anything is written."""
    k_cache, v_cache = values(6, 2, 3), values(6, 2, 3)
    inputs = k_cache[:5], v_cache[:5], kit.tensor([1, 2, 3, 4, 5])
    expected = reference(k_cache.cpu(), v_cache.cpu(), *(x.cpu() for x in inputs))
    assert_close([x.cpu() for x in updated(k_cache, v_cache, *inputs)], list(expected))
    whole = torch.arange(4, device=DEVICE)  # slots that lie in the cache
    kv_cache_update_(whole, values(4), kit.tensor([9, 9, 9, 9]), values(4), whole)
    assert whole.tolist() == [9, 9, 9, 9]


def test_conjugate_views():
    """A value, or the cache, may be a conjugate view: what is read through it is what was written."""
    k_cache, v_cache, k, v, slots = inputs_of(dtype=torch.complex64, slots=[1, 4])
    k, v = torch.complex(k.real, v.real), torch.complex(v.real, k.real)
    new, _ = kv_cache_update(k_cache, v_cache, k.conj(), v, slots)
    assert torch.equal(new[slots], k.conj().resolve_conj())
    for _ in range(300):  # torch's fallback for conjugate views corrupted the heap a little each time
        kv_cache_update_(k_cache.conj(), v_cache, k, v.conj(), slots)
    assert torch.equal(k_cache.conj()[slots], k) and torch.equal(v_cache[slots], v.conj().resolve_conj())


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("of_cache", [False, True], ids=["cache", "negative cache"])
def test_negative_views(dtype, of_cache):
    """As test_conjugate_views; a complex view has both bits."""
    k_cache, v_cache, k, v, slots = inputs_of(dtype=dtype, slots=[1, 4])

    def view(x):
        return torch._neg_view(x.conj())

    cache = view(k_cache) if of_cache else k_cache
    for value in (k, view(k)):
        kv_cache_update_(cache, v_cache, value, view(v), slots)
        assert torch.equal(cache[slots], value) and torch.equal(v_cache[slots], view(v))
        assert torch.equal(k_cache[slots], view(value) if of_cache else value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_negative_views_beside_another_dtype(device):
    """A quantized tensor has no negative: PyTorch calls itself without end to make one."""
    k_cache, v_cache, k, _, slots = (x.to(device) for x in inputs_of())
    v = torch.quantize_per_tensor(k.cpu(), 0.1, 0, torch.qint8).to(device)
    with pytest.raises(RuntimeError, match="expected v of float32, the dtype of v_cache, but got qint8"):
        kv_cache_update_(k_cache, torch._neg_view(v_cache), k, v, slots)


# ---- refused: and nothing written ----


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize(
    ("slots", "sentence"),
    [
        ([0, 8], "expected slots below 8, the number of slots in k_cache, but got slot 8 at position 1; give -1"),
        ([2**31 + 1, 0], "but got slot 2147483649 at position 0"),
        ([2**63 - 1], "but got slot 9223372036854775807"),
        ([3, 1, -1, 1], "expected slots without repetition, but got slot 1 at positions 1 and 3; give -1 to skip"),
        ([5, 5, 2, 2, 2], "but got slot 2 at positions 2 and 3"),
        ([0, 3, 0], "but got slot 0 at positions 0 and 2"),
    ],
    ids=str,
)
def test_refused_slots_write_nothing(slots, sentence, where):
    inputs = inputs_of(slots=slots, device=where)
    before = [x.clone() for x in inputs]
    for name in ("kv_cache_update_", "kv_cache_update"):
        with pytest.raises(IndexError) as caught:
            getattr(torch.ops.openreg, name)(*inputs)
        assert str(caught.value).startswith(f"{name}: ") and sentence in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_rejects():
    k_cache, v_cache, k, v, slots = inputs_of()
    for op in (OP, INPLACE):
        name = op.name().removeprefix("openreg::") + ": "
        for inputs, match in [
            ((k_cache, v_cache, k[1:], v, slots), "expected k of shape [5, 2, 3], a row of k_cache for each slot"),
            ((k_cache, v_cache, k, v.mT, slots), "expected v of shape [5, 2, 3], a row of v_cache for each slot"),
            ((k_cache, v_cache, k[:, 0], v, slots), "but got [5, 3]"),
            (
                (k_cache, v_cache[1:], k, v, slots),
                "expected v_cache with as many slots as k_cache, 8, but got [7, 2, 3]",
            ),
            ((k_cache, v_cache[0, 0, 0], k, v, slots), "expected v_cache with as many slots as k_cache, 8, but got []"),
            ((k_cache[0, 0, 0], v_cache, k, v, slots), "expected k_cache of shape [num_slots, ...], but got a scalar"),
            ((k_cache, v_cache, k, v, slots.float()), "expected slots of int32 or int64, but got float32"),
            ((k_cache, v_cache, k, v, slots.view(1, -1)), "expected slots of one dimension, but got [1, 5]; flatten"),
        ]:
            kit.check_error(op, *inputs, match=name + match if match.startswith(("exp", "k_")) else match)


def test_rejects_caches_that_share_memory():
    k_cache, v_cache, k, v, slots = inputs_of()
    for inputs, match in [
        (
            (k_cache[:1].expand(8, 2, 3), v_cache),
            "kv_cache_update_: k_cache is expanded or overlaps itself, and is written to; make it contiguous first",
        ),
        (
            (k_cache[:6], k_cache[2:]),
            "kv_cache_update_: k_cache and v_cache share memory, and both are written to; clone one of them",
        ),
    ]:
        with pytest.raises(RuntimeError, match=match):
            kv_cache_update_(*inputs, k, v, kit.tensor([-1] * 5))
    out = kv_cache_update(k_cache[:1].expand(8, 2, 3), k_cache, k, v, slots)
    assert_close(
        [x.cpu() for x in out],
        list(reference(k_cache.cpu()[:1].expand(8, 2, 3), k_cache.cpu(), *(x.cpu() for x in (k, v, slots)))),
    )


OF_EACH_SIZE = [torch.float64, torch.float32, torch.float16, torch.int8]


def bytes_of(x):
    """The address of each byte, once for each element that has it."""
    address = torch.zeros(x.shape, dtype=torch.int64)
    for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        address += (stride * torch.arange(size)).view(-1, *[1] * (x.dim() - 1 - d))
    start = x.data_ptr() + address.flatten() * x.element_size()
    return [int(first) + i for first in start for i in range(x.element_size())]


@pytest.mark.parametrize("dtypes", itertools.product(OF_EACH_SIZE, repeat=2), ids=str)
def test_views_of_one_storage_share_memory_where_they_have_a_byte_in_common(dtypes):
    """Strided views of one storage in two dtypes, each of them the first and the second argument; and only there."""
    chosen = random.Random(str(dtypes))
    storage, slots, refused = torch.zeros(200, dtype=torch.int8, device=kit.DEVICE), kit.tensor([-1]), [0, 0, 0]
    for _ in range(60):
        caches = []
        for dtype in dtypes:
            shape, strides = (2, chosen.randint(1, 3)), (chosen.randint(1, 5), chosen.randint(1, 3))
            caches.append(storage.view(dtype).as_strided(shape, strides, chosen.randint(0, 100 // dtype.itemsize)))
        first, second = map(bytes_of, caches)
        call = functools.partial(kv_cache_update_, *caches, *(x[:1].clone() for x in caches), slots)
        itself = [len(set(addresses)) < len(addresses) for addresses in (first, second)]
        if any(itself):
            names = "|".join(name for name, overlaps in zip(("k_cache", "v_cache"), itself, strict=True) if overlaps)
            refused[0] += 1
            with pytest.raises(RuntimeError, match=f"({names}) is expanded or overlaps itself"):
                call()
        elif set(first) & set(second):
            refused[1] += 1
            with pytest.raises(RuntimeError, match="(k_cache and v_cache|v_cache and k_cache) share memory"):
                call()
        else:
            refused[2] += 1
            call()
    assert min(refused) > 1


# ---- transforms, compilation, devices ----


def test_transforms():
    *rest, slots = inputs_of(5, 3, slots=[2, -1, 0])
    for dims in ((0, 0, 0, 0, None), (0, 0, 0, 0, 0), (0, 0, None, None, 0), (1, 2, 0, 1, 0), (-1, 0, None, 2, 1)):
        caches = [torch.stack([x, x + 100, x + 200], d) for x, d in zip(rest[:2], dims, strict=False)]
        kv = [x if d is None else torch.stack([x, x + 1, x + 2], d) for x, d in zip(rest[2:], dims[2:], strict=False)]
        all_slots = slots if dims[4] is None else torch.stack([slots, slots.flip(0), slots + 1], dims[4])
        inputs = [*caches, *kv, all_slots]
        expected = [torch.stack([c.select(d, i) for i in range(3)]) for c, d in zip(caches, dims, strict=False)]
        for i in range(3):
            sample = [x if d is None else x.select(d, i) for x, d in zip(inputs[2:], dims[2:], strict=True)]
            expected[0][i], expected[1][i] = kv_cache_update(expected[0][i], expected[1][i], *sample)
        with kit.no_vmap_fallback():
            torch.vmap(updated, in_dims=dims)(*inputs)
        for cache, d, plain in zip(caches, dims, expected, strict=False):
            assert torch.equal(cache.movedim(d, 0), plain)


def test_batches_of_rows_without_dimensions():
    """Slots of one number each, which samples share."""
    caches = [torch.zeros(3, 8, device=DEVICE) for _ in range(2)]
    rows = [torch.arange(6.0, device=DEVICE).view(3, 2) + 10 * i for i in range(2)]
    slots = kit.tensor([5, 2])
    torch.vmap(updated, in_dims=(0, 0, 0, 0, None))(*caches, *rows, slots)
    for cache, row in zip(caches, rows, strict=True):
        assert torch.equal(cache[:, slots], row) and cache.count_nonzero() == row.count_nonzero()


def test_vmap_refuses():
    k_cache, v_cache, k, v, slots = inputs_of(slots=[1, 2])
    with pytest.raises(RuntimeError, match="kv_cache_update_: expected vmap to map over v_cache, which it writes to"):
        torch.vmap(kv_cache_update_, in_dims=(0, None, 0, None, None))(
            torch.stack([k_cache, k_cache]), v_cache, torch.stack([k, k]), v, slots
        )
    # A slot past the end of its sample never lands in the next one.
    caches = torch.stack([k_cache, k_cache]), torch.stack([v_cache, v_cache])
    with pytest.raises(IndexError, match="kv_cache_update_: expected slots below 16"):
        torch.vmap(kv_cache_update_, in_dims=(0, 0, None, None, 0))(*caches, k, v, kit.tensor([[1, 8], [2, 3]]))


@pytest.mark.slow
def test_compiled():
    for dynamic in (False, True):
        for base in (values(8, 2, 3), values(8, 3, 2).mT):
            k_cache, v_cache, k, v, slots = inputs_of()
            k_cache = base

            def step(k_cache, v_cache, k, v, slots):
                kv_cache_update_(k_cache, v_cache, 2 * k, v, slots)
                kv_cache_update_(v_cache, k_cache, k, v + 1, slots)
                return k_cache + v_cache

            eager = [x.clone() for x in (k_cache, v_cache)]
            expected = step(*eager, k, v, slots)
            torch._dynamo.reset()
            actual = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)(
                k_cache, v_cache, k, v, slots
            )
            assert torch.equal(actual, expected)
            assert torch.equal(k_cache, eager[0]) and torch.equal(v_cache, eager[1])


@pytest.mark.parametrize("device_type", [NAME, "cpu"])
def test_autocast_casts_to_the_caches(device_type):
    k_cache, v_cache, k, v, slots = inputs_of(device=device_type)
    k_cache, v_cache = k_cache.bfloat16(), v_cache.double()
    expected = reference(*(x.cpu() for x in (k_cache, v_cache, k.bfloat16(), v.double(), slots)))
    with torch.autocast(device_type, torch.float16):
        assert_close([x.cpu() for x in kv_cache_update(k_cache, v_cache, k.half().float(), v, slots)][1], expected[1])
        kv_cache_update_(k_cache, v_cache, k, v, slots)
    assert_close([x.cpu() for x in (k_cache, v_cache)], list(expected))


def test_autocast_casts_to_no_integers():
    k_cache, v_cache, k, v, slots = inputs_of()
    with (
        torch.autocast(NAME, torch.bfloat16),
        pytest.raises(RuntimeError, match="expected k of int8, the dtype of k_cache"),
    ):
        kv_cache_update(k_cache.to(torch.int8), v_cache, k, v, slots)


def test_a_replay_refuses_its_slots():
    k_cache, v_cache, rows, slots = (torch.zeros(4, 2, device=DEVICE), torch.zeros(4, 2, device=DEVICE),
                                     torch.ones(2, 2, device=DEVICE), torch.tensor([0, 1], device=DEVICE))  # fmt: skip
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        kv_cache_update_(k_cache, v_cache, rows, rows, slots)
    graph.replay()
    assert k_cache.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    slots.fill_(3)
    with pytest.raises(
        torch.AcceleratorError, match="expected slots without repetition, but got slot 3 at positions 0 and 1"
    ):
        graph.replay()
        torch.openreg.synchronize()
    assert k_cache.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
