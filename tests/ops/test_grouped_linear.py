"""grouped_linear and grouped_linear_backward: lists of tensors, an optional list, and sizes that are data."""

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, random
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import linear
from torch.testing import assert_close

from openreg_ops import grouped_linear, grouped_linear_backward

OP = torch.ops.openreg.grouped_linear.default
BACKWARD = torch.ops.openreg.grouped_linear_backward.default


def reference(x, weights, bias, group_sizes):
    parts = x.split(group_sizes.tolist())
    bias = bias or [None] * len(weights)
    return torch.cat([linear(*group) for group in zip(parts, weights, bias, strict=True)])


def sizes(*numbers, device=DEVICE, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype, device=device)


def inputs_of(numbers=(2, 0, 3), features=(4, 5), bias=True, device=DEVICE, **options):
    """x, weights, bias (an empty list for none) and group_sizes."""
    n, (inside, out) = len(numbers), features
    options["device"] = device
    return (
        random(sum(numbers), inside, **options),
        [random(out, inside, **options) for _ in range(n)],
        [random(out, **options) for _ in range(n)] if bias else [],
        sizes(*numbers, device=device),
    )


def flat(function, numbers, bias=True):
    """Makes `function` one of x, each weight and each bias, as the kit calls functions, for these group sizes."""
    n = len(numbers)

    def call(x, *parameters):
        group_sizes = torch.tensor(numbers, device=x.device)
        return function(x, list(parameters[:n]), list(parameters[n:]) if bias else None, group_sizes)

    return call


def flattened(x, weights, bias, _group_sizes):
    return [x, *weights, *bias]


def test_by_hand():
    """Rows 0 and 1 are doubled, row 2 is negated, and each group adds its bias."""
    x = kit.tensor([[1.0], [2.0], [3.0]])
    weights = [kit.tensor([[2.0]]), kit.tensor([[7.0]]), kit.tensor([[-1.0]])]
    bias = [kit.tensor([10.0]), kit.tensor([20.0]), kit.tensor([30.0])]
    assert grouped_linear(x, weights, None, sizes(2, 0, 1)).tolist() == [[2.0], [4.0], [-3.0]]
    assert grouped_linear(x, weights, bias, sizes(2, 0, 1)).tolist() == [[12.0], [14.0], [27.0]]


@pytest.mark.parametrize(
    ("numbers", "features"),
    [
        ((3,), (4, 5)),
        ((0,), (4, 5)),
        ((0, 0), (3, 2)),
        ((1, 1, 1), (1, 1)),
        ((2, 0, 3), (4, 5)),
        ((5, 2), (0, 3)),
        ((5, 2), (3, 0)),
        ((300, 0, 257, 1), (70, 33)),
        ((40, 20), (260, 520)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_matches_reference(numbers, features, dtype, bias):
    x, weights, b, group_sizes = inputs_of(numbers, features, bias, dtype=dtype)
    # A product of normal numbers is as large as the root of the terms: that is the scale of its rounding.
    tensors = flattened(x, weights, b, group_sizes)
    scale = max(4.0, (max(features[0], features[1], *numbers) ** 0.5))
    kit.check_against(flat(grouped_linear, numbers, bias), flat(reference, numbers, bias), *tensors, scale=scale)
    assert_close(grouped_linear(x, weights, b, group_sizes.int()), grouped_linear(x, weights, b, group_sizes))


def test_weights_that_are_one_tensor():
    """Experts of one stacked parameter, and their transposes: neither is copied."""
    stacked = random(3, 5, 4, grad=True)
    x, _, _, group_sizes = inputs_of()
    y = grouped_linear(x, stacked.unbind(), None, group_sizes)
    assert_close(y, reference(x, stacked.unbind(), None, group_sizes), **kit.TOLERANCE[torch.float32])
    y.sum().backward()
    (expected,) = torch.autograd.grad(reference(x, stacked.unbind(), None, group_sizes).sum(), stacked)
    assert_close(stacked.grad, expected, **kit.TOLERANCE[torch.float32])
    transposed = [w.mT for w in random(3, 4, 5).unbind()]
    expected = reference(x, transposed, None, group_sizes)
    assert_close(grouped_linear(x, transposed, None, group_sizes), expected, **kit.TOLERANCE[torch.float32])


@pytest.mark.parametrize("enabled", [True, False], ids=["oneDNN", "without oneDNN"])
@pytest.mark.parametrize("features", [(1, 300), (33, 257), (1100, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_remainders_of_products(features, dtype, enabled):
    """Remainders of tiles, of blocks of terms, and of vectors, also with transposed and strided operands."""
    numbers, (inside, out) = (13, 0, 260), features
    x, weights, bias, _ = inputs_of(numbers, features, dtype=dtype)
    scale = max(features[0], features[1], *numbers) ** 0.5
    operands = [
        (x, weights),
        (x.mT.contiguous().mT, [w.mT.contiguous().mT for w in weights]),
        (random(273, 2 * inside, dtype=dtype)[:, ::2], [random(out, 2 * inside, dtype=dtype)[:, ::2]] * 3),
    ]
    with torch.backends.mkldnn.flags(enabled=enabled):
        for left, right in operands:
            kit.check_against(flat(grouped_linear, numbers), flat(reference, numbers), left, *right, *bias, scale=scale)


@pytest.mark.parametrize("features", [(1, 1), (17, 6), (600, 259)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_groups_of_few_rows(features, dtype):
    """Up to 32 rows are multiplied 4 at a time, by 4 columns, without packing the weights."""
    numbers = (1, 2, 0, 3, 4, 7, 32, 33)
    x, weights, bias, _ = inputs_of(numbers, features, dtype=dtype)
    scale = max(features[0], features[1], *numbers) ** 0.5
    kit.check_against(flat(grouped_linear, numbers), flat(reference, numbers), x, *weights, *bias, scale=scale)


# ---- autograd ----


@pytest.mark.parametrize("numbers", [(40,), (40, 20)], ids=["one tile", "two tiles"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_threads_of_the_process_stay_as_they_are(dtype, numbers):
    """oneDNN gets one thread for a tile, and the calling thread computes a single tile."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        grouped_linear(*inputs_of(numbers, (32, 24), dtype=dtype))
        torch.openreg.synchronize()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_reference_takes_none_for_no_bias():
    x, weights, _, group_sizes = inputs_of((2, 1), (3, 4))
    expected = reference(x, weights, None, group_sizes)
    assert_close(grouped_linear.reference(x, weights, None, group_sizes), expected)
    for host_sizes in (group_sizes.cpu(), group_sizes.cpu().int()):
        assert_close(grouped_linear.reference(x.cpu(), [w.cpu() for w in weights], None, host_sizes), expected.cpu())


def test_computes_what_is_asked_for():
    """Each subset of gradients gives those, and the mask of the backward operator says which."""
    masks = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is BACKWARD:
                masks.append(tuple(args[4]))
            return function(*args, **(kwargs or {}))

    full = inputs_of(grad=True)
    every = torch.autograd.grad(grouped_linear(*full).sin().sum(), flattened(*full))
    for wanted in ([0], [2], [5], [0, 4], [1, 6], [0, 1, 2, 3, 4, 5, 6]):
        tensors = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(flattened(*full))]
        with Spy():
            y = grouped_linear(tensors[0], tensors[1:4], tensors[4:], full[3])
            y.sin().sum().backward()
        for i, t in enumerate(tensors):
            if i in wanted:
                assert torch.equal(t.grad, every[i])
            else:
                assert t.grad is None
    assert masks == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (True, False, True),
        (False, True, True),
        (True, True, True),
    ]
    assert not grouped_linear(*inputs_of()).requires_grad


def test_a_batch_of_gradients():
    x, weights, bias, group_sizes = inputs_of(grad=True)
    y = grouped_linear(x, weights, bias, group_sizes)
    tensors, grad_y = [x, *weights, *bias], random(3, *y.shape)
    batched = torch.autograd.grad(y, tensors, grad_y, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        for one, batch in zip(torch.autograd.grad(y, tensors, grad_y[i], retain_graph=True), batched, strict=True):
            assert_close(batch[i], one)


@pytest.mark.slow
def test_no_group_sees_another():
    """inf and NaN in one group's rows or weights stay there, in both directions."""
    x, weights, bias, group_sizes = inputs_of((2, 1, 2))
    x[2], weights[1][0, 0] = float("nan"), float("inf")
    leaves = [t.detach().requires_grad_() for t in flattened(x, weights, bias, group_sizes)]
    for where in (DEVICE, "cpu"):
        moved = [t.detach().to(where).requires_grad_() for t in leaves]
        for function in (grouped_linear, torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)):
            y = function(moved[0], moved[1:4], moved[4:], group_sizes.to(where))
            grads = torch.autograd.grad(y[[0, 1, 3, 4]].sum(), moved)
            assert y[[0, 1, 3, 4]].isfinite().all() and not y[2].isfinite().any()
            assert grads[0][[0, 1, 3, 4]].isfinite().all()
            assert all(g.isfinite().all() for i, g in enumerate(grads) if i not in (0, 2))


# ---- transforms, compilation, devices ----


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_vmap_over_sizes(where):
    x, weights, bias, _ = inputs_of((2, 0, 3), device=where)
    grad_y = random(5, 5, device=where)
    mapped = sizes(2, 0, 3, 0, 5, 0, 1, 1, 3, device=where).view(3, 3)
    expected = torch.stack([grouped_linear(x, weights, bias, one) for one in mapped])

    def weight_gradients(group_sizes):
        return grouped_linear_backward(grad_y, x, weights, group_sizes, [False, True, False])[1:]

    for dim in (0, 1):
        with kit.no_vmap_fallback():
            y = torch.vmap(grouped_linear, in_dims=(None, None, None, dim))(x, weights, bias, mapped.movedim(0, dim))
            grads, none = torch.vmap(weight_gradients, in_dims=dim)(mapped.movedim(0, dim))
        assert_close(y, expected, **kit.TOLERANCE[torch.float32])
        one_by_one = [weight_gradients(one)[0] for one in mapped]
        assert none == [] and len(grads) == 3
        for e in range(3):
            assert_close(
                grads[e], torch.stack([gradient[e] for gradient in one_by_one]), **kit.TOLERANCE[torch.float32]
            )
    wrong = sizes(2, 0, 3, 3, 0, 3, 1, 1, 2, device=where).view(3, 3)  # right in sum, for no sample but the first
    with pytest.raises(
        RuntimeError, match="grouped_linear: expected group_sizes of at least 0 that sum to the rows of x"
    ):
        torch.vmap(grouped_linear, in_dims=(None, None, None, 0))(x, weights, bias, wrong)


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_vmap_over_sizes_inside_another(where):
    x, weights, bias, _ = inputs_of((2, 3), (2, 3), dtype=torch.float64, device=where)
    batch, mapped = torch.stack([x, 2 * x]), sizes(2, 3, 5, 0, 1, 4, device=where).view(3, 2)

    def layer(x, group_sizes):
        return grouped_linear(x, weights, bias, group_sizes).sin()

    for function in (layer, torch.func.jacrev(layer), torch.func.hessian(layer)):
        expected = torch.stack([torch.stack([function(one, size) for size in mapped]) for one in batch])
        with kit.no_vmap_fallback():
            inner = torch.vmap(torch.vmap(function, in_dims=(None, 0)), in_dims=(0, None))(batch, mapped)
            outer = torch.vmap(torch.vmap(function, in_dims=(0, None)), in_dims=(None, 0), out_dims=1)(batch, mapped)
        assert_close(inner, expected)
        assert_close(outer, expected)
    wrong = sizes(2, 2, 3, 3, 1, 4, device=where).view(3, 2)
    with pytest.raises(RuntimeError, match="expected group_sizes of at least 0 that sum to the rows of x"):
        torch.vmap(torch.vmap(layer, in_dims=(None, 0)), in_dims=(0, None))(batch, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_sizes_and_rows_change_without_recompiling(where):
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(grouped_linear, backend=counter, fullgraph=True, dynamic=True)
    x, weights, bias, _ = inputs_of((20, 20), (4, 5), device=where, grad=True)
    for numbers in ((9, 1), (0, 10), (4, 3), (20, 20)):
        part, group_sizes = x[: sum(numbers)].detach().requires_grad_(), sizes(*numbers, device=where)
        y, expected = compiled(part, weights, bias, group_sizes), grouped_linear(part, weights, bias, group_sizes)
        assert_close(y, expected)
        tensors = [part, *weights, *bias]
        grads = torch.autograd.grad(y.sin().sum(), tensors)
        assert_close(grads, torch.autograd.grad(expected.sin().sum(), tensors), **kit.TOLERANCE[torch.float32])
    assert counter.frame_count == 1
    with torch.no_grad(), pytest.raises(RuntimeError, match="grouped_linear: expected group_sizes "):
        torch.compile(grouped_linear, backend="aot_eager", dynamic=True)(
            x.detach(), [w.detach() for w in weights], None, sizes(20, 19, device=where)
        )


# ---- refused ----


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ((2, -1, 4), "expected group_sizes of at least 0, but got -1 for group 1"),
        ((-(2**63), 0, 0), "expected group_sizes of at least 0, but got -9223372036854775808 for group 0"),
        ((2, 0, 2), "expected group_sizes that sum to 5, the rows of x, but got a sum of 4"),
        ((2, 0, 4), "expected group_sizes that sum to 5, the rows of x, but got a sum of 6"),
        ((2**62, 2**62, 2**62), "but got a sum of 9223372036854775807"),
        ((2**63 - 1, 2**63 - 1, 7), "but got a sum of 9223372036854775807"),
    ],
    ids=str,
)
def test_rejects_sizes(numbers, sentence, where):
    x, weights, bias, _ = inputs_of(device=where)
    for name, call in {
        "grouped_linear": lambda s: grouped_linear(x, weights, bias, s),
        "grouped_linear_backward": lambda s: grouped_linear_backward(x[:, :1].expand(5, 5), x, weights, s, [True] * 3),
    }.items():
        with pytest.raises(RuntimeError) as caught:
            call(sizes(*numbers, device=where))
        assert str(caught.value).startswith(f"{name}: ") and sentence in str(caught.value)


def test_rejects():
    x, w, b, s = inputs_of()
    for inputs, match in [
        ((x.long(), w, b, s), "expected x of float32, float64, float16 or bfloat16, but got int64"),
        ((x[0], w, b, s), "expected x of shape [rows, in], but got [4]; flatten its rows"),
        ((x, [], [], s), "expected at least one weight, but got none"),
        (
            (x, [w[0][:, :3], *w[1:]], b, s),
            "expected weights[0] of shape [out, 4], for the columns of x, but got [5, 3]",
        ),
        ((x, [w[0][0], *w[1:]], b, s), "expected weights[0] of shape [out, 4], for the columns of x, but got [4]"),
        ((x, [*w[:2], w[2][1:]], b, s), "expected weights[2] of shape [5, 4], the same as weights[0], but got [4, 4]"),
        ((x, w, b[:2], s), "expected bias of a tensor for each of the 3 weights, but got 2"),
        (
            (x, w, [*b[:2], b[2][1:]], s),
            "expected bias[2] of shape [5], a number for each row of a weight, but got [4]",
        ),
        ((x, w, b, s.float()), "expected group_sizes of int32 or int64, but got float32; convert it with .to()"),
        ((x, w, b, s[:2]), "expected group_sizes of shape [3], a number for each weight, but got [2]"),
    ]:
        kit.check_error(OP, *inputs, match=f"grouped_linear: {match}" if match.startswith("exp") else match)
    for inputs, match in [
        ((random(4, 5), x, w, s, [True] * 3), "expected grad_y of shape [5, 5], the rows of x and of a weight"),
        ((random(5, 5), x, w[:2], s, [True] * 3), "expected group_sizes of shape [2], a number for each weight"),
    ]:
        kit.check_error(BACKWARD, *inputs, match=f"grouped_linear_backward: {match}" if match[0] == "e" else match)
