"""What a review of the core broke once; each was a crash, a lost write or a wrong number."""

import copy
import gc
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from openreg_ops import _C, fallback


def run(code, **environment):
    """A program in a process of its own, since the device reads its environment once."""
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)


def test_a_failing_kernel_whose_argument_only_the_stack_held():
    """The temporary that resolves a conj bit died before the call that had lent it."""
    for _ in range(100):
        x = torch.randn(64, 64, dtype=torch.cfloat, device="openreg").conj()
        with pytest.raises(IndexError):
            torch.gather(x, 5, torch.zeros(2, 2, dtype=torch.long, device="openreg"))
        with pytest.raises(RuntimeError):
            torch.trunc(x)
    gc.collect()
    assert torch.ones(3, device="openreg").sum().item() == 3


def test_max_pool2d_under_fake_tensors_and_modes():
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Log(), torch.no_grad():
        F.max_pool2d(torch.ones(1, 1, 4, 4, device="openreg"), 2)
    assert any("max_pool2d" in str(func) for func in seen)
    with FakeTensorMode(), torch.no_grad():
        assert F.max_pool2d(torch.empty(2, 1, 28, 28, device="openreg"), 2).shape == (2, 1, 14, 14)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.MaxPool2d(2)).to("openreg")
    x = torch.randn(2, 1, 8, 8, device="openreg")
    with torch.no_grad():
        assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), net(x))


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


def test_no_devices():
    code = (
        "import torch, openreg_ops\n"
        "assert torch.openreg.device_count() == 0 and not torch.accelerator.is_available()\n"
        "for call in (lambda: torch.ones(1, device='openreg'), lambda: torch.UntypedStorage(4, device='openreg'),\n"
        "             torch.openreg.get_rng_state, torch.openreg.synchronize, torch.openreg.memory_allocated):\n"
        "    try: call()\n"
        "    except RuntimeError as e: assert 'there are no devices. Set OPENREG_DEVICE_COUNT' in str(e), e\n"
        "    else: raise SystemExit('no error')\n"
    )
    done = run(code, OPENREG_DEVICE_COUNT="0")
    assert done.returncode == 0, done.stderr


def test_more_memory_than_there_are_addresses_for():
    code = (
        "import torch, openreg_ops\ntry: torch.ones(1, device='openreg')\nexcept torch.OutOfMemoryError as e: print(e)"
    )
    done = run(code, OPENREG_DEVICE_MEMORY="900 TiB")
    assert "cannot reserve address space for 2 devices of 900.00 TiB; lower OPENREG_DEVICE_MEMORY" in done.stdout, (
        done.stderr
    )


def test_more_memory_than_the_machine_has():
    done = run(
        "import torch, openreg_ops; print(torch.ones(3, device='openreg').sum().item())", OPENREG_DEVICE_MEMORY="2 TiB"
    )
    assert done.stdout == "3.0\n", done.stderr


def test_fallback_of_views_of_one_storage_with_different_itemsizes():
    base = torch.zeros(32, dtype=torch.uint8, device="openreg")
    floats = base.view(torch.float32)
    floats.copy_(torch.arange(8.0))
    expected = base[1:4].cpu() + floats[1:4].cpu()
    with fallback.force("aten::add.Tensor"):
        assert torch.add(base[1:4], floats[1:4]).cpu().equal(expected)


def test_fallback_refuses_two_devices():
    with (
        fallback.force("aten::add.Tensor"),
        pytest.raises(RuntimeError, match="Expected all tensors to be on the same"),
    ):
        torch.ones(3, device="openreg:0") + torch.ones(3, device="openreg:1")


@pytest.mark.parametrize("index", [257, 255, 127, 10**6, -2])
def test_a_device_index_is_not_cut_to_eight_bits(index):
    for use in (torch.openreg.get_device_name, torch.openreg.memory_allocated, torch.openreg.get_rng_state):
        with pytest.raises(RuntimeError, match=f"invalid device ordinal {index}; there are 2 devices"):
            use(index)


def test_pages_go_from_one_size_to_another():
    """Freed blocks of one size class must be able to become another's, else memory is lost to fragmentation."""
    code = (
        "import torch, openreg_ops\n"
        "for size in (32, 28, 24, 20, 7):\n"
        "    keep = [torch.empty(size * 1024, dtype=torch.uint8, device='openreg') for _ in range(60 * 1024 // size)]\n"
        "    del keep\n"
        "torch.empty(60 << 20, dtype=torch.uint8, device='openreg')\n"
        "torch.openreg.empty_cache()\n"
        "assert torch.openreg.memory_reserved() == 0 == torch.openreg.memory_allocated()\n"
    )
    done = run(code, OPENREG_DEVICE_MEMORY="64MiB")
    assert done.returncode == 0, done.stderr


def test_statistics_survive_a_reset():
    keep = [torch.ones(1, device="openreg") for _ in range(5)]
    torch.openreg.reset_accumulated_memory_stats()
    torch.openreg.reset_peak_memory_stats()
    before = torch.openreg.memory_stats()["allocation.all.current"]
    del keep
    stats = torch.openreg.memory_stats()
    assert stats["allocation.all.current"] == before - 5 >= 0 and stats["allocation.all.peak"] == before
    assert stats["allocation.all.freed"] == 5


def test_abs_refuses_an_out_of_another_dtype_as_the_cpu_does():
    for device in ("cpu", "openreg"):
        with pytest.raises(RuntimeError, match="Found dtype Double but expected Long"):
            torch.abs(torch.tensor([-1], device=device), out=torch.empty(1, dtype=torch.float64, device=device))


def test_generators_are_pickled_and_copied():
    generator = torch.Generator("openreg:1").manual_seed(5)
    restored = pickle.loads(pickle.dumps(generator))
    assert restored.device == generator.device
    expected = torch.rand(3, device="openreg:1", generator=generator)
    assert torch.rand(3, device="openreg:1", generator=restored).equal(expected)


def test_functional_transforms_of_selu():
    x = torch.randn(4)
    f = lambda t: F.selu(t).sum()  # noqa: E731
    assert_close(torch.func.grad(f)(x.to("openreg")).cpu(), torch.func.grad(f)(x))
    assert_close(torch.func.hessian(f)(x.to("openreg")).cpu(), torch.func.hessian(f)(x))
    tangent = torch.func.jvp(F.selu, (x.to("openreg"),), (torch.ones(4, device="openreg"),))[1]
    assert_close(tangent.cpu(), torch.func.jvp(F.selu, (x,), (torch.ones(4),))[1])
    assert_close(torch.vmap(F.selu)(x.view(2, 2).to("openreg")).cpu(), F.selu(x.view(2, 2)))


def test_a_route_that_fails_half_way_is_taken_back():
    library = torch.library.Library("test_regressions", "DEF")
    for i in range(20):
        library.define(f"a{i}(Tensor x) -> Tensor")
        if i % 2:
            library.impl(f"a{i}", lambda x: x + 1, "CPU")
    with pytest.raises(ValueError, match="has no CPU kernel to share"):
        fallback.share("test_regressions::a1", "test_regressions::a0")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not any(has(f"test_regressions::a{i}", "PrivateUse1") for i in range(20))
    with fallback.share("test_regressions::*"):  # those that have a CPU kernel
        assert all(has(f"test_regressions::a{i}", "PrivateUse1") == bool(i % 2) for i in range(20))
    assert not any(has(f"test_regressions::a{i}", "PrivateUse1") for i in range(20))
    with fallback.policy("warn"):
        names = fallback.allow("test_regressions::a1")
    with names:  # and again after its scope has ended
        pass
    with names:
        pass


def test_deepcopy_of_a_module_with_buffers():
    module = torch.nn.BatchNorm1d(3).to("openreg")
    twin = copy.deepcopy(module)
    module(torch.randn(4, 3, device="openreg"))
    assert twin.running_mean.eq(0).all() and not module.running_mean.eq(0).all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_is_traced(dynamic):
    """Its algorithm is chosen above the backend, where tensors are fake and modes are active."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 3, 9, 8, device="openreg")
        assert F.scaled_dot_product_attention(q, q, q, is_causal=True).shape == (2, 3, 9, 8)
    torch._dynamo.reset()
    attend = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (9, 12):
        q = torch.randn(2, 3, length, 8, device="openreg", requires_grad=True)
        assert_close(attend(q, q, q), F.scaled_dot_product_attention(q, q, q))
        (got,) = torch.autograd.grad(attend(q, q, q).square().sum(), q)
        assert_close(got, torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).square().sum(), q)[0])
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to("openreg")
    x = torch.randn(2, 5, 8, device="openreg")
    assert_close(torch.compile(layer, backend="aot_eager")(x), layer(x))


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_move_between_devices():
    q = torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8)
    there = q.to("openreg:1")
    assert there.is_quantized and there.device == torch.device("openreg:1") and there.q_zero_point() == 3
    assert there.cpu().int_repr().equal(q.int_repr()) and there.to("openreg:0").dequantize().cpu().equal(q.dequantize())


@pytest.mark.filterwarnings("ignore")
def test_nested_dropout_leaves_the_cpus_generator_alone():
    nested = torch.nested.nested_tensor([torch.ones(50), torch.ones(30)], device="openreg")
    host, device = torch.get_rng_state(), torch.openreg.get_rng_state()
    F.dropout(nested, 0.5)
    assert torch.get_rng_state().equal(host) and not torch.openreg.get_rng_state().equal(device)


def test_a_tensor_without_memory_is_refused():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2,), device="openreg")

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    with torch._C._DisableTorchDispatch(), pytest.raises(RuntimeError, match=r"of shape \[2\] without memory"):
        torch.add(Wrapper(), 1)
    freed = torch.ones(3, device="openreg")
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"of shape \[3\] without memory: its storage was freed"):
        freed + 1


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


def test_an_index_on_another_device_is_refused_as_on_cuda():
    index = torch.tensor([0], device="openreg:1")
    for x, name in [(torch.ones(2), "cpu"), (torch.ones(2, device="openreg:0"), "openreg:0")]:
        with pytest.raises(RuntimeError, match=rf"indices should be either on cpu or on the same device .* \({name}\)"):
            x[index]
