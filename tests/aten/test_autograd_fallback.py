"""Backward through an operator without an autograd kernel: an error by default, never a partial gradient."""

import warnings

import pytest
import torch

from openreg_ops import autograd

library = torch.library.Library("test_autograd_fallback", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.define("twice_(Tensor(a!) x) -> Tensor(a!)")
library.define("flat(Tensor(a) x) -> Tensor(a)")
library.define("count(Tensor x) -> Tensor")
library.define("late(Tensor x) -> Tensor")
library.define("composite(Tensor x) -> Tensor")
for name, function in {
    # detach: a Python kernel may record autograd of its own, a C++ one may not
    "twice": lambda x: x.detach() * 2,
    "twice_": lambda x: x.mul_(2),
    "flat": lambda x: x.view(-1),
    "count": lambda x: (x > 0).sum(),
    "late": lambda x: x.detach() * 2,
}.items():
    library.impl(name, function, "PrivateUse1")
library.impl("composite", lambda x: x * 2, "CompositeImplicitAutograd")
ops = torch.ops.test_autograd_fallback


@pytest.fixture
def x():
    return torch.ones(3, device="openreg", requires_grad=True)


def refused(name):
    return pytest.raises(RuntimeError, match=f"derivative for test_autograd_fallback::{name} is not implemented")


def test_backward_raises(x):
    y = ops.twice(x) + x  # a partial gradient exists: 1 from the second term
    with refused("twice"):
        y.sum().backward()
    assert x.grad is None


def test_forward_without_gradients_is_untouched(x):
    assert ops.twice(x.detach()).tolist() == [2, 2, 2] and not ops.twice(x.detach()).requires_grad
    with torch.no_grad():
        assert not ops.twice(x).requires_grad


def test_in_place(x):
    y = x * 1
    ops.twice_(y)
    assert y.tolist() == [2, 2, 2]
    with refused("twice_"):
        y.sum().backward()


def test_view(x):
    with refused("flat"):
        ops.flat(x * 1).sum().backward()


def test_integer_results_are_not_differentiable(x):
    assert not ops.count(x).requires_grad


def test_composites_keep_their_gradient(x):
    ops.composite(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_autograd_registered_later_is_used(x):
    """Registration order must not matter: the strictness is in the key's fallback, not in the operator."""
    with refused("late"):
        ops.late(x).sum().backward()

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return ops.late(x)

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    library.impl("late", Late.apply, "AutogradPrivateUse1")
    ops.late(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_warn(x):
    with autograd.fallback_mode("warn"):
        y = ops.twice(x) + x
        with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
            y.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]  # the partial gradient that PyTorch's default gives


def test_modes_are_restored_and_checked(x):
    with pytest.raises(ValueError, match='expected the mode "error", "warn" or "nothing", but got "loud"'):
        autograd.set_fallback_mode("loud")
    with autograd.fallback_mode("nothing"):
        assert autograd.get_fallback_mode() == "nothing"
    assert autograd.get_fallback_mode() == "error"
    with refused("twice"):
        ops.twice(x).sum().backward()


def test_other_devices_keep_pytorchs_default():
    library.impl("twice", lambda x: x.detach() * 2, "CPU")
    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (ops.twice(x) + x).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]
