"""adamw_step_, and the optimizer on it, step by step with torch.optim.AdamW."""

import copy
import itertools
import math
import pickle

import kit
import pytest
import torch
from kit import DEVICE, FLOATS, LAYOUTS, NAME, OTHER, random
from torch.testing import assert_close

import openreg_ops
from openreg_ops import AdamW, adamw_step_

OP = torch.ops.openreg.adamw_step_.default
TENSOR_LR = torch.ops.openreg.adamw_step_.tensor_lr
OPTIONS = dict(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
SHAPES = [(3, 5), (), (0, 4), (70,), (2, 3, 4)]
HALF = (torch.float16, torch.bfloat16)


def lists_of(shapes=SHAPES, dtype=torch.float32, state=None, amsgrad=False, steps=0.0, device=DEVICE):
    """params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs and state_steps, after some steps."""
    state = state or dtype
    return (
        [random(*shape, dtype=dtype, device=device) for shape in shapes],
        [random(*shape, dtype=dtype, device=device) for shape in shapes],
        [random(*shape, dtype=state, device=device) for shape in shapes],
        [random(*shape, dtype=state, device=device).square() for shape in shapes],
        [random(*shape, dtype=state, device=device).square() for shape in shapes] if amsgrad else [],
        [torch.tensor(float(steps), device=device) for _ in shapes],
    )


def moved(lists, *to):
    return tuple([x.to(*to, copy=True) for x in tensors] for tensors in lists)


def reference(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **options):
    """The formula of the docstring, for the tensors of one parameter after another."""
    beta1, beta2 = options["beta1"], options["beta2"]
    for i, p in enumerate(params):
        g = -grads[i] if options["maximize"] else grads[i]
        state_steps[i] += 1
        t = state_steps[i].item()
        exp_avgs[i].copy_(beta1 * exp_avgs[i] + (1 - beta1) * g)
        exp_avg_sqs[i].copy_(beta2 * exp_avg_sqs[i] + (1 - beta2) * g**2)
        v = exp_avg_sqs[i]
        if options["amsgrad"]:
            v = max_exp_avg_sqs[i].copy_(torch.maximum(max_exp_avg_sqs[i], v))
        update = exp_avgs[i] / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + options["eps"])
        p.copy_(p * (1 - options["lr"] * options["weight_decay"]) - options["lr"] * update)


def check_step(lists, **changes):
    """One step on the lists gives the reference's result in float64, rounded; gradients and memory around them stay."""
    options = OPTIONS | changes
    wide = moved(lists, "cpu", torch.float64)
    grads = [g.clone() for g in lists[1]]
    adamw_step_(*lists, **options)
    reference(*wide, **options)
    assert_close(lists[1], grads, rtol=0, atol=0, equal_nan=True)
    for actual, expected in zip(lists, wide, strict=True):
        for x, y in zip(actual, expected, strict=True):
            assert_close(x.cpu().double(), y, equal_nan=True, **kit.TOLERANCE[x.dtype])


def test_by_hand():
    """A first step moves by lr against the sign of the gradient, after the decay of lr * weight_decay."""
    p, g = kit.tensor([1.0, 1.0, 1.0]), kit.tensor([0.5, -2.0, 0.0])
    m, v, step = torch.zeros_like(p), torch.zeros_like(p), kit.tensor(0.0)
    assert adamw_step_([p], [g], [m], [v], [], [step], **OPTIONS) is None
    assert_close(p.cpu(), torch.tensor([0.989, 1.009, 0.999]))
    assert_close(m.cpu(), torch.tensor([0.05, -0.2, 0.0]))
    assert_close(v.cpu(), torch.tensor([0.0025, 0.04, 0.0]))
    assert step.item() == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_matches_reference(dtype, amsgrad, maximize):
    for steps in (0, 7):
        check_step(lists_of(dtype=dtype, amsgrad=amsgrad, steps=steps), amsgrad=amsgrad, maximize=maximize)
        check_step(lists_of(dtype=dtype, amsgrad=amsgrad, steps=steps), amsgrad=amsgrad, weight_decay=0.0, eps=0.1)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_parameters_with_float32_state(dtype):
    for amsgrad in (False, True):
        check_step(lists_of(dtype=dtype, state=torch.float32, amsgrad=amsgrad, steps=3), amsgrad=amsgrad)


def test_many_tensors_of_all_sizes_and_dtypes():
    """More elements than a thread takes at once, tensors that threads share, empty ones between, several dtypes."""
    shapes = [(1,), (40_000,), (0,), (0,), (3,), (17, 4001), (), (50_000,), (0,)]
    mixed = [lists_of([shape], FLOATS[i % 4], steps=i, amsgrad=True) for i, shape in enumerate(shapes)]
    check_step(tuple([x for lists in mixed for x in lists[k]] for k in range(6)), amsgrad=True)
    adamw_step_([], [], [], [], [], [], **OPTIONS)
    check_step(lists_of([(0,), (0, 3)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_does_not_depend_on_threads_or_neighbours(dtype):
    shapes = [(33_333,), (7,), (50_001,)]
    start = lists_of(shapes, dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            lists = moved(start, DEVICE)
            adamw_step_(*lists, **OPTIONS)
            results.append(lists)
    finally:
        torch.set_num_threads(threads)
    alone = moved(start, DEVICE)
    for i in range(3):
        adamw_step_(*([tensors[i]] if tensors else [] for tensors in alone), **OPTIONS)
    for other in [*results[1:], alone]:
        for a, b in zip(sum(other, []), sum(results[0], []), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_layouts(layout):
    """Each tensor of a parameter may have its own strides; each is written through them."""
    for which in ({0}, {1}, {2, 3}, {4}, {0, 1, 2, 3, 4}):
        lists = lists_of([(6, 5, 12), (6, 5, 12), (7,), ()], amsgrad=True, steps=2)
        views = tuple([LAYOUTS[layout](x) if k in which else x for x in tensors] for k, tensors in enumerate(lists))
        strides = [[x.stride() for x in tensors] for tensors in views]
        check_step(views, amsgrad=True)
        assert strides == [[x.stride() for x in tensors] for tensors in views]
    expanded = lists_of([(3, 4)])
    check_step((expanded[0], [random(1, 1).expand(3, 4)], *expanded[2:]))


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_grad_scale_and_found_inf(where):
    start = lists_of(device=where, steps=1)
    scaled, plain, skipped = moved(start, where), moved(start, where), moved(start, where)
    for g in scaled[1]:
        g.mul_(8)
    zero, one, eight = (torch.tensor(x, device=where) for x in (0.0, 1.0, 8.0))
    adamw_step_(*plain, **OPTIONS)
    adamw_step_(*scaled, **OPTIONS, grad_scale=eight, found_inf=zero)
    adamw_step_(*skipped, **OPTIONS, grad_scale=eight, found_inf=one)
    for k in (0, 2, 3, 5):
        assert all(torch.equal(a, b) for a, b in zip(scaled[k], plain[k], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(skipped[k], start[k], strict=True))


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lr_may_be_a_tensor(where, dtype):
    start = lists_of(device=where, dtype=dtype)
    one, other = moved(start, where), moved(start, where)
    lr = torch.tensor(0.01, dtype=dtype, device=where)
    adamw_step_(*one, **OPTIONS | dict(lr=lr))
    adamw_step_(*other, **OPTIONS | dict(lr=lr.item()))
    assert all(torch.equal(a, b) for a, b in zip(sum(one, []), sum(other, []), strict=True))


def test_nan_and_infinite_gradients_stay_in_their_elements():
    lists = lists_of([(5,)], amsgrad=True)
    lists[1][0][1], lists[1][0][3] = math.nan, math.inf
    check_step(lists, amsgrad=True)
    assert lists[0][0].isfinite().tolist() == [True, False, True, False, True]


# ---- autograd, transforms, compilation, devices ----


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_derivatives_and_vmap_are_refused(where):
    """test_every_operator.py has the gradients of the other arguments."""
    lists, first = lists_of(device=where), random(3, 5, device=where)
    with pytest.raises(RuntimeError, match=r"adamw_step_: expected no gradient, but lr requires one"):
        adamw_step_(*lists, **OPTIONS | dict(lr=torch.tensor(0.1, device=where, requires_grad=True)))
    with pytest.raises(RuntimeError, match="adamw_step_: expected no vmap, because samples share the steps"):
        torch.vmap(lambda grad: adamw_step_(lists[0], [grad, *lists[1][1:]], *lists[2:], **OPTIONS))(
            torch.stack([first, first])
        )
    with pytest.raises(RuntimeError, match="adamw_step_: expected no vmap, because samples share the steps"):
        torch.vmap(lambda rate: adamw_step_(*lists, **OPTIONS | dict(lr=rate)))(torch.tensor([0.1, 0.2], device=where))


def test_rejects():
    shapes = [(3, 4), (5,)]

    def swapped(k, i, x, amsgrad=False):
        lists = lists_of(shapes, amsgrad=amsgrad)
        lists[k][i] = x
        return lists

    def refuse(lists, match, **changes):
        scalars = {name: x for name, x in changes.items() if isinstance(x, torch.Tensor)}
        fixed = OPTIONS | {name: x for name, x in changes.items() if name not in scalars}

        def call(*arguments):
            adamw_step_(*arguments[:6], **fixed | dict(zip(scalars, arguments[6:], strict=True)))

        kit.check_error(call, *lists, *scalars.values(), match=match)

    p, g, m, v, _, s = lists_of(shapes)
    lists = (p, g, m, v, [], s)
    refuse((p, g[:1], m, v, [], s), "adamw_step_: expected 2 grads, one for each of params, but got 1")
    refuse((p, g, m[:1], v, [], s), "adamw_step_: expected 2 exp_avgs, one for each of params, but got 1")
    refuse((p, g, m, [*v, *v], [], s), "adamw_step_: expected 2 exp_avg_sqs, one for each of params, but got 4")
    refuse((p, g, m, v, [], []), "adamw_step_: expected 2 state_steps, one for each of params, but got 0")
    refuse((p, g, m, v, v, s), "adamw_step_: expected no max_exp_avg_sqs without amsgrad, but got 2")
    refuse(lists, "adamw_step_: expected 2 max_exp_avg_sqs, one for each of params, but got 0", amsgrad=True)
    refuse(([], [], [], [], [], s), "adamw_step_: expected 0 state_steps, one for each of params, but got 2")
    refuse(swapped(0, 1, torch.ones(5, dtype=torch.int64, device=DEVICE)), "expected params[1] of float32, float64")
    refuse(swapped(1, 0, random(4, 3)), "expected grads[0] of shape [3, 4], the same as params[0], but got [4, 3]")
    refuse(swapped(2, 1, random(4)), "expected exp_avgs[1] of shape [5], the same as params[1], but got [4]")
    half = lists_of(shapes, torch.bfloat16)
    half[2][0] = half[2][0].double()
    refuse(half, "expected exp_avgs[0] of bfloat16, the dtype of params[0] (or float32), but got float64; convert one")
    refuse(swapped(3, 1, random(5, 1)), "expected exp_avg_sqs[1] of shape [5], the same as params[1], but got [5, 1]")
    refuse(swapped(4, 0, random(4, 4), True), "expected max_exp_avg_sqs[0] of shape [3, 4]", amsgrad=True)
    refuse(swapped(5, 0, kit.tensor([1.0])), "expected state_steps[0] of float32 and no dimension, but got float32 of")
    refuse(
        swapped(5, 1, kit.tensor(1)), "expected state_steps[1] of float32 and no dimension, but got int64 of shape []"
    )
    refuse(lists, "expected grad_scale of float32 and no dimension, but got float64", grad_scale=random().double())
    refuse(lists, "expected found_inf of float32 and no dimension, but got float32 of shape [1]", found_inf=random(1))
    refuse(lists, f"params[0] is on {DEVICE} but found_inf is on cpu", found_inf=random().cpu())
    refuse(lists, f"params[0] is on {DEVICE} but lr is on cpu", lr=random().cpu())
    refuse(lists, "expected lr of float32 or float64 and no dimension, but got float16 of shape []", lr=random().half())


def test_rejects_shared_steps_and_takes_shared_gradients():
    p, g, m, v, _, s = lists_of([(6,), (6,)])
    before = [x.clone() for x in p]
    with pytest.raises(
        RuntimeError,
        match=r"adamw_step_: state_steps\[[01]\] and state_steps\[[01]\] share memory, and both are written to",
    ):
        adamw_step_(p, g, m, v, [], [s[0], s[0]], **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(p, before, strict=True))
    adamw_step_(p, [g[0], g[0]], m, v, [], s, **OPTIONS)  # gradients are only read


WRITTEN = {"params": 0, "exp_avgs": 2, "exp_avg_sqs": 3, "max_exp_avg_sqs": 4}
AMSGRAD = OPTIONS | dict(amsgrad=True)


@pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(WRITTEN, 2)), ids=str)
def test_each_two_tensors_that_are_written_to_are_checked(pair):
    """Also of one list. Where one begins at the other's end, nothing is wrong. And each one alone, against itself."""
    for places in [(0, 1)] if pair[0] == pair[1] else itertools.product((0, 1), repeat=2):
        names = [rf"{name}\[{place}\]" for name, place in zip(pair, places, strict=True)]
        for apart in (5, 6):
            lists, whole = lists_of([(6,), (6,)], amsgrad=True), random(20).abs()
            for start, name, place in zip((2, 2 + apart), pair, places, strict=True):
                lists[WRITTEN[name]][place] = whole[start : start + 6]
            if apart == 6:
                adamw_step_(*lists, **AMSGRAD)
                continue
            with pytest.raises(RuntimeError, match=f"({' and '.join(names)}|{' and '.join(names[::-1])}) share memory"):
                adamw_step_(*lists, **AMSGRAD)
    lists = lists_of([(6,), (6,)], amsgrad=True)
    lists[WRITTEN[pair[0]]][1] = random(1).abs().expand(6)
    with pytest.raises(RuntimeError, match=rf"{pair[0]}\[1\] is expanded or overlaps itself"):
        adamw_step_(*lists, **AMSGRAD)


def test_rejects_shared_memory_around_others():
    """Between the first element of params[0] and its last one, params[1] lies apart from it."""
    whole = random(20)
    params = [whole[0:20:2], whole[1:4:2], whole[12:20:4]]
    _, *state = lists_of([p.shape for p in params])
    with pytest.raises(RuntimeError, match=r"adamw_step_: params\[0\] and params\[2\] share memory"):
        adamw_step_(params, *state, **OPTIONS)


# ---- the optimizer ----


def model(device=DEVICE, dtype=torch.float32):
    torch.manual_seed(1)
    layers = torch.nn.Linear(6, 9), torch.nn.ReLU(), torch.nn.LayerNorm(9), torch.nn.Linear(9, 1)
    return torch.nn.Sequential(*layers).to(device, dtype)


def train(net, optimizer, steps=4, first=0):
    """Losses and parameters after some steps on numbers that depend on the step alone."""
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        x = random(8, 6, dtype=net[0].weight.dtype, device=net[0].weight.device)
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(lr=0.1, betas=(0.5, 0.8), eps=1e-3, weight_decay=0.3),
        dict(amsgrad=True),
        dict(maximize=True, weight_decay=0),
        dict(lr=torch.tensor(0.01, dtype=torch.float64)),
        dict(fused=True, foreach=False, capturable=True),
    ],
    ids=lambda o: ",".join(o) or "defaults",
)
@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_optimizer_steps_as_torch(options, where):
    ours, theirs = model(where, torch.float64), model(where, torch.float64)
    plain = {k: v for k, v in options.items() if k not in ("fused", "foreach", "capturable")}
    actual = train(ours, AdamW(ours.parameters(), **options))
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), foreach=False, **plain))
    assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_optimizer_steps_as_torch_fused(dtype):
    ours, theirs = model(dtype=dtype), model("cpu", dtype)
    actual = train(ours, AdamW(ours.parameters(), lr=0.02))
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.02, fused=True))
    assert_close([x.cpu() for x in sum(actual, [])], sum(expected, []), **kit.TOLERANCE[dtype])


def test_one_call_a_device():
    """All groups' tensors of one device and one group are one operator call; a second device has its own."""
    calls = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (OP, TENSOR_LR):
                calls.append([str(p.device) for p in args[0]])
            return function(*args, **(kwargs or {}))

    params = [random(3, device=d, grad=True) for d in (DEVICE, OTHER, DEVICE, "cpu")]
    expected = [p.detach().clone().cpu().requires_grad_() for p in params]
    pairs = AdamW(params), torch.optim.AdamW(expected)
    for optimizer, given in zip(pairs, (params, expected), strict=True):
        for i, p in enumerate(given):
            p.grad = torch.full_like(p, i - 1.5)
        with Spy():
            optimizer.step()
    assert calls == [[DEVICE, DEVICE], [OTHER], ["cpu"]]
    assert_close([p.detach().cpu() for p in params], [p.detach() for p in expected])


def test_param_groups_closure_and_missing_gradients():
    def run(kind, where):
        a, b, c = (torch.full((3,), i, dtype=torch.float64, device=where, requires_grad=True) for i in (1, 2, 3))
        optimizer = kind([dict(params=[a], lr=0.1, weight_decay=0.5), dict(params=[b], amsgrad=True)], lr=0.2)
        optimizer.add_param_group(dict(params=[c], lr=0.3))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def closure():
            optimizer.zero_grad()
            loss = (a.square() * b).sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(2)]
        schedule.step()
        losses.append(optimizer.step(closure).item())
        assert c.grad is None and c not in optimizer.state
        return losses, [x.detach().cpu() for x in (a, b, c)]

    assert_close(run(AdamW, DEVICE), run(torch.optim.AdamW, "cpu"))


@pytest.mark.parametrize("first", ["ours", "torch", "torch on the CPU"])
@pytest.mark.parametrize("second", ["ours", "torch"])
def test_state_dicts_are_interchangeable(first, second):
    """Half of the steps with one optimizer, its state saved and loaded, half with another; all with torch's."""

    def make(name, net):
        kind = AdamW if name == "ours" else torch.optim.AdamW
        return kind(net.parameters(), lr=0.03, amsgrad=True)

    net = model("cpu" if "CPU" in first else DEVICE)
    optimizer = make(first, net)
    train(net, optimizer, 3)
    saved = pickle.loads(pickle.dumps((net.state_dict(), optimizer.state_dict())))
    other = model()
    other.load_state_dict(saved[0])
    loaded = make(second, other)
    loaded.load_state_dict(saved[1])
    if second == "ours":
        assert all(s["step"].device == p.device for p, s in loaded.state.items())
    actual = train(other, loaded, 3, first=3)
    plain = model()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.03, amsgrad=True), 6)
    assert_close([x.cpu() for x in sum(actual, [])], [x.cpu() for x in (*expected[0][3:], *expected[1])])


def test_copies():
    """deepcopy and pickle keep a step's count and options."""
    net = model()
    optimizer = AdamW(net.parameters(), lr=0.1, state_dtype=torch.float32)
    train(net, optimizer, 2)
    pair = copy.deepcopy((net, optimizer))
    assert pair[1].param_groups[0]["state_dtype"] == torch.float32
    assert_close(train(net, optimizer, 2, first=2), train(*pair, 2, first=2))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_state_dtype(dtype):
    """Moments in float32 stay so through saving and loading; small second moments are not lost to the half type."""
    net = model(dtype=dtype)
    optimizer = AdamW(net.parameters(), amsgrad=True, state_dtype=torch.float32)
    train(net, optimizer, 3)
    moments = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    for state in optimizer.state.values():
        assert {k for k, x in state.items() if x.dtype == torch.float32} == {"step", *moments} == set(state)
    again = AdamW(net.parameters(), amsgrad=True, state_dtype=torch.float32)
    again.load_state_dict(optimizer.state_dict())
    for p, state in optimizer.state.items():
        assert all(torch.equal(again.state[p][k], x) and again.state[p][k].dtype == x.dtype for k, x in state.items())
    p = torch.zeros(1, dtype=dtype, device=DEVICE, requires_grad=True)
    optimizer = AdamW([p], lr=1.0, state_dtype=torch.float32)
    p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    assert_close(optimizer.state[p]["exp_avg_sq"].item(), 1e-9, rtol=1e-2, atol=0)
    assert_close(p.item(), -1.0, rtol=1e-2, atol=0)
    wide = torch.zeros(1, dtype=torch.float64, device=DEVICE, requires_grad=True)
    optimizer = AdamW([wide], state_dtype=torch.float32)
    wide.grad = torch.ones_like(wide)
    optimizer.step()
    assert optimizer.state[wide]["exp_avg"].dtype == torch.float64


@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=str)
def test_options_that_a_saved_state_lacks_stay(state_dtype):
    """A state of torch.optim.AdamW has no state_dtype: the optimizer that loads it keeps its own."""
    net = model(dtype=torch.bfloat16)
    saved = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, saved, 1)
    optimizer = AdamW(net.parameters(), state_dtype=state_dtype)
    optimizer.load_state_dict(saved.state_dict())
    assert [group["state_dtype"] for group in optimizer.param_groups] == [state_dtype]
    for steps in (0, 1):
        train(net, optimizer, steps, first=1)
        for p, state in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert state[name].dtype == (state_dtype or torch.bfloat16)
                assert steps or torch.equal(state[name], saved.state[p][name].to(state[name].dtype))


def test_hooks_of_loading():
    """What a hook before loading makes of the dict is what is loaded, and one after loading has the last word."""
    p = torch.ones(2, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    optimizer = AdamW([p], state_dtype=torch.float32)
    p.grad = torch.ones_like(p)
    optimizer.step()

    def halve(_optimizer, state_dict):
        state = {key: {**entry, "exp_avg": entry["exp_avg"] / 3} for key, entry in state_dict["state"].items()}
        return {**state_dict, "state": state}

    def fill(optimizer):
        optimizer.state[p]["exp_avg_sq"].fill_(7)

    again = AdamW([p], state_dtype=torch.float32)
    again.register_load_state_dict_pre_hook(halve)
    again.register_load_state_dict_post_hook(fill)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[p]["exp_avg"], optimizer.state[p]["exp_avg"] / 3)
    assert again.state[p]["exp_avg_sq"].tolist() == [7, 7] and again.state[p]["exp_avg_sq"].dtype == torch.float32
    assert len(again._optimizer_load_state_dict_pre_hooks) == 1
    saved = optimizer.state_dict()
    saved["state"][0]["skipped"] = 3  # a user's own
    again.load_state_dict(saved)
    assert again.state[p]["skipped"] == 3


def test_grad_scaler():
    """With a GradScaler the gradients stay scaled, and a step that overflows is left out."""
    results = []
    for kind, where in ((AdamW, NAME), (torch.optim.AdamW, "cpu")):
        p = torch.tensor([1.0, -2.0], device=where, requires_grad=True)
        optimizer = kind([p], lr=0.1)
        scaler = torch.amp.GradScaler(where, init_scale=64.0, growth_interval=2)
        for factor in (1.0, math.inf, 2.0, 3.0):
            optimizer.zero_grad()
            scaler.scale((p.square() * factor).sum()).backward()
            if factor == 2.0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([p], 1.0)
            scaler.step(optimizer)
            scaler.update()
            results.append((p.detach().cpu().clone(), scaler.get_scale()))
        assert optimizer.state[p]["step"].item() == 3
    assert_close(results[:4], results[4:])


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
def test_compiled_optimizer(where):
    def run(compiled):
        torch._dynamo.reset()
        net = model(where)
        optimizer = AdamW(net.parameters(), lr=torch.tensor(0.01), amsgrad=True)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for i in range(3):
            torch.manual_seed(i)
            optimizer.zero_grad()
            net(random(8, 6, device=where)).square().mean().backward()
            step()
        return [p.detach() for p in net.parameters()], [s["step"].item() for s in optimizer.state.values()]

    actual, expected = run(True), run(False)
    assert actual[1] == [3.0] * 6
    assert_close(actual, expected)


def test_optimizer_refuses():
    p = random(2, grad=True)
    for options, match in [
        (dict(foreach=True), "AdamW: expected foreach of None or False, but got True; use torch.optim.AdamW for that"),
        (dict(fused=False), "AdamW: expected fused of None or True, but got False"),
        (dict(differentiable=True), "AdamW: expected differentiable of False, but got True"),
        (
            dict(state_dtype=torch.float64),
            "AdamW: expected state_dtype of None or torch.float32, but got torch.float64",
        ),
        (dict(lr=-1.0), "Invalid learning rate"),
        (dict(betas=(1.0, 0.9)), "Invalid beta parameter at index 0"),
    ]:
        with pytest.raises(ValueError, match=match):
            AdamW([p], **options)
    assert issubclass(AdamW, torch.optim.Optimizer) and openreg_ops.optim.AdamW is AdamW
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), device=DEVICE)
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW([p]).step()
