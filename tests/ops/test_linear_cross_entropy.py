"""linear_cross_entropy and linear_cross_entropy_gradients."""

import math
import threading
import time

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, random
from torch._dynamo import compiled_autograd
from torch.testing import assert_close

from openreg_ops import linear_cross_entropy, linear_cross_entropy_gradients

OP = torch.ops.openreg.linear_cross_entropy.default
GRADIENTS = torch.ops.openreg.linear_cross_entropy_gradients.default
OPTIONS = [
    dict(),
    dict(reduction="sum", label_smoothing=0.1),
    dict(reduction="none", z_loss=0.01),
    dict(reduction="mean", label_smoothing=0.2, z_loss=0.1, ignore_index=1),
]


def reference(x, weight, target, bias=None, *, z_loss=0.0, reduction="mean", ignore_index=-100, **options):
    """torch's own layer and loss, and the z-loss in words."""
    logits = torch.nn.functional.linear(x, weight, bias)
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, weight.shape[0]),
        target.reshape(-1).long(),
        reduction="none",
        ignore_index=ignore_index,
        **options,
    ).reshape(target.shape)
    valid = target != ignore_index
    loss = loss + z_loss * logits.logsumexp(-1) ** 2 * valid
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum() if reduction == "mean" else loss.sum()


def inputs(*shape, classes, bias=True, **options):
    """x, weight and perhaps bias of logits of the size of 1."""
    x, weight = random(*shape, **options), random(classes, shape[-1], **options)
    with torch.no_grad():
        weight /= max(shape[-1], 1) ** 0.5
    return (x, weight, random(classes, **options)) if bias else (x, weight)


def targets(*shape, classes):
    return torch.randint(classes, shape).to(DEVICE)


def check(target, *tensors, scale=1.0, **options):
    kit.check_against(
        lambda x, w, *b: linear_cross_entropy(x, w, target, *b, **options),
        lambda x, w, *b: reference(x, w, target.cpu(), *b, **options),
        *tensors,
        scale=scale,
    )


def test_by_hand():  # logits 0 and log 3 by 1, and 2 log 3 by 2: the second class has 3 of 4, and 9 of 10
    x, weight = kit.tensor([[1.0], [2.0]]), kit.tensor([[0.0], [math.log(3)]])
    loss = linear_cross_entropy(x, weight, kit.tensor([1, 1]), reduction="none")
    assert_close(loss.cpu(), torch.tensor([math.log(4 / 3), math.log(10 / 9)]))
    loss = linear_cross_entropy(x, weight, kit.tensor([1, 0]), kit.tensor([math.log(3), 0.0]))
    assert_close(loss.item(), (math.log(2) + math.log(4)) / 2, rtol=1e-6, atol=0)  # exp: 3 and 3; 3 and 9


# The last three have several tiles, blocks or chunks.
SIZES = [((1,), 1), ((3,), 4), ((5, 1), 3), ((2, 3, 7), 5), ((0, 4), 3), ((3, 0), 5)]
LARGE = [((20, 33), 1000), ((600, 17), 50), ((3, 200, 5), 2000)]


@pytest.mark.parametrize(("shape", "classes"), SIZES + LARGE, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_torch(shape, classes, dtype):
    target = targets(*shape[:-1], classes=classes)
    for i, options in enumerate(OPTIONS):
        tensors = inputs(*shape, classes=classes, bias=i % 2 == 1, dtype=dtype)
        check(target, *tensors, scale=20 if options.get("reduction") in ("sum", "none") else 2, **options)
    loss = linear_cross_entropy(*tensors[:2], target)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# Products of pairs have remainders of rows, classes and columns; an odd width has no pairs.
PAIRS = [((1, 2), 1), ((33, 6), 97), ((515, 18), 193), ((40, 300), 1600), ((2, 65), 3)]


@pytest.mark.parametrize("enabled", [True, False], ids=["oneDNN", "without oneDNN"])
@pytest.mark.parametrize(("shape", "classes"), PAIRS, ids=str)
def test_bfloat16_products(shape, classes, enabled):
    target = targets(*shape[:-1], classes=classes)
    if len(target) > 1:
        target[::7] = -100
    x, weight, bias = inputs(*shape, classes=classes, dtype=torch.bfloat16)
    with torch.backends.mkldnn.flags(enabled=enabled):
        check(target, x, weight, bias, scale=2)
        check(target, x.mT.contiguous().mT, weight, scale=20, reduction="none", label_smoothing=0.1)


def test_onednn_is_enabled_before_a_replay():
    """A graph reserves the memory that pairs need even if it was captured without them."""
    x, weight = inputs(512, 64, classes=2000, bias=False, dtype=torch.bfloat16)
    target = targets(512, classes=2000)
    graph = torch.openreg.Graph()
    with torch.openreg.device(DEVICE), torch.backends.mkldnn.flags(enabled=False), torch.openreg.graph(graph):
        got = linear_cross_entropy_gradients(x, weight, target, None, None, wanted=(True, True, False))
    neighbors = [torch.ones(1 << 18, device=DEVICE) for _ in range(16)]
    graph.replay()
    expected = linear_cross_entropy_gradients(x, weight, target, None, None, wanted=(True, True, False))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert all(bool((neighbor == 1).all()) for neighbor in neighbors)


def test_onednn_is_disabled_while_a_loop_runs():
    """brgemm then refuses, so the rest of the loop does not use it."""
    x, weight = inputs(600, 64, classes=2000, bias=False, dtype=torch.bfloat16)
    target = targets(600, classes=2000)
    expected = linear_cross_entropy_gradients(x, weight, target, None, None, wanted=(True, True, False))
    done = threading.Event()

    def switch():
        while not done.is_set():
            with torch.backends.mkldnn.flags(enabled=False):
                time.sleep(1e-4)
            time.sleep(1e-4)

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        for _ in range(12):
            got = linear_cross_entropy_gradients(x, weight, target, None, None, wanted=(True, True, False))
            for a, b in zip(got, expected, strict=True):
                assert_close(a, b, rtol=0.05, atol=1e-4)
    finally:
        done.set()
        thread.join()


def test_ignored_rows():
    x, weight, bias = inputs(5, 4, classes=7)
    target = kit.tensor([3, -100, 0, -100, 6])
    for reduction in ("mean", "sum", "none"):
        check(target, x, weight, bias, reduction=reduction, label_smoothing=0.1, z_loss=0.1)
    x[1] = math.nan  # which nothing sees
    x.requires_grad_()
    loss = linear_cross_entropy(x, weight.requires_grad_(), target, bias)
    loss.backward()
    assert loss.isfinite() and weight.grad.isfinite().all() and x.grad[1].count_nonzero() == 0
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize("count", [0, 3])
def test_mean_of_no_rows(count, where):
    x, weight, bias = (x.requires_grad_() for x in inputs(count, 4, classes=3, device=where))
    loss = linear_cross_entropy(x, weight, torch.full((count,), -100, device=where), bias)
    loss.backward()
    assert loss.isnan()
    assert all(t.grad.shape == t.shape and t.grad.count_nonzero() == 0 for t in (x, weight, bias))


def test_infinite_logits():
    """A bias of -inf masks classes, whole tiles of them too; a row of inf or NaN is not lost."""
    x, weight, bias = inputs(3, 4, classes=300)
    bias[7:250] = -math.inf
    check(kit.tensor([0, 3, 270]), x, weight, bias)
    check(kit.tensor([0, 3, 270]), 100 * x, weight, bias, scale=10)
    x = x.detach().clone()
    x[1, 2] = math.inf
    x.requires_grad_()
    loss = linear_cross_entropy(x, weight, kit.tensor([0, 3, 270]), reduction="none")
    loss.sum().backward()
    assert loss[[0, 2]].isfinite().all() and not loss[1].isfinite()
    assert x.grad[[0, 2]].isfinite().all() and x.grad[1].isnan().all()


def test_only_wanted_gradients_are_computed():
    x, weight = inputs(3, 4, classes=5, bias=False)
    target = kit.tensor([0, 1, 2])
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append((function, (kwargs or {}).get("wanted")))
            return function(*args, **(kwargs or {}))

    with Spy():
        linear_cross_entropy(x, weight, target)
        assert seen == [(OP, None)]
        linear_cross_entropy(x.requires_grad_(), weight, target).backward()
        assert seen[1] == (GRADIENTS, [True, False, False])
        with torch.no_grad():
            linear_cross_entropy(x, weight, target)
        assert seen[-1] == (OP, None)


def test_derivatives_in_one_tensor_alone():
    f64 = dict(dtype=torch.float64, grad=True)
    x, weight = random(3, 2, **f64), random(5, 2, **f64)
    target = kit.tensor([0, 4, 1])
    kit.check_gradients(lambda x: linear_cross_entropy(x, weight.detach(), target), x, twice=False)
    kit.check_gradients(lambda w: linear_cross_entropy(x.detach(), w, target), weight, twice=False)


def test_backward_twice_gives_the_same():
    x, weight = (t.requires_grad_() for t in inputs(3, 4, classes=5, bias=False))
    loss = linear_cross_entropy(x, weight, kit.tensor([0, 1, 2]))
    first = torch.autograd.grad(3 * loss, (x, weight), retain_graph=True)
    again = torch.autograd.grad(3 * loss, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_has_no_second_derivative(reduction):
    """Backward may be recorded, and differentiated by the gradient of the loss; not by the arguments."""
    x, weight = (t.requires_grad_() for t in inputs(3, 4, classes=5, bias=False))
    loss = linear_cross_entropy(x, weight, kit.tensor([0, 1, 2]), reduction=reduction)
    by = torch.ones_like(loss, requires_grad=True)
    grad = torch.autograd.grad(loss, x, by, create_graph=True)[0]
    for wanted in (x, weight):
        with pytest.raises(RuntimeError, match="linear_cross_entropy: has no second derivative"):
            torch.autograd.grad(grad.square().sum(), wanted, retain_graph=True)
    if reduction == "mean":
        assert_close(torch.autograd.grad(grad.sum(), by)[0], grad.detach().sum())


def test_gradients_of_float16_do_not_underflow():
    """Those of a mean over many rows do, unless the loss's scale is there before they are rounded."""
    rows = 4096
    x = random(1, 4, dtype=torch.float16).expand(rows, 4).requires_grad_()
    weight = kit.tensor([[1e-4] * 4, [2e-4] * 4], dtype=torch.float16)
    target = torch.zeros(rows, dtype=torch.long, device=DEVICE)
    gradient = 0.5 * 1e-4 / rows  # of the mean, by each element of x
    assert torch.tensor(gradient, dtype=torch.float16) == 0
    grad = torch.autograd.grad(linear_cross_entropy(x, weight, target) * 2.0**16, x)[0]
    assert grad.dtype == torch.float16
    assert_close(grad.cpu().double(), torch.full((rows, 4), gradient * 2**16, dtype=torch.float64), rtol=0.01, atol=0)


def test_memory():
    """A quarter of what the layer and the loss take, where rows and classes are many."""
    x, weight = (t.requires_grad_() for t in inputs(2048, 64, classes=2000, bias=False))
    target = targets(2048, classes=2000)

    def peak(loss):
        torch.openreg.reset_peak_memory_stats()
        before = torch.openreg.memory_allocated()
        torch.autograd.grad(loss(), (x, weight))
        return torch.openreg.max_memory_allocated() - before

    eager = peak(lambda: torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), target))
    assert eager > 2 * 4 * 2048 * 2000  # it holds logits and more
    assert peak(lambda: linear_cross_entropy(x, weight, target)) < eager / 4
    with torch.no_grad():
        torch.openreg.reset_peak_memory_stats()
        before = torch.openreg.memory_allocated()
        linear_cross_entropy(x, weight, target)
        assert torch.openreg.max_memory_allocated() - before < 0.1 * 4 * 2048 * 2000


def test_mapped_gradients_and_the_second_derivative():
    f64 = dict(dtype=torch.float64)
    target = kit.tensor([0, 3, 1])
    x, weight, bias = inputs(3, 2, classes=4, **f64)

    def loss(x, w, b):
        return linear_cross_entropy(x, w, target, b, z_loss=0.1)

    gradients = torch.func.grad(loss, argnums=(0, 1, 2))
    batch = torch.stack([x, 2 * x, -x])
    looped = [torch.stack(grads) for grads in zip(*(gradients(sample, weight, bias) for sample in batch), strict=True)]
    with kit.no_vmap_fallback():
        mapped = torch.vmap(gradients, in_dims=(0, None, None))(batch, weight, bias)
    for actual, expected in zip(mapped, looped, strict=True):
        assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: has no second derivative"):
        torch.func.jacrev(torch.func.grad(loss))(x, weight, bias)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_second_derivatives_after_the_inner_transform(reduction):
    x, weight = inputs(3, 2, classes=4, bias=False, dtype=torch.float64)
    target = kit.tensor([0, 3, 1])

    def loss(x, w=weight, t=target):
        return linear_cross_entropy(x, w, t, reduction=reduction)

    def penalty(x):
        y, backward = torch.func.vjp(loss, x)
        return backward(torch.ones_like(y))[0].square().sum()

    def weight_gradient(x):
        y, backward = torch.func.vjp(lambda w: loss(x, w), weight)
        return backward(torch.ones_like(y))[0]

    def compiled(x):
        return torch.compile(torch.func.grad(penalty), backend="aot_eager")(x)

    refusing = [torch.func.grad(penalty), torch.func.jacrev(weight_gradient), compiled]
    if reduction != "none":
        refusing.append(torch.func.jacrev(torch.func.jacrev(loss)))
    for function in refusing:
        with pytest.raises(RuntimeError, match="linear_cross_entropy: has no second derivative"):
            function(x)
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="linear_cross_entropy: has no second derivative"):
        penalty(leaf).backward()
    host = torch.func.hessian(lambda x: loss(x, weight.cpu(), target.cpu()))(x.cpu())
    assert_close(torch.func.hessian(loss)(x).cpu(), host)


def test_rejects_a_target_that_is_no_class():
    x, weight = inputs(2, 3, 4, classes=5, bias=False)
    with pytest.raises(IndexError, match=r"linear_cross_entropy: expected targets in \[0, 5\), .* but got 5 in row 4"):
        linear_cross_entropy(x, weight, kit.tensor([[0, 1, 2], [3, 5, 7]]))
    with pytest.raises(IndexError, match=r"linear_cross_entropy_gradients: .* but got -1 in row 2"):
        linear_cross_entropy(x[0], weight.requires_grad_(), kit.tensor([0, 1, -1]))


def test_rejects():
    x, weight, bias = inputs(2, 3, classes=5)
    target = kit.tensor([0, 1])
    kit.check_error(OP, x.long(), weight, target, match="linear_cross_entropy: expected x of float32, float64, float16")
    kit.check_error(OP, random(), weight, target, match="expected x of at least one dimension")
    kit.check_error(OP, x, weight.mT, target, match="weight of shape [classes, 3], at least one class by the last")
    kit.check_error(OP, x, weight[:0], target, match="dimension of x, but got [0, 3]")
    kit.check_error(OP, x, weight[0], target, match="dimension of x, but got [3]")
    kit.check_error(OP, x, weight, target.float(), match="expected target of int64 or int32, but got float32")
    kit.check_error(OP, x, weight, target[:1], match="target of shape [2], the same as x without its last dimension, b")
    kit.check_error(OP, x, weight, target, bias[:4], match="expected bias of shape [5], the classes of weight, but got")
    kit.check_error(lambda *a: OP(*a, reduction="avg"), x, weight, target, match='"sum" or "none", but got "avg"')
    kit.check_error(GRADIENTS, x, weight, target, None, None, match="wanted asks for the gradient of a bias, but got n")
    kit.check_error(GRADIENTS, x, weight, target, bias, random(2), match="expected grad_loss of shape [], the same as")


@pytest.mark.slow
def test_compiled_autograd_keeps_one_graph_and_the_refusal():
    """Options that backward does not use are not inputs of its graph; a second derivative is refused in our words."""
    x, weight = random(5, 4, grad=True), random(7, 4)
    target = torch.tensor([0, 1, 2, -100, 6], device=DEVICE)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    for smoothing in (0.0, 0.1, 0.2):
        loss = linear_cross_entropy(x, weight, target, label_smoothing=smoothing)
        (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
        with compiled_autograd._enable(lambda graph: torch.compile(graph, backend=backend, dynamic=True)):
            loss.backward()
        assert_close(x.grad, expected)
        x.grad = None
    assert len(graphs) == 1

    loss = linear_cross_entropy(x, weight, target)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with (
        compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")),
        pytest.raises(RuntimeError, match="^linear_cross_entropy: has no second derivative"),
    ):
        gradient.sum().backward()
