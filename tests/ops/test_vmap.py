"""torch.vmap with its rarer options: half types, batches of one and of expanded memory, chunks, and randomness."""

import itertools

import kit
import pytest
import torch
from kit import DEVICE, random
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_unflatten

from openreg_ops import dropout_add
from openreg_ops.meta import op

HALF = (torch.float16, torch.bfloat16)
# What a rule of these mutates, it mutates in the batch; kit's tests of them have that.
MUTABLE = {name for name in op.SAMPLES if getattr(torch.ops.openreg, name).default._schema.is_mutable}
SEEDED = {"dropout_add"}
REFUSING = {"nms"}  # the number of its results depends on the data
NAMES = sorted(op.SAMPLES.keys() - MUTABLE - SEEDED - REFUSING)


def check(function, batches, in_dims, tolerance, size, **options):
    """What vmap gives is what a loop gives, in dtype too."""
    rows = [
        [x if dim is None else x.select(dim, i) for x, dim in zip(batches, in_dims, strict=True)] for i in range(size)
    ]
    expected = [
        torch.stack(outs, options.get("out_dims", 0)) for outs in zip(*(function(*r) for r in rows), strict=True)
    ]
    actual = torch.vmap(function, in_dims, **options)(*batches)
    for one, loop in zip(actual, expected, strict=True):
        assert_close(one, loop, equal_nan=True, **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_batches(name, dtype=torch.bfloat16):
    """All arguments, one, or all but one are batched; also a batch of one, expanded, in chunks, to another dimension.

    test_every_operator.py has float64.
    """
    tolerance = {key: 2 * value for key, value in kit.TOLERANCE[dtype].items()}
    for sample in op.SAMPLES[name](DEVICE, dtype):
        function, tensors = kit.split(getattr(torch.ops.openreg, name).default, sample)
        if not function(*tensors):
            continue
        every = (0,) * len(tensors)
        check(function, [x.unsqueeze(0) for x in tensors], every, tolerance, 1)
        check(function, [x.expand(3, *x.shape) for x in tensors], every, tolerance, 3)
        batches = [torch.stack([x, x.roll(1), x.roll(2)]) for x in tensors]
        if name.startswith(("grouped_linear", "kv_cache")):  # whose numbers of rows, or slots, are not to be moved
            batches = [
                b if x.is_floating_point() else x.expand(3, *x.shape) for x, b in zip(tensors, batches, strict=True)
            ]
        check(function, batches, every, tolerance, 3, chunk_size=2)
        check(function, batches, every, tolerance, 3, out_dims=-1)
        for i, x in enumerate(tensors):
            one = [y.unsqueeze(0) if i == j else y for j, y in enumerate(tensors)]
            check(function, one, tuple(0 if i == j else None for j in range(len(tensors))), tolerance, 1)
            if len(tensors) > 1:
                others = [x if i == j else y for j, y in enumerate(batches)]
                check(function, others, tuple(None if i == j else 0 for j in range(len(tensors))), tolerance, 3)


# ---- what is None, and what is not asked for ----

# The options that choose results, and their values. A bias that is None has no gradient.
CHOSEN = {
    "attention_backward": [dict(bias_grad=asked) for asked in (False, True)],
    "grouped_linear_backward": [dict(output_mask=list(mask)) for mask in itertools.product((False, True), repeat=3)],
    "linear_cross_entropy_gradients": [
        dict(wanted=list(wanted), reduction=reduction)
        for wanted in itertools.product((False, True), repeat=3)
        for reduction in ("mean", "none")
    ],
    "cross_entropy_backward": [dict(reduction=reduction) for reduction in ("mean", "sum", "none")],
}


def optional(name):
    arguments = getattr(torch.ops.openreg, name).default._schema.arguments
    return [argument.name for argument in arguments if str(argument.type) == "Optional[Tensor]"]


def calls(name):
    """The arguments of the last sample that has all optional tensors, with each subset of them None, and each choice."""
    overload, names = getattr(torch.ops.openreg, name).default, optional(name)
    parameters = [argument.name for argument in overload._schema.arguments]
    samples = [dict(zip(parameters, sample, strict=False)) for sample in op.SAMPLES[name](DEVICE, torch.float32)]
    full = [sample for sample in samples if all(sample.get(given) is not None for given in names)][-1]
    for options in CHOSEN.get(name, [{}]):
        for absent in itertools.product((False, True), repeat=len(names)):
            given = full | options | {name: None for name, none in zip(names, absent, strict=True) if none}
            if options.get("reduction") == "none" and given.get("grad_loss") is not None:
                given["grad_loss"] = random(*given["target"].shape)
            wanted = given.get("bias_grad") or given.get("wanted", [False])[-1]
            if not (wanted and given["bias"] is None):  # which is refused
                yield {key: given[key] for key in parameters if key in given}


@pytest.mark.parametrize("name", sorted(CHOSEN.keys() | {name for name in NAMES if optional(name)}))
def test_each_choice_of_what_is_none(name):
    """Outside of vmap it is the reference on the CPU; under vmap, over all tensors and over each alone, it is a loop."""
    function = getattr(torch.ops.openreg, name).default
    tolerance = {key: 4 * value for key, value in kit.TOLERANCE[torch.float32].items()}
    for given in calls(name):
        values, spec = tree_flatten(given)
        where = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor)]

        def run(*tensors, values=values, spec=spec, where=where):
            filled = [*values]
            for i, x in zip(where, tensors, strict=True):
                filled[i] = x
            return tuple(kit.leaves(function(**tree_unflatten(filled, spec))))

        tensors = [values[i] for i in where]
        for here, there in zip(run(*tensors), run(*(x.cpu() for x in tensors)), strict=True):
            assert_close(here.cpu(), there, **tolerance)
        batches = [torch.stack([x, x.roll(1)]) if x.is_floating_point() else x.expand(2, *x.shape) for x in tensors]
        every = (0,) * len(tensors)
        alone = [tuple(0 if i == j else None for j in range(len(tensors))) for i in range(len(tensors))]
        for dims in (every, *alone):
            chosen = [x if d is None else b for x, b, d in zip(tensors, batches, dims, strict=True)]
            check(run, chosen, dims, tolerance, 2)


# ---- random numbers ----


def generator(seed=3):
    return torch.Generator(DEVICE).manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)], ids=str)
def test_dropout_add_with_a_generator(dtype, mapped):
    """With "same", each sample gets the numbers of one call with this generator; with "different", of a call with the batch."""
    full = [random(3, 1000, dtype=dtype) for _ in mapped]
    inputs = [x if dim == 0 else x[0] for x, dim in zip(full, mapped, strict=True)]
    rows = [x if dim == 0 else x[:1].expand(3, 1000) for x, dim in zip(full, mapped, strict=True)]

    def mapping(randomness, p=0.25):
        g = generator()
        out = torch.vmap(lambda x, r: dropout_add(x, r, p, generator=g), mapped, randomness=randomness)(*inputs)
        return *out, g.get_state()

    alone = generator()
    _, kept_alone = dropout_add(rows[0][0], rows[1][0], 0.25, generator=alone)
    out, mask, state = mapping("same")
    assert out.dtype == dtype and mask.dtype == torch.bool and torch.equal(state, alone.get_state())
    for i in range(3):
        assert torch.equal(mask[i], kept_alone)
        assert torch.equal(out[i], dropout_add(rows[0][i], rows[1][i], 0.25, generator=generator())[0])
    whole = generator()
    expected = dropout_add(*rows, 0.25, generator=whole)
    out, mask, state = mapping("different")
    assert torch.equal(mask, expected[1]) and torch.equal(out, expected[0])
    assert torch.equal(state, whole.get_state()) and not torch.equal(mask[0], mask[1])
    for p, kept in ((0.0, True), (1.0, False)):
        for randomness in ("same", "different"):
            assert (mapping(randomness, p)[1] == kept).all()


def constant():
    """What is not mapped: PyTorch has no "same" randomness of mapped probabilities."""
    return torch.full((100,), 0.5, device=DEVICE)


RANDOM = {
    "rand_like": lambda x, g: torch.rand_like(x),
    "randn_like": lambda x, g: torch.randn_like(x),
    "randint_like": lambda x, g: torch.randint_like(x, 1000),
    "rand": lambda x, g: torch.rand(x.shape, generator=g, device=DEVICE) + 0 * x,
    "randn": lambda x, g: torch.randn(x.shape, generator=g, device=DEVICE) + 0 * x,
    "randint": lambda x, g: torch.randint(1000, x.shape, generator=g, device=DEVICE) + 0 * x,
    "randperm": lambda x, g: torch.randperm(len(x), generator=g, device=DEVICE) + 0 * x,
    "bernoulli": lambda x, g: torch.bernoulli(constant(), generator=g) + 0 * x,
    "bernoulli_p": lambda x, g: torch.bernoulli(constant(), 0.5, generator=g) + 0 * x,
    "normal": lambda x, g: torch.normal(constant(), 1.0, generator=g) + 0 * x,
    "multinomial": lambda x, g: torch.multinomial(constant(), 100, True, generator=g) + 0 * x,
    "dropout": lambda x, g: torch.dropout(x.exp(), 0.5, True),
    "alpha_dropout": lambda x, g: torch.nn.functional.alpha_dropout(x, 0.5, True),
    "bernoulli_": lambda x, g: torch.empty_like(x).bernoulli_(0.5, generator=g),
    "normal_": lambda x, g: torch.empty_like(x).normal_(generator=g),
    "uniform_": lambda x, g: torch.empty_like(x).uniform_(generator=g),
    "exponential_": lambda x, g: torch.empty_like(x).exponential_(generator=g),
    "random_": lambda x, g: torch.empty_like(x).random_(1000, generator=g),
    "dropout_add": lambda x, g: dropout_add(x, x.sin(), 0.5, generator=g)[0],
    "dropout_add of no sample": lambda x, g: dropout_add(constant(), constant(), 0.5, generator=g)[0] + 0 * x,
}


@pytest.mark.parametrize("given", [False, True], ids=["default", "generator"])
@pytest.mark.parametrize("name", RANDOM)
def test_random_operators(name, given):
    """ "same" gives every sample what one call gives, "different" others, "error" refuses."""
    x = random(3, 100)
    x[1:] = x[0]

    def run(function):
        torch.manual_seed(11)
        g = generator() if given else None
        return function(lambda x: RANDOM[name](x, g))

    single = run(lambda f: f(x[0]))
    same = run(lambda f: torch.vmap(f, randomness="same")(x))
    assert same.dtype == single.dtype and same.device == x.device
    for row in same:
        assert torch.equal(row, single)
    different = run(lambda f: torch.vmap(f, randomness="different")(x))
    assert torch.equal(different, run(lambda f: torch.vmap(f, randomness="different")(x)))
    assert not torch.equal(different[0], different[1]) and not torch.equal(different[1], different[2])
    with pytest.raises(RuntimeError, match="randomness error mode"):
        run(lambda f: torch.vmap(f)(x))
