"""Every operator on DTensors: on 2 processes against one, and on a mesh of 2 by 2, forward and backward, and what stays
sharded. That the rules are right for every placement is tested without processes, at the end.

The functions named `check_…` run on each process of a group; the tests start them. See tests/backend/workers.py.
"""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from processes import python
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from openreg_ops.meta import op
from openreg_tools.core.samples import Sample, sample_of

pytestmark = pytest.mark.processes

NAMES = sorted(op.SAMPLES)
MUTABLE = {name for name in NAMES if getattr(torch.ops.openreg, name).default._schema.is_mutable}


def meshes():
    """One of one dimension, and of four processes one of two."""
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    return [init_device_mesh("openreg", shape) for shape in [(size,), (2, 2)][: size // 2]]


def placed(x, mesh, at):
    """x, the same on all processes, as a DTensor with this `At` for each dimension of the mesh."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = [Replicate()] * mesh.ndim
    x = DTensor.from_local(x.detach().clone(), mesh, whole, run_check=False)
    return x.redistribute(placements=[Replicate() if dim is None else Shard(dim) for dim in at])


def at_of(x):
    """Its placements as a rule says them."""
    from openreg_ops.distributed.sharding import _at

    return tuple(map(_at, x.placements))


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def here(x, whole):
    """The parts of x and of `whole` that this process holds, placed as x is; all of both if x is a sum."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not all(at is None or isinstance(at, int) for at in at_of(x)):
        return x.full_tensor(), whole
    assert x.shape == whole.shape
    shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return x.to_local(), whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def cotangent(out):
    numbers = torch.sin(1.3 * torch.arange(out.numel(), dtype=torch.float64) + 0.7).reshape(out.shape)
    return numbers.to(out.device, out.dtype)


def run(function, sample, grads, place=None):
    """Outputs, what was written to and gradients of a call; `place` makes each tensor of the sample a DTensor."""
    values, spec = tree_flatten((sample.args, sample.kwargs))
    values = [x.detach().clone() if isinstance(x, Tensor) else x for x in values]
    if place:
        counter = iter(range(len(values)))
        values = [place(x, next(counter)) if isinstance(x, Tensor) else x for x in values]
    leaves = [x for x in values if isinstance(x, Tensor) and x.is_floating_point()] if grads else []
    leaves = [x.requires_grad_() for x in leaves]
    args, kwargs = tree_unflatten(values, spec)
    outs = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]
    if not grads:
        return outs, [x for x in values if isinstance(x, Tensor)], []
    attached = [x for x in outs if x.requires_grad]
    given = [cotangent(x) for x in attached]
    if place:
        mesh = outs[0].device_mesh
        at = [[d if isinstance(d, int) else None for d in at_of(x)] for x in attached]
        given = [placed(g, mesh, dims) for g, dims in zip(given, at, strict=True)]
    got = torch.autograd.grad(attached, leaves, given, allow_unused=True)
    return outs, [], [torch.zeros_like(x) if g is None else g for g, x in zip(got, leaves, strict=True)]


OPTIONS = {
    "attention": [dict(causal=True)],
    "cross_entropy": [
        dict(reduction="sum", label_smoothing=0.1),
        dict(reduction="none", z_loss=0.01),
        dict(label_smoothing=0.2, z_loss=0.1, ignore_index=1),
    ],
}
OPTIONS["linear_cross_entropy"] = OPTIONS["cross_entropy"]


def samples(name):
    """The sample inputs of the meta files, some with other options, and a longer one."""
    torch.manual_seed(0)
    every = [*map(sample_of, op.SAMPLES[name]("openreg", torch.float64))]
    every += [Sample(*every[-1].args, **every[-1].kwargs | options) for options in OPTIONS.get(name, ())]
    if name == "linear_cross_entropy":  # more than one chunk
        target = torch.randint(10, (600,), device="openreg")
        every.append(Sample(*op.normal("openreg", torch.float64, (600, 4), (10, 4)), target))
    return every


def choices(sample, mesh, name):
    """Some ways to place the tensors of a sample: whole, and each along one of its dimensions that is long enough."""
    tensors = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
    chosen = random.Random(name)  # the same on every process

    def one(x):
        dims = [d for d, size in enumerate(x.shape) if size >= mesh.size()]
        picked = []
        for _ in range(mesh.ndim):
            picked.append(chosen.choice([None, *dims]))
        return picked

    yield [[None] * mesh.ndim for _ in tensors]
    for d in (0, 1):  # all along one dimension, as far as they have it
        yield [[d if x.dim() > d and x.shape[d] >= mesh.size() else None] * mesh.ndim for x in tensors]
    yield [one(x) for x in tensors]


def check_operator(name, count):
    """However the arguments are placed, the results equal the results for plain tensors."""
    function, ran = getattr(torch.ops.openreg, name).default, 0
    for sample in samples(name)[-count:]:
        grads = name in DIFFERENTIABLE
        expected = run(function, sample, grads)
        for mesh in meshes()[-1:]:
            for choice in choices(sample, mesh, name):
                leaf = iter(choice)
                try:
                    found = run(function, sample, grads, lambda x, _, leaf=leaf, mesh=mesh: placed(x, mesh, next(leaf)))
                except RuntimeError as error:
                    assert name in MUTABLE and "do not move the tensors it writes to" in str(error), (
                        f"{choice}: {error}"
                    )
                    continue
                ran += 1
                for got, plain in zip(found, expected, strict=True):
                    for a, b in zip(got, plain, strict=True):
                        wrong = f"{name} of {sample}, placed {choice} on {mesh.shape}"
                        assert_close(
                            *here(a.detach(), b), equal_nan=True, msg=lambda text, wrong=wrong: f"{wrong}: {text}"
                        )
    return ran


DIFFERENTIABLE = {
    "attention", "cross_entropy", "custom_autograd_fn_aliasing", "custom_autograd_fn_returns_self", "dropout_add",
    "dropout_add_backward", "fake_quantize", "fused_add_rms_norm", "grouped_linear", "linear_cross_entropy", "rms_norm",
    "rotary_embedding", "scale_gradient", "swiglu",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_operator(two, name):
    ran = two.run(check_operator, name, len(OPTIONS.get(name, "1")))
    assert len(set(ran)) == 1 and ran[0] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_operator_on_a_mesh_of_two_dimensions(four, name):
    ran = four.run(check_operator, name, 1)
    assert len(set(ran)) == 1 and ran[0] >= 1


# ---- what stays sharded ----

R, S = None, op.SUM
# Where the arguments are along one dimension of the mesh, and where the outputs and the gradients come out; for a list
# of tensors, each. `shapes` has the shapes.
STAYS = [
    ("rms_norm", ((4, 8), (8,)), {}, [0, R], [0, 0], [0, S]),
    ("rms_norm", ((4, 8), (8,)), {}, [1, R], [R, R], [1, R]),  # a norm over a sharded dimension: x is gathered
    ("fused_add_rms_norm", ((4, 8), (4, 8), (8,)), {}, [0, 0, R], [0, 0], [0, 0, S]),
    ("swiglu", ((4, 8), (4, 8)), {}, [1, 1], [1], [1, 1]),
    ("scale_gradient", ((4, 8),), dict(scale=2.0), [1], [1], [1]),
    ("custom_autograd_fn_aliasing", ((4, 8),), {}, [0], [0], [0]),
    ("custom_autograd_fn_returns_self", ((4, 8),), {}, [0], [0], [0]),
    ("rotary_embedding", ((4, 4, 8, 6), (8, 3), (8, 3)), {}, [1, R, R], [1], [1, S, S]),
    ("rotary_embedding", ((4, 4, 8, 6), (8, 3), (8, 3)), {}, [2, 0, 0], [2], [2, 0, 0]),
    ("attention", ((4, 4, 8, 6),) * 3, {}, [0, 0, 0], [0, 0], [0, 0, 0]),
    ("attention", ((4, 4, 8, 6),) * 3, dict(causal=True), [1, 1, 1], [1, 1], [1, 1, 1]),
    ("attention", ((2, 8, 8, 6), (2, 4, 8, 6), (2, 4, 8, 6)), {}, [1, 1, 1], [1, 1], [1, 1, 1]),
    ("attention", ((4, 4, 8, 6),) * 3, {}, [2, R, R], [2, 2], [2, S, S]),
    ("dropout_add", ((4, 8), (4, 8)), dict(p=0.5), [0, 0], [0, 0], [0, 0]),
    ("cross_entropy", ((4, 8), (4, "target")), {}, [0, 0], [S, 0], [0]),
    ("cross_entropy", ((4, 8), (4, "target")), dict(reduction="none"), [0, 0], [0, 0], [0]),
    ("linear_cross_entropy", ((4, 6), (8, 6), (4, "target")), {}, [0, R, 0], [S], [0, S]),
    ("linear_cross_entropy", ((4, 6), (8, 6), (4, "target")), {}, [R, 0, R], [R], [S, 0]),
    ("linear_cross_entropy", ((4, 6), (8, 6), (4, "target")), dict(reduction="none"), [R, 0, R], [R], [S, 0]),
    ("quantize_rowwise", ((4, 8),), {}, [0], [0, 0], None),
    ("quantize_rowwise", ((4, 8),), {}, [1], [R, R], None),
    ("fake_quantize", ((4, 8), (), (0, "zero")), dict(quant_min=-4, quant_max=3), [0, R, R], [0], [0, S]),
    ("custom_abs", ((4, 8),), {}, [1], [1], None),
]  # fmt: skip


def check_stays(name, shapes, options, where, outs_at, grads_at):
    """On a mesh of one dimension; nothing is gathered that stays."""
    from torch.distributed.tensor.debug import CommDebugMode

    mesh, tensors = meshes()[0], []
    for shape in shapes:
        if shape and shape[-1] == "target":
            tensors.append(torch.arange(shape[0], device="openreg"))
        elif shape and shape[-1] == "zero":
            tensors.append(torch.zeros((), dtype=torch.int32, device="openreg"))
        else:
            tensors.append(torch.rand(shape, device="openreg"))
    leaves = [placed(x, mesh, [at]) for x, at in zip(tensors, where, strict=True)]
    grads = grads_at is not None
    leaves = [x.requires_grad_(grads and x.is_floating_point()) for x in leaves]
    with CommDebugMode() as traffic:
        outs = getattr(torch.ops.openreg, name)(*leaves, **options)
        outs = [outs] if isinstance(outs, Tensor) else list(outs)
        assert [at_of(x) for x in outs] == [(at,) for at in outs_at]
        wanted, got = [x for x in leaves if x.requires_grad], []
        if grads:
            attached = [x for x in outs if x.requires_grad]
            got = torch.autograd.grad(attached, wanted, [torch.ones_like(x) for x in attached])
    for x, grad, at in zip(wanted, got, grads_at or (), strict=True):
        assert grad.shape == x.shape
        if not (name == "rms_norm" and where == [1, R]):
            assert at_of(grad) == (at,), f"the gradient of {list(x.shape)} is {grad.placements}"
    counts = {str(call): count for call, count in traffic.get_comm_counts().items()}
    # A broadcast is of the seed, at the first random operator of a process.
    gathered = {call: count for call, count in counts.items() if "reduce" not in call and "broadcast" not in call}
    assert bool(gathered) == (where[0] == 1 and name in ("rms_norm", "quantize_rowwise")), gathered


@pytest.mark.parametrize("row", STAYS, ids=[f"{row[0]}-{i}" for i, row in enumerate(STAYS)])
def test_stays_sharded(two, row):
    two.run(check_stays, *row)


def check_whole_results():
    """Where nothing can stay sharded."""
    mesh = meshes()[0]
    boxes = torch.tensor([[0, 0, 2, 2], [0, 0, 2, 1.9], [3, 3, 4, 4], [0, 5, 1, 6]], device="openreg")
    scores = torch.tensor([0.5, 0.9, 0.1, 0.2], device="openreg")
    kept = torch.ops.openreg.nms(placed(boxes, mesh, [0]), placed(scores, mesh, [0]), 0.5)
    assert at_of(kept) == (None,) and kept.to_local().tolist() == [1, 3, 2]


def check_dropout():
    """Shards draw their own numbers, and together they are a dropout with the given probability and its gradient."""
    mesh = meshes()[0]
    x = placed(torch.ones(64, 64, device="openreg"), mesh, [0]).requires_grad_()
    out, mask = torch.ops.openreg.dropout_add(x, x.detach(), 0.25)
    parts = mask.full_tensor().chunk(dist.get_world_size())
    assert not parts[0].equal(parts[1])
    assert abs(mask.full_tensor().float().mean() - 0.75) < 0.05
    assert_close(out.full_tensor(), 1 + mask.full_tensor() / 0.75)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert_close(grad.full_tensor(), mask.full_tensor() / 0.75)


def check_options_are_seen():
    """DTensor caches its decisions: a call with other options must get its own."""
    mesh = meshes()[0]
    q = torch.randn(2, 4, 8, 6, device="openreg")
    sharded = placed(q, mesh, [2])
    for causal in (False, True, False):
        out, _ = torch.ops.openreg.attention(sharded, placed(q, mesh, [None]), placed(q, mesh, [None]), causal=causal)
        assert_close(out.full_tensor(), torch.ops.openreg.attention(q, q, q, causal=causal)[0])
    x, scale = torch.ones(4, 8, dtype=torch.int8, device="openreg"), torch.ones(4, device="openreg")
    for dtype in (None, torch.bfloat16, torch.float64):
        out = torch.ops.openreg.dequantize_rowwise(placed(x, mesh, [0]), placed(scale, mesh, [0]), dtype=dtype)
        assert out.dtype == out.to_local().dtype == (dtype or torch.float32)


def check_large_logits():
    """exp() of their differences to the largest one of all devices neither overflows nor is zero."""
    mesh = meshes()[0]
    x, weight = torch.ones(6, 1, device="openreg"), torch.arange(8, 0, -1, device="openreg").unsqueeze(1)
    target = torch.arange(6, device="openreg")
    for scale in (1000.0, -1000.0):
        sample = Sample(x * scale, weight.float(), target)
        expected = run(torch.ops.openreg.linear_cross_entropy, sample, True)
        for at in itertools.product((None, 0), (None, 0)):
            places = iter([*([dim] for dim in at), [None]])
            found = run(
                torch.ops.openreg.linear_cross_entropy, sample, True, lambda x, _, at=places: placed(x, mesh, next(at))
            )
            for a, b in zip(found[0] + found[2], expected[0] + expected[2], strict=True):
                assert b.isfinite().all()
                assert_close(full(a.detach()), b.detach())


def check_errors():
    mesh = meshes()[0]
    caches = [placed(torch.zeros(8, 2, device="openreg"), mesh, [0]) for _ in range(2)]
    rows = [placed(torch.ones(1, 2, device="openreg"), mesh, [None]) for _ in range(2)]
    slots = placed(torch.tensor([3], device="openreg"), mesh, [None])
    with pytest.raises(
        RuntimeError, match="kv_cache_update_: expected placements that do not move the tensors it writes to"
    ):
        torch.ops.openreg.kv_cache_update_(*caches, *rows, slots)
    x, weight = torch.randn(4, 6, device="openreg"), torch.randn(8, 6, device="openreg")
    target = torch.tensor([1, -100, 8, 2], device="openreg")
    with pytest.raises(RuntimeError, match=r"linear_cross_entropy: expected all tensors to be DTensors, but target of"):
        torch.ops.openreg.linear_cross_entropy(placed(x, mesh, [None]), placed(weight, mesh, [0]), target)
    sentence = (
        r"linear_cross_entropy: expected targets in \[0, 8\), the classes, or ignore_index -100, but got 8 in row 2"
    )
    with pytest.raises(IndexError, match=sentence):
        torch.ops.openreg.linear_cross_entropy(x, weight, target)
    with pytest.raises(IndexError, match=sentence):
        torch.ops.openreg.linear_cross_entropy(
            placed(x, mesh, [None]), placed(weight, mesh, [0]), placed(target, mesh, [None])
        )
    sizes = placed(torch.tensor([1, 2], device="openreg"), mesh, [None])
    with pytest.raises(
        RuntimeError, match=r"grouped_linear: expected group_sizes that sum to 4, the rows of x, but got a sum"
    ):
        torch.ops.openreg.grouped_linear(placed(x, mesh, [0]), [placed(weight, mesh, [None])] * 2, [], sizes)


def check_half_types():
    """The gradients of a float16 x are kept in float32 in linear_cross_entropy; they come out in float16."""
    mesh = meshes()[0]
    for dtype, at in itertools.product((torch.float16, torch.bfloat16), ([R, 0, R], [0, R, 0], [R, R, R])):
        x, weight = op.normal("openreg", dtype, (6, 8), (12, 8))
        target = torch.arange(6, device="openreg")
        expected = run(torch.ops.openreg.linear_cross_entropy, Sample(x, weight, target), True)
        places = iter([dim] for dim in at)
        sample = Sample(x, weight, target)
        found = run(
            torch.ops.openreg.linear_cross_entropy, sample, True, lambda x, _, at=places: placed(x, mesh, next(at))
        )
        assert [x.dtype for x in found[0] + found[2]] == [x.dtype for x in expected[0] + expected[2]]
        for a, b in zip(found[0] + found[2], expected[0] + expected[2], strict=True):
            assert_close(full(a.detach()), b, rtol=2e-2, atol=2e-3)


def check_wrong_rules():
    from openreg_ops.distributed.sharding import _combinations

    swiglu, given = torch.ops.openreg.swiglu.default, {"gate": None, "up": None}
    with pytest.raises(TypeError, match="the rule of swiglu places gates, which swiglu does not take"):
        list(_combinations(swiglu, lambda: [(dict(gates=0), (0,))], given, meshes()[0], 0))
    with pytest.raises(TypeError, match="the rule of swiglu places 2 outputs, but swiglu returns 1"):
        list(_combinations(swiglu, lambda: [(dict(gate=0), (0, 0))], given, meshes()[0], 0))


def check_out():
    mesh = meshes()[0]
    x, out = (
        placed(torch.arange(-8.0, 8, device="openreg"), mesh, [0]),
        placed(torch.zeros(16, device="openreg"), mesh, [0]),
    )
    assert torch.ops.openreg.custom_abs.out(x, out=out) is out
    assert_close(out.full_tensor(), x.full_tensor().abs())
    assert torch.ops.openreg.custom_abs_(x) is x and x.full_tensor().equal(out.full_tensor())


def check_second_derivatives():
    """These differentiate the plain reference, on DTensors."""
    mesh = meshes()[0]
    for name in ("rms_norm_backward", "rotary_embedding_backward", "swiglu_backward", "attention_backward"):
        function = getattr(torch.ops.openreg, name)
        for sample in samples(name)[: 1 if name == "attention_backward" else None]:
            values = [x for x in sample.args if isinstance(x, Tensor) and x.is_floating_point()]
            rest = iter(values)
            place = {i: next(rest) for i, x in enumerate(sample.args) if isinstance(x, Tensor)}

            def grads(leaves, args=sample.args, function=function, place=place):
                moved = dict(zip(place, leaves, strict=True))
                outs = function(*[moved.get(i, x) for i, x in enumerate(args)])
                outs = [x for x in ((outs,) if isinstance(outs, Tensor) else outs) if x.numel()]
                return torch.autograd.grad(sum(x.pow(3).sum() for x in outs), leaves)

            expected = grads([x.detach().clone().requires_grad_() for x in values])
            for d in (0, -1) if name != "attention_backward" else (0,):  # DTensor refuses views of sharded dimensions
                at = [[d % x.dim() if x.dim() and x.shape[d] >= mesh.size() else None] for x in values]
                leaves = [placed(x, mesh, place).requires_grad_() for x, place in zip(values, at, strict=True)]
                for got, grad in zip(grads(leaves), expected, strict=True):
                    assert_close(full(got), grad, msg=lambda text, name=name, at=at: f"{name} placed {at}: {text}")


def check_compiled():
    """In graphs, with their backward."""
    import openreg_ops

    mesh, size = meshes()[0], dist.get_world_size()

    def program(x, norm, weight, target, weights, sizes):
        y, _ = openreg_ops.rms_norm(x, norm)
        y = y + openreg_ops.grouped_linear(y, weights, None, sizes)
        return openreg_ops.cross_entropy(y, target)[0] + openreg_ops.linear_cross_entropy(y, weight, target)

    x, norm, weight, *weights = op.normal("openreg", torch.float64, (2 * size, 6), (6,), (8, 6), (6, 6), (6, 6))
    target, sizes = torch.arange(2 * size, device="openreg") % 6, torch.tensor([1, 2 * size - 1], device="openreg")
    for x_at, weight_at in ((0, R), (R, 0)):
        both = []
        for place in (lambda x, at: x.clone(), lambda x, at: placed(x, mesh, [at])):
            leaves = [
                place(x, x_at),
                place(norm, R),
                place(weight, weight_at),
                *(place(expert, R) for expert in weights),
            ]
            leaves = [x.requires_grad_() for x in leaves]
            rest = place(target, x_at), leaves[3:], place(sizes, R)
            compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
            loss = full((compiled if hasattr(leaves[0], "placements") else program)(*leaves[:3], *rest))
            both.append([loss.detach(), *map(full, torch.autograd.grad(loss, leaves))])
        assert_close(both[1], both[0])


def check_optimizer():
    """openreg_ops.AdamW on parameters that are sharded, with gradients that are still to be summed."""
    import openreg_ops

    mesh = meshes()[0]
    start = torch.randn(8, 4, device="openreg")
    for amsgrad in (False, True):
        plain, sharded = start.clone().requires_grad_(), placed(start, mesh, [0]).requires_grad_()
        for x in (plain, sharded):
            optimizer = openreg_ops.AdamW([x], lr=0.1, amsgrad=amsgrad)
            for scale in (3, 1, 1):  # the largest square is of the first step
                optimizer.zero_grad()
                (scale * x).square().sum().backward()
                optimizer.step()
        assert at_of(sharded) == (0,)
        assert_close(sharded.full_tensor(), plain)


def check_grouped_linear_stays():
    """Rows, outputs or inputs stay sharded, forward and backward; nothing is gathered."""
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = meshes()[0]
    sizes = placed(torch.tensor([3, 5], device="openreg"), mesh, [R])
    for x_at, weight_at, y_at, grads_at in ((0, R, 0, [0, S, S]), (R, 0, 1, [S, 0, 0]), (1, 1, S, [1, 1, 1])):
        x = placed(torch.rand(8, 4, device="openreg"), mesh, [x_at]).requires_grad_()
        weights = [placed(torch.rand(8, 4, device="openreg"), mesh, [weight_at]).requires_grad_() for _ in range(2)]
        with CommDebugMode() as traffic:
            y = torch.ops.openreg.grouped_linear(x, weights, [], sizes)
            grads = torch.autograd.grad(y, [x, *weights], torch.ones_like(y))
        assert at_of(y) == (y_at,) and [at_of(grad) for grad in grads] == [(at,) for at in grads_at]
        assert not [call for call in traffic.get_comm_counts() if "reduce" not in str(call)]


CHECKS = [
    check_whole_results, check_dropout, check_grouped_linear_stays, check_options_are_seen, check_large_logits, check_errors,
    check_half_types, check_wrong_rules, check_out, check_second_derivatives, check_optimizer, check_compiled,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_check(two, check):
    two.run(check)


# ---- PyTorch's attention and norms ----

attend = torch.nn.functional.scaled_dot_product_attention
NORMS = {
    "rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w),
    "rms_norm_without_weight": lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-2:], None, 1e-3),
    "layer_norm": lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:], w),
    "instance_norm": lambda x, w: torch.nn.functional.instance_norm(x),
    "batch_norm": lambda x, w: torch.nn.functional.batch_norm(x, None, None, training=True),
    "normalize": lambda x, w: torch.nn.functional.normalize(x, dim=-1),
}


def with_gradients(function, tensors, at, mesh=None):
    """The result and the gradients of the tensors, which are placed if there is a mesh."""
    leaves = [
        x.detach().clone() if mesh is None else placed(x, mesh, place) for x, place in zip(tensors, at, strict=True)
    ]
    out = function(*[x.requires_grad_() for x in leaves])
    given = cotangent(out)
    return [out, *torch.autograd.grad(out, leaves, given if mesh is None else placed(given, mesh, [R] * mesh.ndim))]


def check_norms():
    for name, function in NORMS.items():
        for dtype, tolerance in ((torch.float32, {}), (torch.bfloat16, dict(rtol=3e-2, atol=3e-2))):
            x, w = op.normal("openreg", dtype, (4, 4, 8), (8,))
            expected = with_gradients(lambda x, w, f=function: f(x, w) + 0 * w, (x, w), (R, R))
            for mesh in meshes():
                for x_at, w_at in itertools.product((0, 1, 2), (R, 0)):
                    at = [[x_at] * mesh.ndim, [w_at] * mesh.ndim]
                    if x_at != 2 and mesh.ndim == 2:
                        at[0] = [x_at, R]
                    found = with_gradients(lambda x, w, f=function: f(x, w) + 0 * w, (x, w), at, mesh)
                    for got, plain in zip(found, expected, strict=True):
                        assert_close(full(got), plain, **tolerance, msg=lambda text, n=name, at=at: f"{n} {at}: {text}")


def check_attention():
    """Heads and batches stay sharded, with every mask, and nothing is gathered; other shards give the same results."""
    from torch.distributed.tensor.debug import CommDebugMode

    size = dist.get_world_size()
    for heads, dtype in ((4, torch.float32), (8, torch.float32), (8, torch.bfloat16)):
        tolerance = {} if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
        tensors = op.normal("openreg", dtype, (4, heads, 8, 16), (4, 4, 8, 16), (4, 4, 8, 16))
        cases = [((4, heads, 8, 8), {}), (None, dict(is_causal=True))]
        if dtype == torch.float32:
            cases += [(None, dict(scale=0.3)), ((8, 8), {}), ((4, 1, 8, 8), {}), ((1, heads, 1, 8), {})]
        for shape, options in cases:
            mask = None if shape is None else op.normal("openreg", dtype, shape)[0]
            masked = [R] if shape is None else [R, *(dim for dim in range(len(shape)) if shape[dim] >= size)]
            options["enable_gqa"] = heads != 4
            expected = with_gradients(lambda *qkv, m=mask, o=options: attend(*qkv, m, **o), tensors, [R] * 3)
            for mesh, at in itertools.product(meshes(), (0, 1, 2, R)):
                if mesh.ndim == 2:
                    at = {0: [0, 1], 1: [1, R], 2: [0, 2], R: [R, R]}[at]  # noqa: PLW2901
                else:
                    at = [at]  # noqa: PLW2901
                for mask_at in masked if mesh.ndim == 1 else [R]:
                    m = None if mask is None else placed(mask, mesh, [mask_at, *[R] * (mesh.ndim - 1)])
                    with CommDebugMode() as traffic:
                        out = attend(*(placed(x, mesh, at) for x in tensors), m, **options)
                    if 2 not in at:
                        assert at_of(out) == tuple(at), (shape, options, at, out.placements)
                        assert mask_at is not R or not traffic.get_total_counts(), traffic.get_comm_counts()
                    found = with_gradients(lambda *qkv, m=m, o=options: attend(*qkv, m, **o), tensors, [at] * 3, mesh)
                    for got, plain in zip(found, expected, strict=True):
                        assert_close(full(got), plain, **tolerance)


def check_attention_that_does_not_divide():
    """Groups of heads are not split, and no device gets an empty part."""
    mesh, size = meshes()[0], dist.get_world_size()
    for batch, heads, grouped in (
        (1, 2 * size, 1),
        (size - 1, size + 1, size + 1),
        (2 * size - 1, 3, 3),
        (size + 1, 6, 3),
    ):
        tensors = op.normal("openreg", torch.float32, (batch, heads, 5, 8), *[(batch, grouped, 5, 8)] * 2)

        def call(q, k, v, gqa=heads != grouped):
            return attend(q, k, v, is_causal=True, enable_gqa=gqa)

        expected = with_gradients(call, tensors, [R] * 3)
        for at in (0, 1):
            places = [[at if x.shape[at] >= size else R] for x in tensors]
            for got, plain in zip(with_gradients(call, tensors, places, mesh), expected, strict=True):
                assert_close(full(got), plain)


def check_attention_of_a_plain_tensor():
    """It is rejected as for other operators, except where PyTorch takes it as replicated."""
    from torch.distributed.tensor.experimental import implicit_replication

    mesh = meshes()[0]
    q, mask = op.normal("openreg", torch.float32, (4, 4, 8, 8), (4, 4, 8, 8))
    sharded = placed(q, mesh, [1])
    with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
        attend(sharded, sharded, q)
    with implicit_replication():
        out = attend(sharded, sharded, sharded, mask)
    assert at_of(out) == (1,)
    assert_close(out.full_tensor(), attend(q, q, q, mask))


def check_compiled_attention():
    mesh = meshes()[0]
    tensors = op.normal("openreg", torch.float32, (4, 4, 8, 16), (4, 4, 8, 16), (4, 4, 8, 16))

    def call(*qkv):
        return attend(*qkv, is_causal=True).transpose(1, 2).reshape(4, 8, 64) * 2

    expected = with_gradients(call, tensors, [R] * 3)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for got, plain in zip(with_gradients(compiled, tensors, [[1]] * 3, mesh), expected, strict=True):
        assert_close(full(got), plain)


def check_context_parallel():
    """Keys and values travel around a ring, forward and backward."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.distributed.tensor.experimental._context_parallel import _attention

    mesh = meshes()[0]
    for causal, balanced in ((False, False), (True, False), (True, True)):
        _attention._cp_options.enable_load_balance = balanced
        tensors = op.normal("openreg", torch.float32, (2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8))

        def call(*qkv, causal=causal):
            return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=causal)

        expected = with_gradients(call, tensors, [R] * 3)
        weights = cotangent(expected[0])
        buffers = [x.detach().clone() for x in (*tensors, weights)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            leaves = [x.detach().requires_grad_() for x in buffers[:3]]
            out = call(*leaves)
            grads = torch.autograd.grad(out, leaves, buffers[3])
            found = context_parallel_unshard(mesh, [out.detach(), *grads], [2] * 4)
        for got, plain in zip(found, expected, strict=True):
            assert_close(got, plain.detach(), rtol=1e-4, atol=1e-5)
    mask = torch.ones(1, 1, 16 // dist.get_world_size(), 16, device="openreg")  # of this rank's queries
    with (
        context_parallel(mesh, buffers=buffers[:3], buffer_seq_dims=[2] * 3),
        pytest.raises(
            NotImplementedError, match="expected no attn_mask inside context_parallel.*; pass is_causal=True"
        ),
    ):
        torch.nn.functional.scaled_dot_product_attention(*buffers[:3], mask)


OF_PYTORCH = [
    check_norms, check_attention, check_attention_that_does_not_divide, check_attention_of_a_plain_tensor,
    check_context_parallel, check_compiled_attention,
]  # fmt: skip


@pytest.mark.parametrize("check", OF_PYTORCH, ids=lambda f: f.__name__.removeprefix("check_"))
def test_attention_and_norms(two, check):
    two.run(check)


def test_attention_on_four_devices(four):
    four.run(check_attention_that_does_not_divide)


def test_cudas_rules():
    """The operators that have a rule and a kernel for CUDA only: programs reach others here, which are tested above."""
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    ruled = {*propagator.op_strategy_funcs, *propagator.op_single_dim_strategy_funcs}
    keys = "CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    only = {
        operator.name()
        for operator in ruled
        if operator.namespace == "aten" and not any(has(operator.name(), k) for k in keys)
    }
    kinds = [f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
    assert only == {*kinds, *(f"{name}_backward" for name in kinds), "aten::_fused_rms_norm_backward"}


# ---- without processes ----

# Placements that would be right and that no rule has, because nobody places tensors so: the columns of v, and the keys of
# a backward.
UNUSED = {"attention": {("v", 3)}, "attention_backward": {("k", 2), ("v", 2), ("bias", 2), ("bias", 1)}}
MOST = 300  # placements of the arguments of one call


class Whole:
    """What a rule sees of a tensor that is not placed."""

    at = None

    def __init__(self, x):
        self.shape = x.shape

    def dim(self):
        return len(self.shape)


def ways(parts, whole):
    """How two parts of a result may be placed, given the whole one."""

    def same(x):
        return x.shape == whole.shape and torch.allclose(x.double(), whole.double(), equal_nan=True)

    found = [R] if all(map(same, parts)) else []
    for d in range(whole.dim()):
        rest = {(*x.shape[:d], *x.shape[d + 1 :]) for x in parts if x.dim() == whole.dim()}
        found += [d] if rest == {(*whole.shape[:d], *whole.shape[d + 1 :])} and same(torch.cat(parts, d)) else []
    summed = whole.is_floating_point() and whole.numel() and len({x.shape for x in parts}) == 1
    return [*found, S] if summed and same(sum(parts)) else found


@pytest.mark.parametrize("name", sorted(op.SHARDED.keys() - MUTABLE))
def test_a_rule_has_the_placements_that_are_right_and_no_other(name):
    """The operator on two parts, however its arguments are split: what comes out, as whole, sharded or summed tensors."""
    rule, overload = op.SHARDED[name], getattr(torch.ops.openreg, name).default
    schema, chosen, split = overload._schema.arguments, random.Random(0), 0
    torch.manual_seed(0)
    for sample in map(sample_of, op.SAMPLES[name]("cpu", torch.float64)):
        given = {argument.name: argument.default_value for argument in schema}
        given |= dict(zip(given, sample.args, strict=False)) | sample.kwargs
        names = [argument for argument, x in given.items() if isinstance(x, Tensor)]

        def run(tensors, given=given, overload=overload):
            out = overload(**given | tensors)
            return [out] if isinstance(out, Tensor) else list(out)

        whole = run({})
        seen = {key: Whole(x) if isinstance(x, Tensor) else x for key, x in given.items()} | {"shards": 2}
        options = {
            argument: [R, *(d for d, size in enumerate(given[argument].shape) if size > 1)] for argument in names
        }
        placements = [dict(zip(names, choice, strict=True)) for choice in itertools.product(*options.values())]
        of_rule = {}
        for inputs, outs in op.call_with(rule, seen):
            placement = {argument: inputs.get(argument) for argument in names}
            if placement in placements:
                of_rule[tuple(placement.values())] = outs
        if len(placements) > MOST:
            placements = chosen.sample(placements, MOST) + [dict(zip(names, choice, strict=True)) for choice in of_rule]
        for placement in placements:
            outs = of_rule.get(tuple(placement.values()))
            parts = [
                {
                    argument: given[argument].chunk(2, d)[rank].contiguous()
                    for argument, d in placement.items()
                    if d is not None
                }
                for rank in (0, 1)
            ]
            try:
                results = [run(part) for part in parts]
            except (RuntimeError, IndexError):
                assert outs is None, f"{name} cannot run with {placement}"
                continue
            right = [ways(list(halves), x) for halves, x in zip(zip(*results, strict=True), whole, strict=True)]
            if outs is not None:
                assert all(at in allowed for at, allowed in zip(outs, right, strict=True)), (
                    f"{placement} gives {right}, not {outs}"
                )
                split += any(at is not None for at in placement.values())
            elif all(right) and not all(R in allowed for allowed in right):
                sharded = {(argument, d) for argument, d in placement.items() if d is not None}
                assert sharded <= UNUSED.get(name, set()), f"no rule of {name} has {placement}, which gives {right}"
    assert split


def test_dtensor_is_not_imported():
    """Importing it takes a second."""
    code = "import sys, openreg_ops; assert not [x for x in sys.modules if x.startswith('torch.distributed.tensor')]"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
