"""The tests that scale_gradient and the custom_autograd_fn_* share, as a class to derive from."""

import kit
import pytest
import torch
from kit import DEVICE, LAYOUTS, random
from torch import func
from torch.autograd import forward_ad
from torch.testing import assert_close


class HalvedGradient:
    """An operator whose output is its input's memory, and which passes half of its gradient on."""

    function = None  # the typed wrapper, a staticmethod
    reference = None  # the plain reference, a staticmethod
    op = None  # the operator's overload
    arguments = ()  # what it takes after the input

    def test_by_hand(self):
        x = kit.tensor([1.0, -2.0]).requires_grad_()
        y = self.function(x)
        y.backward(kit.tensor([4.0, 6.0]))
        assert y.tolist() == [1.0, -2.0] and x.grad.tolist() == [2.0, 3.0]

    @pytest.mark.parametrize("dtype", [*kit.FLOATS, torch.complex64], ids=str)
    def test_matches_reference(self, dtype):
        assert self.function(kit.tensor([1, 2])).tolist() == [1, 2]  # integers pass
        for shape in [(), (0, 3), (5, 7)]:
            x = random(*shape, dtype=dtype)
            (out, grad), (expected, expected_grad) = kit.run(self.function, x), kit.run(self.reference, x)
            assert_close(out, expected)
            assert_close(grad, expected_grad)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, layout):
        x = LAYOUTS[layout](random(4, 5, 6))
        y = self.function(x)
        assert y.stride() == x.stride() and y.data_ptr() == x.data_ptr()
        kit.check_against(self.function, self.reference, x)

    @pytest.mark.parametrize("where", [DEVICE, "cpu"])
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_output_shares_memory(self, mode, where):
        with mode():
            x = torch.zeros(3, device=where)
            y = self.function(x)
            y.add_(1)
        assert y is not x and y.data_ptr() == x.data_ptr() and x.tolist() == [1, 1, 1]

    def test_gradient_is_halved_each_time(self):
        """gradcheck cannot serve: the gradient is, on purpose, not the derivative. Half is exact, so this is."""
        x = random(3, 4, dtype=torch.float64, grad=True)
        (first,) = torch.autograd.grad(self.function(x).pow(3).sum(), x, create_graph=True)
        assert_close(first, 1.5 * x**2)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert_close(second, 1.5 * x)  # half of d(1.5 * y**2), since y passes half of its gradient on
        # Followed by a doubling it is differentiable as written, any number of times.
        kit.check_gradients(lambda x: self.function(2 * x) - x.detach(), x, twice=False)

    @pytest.mark.parametrize("where", [DEVICE, "cpu"])
    def test_forward_mode(self, where):
        x, tangent = random(3, 4, device=where, grad=True), random(3, 4, device=where)
        with forward_ad.dual_level():
            y = self.function(forward_ad.make_dual(x, tangent))
            primal, halved = forward_ad.unpack_dual(y)
            assert torch.equal(primal, x) and primal.data_ptr() == x.data_ptr()
            assert torch.equal(halved, tangent / 2)
            assert torch.equal(*torch.autograd.grad(y, x, tangent), tangent / 2)

    @pytest.mark.parametrize("where", [DEVICE, "cpu"])
    def test_transforms_halve_at_every_level(self, where):
        x, tangent = random(4, dtype=torch.float64, device=where), random(4, dtype=torch.float64, device=where)

        def cube(x):
            return self.function(x).pow(3).sum()

        assert_close(func.grad(cube)(x), 1.5 * x**2)
        assert_close(func.grad(lambda x: func.grad(cube)(x).sum())(x), 1.5 * x)
        third = func.grad(lambda x: func.grad(lambda x: func.grad(cube)(x).sum())(x).sum())
        assert_close(third(x), torch.full_like(x, 0.75))
        assert_close(func.jvp(self.function, (x,), (tangent,)), (x, tangent / 2))
        for hessian in (func.hessian, lambda f: func.jacrev(func.jacfwd(f)), lambda f: func.jacrev(func.jacrev(f))):
            assert_close(hessian(cube)(x), torch.diag(1.5 * x))
        twice = func.jvp(lambda x: func.jvp(cube, (x,), (tangent,))[1], (x,), (tangent,))[1]
        assert_close(twice, (1.5 * x * tangent**2).sum())
        rows = x * torch.arange(3, device=where)[:, None]
        with kit.no_vmap_fallback():
            assert_close(torch.vmap(func.grad(cube), in_dims=1)(rows), (1.5 * rows**2).T)
            assert_close(func.grad(lambda x: torch.vmap(cube)(x).sum())(rows), 1.5 * rows**2)
            assert_close(torch.vmap(self.function, in_dims=1, out_dims=1)(rows), rows)

    def test_transforms(self):
        """A doubling before it makes it differentiable as written: the shared checks serve."""
        kit.check_transforms(lambda x: self.function(2 * x) - x.detach(), random(3, 4, dtype=torch.float64))

    def test_transforms_refuse_a_write_that_would_lose_the_gradient(self):
        def write(x):
            self.function(x).mul_(2)
            return x.sum()

        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            func.grad(write)(random(3))

    @pytest.mark.parametrize("where", [DEVICE, "cpu"])
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_compiled_write_reaches_the_input(self, mode, where):
        def write(x):
            y = self.function(x)
            y.add_(1)
            return y * 2

        torch._dynamo.reset()
        compiled = torch.compile(write, backend="aot_eager", fullgraph=True)
        with mode():
            x = torch.zeros(3, device=where)
            assert compiled(x).tolist() == [2, 2, 2] and x.tolist() == [1, 1, 1]

    def test_rejects_what_is_no_tensor(self):
        with pytest.raises(RuntimeError, match=f"{self.op._opname}.*Expected a value of type 'Tensor'"):
            self.op([1.0], *self.arguments)
