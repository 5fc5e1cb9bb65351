"""The kernel that lends device memory to CPU kernels: what an alias must never leak, lose or mix up."""

import gc
import itertools
import re

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo

from openreg_ops import fallback, kernel_library

library = torch.library.Library("test_native", "DEF")
kept = []


def keep(x):
    kept.append(x)  # a kernel that holds on to its argument
    return x * 2


def keep_result(x):
    out = x + 1
    kept.append(out)
    return out


def shape_up(x):
    x.resize_(x.numel() + 100)
    return x.fill_(3)


def grow(x, *, out):
    total = x.sum()
    return out.resize_(out.numel() + 100).fill_(total)


def mark(x):
    assert not hasattr(x, "marked")
    x.marked = True
    return x + 1


def fail_late(x):
    x.resize_(1000)
    raise ValueError("the kernel failed")


def nested(x):
    kept.append(torch.ones(3, device="openreg:1").add(1))
    return x + 1


def swap(x, y):
    x.set_(y)


for schema, function in {
    "keep(Tensor x) -> Tensor": keep,
    "keep_result(Tensor x) -> Tensor": keep_result,
    "shape_up_(Tensor(a!) x) -> Tensor(a!)": shape_up,
    "grow.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)": grow,
    "mark(Tensor x) -> Tensor": mark,
    "fail_late_(Tensor(a!) x) -> Tensor(a!)": fail_late,
    "nested(Tensor x) -> Tensor": nested,
    "swap_(Tensor(a!) x, Tensor y) -> ()": swap,
    "first(Tensor[] xs) -> Tensor": lambda xs: xs[0],
    "both(Tensor x) -> (Tensor, Tensor)": lambda x: (x, x[1:]),
}.items():
    library.define(schema)
    library.impl(schema.split("(")[0], function, "CPU")
ops = torch.ops.test_native


@pytest.fixture(autouse=True)
def shared():
    with fallback.share("test_native::*"):
        yield
    kept.clear()


def test_a_kept_argument_stays_what_it_was():
    x = torch.arange(4.0, device="openreg")
    ops.keep(x)
    (alias,) = kept
    del x
    gc.collect()
    filler = [torch.full((4,), 9.0, device="openreg") for _ in range(200)]
    assert alias.device.type == "cpu" and alias.tolist() == [0, 1, 2, 3] and len(filler) == 200
    y = torch.ones(4, device="openreg")
    assert ops.keep(y).tolist() == [2, 2, 2, 2] and alias.tolist() == [0, 1, 2, 3]


def test_a_kept_result_stays_on_the_host():
    out = ops.keep_result(torch.zeros(3, device="openreg"))
    assert out.is_openreg and kept[0].device.type == "cpu"
    out.fill_(7)
    assert kept[0].tolist() == [1, 1, 1]


def test_growth_inside_a_kernel_is_carried_back_to_every_view():
    x = torch.zeros(4, device="openreg")
    assert ops.shape_up_(x) is not None and x.shape == (104,) and x.sum().item() == 312
    assert x.untyped_storage().nbytes() == 416 and x.untyped_storage().is_openreg


@pytest.mark.parametrize("lazy", [False, True])
def test_a_result_that_is_an_argument_too(lazy):
    """First read, then written and grown."""
    start = torch.arange(4.0, device="openreg")
    x = torch._lazy_clone(start) if lazy else start.clone()
    ops.grow(x, out=x)
    assert x.tolist() == [6] * 104 and start.tolist() == [0, 1, 2, 3]


def test_python_attributes_end_with_the_call():
    for _ in range(3):
        assert ops.mark(torch.zeros(2, device="openreg")).tolist() == [1, 1]


def test_a_failed_kernel_changes_nothing():
    x = torch.arange(4.0, device="openreg")
    allocated = torch.openreg.memory_allocated()
    for _ in range(3):
        with pytest.raises(ValueError, match="the kernel failed"):
            ops.fail_late_(x)
    gc.collect()
    assert x.tolist() == [0, 1, 2, 3] and torch.openreg.memory_allocated() == allocated
    assert (x + 1).tolist() == [1, 2, 3, 4]


def test_calls_nest():
    assert ops.nested(torch.zeros(2, device="openreg:0")).device.index == 0
    assert kept[0].device == torch.device("openreg:1") and kept[0].tolist() == [2, 2, 2]


def test_set_inside_a_kernel():
    x, y = torch.zeros(2, device="openreg"), torch.arange(3.0, device="openreg")
    ops.swap_(x, y)
    assert x.tolist() == [0, 1, 2] and x.data_ptr() == y.data_ptr()
    y[0] = 5
    assert x[0].item() == 5


def test_results_that_are_arguments_or_views_of_them():
    x = torch.arange(3.0, device="openreg")
    assert ops.first([x, x + 1]).data_ptr() == x.data_ptr()
    same, view = ops.both(x)
    view.zero_()
    assert same.tolist() == x.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "overlap",
    [
        lambda x: torch.add(x[:-1], 1, out=x[1:]),
        lambda x: x[1:].mul_(x[:-1]),
        lambda x: torch.cat([x[:2], x[2:4]], out=x[1:5]),
        lambda x: torch.cat([x[i % 5 :][:1] for i in range(40)], out=x.resize_(41)[1:]),  # enough for a table of them
    ],
)
def test_overlap_is_seen_as_on_the_cpu(overlap):
    """Two arguments on one storage: aliases with separate storages would hide the overlap."""
    for device in ("cpu", "openreg"):
        with pytest.raises(RuntimeError, match="refer to a single memory location|overlap"):
            overlap(torch.arange(6.0, device=device))


def test_version_counters_protect_saved_tensors():
    x = torch.ones(3, device="openreg", requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_memory_is_given_back():
    x = torch.randn(64, 64, device="openreg", requires_grad=True)
    for _ in range(3):
        (x @ x).relu().softmax(0).sum().backward()
    x.grad = None
    gc.collect()
    before = torch.openreg.memory_allocated()
    for _ in range(50):
        (x @ x).relu().softmax(0).sum().backward()
    x.grad = None
    gc.collect()
    assert torch.openreg.memory_allocated() == before


def test_results_lie_in_device_memory_and_are_not_copied():
    x = torch.randn(1 << 16, device="openreg")
    torch.openreg.reset_peak_memory_stats()
    before = torch.openreg.memory_allocated()
    y = torch.cosh(x)
    assert torch.openreg.memory_allocated() - before == x.nbytes == torch.openreg.max_memory_allocated() - before
    assert y.is_openreg


def test_every_operator_with_a_cpu_kernel_has_one_here():
    """By construction, no torch operator with a CPU kernel, and no composite one, uses the fallback."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    missing = [
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
        if name.startswith("aten::") and not has(name, "PrivateUse1") and not has(name, "CompositeImplicitAutograd")
    ]
    assert missing == [] and kernel_library.shared > 1000


def test_a_failing_kernel_whose_argument_only_the_stack_held():
    """The temporary that resolves a conj bit must outlive the call that lends it."""
    for _ in range(100):
        x = torch.randn(64, 64, dtype=torch.cfloat, device="openreg").conj()
        with pytest.raises(IndexError):
            torch.gather(x, 5, torch.zeros(2, 2, dtype=torch.long, device="openreg"))
        with pytest.raises(RuntimeError):
            torch.trunc(x)
    gc.collect()
    assert torch.ones(3, device="openreg").sum().item() == 3


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch.add(x[2:], 5, out=x[:2]),
        lambda x: x[:2].copy_(x[2:]),
        lambda x: x.mul_(2),
        lambda x: x.fill_(0),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_copy_on_write_is_never_written_through(write, index):
    original = torch.arange(4.0, device=f"openreg:{index}")
    clone, expected = torch._lazy_clone(original), torch.arange(4.0)
    write(clone), write(expected)
    assert original.tolist() == [0, 1, 2, 3] and clone.tolist() == expected.tolist()
    assert clone.untyped_storage().device.index == index


def test_a_kernel_that_reads_copy_on_write_memory_leaves_it_shared():
    before = torch.openreg.memory_allocated()
    x = torch.arange(4.0, device="openreg")
    clone = x._lazy_clone()
    assert (x + clone).tolist() == [0, 2, 4, 6] and (x @ clone).item() == 14
    assert torch._C._is_cow_tensor(x) and torch._C._is_cow_tensor(clone)
    mean = torch.zeros(2, device="openreg")
    kept = mean._lazy_clone()  # batch_norm writes the statistics, which its schema does not say
    torch.nn.functional.batch_norm(torch.ones(3, 2, device="openreg"), mean, torch.ones_like(mean), training=True)
    assert mean.tolist() == pytest.approx([0.1, 0.1]) and kept.tolist() == [0, 0]
    x[1:].copy_(clone[:3])
    assert x.tolist() == [0, 0, 1, 2] and clone.tolist() == [0, 1, 2, 3]
    grown = torch.arange(2.0, device="openreg")
    shared, out = grown._lazy_clone(), grown[:0]
    torch.add(grown.view(2, 1), torch.ones(1, 50, device="openreg"), out=out)  # reads, then resizes what it read
    assert out.shape == (2, 50) and out[0, 0].item() == 1 and shared.tolist() == [0, 1]
    again = shared._lazy_clone()
    shared.resize_(1000)
    assert (shared[:2] + again).tolist() == [0, 2]
    del grown, shared, out, again
    del x, clone, mean, kept
    assert torch.openreg.memory_allocated() == before


def test_a_tensor_without_memory_is_refused():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2,), device="openreg")

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    with (
        torch._C._DisableTorchDispatch(),
        pytest.raises(RuntimeError, match=r"of shape \[2\] on openreg without memory"),
    ):
        torch.add(Wrapper(), 1)
    freed = torch.ones(3, device="openreg")
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"of shape \[3\] on openreg:0 without memory: its storage was freed"):
        freed + 1


def test_an_index_on_another_device_is_refused_as_on_cuda():
    index = torch.tensor([0], device="openreg:1")
    for x, name in [(torch.ones(2), "cpu"), (torch.ones(2, device="openreg:0"), "openreg:0")]:
        with pytest.raises(RuntimeError, match=rf"indices should be either on cpu or on the same device .* \({name}\)"):
            x[index]


# ---- what a composite computes ----

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]


def ends(dtype):
    """The extremes of a dtype, with subnormal numbers and NaN."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return torch.tensor([least, least + 1, 0, 1, 7, 100, most - 1, most], dtype=dtype)
    info, inf, nan = torch.finfo(dtype), torch.inf, torch.nan
    subnormal = info.smallest_normal * info.eps
    values = [info.min, -1.5, -info.tiny, -subnormal, -0.0, 0.0, subnormal, info.tiny, 1, 2.5, info.max, inf, -inf, nan]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


# A polynomial of a degree of 2**31 takes minutes, the CPU's lcm of two least numbers divides by zero, and the jiterator
# compiles for CUDA alone.
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "info",
    [
        each
        for each in op_db
        if isinstance(each, BinaryUfuncInfo) and not re.search("polynomial|^lcm$|jiterator", each.name)
    ],
    ids=lambda info: info.formatted_name,
)
def test_binary_operators_at_the_ends_of_each_pair_of_dtypes(info):
    """As on the CPU, the sign of zero included, where a composite may compute otherwise if its arguments are on a device."""
    for first, second in itertools.product(FLOATS + INTEGERS, repeat=2):
        x, y = (
            broadcast_tensor.contiguous()
            for broadcast_tensor in torch.broadcast_tensors(ends(first)[:, None], ends(second))
        )
        there = x.to("openreg"), y.to("openreg")
        try:
            expected = info.op(x, y)
        except (RuntimeError, NotImplementedError) as error:
            with pytest.raises(type(error)):
                info.op(*there)
            continue
        results = [info.op(*there)]
        if "out" in getattr(getattr(torch.ops.aten, info.name, None), "overloads", list)():
            results.append(info.op(*there, out=torch.empty_like(results[0])))
        for got in results:
            assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
            if expected.is_floating_point():
                signs = (torch.where(each.isnan(), 1, each).signbit() for each in (got.cpu(), expected))
                assert torch.equal(*signs)


@pytest.mark.parametrize("overlap", ["same", "smaller", "shifted", "expanded", "expanded and smaller"])
@pytest.mark.parametrize("which", [0, 1])
def test_binary_operators_refuse_the_out_tensors_that_the_cpu_refuses(which, overlap):
    """out= that is an argument, is an argument of a smaller shape, overlaps one, or has elements that share memory."""
    for info in op_db:
        overloads = getattr(getattr(torch.ops.aten, info.name, None), "overloads", list)()
        if not isinstance(info, BinaryUfuncInfo) or "out" not in overloads or "polynomial" in info.name:
            continue
        outcomes = []
        for device in ("cpu", "openreg"):
            whole = torch.full((4, 3), 0.5).to(
                device, torch.float32 if info.supports_dtype(torch.float32, "cpu") else torch.int32
            )
            arguments = [whole[:3].clone(), whole[:3].clone()]
            if overlap == "smaller":
                arguments[which] = whole[:1]
            elif overlap == "shifted":
                arguments[which] = whole[1:]
            out = {"shifted": whole[:3], "expanded": whole[:1].expand(3, 3)}.get(overlap, arguments[which])
            try:
                info.op(*arguments, out=out)
                outcomes.append(None)
            except RuntimeError as error:
                outcomes.append(str(error).splitlines()[0])
        assert (outcomes[0] is None) == (outcomes[1] is None), f"{info.name}: {outcomes}"


def test_ldexp_where_a_power_of_two_overflows():
    x, powers = torch.tensor([1e-38, 1e-45, -3.0], device="openreg"), torch.tensor([130, 150, 2], device="openreg")
    expected = torch.ldexp(x.cpu(), powers.cpu())
    for dtype in (torch.float32, torch.float64, torch.complex64):
        out = torch.empty(0, dtype=dtype, device="openreg")
        assert torch.ldexp(x, powers, out=out) is out
        assert_close(out.cpu(), expected.to(dtype), rtol=0, atol=0)
    strided = torch.zeros(6, device="openreg")[::2]
    torch.ldexp(x, powers, out=strided)
    assert_close(strided.cpu(), expected, rtol=0, atol=0)
    assert_close(x.clone().ldexp_(powers).cpu(), expected, rtol=0, atol=0)
    assert_close(torch.ldexp(x, powers, out=x).cpu(), expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type Long"):
        torch.ldexp(x, powers, out=powers)
    for first, second in ((x, powers), (x[0], powers[0])):
        with pytest.raises(RuntimeError, match="move one with"):
            torch.ldexp(first, second, out=torch.empty(first.shape))
