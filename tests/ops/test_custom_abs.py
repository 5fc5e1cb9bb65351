"""custom_abs: every dtype and layout of torch.abs, and never a gradient."""

import kit
import pytest
import torch
from kit import DEVICE, LAYOUTS, random
from torch.testing import assert_close

from openreg_ops import custom_abs, custom_abs_

OP = torch.ops.openreg.custom_abs.default
NO_DERIVATIVE = "derivative for openreg::custom_abs is not implemented"
DTYPES = (
    *kit.FLOATS,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
REFUSED = (torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu)


def values(*shape, dtype):
    if dtype.is_complex:
        return torch.complex(random(*shape, device="cpu"), random(*shape, device="cpu")).to(dtype)
    return (
        (3 * random(*shape, device="cpu")).to(dtype) if dtype != torch.uint8 else torch.randint(256, shape, dtype=dtype)
    )


def test_by_hand():
    assert custom_abs(kit.tensor([-1, 0, 2])).tolist() == [1, 0, 2]
    assert custom_abs(kit.tensor([3 - 4j])).tolist() == [5.0]


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 123), (3, 20000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_matches_torch_abs(shape, dtype):
    x = values(*shape, dtype=dtype)
    expected, actual = torch.abs(x), custom_abs(x.to(DEVICE))
    assert actual.dtype == expected.dtype
    if dtype.itemsize == 1 and dtype.is_floating_point:  # not comparable as they are
        expected, actual = expected.float(), actual.float()
    assert_close(actual.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_strides(layout, dtype):
    x = values(6, 5, 12, dtype=dtype)
    there, here = LAYOUTS[layout](x.to(DEVICE)), LAYOUTS[layout](x)
    for view in (lambda t: t, lambda t: t[1:], lambda t: t.permute(2, 0, 1), lambda t: t[:, ::2], lambda t: t[:, :1]):
        expected, actual = torch.abs(view(here)), custom_abs(view(there))
        assert actual.stride() == expected.stride()
        assert_close(actual.cpu(), expected)
        kit.check_same_metadata(OP, view(there))
    channels_last = x.unsqueeze(0).to(DEVICE).to(memory_format=torch.channels_last)
    assert custom_abs(channels_last).is_contiguous(memory_format=torch.channels_last)


def test_vmap_keeps_strides():
    x = values(2, 3, 4, dtype=torch.complex64).to(DEVICE)
    assert torch.vmap(custom_abs, in_dims=1, out_dims=1)(x).stride() == custom_abs(x).stride()


def test_conjugate_and_negative_views():
    x = values(4, 5, dtype=torch.complex64)
    for view in (torch.conj, lambda t: t.conj().imag, lambda t: torch._neg_view(t), lambda t: t.mT.conj()):
        assert_close(custom_abs(view(x.to(DEVICE))).cpu(), torch.abs(view(x)))


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_needs_no_gradient_where_there_is_none(where):
    x = random(3, device=where, grad=True)
    with torch.no_grad():
        assert not custom_abs(x).requires_grad
    with torch.inference_mode():
        assert_close(custom_abs(x), x.abs())
    assert not custom_abs(torch.ones(2, dtype=torch.int64, device=where)).requires_grad


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_transforms_and_forward_mode_are_an_error(where):
    x = random(3, device=where)
    for transform in (torch.func.grad(lambda x: custom_abs(x).sum()), torch.vmap(torch.func.grad(custom_abs))):
        with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
            transform(x)
    with pytest.raises(NotImplementedError, match="forward AD.*custom_abs"):
        torch.func.jvp(custom_abs, (x,), (x,))


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_compiled_gradient_is_an_error(where):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: custom_abs(x) + x, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        compiled(random(3, device=where, grad=True)).sum().backward()


def test_other_devices():
    x = values(4, 5, dtype=torch.complex64)
    assert_close(custom_abs(x), x.abs())
    y = custom_abs(x.to("meta"))
    assert y.is_meta and y.dtype == torch.float32 and y.shape == x.shape
    torch._dynamo.reset()
    assert_close(torch.compile(custom_abs, backend="aot_eager", fullgraph=True)(x), x.abs())


FORMS = {
    "in place": lambda x: custom_abs_(x.clone()),
    "out": lambda x: custom_abs(x, out=torch.empty_like(x)),
    "out of another layout": lambda x: custom_abs(x, out=torch.empty(x.shape[::-1], device=x.device, dtype=x.dtype).mT),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_forms_that_write(form, layout, where):
    x = LAYOUTS[layout](random(6, 5, device=where))
    x = x if x.dim() == 2 else x.reshape(6, 5)
    assert_close(FORMS[form](x), x.abs())
    y = x.clone()
    assert custom_abs_(y) is y and custom_abs(x, out=y) is y and torch.equal(y, x.abs())


def test_out_is_resized_and_aliases():
    x = random(4, 3)
    out = torch.empty(0, device=DEVICE)
    assert custom_abs(x, out=out) is out and torch.equal(out, x.abs())
    assert custom_abs(x, out=torch.empty(2, device=DEVICE)).shape == (4, 3)
    assert torch.equal(custom_abs(torch.complex(x, x), out=x.clone()).cpu(), torch.complex(x, x).abs().cpu())
    rows = x.clone()
    assert torch.equal(custom_abs(rows, out=rows), x.abs()) and torch.equal(rows, x.abs())
    with pytest.raises(RuntimeError, match="unsupported operation"):
        custom_abs(rows[1:], out=rows[:-1])
    with pytest.raises(RuntimeError, match="unsupported operation"):
        custom_abs_(rows[0].expand(4, 3))


def test_writing_is_counted_and_refused_for_leaves():
    x = random(3, grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        custom_abs_(x)
    with pytest.raises(RuntimeError, match="custom_abs: expected no gradient, but input requires one"):
        custom_abs(x, out=torch.empty_like(x))
    y = x * 2
    custom_abs_(y)
    with pytest.raises(RuntimeError, match="derivative for openreg::custom_abs_ is not implemented"):
        y.sum().backward()
    saved = x * 2
    z = saved.square()
    custom_abs_(saved.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_forms_that_write_compiled(where, backend):
    """Functionalized, also through a view and after another one was written to, and the arguments hold the result
    afterwards."""

    def program(x, out):
        y = x * 2
        custom_abs_(y[1:])
        custom_abs_(x[0])
        z = y - 1
        z[1].add_(5)
        custom_abs(z, out=out)
        return y + out

    torch._dynamo.reset()
    results = []
    for f in (program, torch.compile(program, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        x, out = random(4, 3, device=where), random(4, 3, device=where)
        results.append((f(x, out), x, out))
    assert_close(*results)
    functional = torch.func.functionalize(program)
    torch.manual_seed(0)
    x, out = random(4, 3, device=where), random(4, 3, device=where)
    assert_close(functional(x, out), results[0][0])
    assert_close((x, out), results[0][1:])


def test_forms_that_write_vmapped():
    x, out = random(3, 4), random(4, 3)
    assert_close(torch.vmap(custom_abs_, in_dims=1, out_dims=1)(x.clone()), x.abs())
    torch.vmap(lambda x, out: custom_abs(x, out=out), in_dims=(0, 1))(x, out)
    assert_close(out, x.abs().mT)
    with pytest.raises(RuntimeError, match=r"custom_abs: expected out of shape \[4\] under vmap.*but got \[5\]"):
        torch.vmap(lambda x, out: custom_abs(x, out=out))(x, random(3, 5))
    with pytest.raises(RuntimeError, match="expected vmap to map over both input and out"):
        torch.vmap(lambda x: custom_abs(x, out=out), in_dims=0)(x)


def test_rejects_under_functionalize():
    z = torch.complex(random(3), random(3))
    with pytest.raises(RuntimeError, match="custom_abs_: expected input of a real dtype"):
        torch.func.functionalize(lambda z: custom_abs_(z))(z)
    with pytest.raises(RuntimeError, match="custom_abs: expected out of float32"):
        torch.func.functionalize(lambda x: custom_abs(x, out=x.double()))(random(3))


def test_rejects_for_forms_that_write():
    x, z = random(3), torch.complex(random(3), random(3))
    into, out = torch.ops.openreg.custom_abs_.default, lambda x, out: torch.ops.openreg.custom_abs.out(x, out=out)
    kit.check_error(
        into, z, match="custom_abs_: expected input of a real dtype, in which the result is stored, but got"
    )
    kit.check_error(into, x > 0, match="custom_abs_: not implemented for bool", error=NotImplementedError)
    kit.check_error(out, x, x.double(), match="custom_abs: expected out of float32, the dtype of the result, but got")
    kit.check_error(out, z, z, match="custom_abs: expected out of float32, the dtype of the result, but got complex64")
    kit.check_error(out, x, x.cpu(), match=f"custom_abs: input is on {DEVICE} but out is on cpu; move one")


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_rejects_what_torch_abs_rejects(dtype):
    with pytest.raises(NotImplementedError):
        torch.abs(torch.zeros(2, dtype=torch.uint8).to(dtype))
    x = torch.zeros(2, dtype=torch.uint8).to(dtype).to(DEVICE)
    name = str(dtype).removeprefix("torch.")
    kit.check_error(OP, x, match=f"custom_abs: not implemented for {name}; convert", error=NotImplementedError)
