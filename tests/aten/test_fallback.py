"""The CPU fallback: policy, lists, report, and what it must never get wrong."""

import warnings

import pytest
import torch
from processes import python
from torch.testing import assert_close

from openreg_ops import fallback

library = torch.library.Library("test_fallback", "DEF")


def define(schema, function, **kwargs):
    library.define(schema, **kwargs)
    library.impl(schema.split("(")[0], function, "CPU")


def add_into(x, y):
    x.add_(y)


def fill_out(x, out):
    out.resize_(x.shape)
    return out.copy_(x * 3)


define("double(Tensor x) -> Tensor", lambda x: x * 2)
define("pair(Tensor[] xs, Tensor?[] ys) -> Tensor[]", lambda xs, ys: [*xs, *(y + 1 for y in ys if y is not None)])
define("add_into_(Tensor(a!) x, Tensor y) -> ()", add_into)
define("triple.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", lambda x, *, out: fill_out(x, out))
define("flat(Tensor(a) x) -> Tensor(a)", lambda x: x.view(-1))
define("same(Tensor x) -> Tensor", lambda x: x.sum())
define("iota(int n, *, Device device) -> Tensor", lambda n, *, device: torch.arange(n, device=device))
define("noise(Tensor x) -> Tensor", lambda x: torch.rand_like(x), tags=torch.Tag.nondeterministic_seeded)
define("noise2(Tensor x, Generator? g=None) -> Tensor", lambda x, g=None: torch.rand(x.shape, generator=g))
define("turn_(Tensor(a!) x) -> Tensor(a!)", lambda x: x.t_())
define("product(Tensor x, Tensor y) -> Tensor", torch.mul)
define("lazy(Tensor x) -> Tensor", lambda x: x.resolve_neg().resolve_conj() + 0)
for bit in ("Negative", "Conjugate"):  # otherwise the dispatcher resolves them first
    library.impl("lazy", torch.library.fallthrough_kernel, bit)
library.define("nowhere(Tensor x) -> Tensor")
ops = torch.ops.test_fallback
# BackendSelect reads the device of a factory only for operators that PyTorch knows; others say where they are registered.
library.impl("iota", lambda n, *, device: _iota_on_device(n, device), "BackendSelect")


def _iota_on_device(n, device):
    keys = torch._C.DispatchKeySet(
        torch._C.DispatchKey.PrivateUse1 if device.type == "openreg" else torch._C.DispatchKey.CPU
    )
    return ops.iota.default.redispatch(keys, n, device=device)


@pytest.fixture
def x():
    return torch.arange(6.0, device="openreg:1").view(2, 3)


def test_runs_and_is_counted(x):
    assert_close(ops.double(x).cpu(), x.cpu() * 2)
    ops.double(x)
    (record,) = fallback.report()
    assert record.operator == "test_fallback::double" and record.calls == 2
    assert record.bytes == 2 * 2 * 6 * 4 and 0 < record.seconds < 1
    fallback.reset()
    assert fallback.report() == []


def test_lists(x):
    out = ops.pair([x, x + 1], [None, x])
    assert [t.device.index for t in out] == [1, 1, 1]
    assert out[0] is not None and out[2].sum().item() == 21


def test_new_strides_of_the_same_sizes():
    x = torch.arange(9.0, device="openreg").view(3, 3)
    expected = x.cpu().t_()
    assert ops.turn_(x) is x
    assert x.stride() == (1, 3) and x.cpu().equal(expected)


@pytest.mark.parametrize("views", [(slice(2, 6), slice(0, 1)), (slice(0, 1), slice(2, 6)), (slice(0, 6), slice(2, 3))])
def test_parts_of_one_memory(views):
    base = torch.arange(8.0, device="openreg")
    x, y = (base[each] for each in views)
    assert ops.product(x, y).cpu().equal(x.cpu() * y.cpu())


def test_lazy_bits(x):
    z = torch.complex(x, x + 1)
    for each in (torch._neg_view(x), z.conj(), z.conj().imag, torch._neg_view(z.conj())):
        assert each.is_neg() or each.is_conj()
        assert ops.lazy(each).cpu().equal(each.cpu().resolve_neg().resolve_conj())


def test_in_place_through_overlapping_views():
    base = torch.zeros(4, 4, device="openreg")
    ops.add_into_(base[1:3], base[2:4] + 1)
    expected = torch.zeros(4, 4)
    expected[1:3].add_(expected[2:4] + 1)
    assert base.cpu().equal(expected)


def test_in_place_on_what_it_reads():
    base, expected = torch.arange(5.0, device="openreg"), torch.arange(5.0)
    ops.add_into_(base[:4], base[:4])
    expected[:4].add_(expected[:4])
    assert base.cpu().equal(expected)


def test_expanded_and_conjugated_inputs():
    z = torch.randn(3, 1, dtype=torch.cfloat)
    assert_close(ops.double(z.to("openreg").expand(3, 4).conj()).cpu(), (z.expand(3, 4).conj() * 2).resolve_conj())


def test_out_is_resized(x):
    out = torch.empty(0, device="openreg:1")
    assert ops.triple(x, out=out) is out
    assert_close(out.cpu(), x.cpu() * 3)


def test_a_view_is_refused(x):
    with pytest.raises(
        NotImplementedError, match=r"test_fallback::flat returns a view, but the fallback computes on copies"
    ):
        ops.flat(x)


def test_a_factory_makes_its_result_on_the_device():
    made = ops.iota(4, device=torch.device("openreg:1"))
    assert made.device == torch.device("openreg:1") and made.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("op", ["noise", "noise2"])
def test_random_operators_draw_from_the_device(x, op):
    host = torch.get_rng_state()
    torch.openreg.manual_seed_all(3)
    first = getattr(ops, op)(x)
    second = getattr(ops, op)(x)
    torch.openreg.manual_seed_all(3)
    assert getattr(ops, op)(x).equal(first) and not first.equal(second)
    assert torch.get_rng_state().equal(host)
    assert first.cpu().equal(torch.rand(2, 3, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("policy", ["allow", "error"])
def test_no_kernel_anywhere(x, policy):
    with (
        fallback.policy(policy),
        pytest.raises(
            NotImplementedError, match="test_fallback::nowhere has no kernel for openreg and none for the CPU"
        ),
    ):
        ops.nowhere(x)


def test_error_policy_names_operator_arguments_and_remedy(x):
    with fallback.policy("error"), pytest.raises(NotImplementedError) as refused:
        ops.double(x)
    message = str(refused.value)
    for part in (
        "test_fallback::double",
        "Float[2, 3]@openreg:1",
        'fallback.allow("test_fallback::double")',
        "PrivateUse1",
    ):
        assert part in message
    ops.double(x)  # allowed again


def test_warn_policy(x):
    with fallback.policy("warn"), pytest.warns(UserWarning, match="test_fallback::double has no openreg kernel"):
        ops.double(x)
    with fallback.policy("warn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            ops.double(x)
        with fallback.allow("test_fallback::double"):
            ops.double(x)


@pytest.mark.parametrize("pattern", ["test_fallback::double", "test_fallback::*", "*::double"])
def test_allow_list(x, pattern):
    with fallback.policy("error", allow=[pattern]):
        ops.double(x)
    with fallback.policy("error"), fallback.allow(pattern):
        ops.double(x)
    with fallback.policy("error"), pytest.raises(NotImplementedError):
        ops.double(x)


def test_deny_list(x):
    with fallback.deny("test_fallback::double"):
        with pytest.raises(NotImplementedError, match="test_fallback::double is on the deny list"):
            ops.double(x)
        with fallback.allow("test_fallback::double"), pytest.raises(NotImplementedError):
            ops.double(x)
    ops.double(x)


@pytest.mark.parametrize(
    "name,call",
    [("aten::add", lambda x: x + 1), ("aten::matmul", lambda x: x @ x.t()), ("aten::view", lambda x: x.view(6))],
)
def test_deny_reaches_native_and_composite_operators(x, name, call):
    with fallback.deny(name), pytest.raises(NotImplementedError, match=f"{name}.* is on the deny list.*called with"):
        call(x)
    assert call(x).is_openreg


def test_force_moves_a_native_operator_to_the_fallback(x):
    with fallback.force("aten::cosh"):
        assert_close(torch.cosh(x).cpu(), torch.cosh(x.cpu()))
        assert [r.operator for r in fallback.report()] == ["aten::cosh"]
    torch.cosh(x)
    assert fallback.report()[0].calls == 1


def test_force_keeps_the_gradient(x):
    x.requires_grad_()
    with fallback.force("aten::sinh"):
        torch.sinh(x).sum().backward()
    assert_close(x.grad.cpu(), torch.cosh(x.detach().cpu()))


def test_share_runs_another_librarys_kernel_without_copies(x):
    with fallback.share("test_fallback::double", "test_fallback::flat"):
        assert_close(ops.double(x).cpu(), x.cpu() * 2)
        view = ops.flat(x)
        view[0] = 9  # a view is a view
        assert x[0, 0].item() == 9
        assert fallback.report() == []
    with pytest.raises(ValueError, match="test_fallback::nowhere has no CPU kernel to share"):
        fallback.share("test_fallback::nowhere")


def test_share_takes_of_a_namespace_what_can_be_shared():
    x = torch.tensor([-1.0, 2.0], device="openreg")
    with torch.library._scoped_library("test_shared", "DEF") as mine:
        mine.define("plain(Tensor x) -> Tensor")
        mine.impl("plain", lambda x: x + 1, "CPU")
        mine.define("both(Tensor x) -> Tensor")
        mine.impl("both", lambda x: x + 1, "CPU")
        mine.impl("both", lambda x: x + 10, "PrivateUse1")
        mine.define("device_only(Tensor x) -> Tensor")
        mine.impl("device_only", lambda x: x + 10, "PrivateUse1")
        mine.define("composite(Tensor x) -> Tensor")
        mine.impl("composite", lambda x: x + 100, "CompositeImplicitAutograd")
        mine.define("nothing(Tensor x) -> Tensor")
        shared = torch.ops.test_shared
        for name in ("later", "latest"):  # in the second round, with what was shared before
            with fallback.share("test_shared::*"), fallback.share("test_shared::plain"):
                fallback.reset()
                assert shared.plain(x).tolist() == [0, 3]
                assert shared.both(x).tolist() == shared.device_only(x).tolist() == [9, 12]
                assert shared.composite(x).tolist() == [99, 102]
                assert fallback.report() == []
                mine.define(f"{name}(Tensor x) -> Tensor")
                mine.impl(name, lambda x: x + 1, "CPU")
                later = getattr(shared, name)
                assert later(x).tolist() == [0, 3]
                assert [record.operator for record in fallback.report()] == [f"test_shared::{name}"]
                with fallback.allow("test_shared::plain"):  # any function there looks the names up again
                    fallback.reset()
                    assert later(x).tolist() == [0, 3] and fallback.report() == []
            assert shared.plain(x).tolist() == [0, 3] and len(fallback.report()) == 1
        with fallback.force("test_shared::both"):
            assert shared.both(x).tolist() == [0, 3]
            with pytest.raises(ValueError, match="test_shared::both has its own device kernel"):
                fallback.share("test_shared::both")
        for name in ("both", "device_only", "[bd]*"):
            with pytest.raises(ValueError, match="but test_shared::[a-z_]+ has (its own device kernel|no CPU kernel)"):
                fallback.share(f"test_shared::{name}")
        with pytest.raises(ValueError, match="test_shared::nothing has no CPU kernel to share"):
            fallback.share("test_shared::plain", "test_shared::nothing")
        assert shared.both(x).tolist() == [9, 12]


def test_bad_arguments():
    with pytest.raises(ValueError, match='expected the policy "allow", "warn" or "error", but got "maybe"'):
        fallback.set_policy("maybe")
    with pytest.raises(ValueError, match="expected operator names such as"):
        fallback.deny("add")
    for wrong in ("add", "aten::ad"):
        with pytest.raises(ValueError, match="expected operator names|no operator matches 'aten::ad'"):
            with fallback.policy("error", deny=[wrong]):
                pass
    for function in (fallback.share, fallback.force):
        with pytest.raises(ValueError, match="no operator matches 'nolib::op'; import the library"):
            function("nolib::op")
    with fallback.deny("nolib::later"), fallback.policy("allow", deny="aten::cosh"):
        with pytest.raises(NotImplementedError):
            torch.ones(1, device="openreg").cosh()
    assert fallback.get_policy() == "allow"
    with fallback.policy("warn"):
        assert fallback.get_policy() == "warn"
    assert fallback.get_policy() == "allow"


def test_a_sparse_tensor_is_refused():
    sparse = torch.eye(3).to_sparse().to("openreg")
    with pytest.raises(
        NotImplementedError, match="test_fallback::double: openreg has no kernel for SparsePrivateUse1.*to_dense"
    ):
        ops.double(sparse)


@pytest.mark.slow
@pytest.mark.processes
def test_environment():
    code = (
        "import torch, openreg_ops; from openreg_ops import fallback\n"
        "assert fallback.get_policy() == 'error'\n"
        "try: torch.ones(2, device='openreg').cosh()\n"
        "except NotImplementedError as e: assert 'deny list' in str(e); print('refused')\n"
    )
    done = python("-c", code, OPENREG_FALLBACK="error", OPENREG_FALLBACK_DENY="aten::cosh, aten::sinh")
    assert done.stdout == "refused\n", done.stderr


def test_a_route_that_fails_half_way_is_taken_back():
    library = torch.library.Library("test_fallback_routes", "DEF")
    for i in range(20):
        library.define(f"a{i}(Tensor x) -> Tensor")
        if i % 2:
            library.impl(f"a{i}", lambda x: x + 1, "CPU")
    with pytest.raises(ValueError, match="has no CPU kernel to share"):
        fallback.share("test_fallback_routes::a1", "test_fallback_routes::a0")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not any(has(f"test_fallback_routes::a{i}", "PrivateUse1") for i in range(20))
    with fallback.share("test_fallback_routes::*"):  # those that have a CPU kernel
        assert all(has(f"test_fallback_routes::a{i}", "PrivateUse1") == bool(i % 2) for i in range(20))
    assert not any(has(f"test_fallback_routes::a{i}", "PrivateUse1") for i in range(20))
    with fallback.policy("warn"):
        names = fallback.allow("test_fallback_routes::a1")
    with names:  # and again after its scope has ended
        pass
    with names:
        pass


def test_names_given_twice_and_left_twice(x):
    """Exiting one of two contexts keeps the other; exiting it again changes nothing."""
    first, second = fallback.allow("test_fallback::double"), fallback.allow("test_fallback::double")
    with fallback.policy("error"):
        ops.double(x)
        first.__exit__()
        first.__exit__()
        ops.double(x)
        second.__exit__()
        with pytest.raises(RuntimeError, match="test_fallback::double"):
            ops.double(x)


def test_two_names_of_a_policy_and_two_records(x):
    names = ["test_fallback::double", "test_fallback::same"]
    with fallback.policy("error", allow=names):
        ops.double(x)
        ops.same(x)
        with fallback.policy("allow", deny=names[1:]):
            ops.double(x)
            with pytest.raises(RuntimeError, match="test_fallback::same"):
                ops.same(x)
        ops.same(x)
    assert fallback.get_policy() == "allow"
    records = {record.operator: record for record in fallback.report()}
    assert [records[name].calls for name in names] == [2, 2]
    assert records[names[0]].bytes == 2 * 48 and records[names[1]].bytes == 2 * 28
