"""custom_autograd_fn_returns_self: the input, with half the gradient."""

import kit
import pytest
import torch
from kit import DEVICE, LAYOUTS, random
from torch.testing import assert_close

from openreg_ops import custom_autograd_fn_returns_self
from openreg_ops.meta.custom_autograd_fn_returns_self import reference

OP = torch.ops.openreg.custom_autograd_fn_returns_self.default


def test_by_hand():
    x = kit.tensor([1.0, -2.0]).requires_grad_()
    y = custom_autograd_fn_returns_self(x)
    y.backward(kit.tensor([4.0, 6.0]))
    assert y.tolist() == [1.0, -2.0] and x.grad.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("dtype", [*kit.FLOATS, torch.complex64], ids=str)
def test_matches_reference(dtype):
    for shape in [(), (0, 3), (5, 7)]:
        x = random(*shape, dtype=dtype)
        (out, grad), (expected, expected_grad) = kit.run(custom_autograd_fn_returns_self, x), kit.run(reference, x)
        assert_close(out, expected)
        assert_close(grad, expected_grad)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    x = LAYOUTS[layout](random(4, 5, 6))
    y = custom_autograd_fn_returns_self(x)
    assert y.stride() == x.stride() and y.data_ptr() == x.data_ptr()
    kit.check_against(custom_autograd_fn_returns_self, reference, x)
    kit.check_same_metadata(OP, x)


def test_integers_pass():
    assert custom_autograd_fn_returns_self(kit.tensor([1, 2])).tolist() == [1, 2]


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_output_shares_memory(mode, where):
    with mode():
        x = torch.zeros(3, device=where)
        y = custom_autograd_fn_returns_self(x)
        y.add_(1)
    assert y is not x and y.data_ptr() == x.data_ptr() and x.tolist() == [1, 1, 1]


def test_gradient_is_halved_each_time():
    """gradcheck cannot serve: the gradient is, on purpose, not the derivative. Half is exact, so this is."""
    x = random(3, 4, dtype=torch.float64, grad=True)
    (first,) = torch.autograd.grad(custom_autograd_fn_returns_self(x).pow(3).sum(), x, create_graph=True)
    assert_close(first, 1.5 * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_close(second, 1.5 * x)  # half of d(1.5 * y**2), since y passes half of its gradient on
    # Followed by a doubling it is differentiable as written, any number of times.
    kit.check_gradients(lambda x: custom_autograd_fn_returns_self(2 * x) - x.detach(), x, twice=False)


def test_opcheck():
    kit.check_operator(OP, random(3, 8, grad=True))
    kit.check_operator(OP, random(3, 8))


def test_compiled():
    kit.check_compiled(custom_autograd_fn_returns_self, random(6, 10))
    kit.check_compiled(lambda x: custom_autograd_fn_returns_self(x.mT * 2).sin(), random(6, 10))


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_write_reaches_the_input(mode, where):
    def write(x):
        y = custom_autograd_fn_returns_self(x)
        y.add_(1)
        return y * 2

    torch._dynamo.reset()
    compiled = torch.compile(write, backend="aot_eager", fullgraph=True)
    with mode():
        x = torch.zeros(3, device=where)
        assert compiled(x).tolist() == [2, 2, 2] and x.tolist() == [1, 1, 1]


def test_exported():
    kit.check_exported(lambda x: custom_autograd_fn_returns_self(x) * 2, random(4, 10))


def test_side_stream(device):
    kit.check_side_stream(custom_autograd_fn_returns_self, random(6, 10, device=device))


def test_other_devices():
    kit.check_other_devices(custom_autograd_fn_returns_self, random(3, 10))


@pytest.mark.parametrize("device_type", ["openreg", "cpu"])
def test_autocast_leaves_the_dtype_alone(device_type):
    with kit.autocast(torch.bfloat16, device_type):
        assert custom_autograd_fn_returns_self(random(3, device=device_type)).dtype == torch.float32


def test_rejects_what_is_no_tensor():
    with pytest.raises(RuntimeError, match="custom_autograd_fn_returns_self.*Expected a value of type 'Tensor'"):
        OP([1.0])
