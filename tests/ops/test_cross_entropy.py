"""cross_entropy and cross_entropy_backward."""

import itertools
import math

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, random
from torch.testing import assert_close

from openreg_ops import cross_entropy, cross_entropy_backward

OP = torch.ops.openreg.cross_entropy.default
BACKWARD = torch.ops.openreg.cross_entropy_backward.default
OPTIONS = [
    dict(),
    dict(reduction="sum", label_smoothing=0.1),
    dict(reduction="none", z_loss=0.01),
    dict(reduction="mean", label_smoothing=0.2, z_loss=0.1, ignore_index=1),
]


def reference(logits, target, *, z_loss=0.0, reduction="mean", ignore_index=-100, **options):
    """torch's own loss, which has its classes second, and the z-loss in words."""
    logsumexp = logits.logsumexp(-1)
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1).long(),
        reduction="none",
        ignore_index=ignore_index,
        **options,
    ).reshape(target.shape)
    valid = target != ignore_index
    loss = loss + z_loss * logsumexp**2 * valid
    if reduction == "none":
        return loss, logsumexp
    return (loss.sum() / valid.sum() if reduction == "mean" else loss.sum()), logsumexp


def targets(*shape, classes):
    return torch.randint(classes, shape).to(DEVICE)


def check(logits, target, scale=1, **options):
    kit.check_against(
        lambda x: cross_entropy(x, target, **options),
        lambda x: reference(x, target.cpu(), **options),
        logits,
        scale=scale,
    )


def test_by_hand():  # exp: 1 and 3; the second class has 3 of 4
    loss, logsumexp = cross_entropy(kit.tensor([[0.0, math.log(3)]]), kit.tensor([1]))
    assert_close(loss.cpu(), torch.tensor(math.log(4 / 3)))
    assert_close(logsumexp.cpu(), torch.tensor([math.log(4)]))
    loss, _ = cross_entropy(kit.tensor([0.0, math.log(3)]), kit.tensor(1), z_loss=0.5, label_smoothing=0.5)
    smooth = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert_close(loss.item(), smooth + 0.5 * math.log(4) ** 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (5, 123), (4, 2), (2, 3, 64), (3, 0, 7), (2, 5000)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_torch(shape, dtype):
    target = targets(*shape[:-1], classes=shape[-1])
    for options in OPTIONS:
        check(random(*shape, dtype=dtype), target, **options)
    loss, logsumexp = cross_entropy(random(*shape, dtype=dtype), target)
    assert loss.dtype == logsumexp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_ignored_rows():
    logits, target = random(5, 7), kit.tensor([3, -100, 0, -100, 6])
    for reduction in ("mean", "sum", "none"):
        check(logits, target, reduction=reduction, label_smoothing=0.1, z_loss=0.1)
    check(logits, torch.full((5,), -100, device=DEVICE), reduction="sum")
    # The loss of an ignored row gives exactly nothing, whatever the row holds.
    logits = kit.tensor([[1.0, math.inf], [math.nan, 1.0], [1.0, 2.0]]).requires_grad_()
    loss, _ = cross_entropy(logits, kit.tensor([-100, -100, 0]))
    loss.backward()
    assert_close(loss.cpu(), torch.tensor(math.log(1 + math.e)))
    assert logits.grad[:2].count_nonzero() == 0 and logits.grad[2].isfinite().all()


def test_infinite_logits():
    """-inf masks a class; a row of -inf, and +inf, give what torch gives."""
    inf = math.inf
    rows = [[0.0, -inf, 1.0], [-inf, -inf, -inf], [0.0, inf, 1.0], [0.0, math.nan, 1.0]]
    for row, dtype in itertools.product(rows, (torch.float32, torch.float64)):
        check(kit.tensor([row], dtype=dtype), kit.tensor([2]))
    loss, logsumexp = cross_entropy(kit.tensor([[0.0, -inf, 1.0]]), kit.tensor([1]))
    assert loss.item() == inf and logsumexp.isfinite().all()
    for device in (DEVICE, "cpu"):
        assert cross_entropy(torch.tensor([[0.0, inf, 1.0]], device=device), torch.tensor([2], device=device))[
            0
        ].isnan()


def test_large_logits_do_not_overflow():
    check(1e4 * random(4, 40), targets(4, classes=40))
    logits = torch.full((2, 30), 60000.0, dtype=torch.float16, device=DEVICE)
    assert_close(cross_entropy(logits, kit.tensor([0, 1]))[0].cpu(), torch.tensor(math.log(30)), rtol=0, atol=0.01)


def test_second_derivative_of_no_rows_is_zero():
    logits = random(2, 3, grad=True)
    loss, _ = cross_entropy(logits, kit.tensor([-100, -100]))
    grad = torch.autograd.grad(loss, logits, create_graph=True)[0]
    assert torch.autograd.grad(grad.sum(), logits)[0].count_nonzero() == 0


def test_keeps_no_softmax():
    """Forward allocates numbers for rows only, and backward no more than the gradient."""
    logits, target = random(256, 4096, grad=True), targets(256, classes=4096)
    torch.openreg.reset_peak_memory_stats()
    before = torch.openreg.memory_allocated()
    loss, _ = cross_entropy(logits, target)
    assert torch.openreg.max_memory_allocated() - before < 0.01 * logits.nbytes
    loss.backward()
    assert torch.openreg.max_memory_allocated() - before < 1.01 * logits.nbytes


def test_rejects_a_target_that_is_no_class():
    logits = random(2, 3, 5)
    with pytest.raises(IndexError, match=r"cross_entropy: expected targets in \[0, 5\), .* but got 5 in row 4"):
        cross_entropy(logits, kit.tensor([[0, 1, 2], [3, 5, 7]]))
    with pytest.raises(IndexError, match=r"ignore_index 9, but got -100 in row 0"):
        cross_entropy(logits[0], kit.tensor([-100, 1, 2]), ignore_index=9)
    with pytest.raises(IndexError, match=r"cross_entropy_backward: .* but got -1 in row 2"):
        cross_entropy_backward(random(), None, logits[0], kit.tensor([0, 1, -1]), random(3))
    check(logits[0], kit.tensor([9, 1, 9]), ignore_index=9)  # the device has survived


def test_rejects():
    logits, target = random(2, 3), kit.tensor([0, 1])
    kit.check_error(
        OP,
        logits,
        kit.tensor([0]),
        match="cross_entropy: expected target of shape [2], the same as logits without its last dimension, but got [1]",
    )
    kit.check_error(OP, logits, target.float(), match="expected target of int64 or int32, but got float32")
    kit.check_error(OP, logits.long(), target, match="expected logits of float32, float64, float16 or bfloat16")
    kit.check_error(OP, random(), target, match="cross_entropy: expected logits of at least one dimension")
    kit.check_error(OP, random(2, 0), target, match="expected logits of at least one class, but got shape [2, 0]")
    kit.check_error(lambda *x: OP(*x, reduction="avg"), logits, target, match='"mean", "sum" or "none", but got "avg"')
    kit.check_error(lambda *x: OP(*x, label_smoothing=1.5), logits, target, match="expected label_smoothing in [0, 1],")
    kit.check_error(
        BACKWARD,
        random(2),
        None,
        logits,
        target,
        random(2),
        match="cross_entropy_backward: expected grad_loss of shape [], the same as its cross_entropy output, but got [2]",
    )
    kit.check_error(BACKWARD, None, random(3), logits, target, random(2), match="expected grad_logsumexp of shape [2],")
    kit.check_error(BACKWARD, None, None, logits, target, random(3), match="expected logsumexp of shape [2]")
    kit.check_error(
        BACKWARD, None, None, logits.half(), target, random(2).half(), match="expected logsumexp of float32, the dtype"
    )
