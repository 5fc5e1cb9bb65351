"""rms_norm and rms_norm_backward."""

import kit
import pytest
import torch
from functorch.compile import make_boxed_func
from kit import DEVICE, FLOATS, LAYOUTS, TOLERANCE, random
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

import openreg_ops
from openreg_ops import rms_norm, rms_norm_backward

OP = torch.ops.openreg.rms_norm.default
BACKWARD = torch.ops.openreg.rms_norm_backward.default


def reference(x, weight, eps=1e-6):
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd.unsqueeze(-1) * weight, rstd


def reference_backward(grad_y, x, weight, rstd):
    r, g = rstd.unsqueeze(-1), grad_y * weight
    grad_x = r * g - r**3 * (g * x).mean(-1, keepdim=True) * x
    return grad_x, (grad_y * x * r).sum_to_size(weight.shape)


def test_by_hand():  # the mean square of 3, 4 is 12.5
    y, rstd = rms_norm(kit.tensor([3.0, 4.0]), kit.tensor([1.0, 10.0]), eps=0.0)
    assert_close(y.cpu(), torch.tensor([0.8485, 11.3137]), atol=1e-4, rtol=0)
    assert_close(rstd.cpu(), torch.tensor(0.2828), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "shape", [(1,), (1, 1), (5, 123), (0, 4), (4, 0), (2, 0, 3), (2, 3, 64), (40, 17), (2, 5000)], ids=str
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_reference(shape, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    kit.check_against(rms_norm, reference, x, weight, 1e-5, scale=4)
    y, rstd = rms_norm(x, weight)
    assert y.dtype == dtype and rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    x, weight = LAYOUTS[layout](random(6, 5, 12)), LAYOUTS[layout](random(12))
    kit.check_against(rms_norm, reference, x, weight)


def test_backward_operator_matches_reference():
    inputs = random(6, 5, 33), random(6, 5, 33), random(33), random(6, 5)
    kit.check_against(rms_norm_backward, reference_backward, *inputs, scale=10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_second_derivative_of_half_types(dtype):
    """gradgradcheck is for float64; here the half types' second derivative meets the reference's."""

    def penalty(function):
        def of(x, weight):
            y, rstd = function(x, weight)
            grads = torch.autograd.grad((y * y).sum() + rstd.sum(), [x, weight], create_graph=True)
            return tuple(grads)

        return of

    kit.check_against(
        penalty(rms_norm), penalty(reference), random(3, 40, dtype=dtype), random(40, dtype=dtype), scale=4
    )


def test_half_types_accumulate_in_float32():
    """A float16 sum of 300**2 overflows; a bfloat16 one of 4096 ones stops at 256."""
    y, rstd = rms_norm(
        torch.full((1, 64), 300.0, dtype=torch.float16, device=DEVICE),
        torch.ones(64, dtype=torch.float16, device=DEVICE),
    )
    assert_close(y.cpu(), torch.ones(1, 64, dtype=torch.float16))
    x = torch.ones(4096, 3, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.ones(3, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    rms_norm(x, weight)[0].sum().backward()
    assert weight.grad.tolist() == [4096.0] * 3


def test_long_rows_stay_accurate():
    x = random(1, 3_000_000).abs() + 1
    exact = reference(x.cpu().double(), torch.ones((), dtype=torch.float64))[1]
    assert_close(rms_norm(x, torch.ones(3_000_000, device=DEVICE))[1].cpu().double(), exact, rtol=1e-7, atol=0)


def test_gradients_do_not_depend_on_threads():
    x, weight, grad = random(1000, 64), random(64), random(1000, 64)
    rstd = rms_norm(x, weight)[1]
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(rms_norm_backward(grad, x, weight, rstd))
    finally:
        torch.set_num_threads(threads)
    for grad_x, grad_weight in results[1:]:
        assert torch.equal(grad_x, results[0][0]) and torch.equal(grad_weight, results[0][1])


def test_derivatives_through_one_output():
    f64 = dict(dtype=torch.float64, grad=True)
    kit.check_gradients(lambda x, w: rms_norm(x, w)[0], random(3, 5, **f64), random(5, **f64))
    kit.check_gradients(
        lambda x: rms_norm(x, torch.ones(5, **{"dtype": x.dtype, "device": DEVICE}))[1], random(3, 5, **f64)
    )


def test_backward_goes_through_the_dispatcher():
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x, weight = random(3, 4, grad=True), random(4, grad=True)
    with Spy():
        rms_norm(x, weight)[0].sum().backward()
    assert OP in seen and BACKWARD in seen


def test_graph_holds_both_operators():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch._dynamo.reset()
    torch.compile(rms_norm, backend=backend, fullgraph=True)(random(2, 4, grad=True), random(4))[0].sum().backward()
    targets = {node.target for graph in graphs for node in graph.graph.nodes}
    assert {OP, BACKWARD} <= targets


def test_exported():
    program = kit.check_exported(rms_norm, random(4, 10), random(10))
    assert any(node.target is OP for node in program.graph.nodes)


@pytest.mark.parametrize("device_type", ["openreg", "cpu"])
def test_autocast_runs_in_float32(device_type):
    x = random(3, 8, dtype=torch.bfloat16, device=device_type, grad=True)
    weight = random(8, device=device_type, grad=True)
    with kit.autocast(torch.bfloat16, device_type):
        y, rstd = rms_norm(x, weight)
    assert y.dtype == rstd.dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    assert_close(y.detach().cpu(), reference(x.detach().cpu().float(), weight.detach().cpu())[0])


def test_rejects():
    x, weight, rstd = random(2, 3), random(3), random(2)
    kit.check_error(
        OP, x, random(4), match="rms_norm: expected weight of shape [3], the last dimension of x, but got [4]"
    )
    kit.check_error(OP, x, random(1, 3), match="but got [1, 3]")
    kit.check_error(
        OP, x.double(), weight, match="rms_norm: expected weight of float64, the dtype of x, but got float32"
    )
    kit.check_error(OP, x.long(), weight, match="of float32, float64, float16 or bfloat16, but got int64")
    kit.check_error(OP, random(), weight, match="rms_norm: expected x of at least one dimension")
    kit.check_error(OP, x, weight.cpu(), match="rms_norm: x is on openreg:0 but weight is on cpu; move one with .to()")
    kit.check_error(OP, x.cpu(), weight, match="rms_norm: x is on cpu but weight is on openreg:0")
    kit.check_error(OP, x, weight.to("openreg:1"), match="x is on openreg:0 but weight is on openreg:1")
    kit.check_error(
        BACKWARD,
        random(3, 2),
        x,
        weight,
        rstd,
        match="rms_norm_backward: expected grad_y of shape [2, 3], the same as x",
    )
    kit.check_error(
        BACKWARD, x.double(), x, weight, rstd, match="expected grad_y of float32, the dtype of x, but got float64"
    )
    kit.check_error(
        BACKWARD, x, x, weight, random(3), match="expected rstd of shape [2], the same as x without its last dimension"
    )
    kit.check_error(BACKWARD, x, x, weight, rstd.double(), match="expected rstd of float32")
    kit.check_error(BACKWARD, x, x, weight, rstd.cpu(), match="x is on openreg:0 but rstd is on cpu")
    kit.check_error(BACKWARD, x.cpu(), x, weight, rstd, match="x is on openreg:0 but grad_y is on cpu")


def test_package_function_is_the_operator():
    x, weight = random(2, 3), random(3)
    assert_close(openreg_ops.rms_norm(x, weight), torch.ops.openreg.rms_norm(x, weight), **TOLERANCE[torch.float32])
