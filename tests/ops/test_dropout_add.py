"""dropout_add and dropout_add_backward."""

import math

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, OTHER, random
from torch.testing import assert_close

from openreg_ops import dropout_add, dropout_add_backward

OP = torch.ops.openreg.dropout_add.default
BACKWARD = torch.ops.openreg.dropout_add_backward.default


def generator(seed=0, device=DEVICE):
    return torch.Generator(device=device).manual_seed(seed)


def reference(x, residual, mask, p):
    return residual + x * mask * (1 / (1 - p) if p < 1 else 0)


def with_seed(p, seed=0):
    """out as a function of x and residual, with the same mask each time."""
    return lambda x, residual: dropout_add(x, residual, p, generator=generator(seed, x.device))[0]


def test_by_hand():  # a kept element is doubled, a dropped one is 0
    x, residual = kit.tensor([1.0, 2.0, 3.0, 4.0]), kit.tensor([10.0, 20.0, 30.0, 40.0])
    out, mask = dropout_add(x, residual, 0.5)
    assert out.tolist() == [r + 2 * v * m for v, r, m in zip(x.tolist(), residual.tolist(), mask.tolist(), strict=True)]
    assert dropout_add_backward(x, kit.tensor([True, False, True, False]), 0.5).tolist() == [2.0, 0.0, 6.0, 0.0]


def philox(key, counter):
    """Philox4x32-10 as the paper writes it."""
    c, (k0, k1), low = list(counter), key, 2**32 - 1
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & low, (p0 >> 32) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c


def test_numbers_are_philox():
    """Random123's known answers first; then the mask of a seed, from the Mersenne Twister's first numbers."""
    assert philox((0, 0), (0,) * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    full = 2**32 - 1
    assert philox((full, full), (full,) * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]

    key, high = torch.empty(2, dtype=torch.int64).random_(generator=generator(7, "cpu")).tolist()
    n, p = 300, 0.3

    def kept(element, key, high):
        halves = [(number % 2**32, number >> 32) for number in (key, high)]
        return philox(halves[0], (element // 4, 0, *halves[1]))[element % 4] >= round(p * 2**32)

    # random_() leaves out the highest of the 64 bits, so that each is one of two.
    tops = [(a << 63, b << 63) for a in (0, 1) for b in (0, 1)]
    possible = [[kept(i, key + a, high + b) for i in range(n)] for a, b in tops]
    x = torch.ones(n, device=DEVICE)
    assert dropout_add(x, x, p, generator=generator(7))[1].tolist() in possible


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (128,), (5, 123), (2, 3, 257), (40, 1000)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_reference(shape, dtype):
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    for p in (0.0, 0.1, 0.75, 1.0):
        out, mask = dropout_add(x, residual, p, generator=generator())
        assert out.dtype == dtype and mask.dtype == torch.bool and mask.shape == shape
        plain = mask.cpu()
        kit.check_against(with_seed(p), lambda x, r, m=plain, p=p: reference(x, r, m, p), x, residual, scale=4)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.97])
def test_statistics_of_the_mask(p):
    """Five standard deviations, of: the mean, columns, rows, and the agreement of neighbours near and far."""
    rows, columns = 2000, 1000
    x = torch.zeros(rows, columns, device=DEVICE)
    dropped = ~dropout_add(x, x, p, generator=generator(1))[1].cpu()
    deviation = math.sqrt(p * (1 - p))
    assert abs(dropped.double().mean() - p) < 5 * deviation / math.sqrt(rows * columns)
    assert (dropped.double().mean(0) - p).abs().max() < 6 * deviation / math.sqrt(rows) + 1 / rows
    assert (dropped.double().mean(1) - p).abs().max() < 6 * deviation / math.sqrt(columns) + 1 / columns
    centred = dropped.flatten().double() - p
    for lag in (1, 2, 3, 4, 8, 32, 64, 128, 1000, 4096):  # words, counters, registers, blocks, rows further
        agreement = (centred[lag:] * centred[:-lag]).mean() / deviation**2
        assert abs(agreement) < 5 / math.sqrt(rows * columns - lag), lag
    other = ~dropout_add(x, x, p, generator=generator(2))[1].cpu()
    agreement = (centred * (other.flatten().double() - p)).mean() / deviation**2
    assert abs(agreement) < 5 / math.sqrt(rows * columns)


def test_a_seed_gives_one_mask():
    x = random(1000)

    def mask(**options):
        return dropout_add(x, x, 0.5, **options)[1]

    torch.manual_seed(3)
    first, second = mask(), mask()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(mask(), first) and torch.equal(mask(), second)
    assert torch.equal(mask(generator=generator(3)), first)
    given = generator(3)
    assert torch.equal(mask(generator=given), first) and torch.equal(mask(generator=given), second)
    assert torch.equal(dropout_add(x.double(), x.double(), 0.5, generator=generator(3))[1], first)
    assert not torch.equal(mask(generator=generator(4)), first)


def test_the_cpus_generator_does_not_move():
    before = torch.get_rng_state()
    dropout_add(random(10), random(10), 0.5)  # random() draws on the CPU
    moved = torch.get_rng_state()
    torch.set_rng_state(before)
    random(10), random(10)
    assert torch.equal(torch.get_rng_state(), moved)
    device = torch.openreg.get_rng_state()
    x = torch.ones(3, device=DEVICE)
    dropout_add(x, x, 0.5, generator=generator())
    assert torch.equal(torch.openreg.get_rng_state(), device)


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_derivatives(p):
    f64 = dict(dtype=torch.float64, grad=True)
    kit.check_gradients(with_seed(p), random(3, 50, **f64), random(3, 50, **f64))
    mask = torch.rand(3, 5, device=DEVICE) > 0.5
    kit.check_gradients(lambda grad: dropout_add_backward(grad, mask, p), random(3, 5, **f64))
    assert not dropout_add(random(3, **f64), random(3, **f64), p)[1].requires_grad


def test_residual_alone_needs_no_backward_operator():
    x, residual, grad = random(3, 5), random(3, 5, grad=True), random(3, 5)
    dropout_add(x, residual, 0.5)[0].backward(grad)
    assert torch.equal(residual.grad, grad)


def test_transforms_of_random_numbers():
    f64 = dict(dtype=torch.float64)
    x, residual = random(3, 40, **f64), random(3, 40, **f64)
    mask = dropout_add(x, residual, 0.3, generator=generator())[1]
    grad = torch.func.grad(lambda x: with_seed(0.3)(x, residual).sum())(x)
    assert_close(grad, mask.double() / 0.7)
    out, tangent = torch.func.jvp(with_seed(0.3), (x, residual), (residual, x))
    assert_close(out, reference(x, residual, mask, 0.3))
    assert_close(tangent, reference(residual, x, mask, 0.3))


def test_vmap_of_grad():
    x, residual = random(3, 100), random(3, 100)
    sample = torch.func.grad(lambda x, r: (dropout_add(x, r, 0.5)[0] * r).sum())
    grad = torch.vmap(sample, randomness="different")(x, residual)
    kept = grad != 0
    assert_close(grad, 2 * residual * kept)
    assert not torch.equal(kept[0], kept[1]) and 0.3 < kept.double().mean() < 0.7


def test_compiled_numbers_are_the_seeds():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, r: dropout_add(x, r, 0.5), backend="aot_eager", fullgraph=True)
    x, residual = random(6, 100, grad=True), random(6, 100)
    torch.manual_seed(5)
    out, mask = compiled(x, residual)
    out.sum().backward()
    torch.manual_seed(5)
    assert torch.equal(mask, dropout_add(x, residual, 0.5)[1])
    assert_close(x.grad, mask * 2.0)


def test_random_numbers_on_the_cpu():
    x, residual = random(100, 100, device="cpu"), random(100, 100, device="cpu")
    out, mask = dropout_add(x, residual, 0.2, generator=generator(0, "cpu"))
    assert_close(out, reference(x, residual, mask, 0.2))
    assert abs(mask.double().mean() - 0.8) < 0.02
    assert torch.equal(mask, dropout_add(x, residual, 0.2, generator=generator(0, "cpu"))[1])
    f64 = dict(dtype=torch.float64, grad=True, device="cpu")
    assert torch.autograd.gradgradcheck(with_seed(0.3), (random(3, 5, **f64), random(3, 5, **f64)))


def test_rejects():
    x, mask = random(2, 3), random(2, 3) > 0
    kit.check_error(OP, x.long(), x, 0.5, match="dropout_add: expected x of float32, float64, float16 or bfloat16, but")
    kit.check_error(OP, x, random(3), 0.5, match="expected residual of shape [2, 3], the same as x, but got [3]")
    for p, text in ((-0.1, "-0.1"), (1.5, "1.5"), (math.inf, "inf"), (math.nan, "nan")):
        kit.check_error(
            OP, x, x, p, match=f"dropout_add: expected p from 0 to 1, but got {text}; it is the probability"
        )
        kit.check_error(BACKWARD, x, mask, p, match=f"dropout_add_backward: expected p from 0 to 1, but got {text}")
    for where in ("cpu", OTHER):
        sentence = f"x is on {DEVICE} but generator is on {where}; make it with torch.Generator"
        with pytest.raises(RuntimeError, match=sentence):
            dropout_add(x, x, 0.5, generator=generator(0, where))
    with pytest.raises(RuntimeError, match=f"x is on cpu but generator is on {DEVICE}"):
        dropout_add(x.cpu(), x.cpu(), 0.5, generator=generator())
    kit.check_error(BACKWARD, x.long(), mask, 0.5, match="dropout_add_backward: expected grad_out of float32, float64")
    kit.check_error(BACKWARD, x, mask[0], 0.5, match="expected mask of shape [2, 3], the same as grad_out, but got [3]")
