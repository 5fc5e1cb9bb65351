"""The operators that every backend must provide, each by name, against the CPU's behavior."""

import pytest
import torch
from torch.testing import assert_close

from openreg_ops import _C

aten = torch.ops.aten

REQUIRED = [
    "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "resize_", "_copy_from",
    "_copy_from_and_resize", "_local_scalar_dense", "set_.source_Tensor", "set_.source_Storage",
    "set_.source_Storage_storage_offset",
]  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_registered_for_the_device(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "PrivateUse1")


def same_geometry(a, b):
    assert (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)


@pytest.mark.parametrize("size", [(), (0,), (3,), (2, 0, 4), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index", [0, 1])
def test_empty(size, dtype, index):
    made = torch.empty(size, dtype=dtype, device=f"openreg:{index}")
    same_geometry(made, torch.empty(size, dtype=dtype))
    assert made.device == torch.device("openreg", index)


def test_empty_refuses_what_it_cannot_make():
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.empty(2, device="openreg", pin_memory=True)
    with pytest.raises(RuntimeError, match="negative dimension"):
        torch.empty(-1, device="openreg")
    with pytest.raises(RuntimeError, match="invalid device ordinal 7; there are 2 devices"):
        torch.empty(1, device="openreg:7")


def test_empty_strided():
    made = torch.empty_strided((2, 3), (1, 5), device="openreg")
    same_geometry(made, torch.empty_strided((2, 3), (1, 5)))
    assert made.untyped_storage().nbytes() == torch.empty_strided((2, 3), (1, 5)).untyped_storage().nbytes()


def test_as_strided_shares_memory():
    base = torch.arange(12.0, device="openreg")
    view = base.as_strided((3, 2), (4, 1), 1)
    same_geometry(view, torch.arange(12.0).as_strided((3, 2), (4, 1), 1))
    view.fill_(-1)
    assert base.tolist() == [0, -1, -1, 3, 4, -1, -1, 7, 8, -1, -1, 11]


def test_view_shares_memory():
    base = torch.zeros(2, 6, device="openreg")
    view = base.view(3, 4)
    view[1, 2] = 5
    assert base.flatten().nonzero().item() == 6 and view.data_ptr() == base.data_ptr()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        base.t().view(12)


def test_reshape_alias_shares_memory():
    base = torch.arange(6.0, device="openreg")
    view = aten._reshape_alias(base, [3, 2], [2, 1])
    view[2, 1] = 9
    assert base[5].item() == 9


@pytest.mark.parametrize("size", [(2,), (8,), (3, 4), (0,), ()], ids=str)
def test_resize(size):
    host, device = torch.arange(4.0), torch.arange(4.0, device="openreg")
    host.resize_(size), device.resize_(size)
    same_geometry(device, host)
    kept = min(host.numel(), 4)
    assert_close(device.flatten()[:kept].cpu(), host.flatten()[:kept])


def test_resize_keeps_views_of_the_same_storage():
    base = torch.arange(4.0, device="openreg")
    view = base[1:3]
    base.resize_(100)
    view.fill_(7)
    assert base[:4].tolist() == [0, 7, 7, 3]


def test_resize_of_a_view_grows_the_storage_from_its_offset_on():
    views = [torch.arange(4.0, device=device)[2:].resize_(3, 2) for device in ("cpu", "openreg")]
    same_geometry(*views)
    assert views[1].untyped_storage().nbytes() == views[0].untyped_storage().nbytes() == 8 * 4
    assert views[1].flatten()[:2].tolist() == [2, 3]


def test_resize_refuses_a_negative_size():
    with pytest.raises(RuntimeError, match="resize_: trying to create a tensor with negative dimension -2"):
        torch.zeros(2, device="openreg").resize_(-2)


def test_copy_from_and_resize():
    source, target = torch.arange(6.0).view(2, 3), torch.empty(0, device="openreg")
    aten._copy_from_and_resize(source, target)
    assert_close(target.cpu(), source)


@pytest.mark.parametrize("value", [1.5, -3, True, 2 + 3j, float("inf")], ids=lambda v: type(v).__name__ + str(v))
def test_local_scalar_dense(value):
    assert torch.tensor(value, device="openreg").item() == value
    assert torch.tensor([0, value], device="openreg")[1].item() == value


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.uint16, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_local_scalar_dense_reads_every_dtype(dtype):
    assert torch.tensor(2, dtype=dtype).to("openreg").item() == 2


def test_set_refuses_another_device_and_a_negative_offset():
    source = torch.arange(12.0, device="openreg")
    with pytest.raises(RuntimeError, match="Attempted to set the storage of a tensor on device"):
        torch.empty(0, device="openreg").set_(torch.zeros(4).untyped_storage(), 0, (4,))
    with pytest.raises(RuntimeError, match="invalid storage offset"):
        torch.empty(0, device="openreg").set_(source.untyped_storage(), -1, (1,))


GEOMETRIES = [(), (0,), (2,), (8,), (9,), (2, 4), (3, 3), (0, 5), (-1,)]
STRIDES = {(): [()], (8,): [(0,), (1,), (2,)], (9,): [(1,)], (2, 4): [(4, 1), (1, 2), (8, 1)], (3, 3): [(3, 1), (1,)]}


@pytest.mark.parametrize("start", [(0,), (8,), (9,), (2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8], ids=str)
def test_set_is_the_cpus(start, dtype):
    """In range, past the end and with bad arguments: the same tensor in the given storage, or the same error."""

    def outcomes(device):
        for offset in (0, 1, 8, 100, -1, 2**62):
            for size in GEOMETRIES:
                for stride in (None, *STRIDES.get(size, [(1,) * len(size)]), (-1,)):
                    source = torch.arange(8.0, device=device)
                    storage = source.untyped_storage()
                    for call in (
                        lambda x, *args, storage=storage: x.set_(storage, *args),
                        lambda x, *args, storage=storage: torch.ops.aten.set_.source_Storage_storage_offset(
                            x, storage, *args
                        ),
                        lambda x, *args, source=source: x.set_(source, *args),
                    ):
                        target = torch.zeros(start, dtype=dtype, device=device)
                        case = (offset, size, stride)
                        try:
                            call(target, *(case if stride is not None else case[:2]))
                            shares = target.untyped_storage().data_ptr() == storage.data_ptr()
                            ours = (target.shape, target.stride(), target.storage_offset(), shares)
                            error = None
                        except (RuntimeError, TypeError) as raised:
                            ours, error = None, (isinstance(raised, RuntimeError), "out of bounds" in str(raised))
                        yield case, ours, error, storage.nbytes(), source.tolist()

    cpu, device = list(outcomes("cpu")), list(outcomes("openreg"))
    assert any(error and error[1] for _, _, error, _, _ in cpu) == (start != (0,))
    assert any(nbytes > 32 for *_, nbytes, _ in cpu)
    assert device == cpu


def test_out_that_grows_while_an_input_shares_its_storage():
    results = []
    for device in ("cpu", "openreg"):
        x = torch.ones(2, device=device)
        out = x.detach()
        torch.add(x, torch.arange(10.0, device=device).view(5, 2), out=out)
        assert out.shape == (5, 2) and out.untyped_storage().nbytes() == 40
        results.append(out.tolist())
    assert results[0] == results[1]


@pytest.mark.parametrize("size", [10**13, (10**10, 10**10)], ids=str)
def test_a_failed_resize_leaves_the_tensor_as_it_was(size):
    x, guard = torch.arange(3.0, device="openreg"), torch.ones(1000, device="openreg")
    with pytest.raises(RuntimeError):  # OutOfMemoryError is one
        x.resize_(size)
    with pytest.raises(RuntimeError):
        x.set_(x.untyped_storage(), 0, size if isinstance(size, tuple) else (size,))
    assert x.shape == (3,) and x.tolist() == [0, 1, 2]
    x.fill_(7)
    assert guard.sum().item() == 1000


def test_item_of_an_empty_tensor():
    with pytest.raises(
        RuntimeError, match="_local_scalar_dense: expected a tensor of one element, but got an empty one"
    ):
        torch.ops.aten._local_scalar_dense(torch.empty(0, device="openreg"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool, torch.uint8, torch.int64], ids=str)
def test_uninitialised_memory_is_filled_where_algorithms_are_deterministic(dtype):
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else True
    value = value if isinstance(value, float) or dtype == torch.bool else torch.iinfo(dtype).max
    _C.set_poison(False)  # which is the value of most
    torch.ones(100, dtype=torch.uint8, device="openreg")  # what is allocated next is not 0
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.empty(3, dtype=dtype, device="openreg")
        y = torch.zeros(2, dtype=dtype, device="openreg").resize_(5)
        z = torch.empty_strided((2, 3), (1, 2), dtype=dtype, device="openreg")
    finally:
        torch.use_deterministic_algorithms(False)
    for filled in (x, z, y[2:]):
        assert_close(filled.cpu(), torch.full(filled.shape, value, dtype=dtype), equal_nan=True)
    assert not y[:2].any()
