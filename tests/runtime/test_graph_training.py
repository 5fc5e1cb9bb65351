"""Training with graphs: callables, optimizers and gradient scalers, equal to eager mode."""

import pytest
import torch
from graph_kit import DEVICE, warmed_up
from stream_kit import captured
from torch import nn
from torch.testing import assert_close

# ---- callables ----


def test_graphed_callables_need_autocast_without_its_cache():
    model, x = nn.Linear(6, 4).to(DEVICE), torch.zeros(5, 6, device=DEVICE)
    with torch.autocast("openreg", torch.bfloat16), pytest.raises(RuntimeError, match="autocast caching"):
        torch.openreg.make_graphed_callables(model, (x,))


class OfDict(nn.Module):
    """Takes a dictionary, of which it uses one entry."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        return {"output": self.inner(batch["x"])}


class Picks(nn.Module):
    """Has no parameters."""

    def forward(self, x):
        rows = torch.arange(x.size(0), device=x.device).view(-1, 1).expand(-1, x.size(1))
        return x.gather(0, rows) * 2


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_graphed_callables_of_every_kind(autocast):
    """Dictionaries, an unused input, modules without parameters, functions; evaluation runs without graphs."""

    def context():
        return torch.autocast("openreg", torch.bfloat16, enabled=autocast, cache_enabled=False)

    def models():
        torch.manual_seed(0)
        parts = [
            OfDict(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1))),
            nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.2)),
            Picks(),
        ]
        return [part.to(DEVICE) for part in parts], nn.functional.relu, nn.functional.mse_loss

    def sample(columns, grad=True):
        return torch.randn(5, columns, device=DEVICE, requires_grad=grad)

    def train(parts, relu, loss_of, unused, batches):
        parameters = [p for part in parts for p in part.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        torch.openreg.manual_seed(5)
        losses = []
        for x, target in batches:
            optimizer.zero_grad(set_to_none=True)
            with context():
                h = parts[0]({"x": x, "unused": unused})["output"]
                loss = loss_of(relu(parts[2](parts[1](h)).float()), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, parameters

    unused, batches = sample(3), [(sample(6, False), sample(4, False)) for _ in range(4)]
    dtype = torch.bfloat16 if autocast else torch.float32
    half = lambda t: t.detach().to(dtype).requires_grad_()  # noqa: E731
    parts, relu, loss_of = models()
    with context():
        *graphed, relu, loss_of = torch.openreg.make_graphed_callables(
            (*parts, relu, loss_of),
            (
                ({"x": sample(6, False), "unused": unused},),
                (half(sample(8)),),
                (half(sample(4)),),
                (sample(4),),
                (sample(4), sample(4, False)),
            ),
            allow_unused_input=True,
        )
    losses, parameters = train(graphed, relu, loss_of, unused, batches)
    eager = models()
    expected, ones = train(*eager, unused, batches)
    assert losses == expected
    assert_close(parameters, ones, rtol=0, atol=0)
    for mine, theirs in zip(graphed, eager[0], strict=True):
        mine.eval(), theirs.eval()
    x = torch.randn(3, 6, device=DEVICE)  # another size, which no graph takes
    mine, theirs = (parts[2](parts[1](parts[0]({"x": x})["output"])) for parts in (graphed, eager[0]))
    assert torch.equal(mine, theirs)


def test_graphed_callables_refuse_an_unused_input():
    x, unused = (torch.randn(5, n, device=DEVICE, requires_grad=True) for n in (6, 3))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.openreg.make_graphed_callables(OfDict(nn.Linear(6, 8).to(DEVICE)), ({"x": x, "unused": unused},))
    assert torch.ones(2, device=DEVICE).tolist() == [1.0] * 2


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("allow_unused_input", [False, True])
def test_graphed_callables_without_anything_to_differentiate(autocast, allow_unused_input):
    with torch.autocast("openreg", torch.bfloat16, enabled=autocast, cache_enabled=False):
        module = OfDict(Picks())
        graphed = torch.openreg.make_graphed_callables(
            module,
            ({"x": torch.zeros(5, 6, device=DEVICE), "unused": torch.zeros(5, 3, device=DEVICE)},),
            allow_unused_input=allow_unused_input,
        )
        for _ in range(3):
            x = torch.randn(5, 6, device=DEVICE, requires_grad=True)
            out = graphed({"x": x, "unused": torch.ones(5, 3, device=DEVICE)})["output"]
            assert torch.equal(out, x * 2)
    graphed.eval()
    assert torch.equal(graphed({"x": x[:2]})["output"], x[:2] * 2)


# ---- optimizers ----


OPTIMIZERS = ["Adam", "AdamW", "ASGD", "Adamax", "NAdam", "RAdam", "Adadelta", "RMSprop", "Rprop"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_group_of_parameters_must_be_capturable(name):
    parameters = [torch.ones(2, device=DEVICE, requires_grad=True) for _ in range(2)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    groups = [{"params": [p], "capturable": i == 0} for i, p in enumerate(parameters)]
    optimizer = getattr(torch.optim, name)(groups)
    optimizer.step()
    with pytest.raises(RuntimeError, match="expected capturable=True"):
        captured(optimizer.step)


@pytest.mark.parametrize("graph", [
    lambda: torch.openreg.graph(torch.openreg.Graph()),
    lambda: torch.accelerator.Graph(),
], ids=["openreg", "accelerator"])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=str)
def test_optimizers_that_are_not_capturable_say_so(graph, options):
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    x.grad = torch.ones_like(x)
    optimizer = torch.optim.Adam([x], lr=0.1, **options)
    optimizer.step()
    with pytest.raises(RuntimeError, match="Adam: expected capturable=True"), torch.openreg.stream(torch.openreg.Stream()), graph():  # fmt: skip
        optimizer.step()
    optimizer.step()
    assert optimizer.state[x]["step"] == 2


def test_an_optimizers_step_is_compiled():
    """The check of capturable=True is no graph break."""
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    x.grad = torch.ones_like(x)
    optimizer = torch.optim.Adam([x], lr=0.1)
    torch.compile(optimizer.step, backend="eager")()
    assert optimizer.state[x]["step"] == 1


# ---- scaled gradients ----


@pytest.mark.parametrize(
    ("name", "options"),
    [("Adam", {"capturable": True}), ("Adam", {"capturable": True, "amsgrad": True}), ("AdamW", {"capturable": True}),
     ("SGD", {"momentum": 0.9}), ("SGD", {})],
    ids=str,
)  # fmt: skip
def test_a_scaler_and_a_fused_optimizer_in_a_graph(name, options):
    """step() and update() of a GradScaler are captured: no value goes to the host, also when a gradient overflows."""
    start = [torch.randn(n, n, device=DEVICE) for n in (5, 6)]
    grads = [[torch.randn_like(p) for p in start] for _ in range(7)]
    grads[5][1][0, 0] = float("inf")

    def made(**more):
        parameters = [p.clone().requires_grad_() for p in start]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=128.0, growth_interval=2)
        scaler.scale(torch.ones(1, device=DEVICE))  # creates the scale
        return parameters, getattr(torch.optim, name)(parameters, lr=0.1, fused=True, **{**options, **more}), scaler

    def give(parameters, i):
        for p, grad in zip(parameters, grads[i], strict=True):
            p.grad.copy_(grad)

    theirs, other, scaler = made(**({"capturable": False} if "capturable" in options else {}))
    expected = []
    for i in range(7):
        give(theirs, i)
        scaler.step(other)
        scaler.update()
        expected.append([*(p.detach().clone() for p in theirs), scaler._scale.clone()])
    mine, optimizer, scaler = made()
    for i in range(3):
        give(mine, i)
        scaler.step(optimizer)
        scaler.update()

    def step():
        scaler.step(optimizer)
        scaler.update()

    graph, _ = captured(step)
    for i in range(3, 7):
        give(mine, i)
        graph.replay()
        assert_close([*(p.detach() for p in mine), scaler._scale], expected[i])


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
def test_the_scale_grows_and_shrinks_with_captured_gradients(name, implementation):
    """float16 overflows, which halves the scale and skips the step."""
    weight = torch.ones(100, device=DEVICE, requires_grad=True)
    optimizer = getattr(torch.optim, name)(
        [weight], lr=0.1, foreach=implementation == "foreach", fused=implementation == "fused"
    )
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    x = torch.ones(100, device=DEVICE)

    def backward():
        scaler.scale((weight.half() * x).sum()).backward()

    warmed_up(backward)
    optimizer.zero_grad(set_to_none=True)
    graph, _ = captured(backward)
    inf = float("inf")
    for value, scale, tracker, grad in ((5, 4, 1, 20), (20000, 2, 0, inf), (5, 2, 1, 10), (40000, 1, 0, inf)):
        x.fill_(value)
        before = weight.detach().clone()
        graph.replay()
        assert weight.grad.unique().tolist() == [grad]
        scaler.step(optimizer)
        scaler.update()
        assert (scaler._scale.item(), scaler._growth_tracker.item()) == (scale, tracker)
        assert torch.equal(weight, before) == (grad == inf)
