"""`compare` on compiled programs: right ones have no differences, and a wrong graph is named."""

import contextlib
import gc

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from openreg_tools.compare import compare
from openreg_tools.compare.graphs import Graphs, _Call, _Graph
from openreg_tools.core.place import Place

DEVICE = "openreg"

pytestmark = pytest.mark.compiles


def compiled(function, **options):
    return torch.compile(function, **{"backend": "aot_eager", **options})


# ---- right programs ----


def trains(model, x):
    y = torch.compile(lambda x: model(x).sin() * 2)(x)
    y.register_hook(lambda grad: grad * 3)
    y.sum().backward(retain_graph=True)
    y.sum().backward()


def goes_backward_separately(model, x):
    a, b = compiled(lambda x: (model(x), model(x) * 2))(x)
    a.sum().backward(retain_graph=True)
    b.sum().backward()


def is_in_inference_mode(model, x):
    with torch.inference_mode():
        compiled(lambda x: x.clone().add_(1) + model(x))(torch.randn(4, 8, device=DEVICE))


def is_in_autocast(model, x):
    def forward(x):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return model(x).float().tanh()

    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = torch.compile(lambda x: nn.functional.layer_norm(model(x), (8,)))(x).float().square().mean()
    (loss + torch.compile(forward)(x).sum()).backward()


def returns_views(model, x):
    y = x.clone().requires_grad_()
    a, b, c = compiled(lambda x: (model(x), x[0], x))(y)
    (a.sum() + b.sum() + c.sum()).backward()


def computes_with_complex_numbers(model, x):
    y = torch.complex(x, x)
    compiled(lambda a, b: a * 2 + b)(y.conj(), y.conj().imag)
    compiled(lambda x: x * 2)(torch.ones(8, dtype=torch.complex64, device=DEVICE).chalf())


def has_nested_tensors(model, x):
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, device=DEVICE)
    assert compiled(lambda x: x * 2)(jagged).values().sum() == 36


def has_saved_tensor_hooks(model, x):
    def pack(saved):
        assert saved.device.type == DEVICE
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = compiled(lambda x: model(x).sin())(x).sum()
    loss.backward()


def is_checkpointed(model, x):
    torch.utils.checkpoint.checkpoint(compiled(model), x, use_reentrant=False).sum().backward()


def writes_in_the_graph(model, x):
    compiled(lambda y: y.mul_(2).sin())(model(x)).sum().backward()


def branches(model, x):
    compiled(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)))(x)


def compiles_the_backward(model, x):
    with torch._dynamo.compiled_autograd._enable(compiled):
        model(x).sum().backward()


def goes_backward_inside(model, x):
    @compiled
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    step(x)


def leaves_memory_uninitialized(model, x):
    def function(x):
        padded = torch.empty(6, 8, device=DEVICE)
        padded[:4] = x
        return x * 2, torch.empty_like(x), x.new_empty(6, 8), padded

    junk = [torch.full((6, 8), each, device=DEVICE) for each in (7.0, 8.0, 9.0)]
    del junk
    compiled(function)(x)


def expects_an_error(model, x):
    compiled(model)(x)
    with contextlib.suppress(torch.linalg.LinAlgError):
        compiled(torch.linalg.cholesky)(-torch.eye(3, device=DEVICE))


def draws_numbers(model, x):
    def function(x):
        return nn.functional.dropout(x, 0.5) + torch.rand_like(x) * torch.randn(8, device=x.device)

    before = torch.openreg.get_rng_state()
    torch.compile(function)(x)
    assert not torch.equal(before, torch.openreg.get_rng_state())


def has_gradients_that_are_rounding(model, x):
    attention, norm = nn.MultiheadAttention(16, 2, batch_first=True).to(DEVICE), nn.LayerNorm(16).to(DEVICE)
    x = torch.randn(2, 5, 16, device=DEVICE)
    torch.compile(lambda x: norm(x + attention(x, x, x, need_weights=False)[0]))(x).square().mean().backward()


def has_masks_that_are_rounding(model, x):
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), model).to(DEVICE)
    torch.compile(layers)(torch.ones(4, 8, device=DEVICE)).square().sum().backward()


def rounds_equal_probabilities(model, x):
    def function(x):
        probabilities = (x * 0).softmax(-1)
        return probabilities - probabilities.mean(-1, keepdim=True)

    torch.compile(function)(torch.randn(16, 1000, device=DEVICE))


def is_of_numbers_alone(model, x):
    compiled(lambda n: (torch.arange(n, device=DEVICE) * 2.0, n + 1), dynamic=True)(4)


def writes_a_large_cache(model, x):
    def function(x, cache):
        cache.copy_(x)
        return x.sum()

    for _ in range(2):
        compiled(function)(torch.ones(512, 1024, device=DEVICE), torch.zeros(512, 1024, device=DEVICE))


RIGHT = (trains, goes_backward_separately, is_in_inference_mode, is_in_autocast, returns_views, computes_with_complex_numbers,
         has_nested_tensors, has_saved_tensor_hooks, is_checkpointed, writes_in_the_graph, branches, compiles_the_backward,
         goes_backward_inside, leaves_memory_uninitialized, expects_an_error, draws_numbers, has_gradients_that_are_rounding,
         has_masks_that_are_rounding, rounds_equal_probabilities, is_of_numbers_alone, writes_a_large_cache)  # fmt: skip


def graphs_of(result):
    return [name for name in result._rows if "compiled graph" in name]


@pytest.mark.parametrize("program", RIGHT)
def test_right_programs(program):
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8).to(DEVICE), torch.randn(4, 8, device=DEVICE)
    with compare(device=DEVICE) as result:
        program(model, x)
    assert not result.differences and not result.skipped and not result.notes and graphs_of(result), result


def test_a_compiled_optimizer_steps_once():
    """The reference must not write to the program's own state."""

    def train():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(8, 8).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step = compiled(optimizer.step)
        for _ in range(3):
            model(torch.ones(4, 8, device=DEVICE)).sum().backward()
            step()
            optimizer.zero_grad()
        return [state["step"].item() for state in optimizer.state.values()], model.weight.sum().item()

    plain = train()
    with compare(device=DEVICE) as result:
        assert train() == plain
    assert plain[0] == [3, 3] and not result.differences and not result.skipped and graphs_of(result)


def test_compiled_training_holds_no_memory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(DEVICE)
    function, used = compiled(model), []
    with compare(device=DEVICE) as result:
        for step in range(6):
            loss = function(torch.randn(128, 64, device=DEVICE)).sum()
            if step % 3:  # and a graph whose backward never runs
                loss.backward()
            del loss
            gc.collect()
            used.append(torch.openreg.memory_allocated())
    assert used[2] == used[-1] and not result.differences


# ---- wrong graphs ----


def wrong_backend(change, wrong_in="forward"):
    """A backend of which the forward or the backward changes results and arguments."""

    def compiler(phase):
        def compile_graph(graph, inputs):
            def run(*args):
                out = graph(*args)
                return change([*out], args) if phase == wrong_in else out

            return make_boxed_func(run)

        return compile_graph

    forward = compiler("forward")
    return aot_autograd(fw_compiler=forward, bw_compiler=compiler("backward"), inference_compiler=forward)


def adds_one(out, args):
    return [out[0] + 1, *out[1:]]


def writes_its_input(out, args):
    args[-1].detach().add_(1)
    return out


@pytest.mark.parametrize(
    ("function", "change", "what"),
    [
        (lambda x: nn.functional.dropout(x, 0.5) * 2, adds_one, "result 0"),
        (lambda x: torch.arange(4, device=DEVICE) * 2.0, adds_one, "result 0"),
        (lambda x: (x.shape[0] + 1, x * 2), adds_one, "result 0"),
        (lambda x: (x * 2, x * 3), lambda out, args: [out[0], out[1] + 1], "result 1"),
        (lambda x: x.argmax(), adds_one, "result 0"),
        (lambda x: x > 0, lambda out, args: [~out[0]], "result 0"),
        (lambda x: x * 2, lambda out, args: [None], "result 0"),
        (lambda x: x * 2, lambda out, args: [out[0][None]], "result 0"),
        (lambda x: x * 2, lambda out, args: [out[0].double()], "result 0"),
        (lambda x: (x * 2, x * 3), lambda out, args: out[:1], "results"),
        (lambda x: x * 2, writes_its_input, "argument 1"),
        (lambda x: torch.empty_like(x).copy_(x), adds_one, "result 0"),
    ],
    ids=["random", "no device inputs", "an integer", "the second", "indices", "a mask", "None", "shape", "dtype", "fewer",
         "clobbers", "empty"],
)  # fmt: skip
def test_what_a_wrong_graph_does(function, change, what):
    x = torch.randn(4, 8, device=DEVICE)
    torch._dynamo.mark_dynamic(x, 0)
    with compare(device=DEVICE) as result, contextlib.suppress(Exception):  # what follows in PyTorch may raise
        torch.compile(function, backend=wrong_backend(change))(x)
    assert result.first.operator.startswith("compiled graph 0 (") and result.first.what == what, result


@pytest.mark.parametrize("wrong_in", ["forward", "backward"])
def test_a_wrong_graph_is_named(wrong_in):
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with compare(device=DEVICE) as result:
        compiled(lambda x: x * 2)(torch.ones(3, device=DEVICE))
        torch.compile(lambda x: x.sin(), backend=wrong_backend(adds_one, wrong_in))(x).sum().backward()
    first = result.first
    backward = wrong_in == "backward"
    assert first.operator.startswith("backward of compiled graph 1 (" if backward else "compiled graph 1 (")
    assert first.what == ("gradient 0" if backward else "result 0") and first.place.phase == wrong_in
    assert "test_compare_graphs.py" in first.place.line() and first.inputs[0].startswith("float32[3]")


def test_a_backward_that_writes_to_a_weight():
    weight = torch.randn(8, 8, device=DEVICE, requires_grad=True)

    def writes_the_weight(out, args):
        next(each for each in args if each.shape == (8, 8)).detach().add_(1)
        return out

    with compare(device=DEVICE) as result:
        backend = wrong_backend(writes_the_weight, "backward")
        x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
        torch.compile(lambda x: x @ weight, backend=backend)(x).sum().backward()
    assert result.first.operator.startswith("backward of compiled graph 0") and "argument" in result.first.what


def test_a_graph_that_raises_on_the_device_alone():
    def raises(out, args):
        raise RuntimeError("the compiled code has no such mode")

    with pytest.raises(RuntimeError, match="no such mode"), compare(device=DEVICE) as result:
        torch.compile(lambda x: x * 2, backend=wrong_backend(raises))(torch.ones(3, device=DEVICE))
    assert result.first.sentence() == "the call raised RuntimeError: the compiled code has no such mode"
    assert result.first.operator.startswith("compiled graph 0") and len(result.differences) == 1


def test_a_library_kernel_of_a_graph_is_named():
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("sin", lambda x: x * 3, "PrivateUse1", allow_override=True)
        with compare(device=DEVICE) as result:
            compiled(lambda x: x.sin() * 2)(torch.ones(3, device=DEVICE))
    assert result.first.operator == "aten::sin" and graphs_of(result)


# ---- tolerances ----


def times(factor):
    return lambda out, args: [each * (1 + factor) for each in out]


@pytest.mark.parametrize(
    "function, right, wrong",
    [
        (lambda x: x * 2, 2**-20, 2**-16),  # 32 ulps of float32 are 2^-18
        (lambda x: (x.bfloat16() @ x.bfloat16()).float(), 2**-7, 4.0),
        (lambda x: x.to(torch.float8_e4m3fn).float(), 2**-3, 8.0),
        (lambda x: (x * 1e6).sin(), 1e-3, None),  # the input's last bits are as much
    ],
    ids=["float32", "bfloat16", "float8", "sensitive"],
)
def test_what_decides_the_tolerance(function, right, wrong):
    """The number of operators, the smallest type, and what the last bits of inputs change."""
    for factor, differ in ((right, False), *([(wrong, True)] if wrong else [])):
        torch.compiler.reset()
        with torch.no_grad(), compare(device=DEVICE) as result:
            torch.compile(function, backend=wrong_backend(times(factor)))(torch.ones(16, 16, device=DEVICE))
        assert bool(result.differences) == differ and not result.skipped, result


def test_a_graph_runs_at_most_twice_more(monkeypatch):
    """However many of its results are rounding alone."""
    count, run = [], _Call.run
    monkeypatch.setattr(
        _Call, "run", lambda self, *args, **options: count.append(self.graph.name) or run(self, *args, **options)
    )
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())]
    model, x = nn.Sequential(*layers).to(DEVICE), torch.randn(16, 8, device=DEVICE)
    with compare(device=DEVICE) as result:
        torch.compile(model)(x).square().sum().backward()
    assert not result.differences and len({*count}) == 2 and len(count) <= 4


def test_graphs_of_collectives_do_not_run_again():
    """The other ranks would not join in."""
    context = compare(device=DEVICE)
    x = torch.rand(9)
    for collective in (False, True):
        graph = torch.fx.Graph()
        y = graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 1e6))
        if collective:
            graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (y,))
        graph.call_function(torch.ops.aten.empty_like.default, (y,))
        graph.output(y)
        step = _Call(
            _Graph(Graphs(context.mode), torch.fx.GraphModule({}, graph), "a graph"), 0, Place("", None, ""), []
        )
        step.given = [x]
        assert bool(step.changed) != collective and bool(step.filled) != collective
        step.given = [None]
        assert step.raises_too(ValueError()) != collective, "the reference raises for None"


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("where", ["cpu", DEVICE, f"{DEVICE}:1"])
def test_numbers_of_one_generator_are_compared(where, wrong):
    backend = wrong_backend(times(0.01 if wrong else 0.0))
    torch.rand(1), torch.rand(1, device=f"{DEVICE}:1")
    with compare(device=DEVICE) as result:
        torch.compile(lambda x: x + torch.rand(8, device=where).to(DEVICE), backend=backend)(
            torch.ones(8, device=DEVICE)
        )
    assert len(result.differences) == wrong and not result.notes and not result.skipped


def test_numbers_of_two_generators_are_not():
    torch.rand(1)
    with compare(device=DEVICE) as result:
        compiled(lambda x: x + torch.rand(8).to(DEVICE) + torch.rand_like(x))(torch.ones(8, device=DEVICE))
    assert not result.differences and any("draws random numbers" in note for note in result.notes)


# ---- what is not compared ----


@pytest.mark.parametrize("why, function", [("be copied", lambda x: x.view(torch.float4_e2m1fn_x2))])
def test_what_is_not_compared_is_listed(why, function):
    """The program goes on, and the report says why."""
    with compare(device=DEVICE) as result:
        compiled(function)(torch.ones(8, dtype=torch.uint8, device=DEVICE))
    (reason,) = result.skipped.values()
    assert why in reason and not result.differences, reason


def test_a_graph_without_the_device_is_not_compared():
    with compare(device=DEVICE) as result:
        assert torch.equal(compiled(lambda x: x.sin() * 2)(torch.ones(4)), torch.ones(4).sin() * 2)
    assert not result._rows and not result.skipped and not result.notes


def test_compare_respects_a_stance():
    function, x = compiled(lambda x: x.sin() * 2), torch.ones(4, device=DEVICE)
    function(x)
    with torch.compiler.set_stance("fail_on_recompile"), compare(device=DEVICE) as result:
        function(x)
    assert not result.differences and any("fail_on_recompile" in note for note in result.notes)
    with compare(device=DEVICE) as result:
        function(x)
    assert graphs_of(result) and not result.notes


def test_a_backward_after_compare_is_not_compared():
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    with compare(device=DEVICE) as result:
        loss = torch.compile(lambda x: x.sin() * 2, backend=wrong_backend(adds_one, "backward"))(x).sum()
    loss.backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * 2 + 1)  # the backend's wrong backward ran
    assert not result.differences and not result.skipped and graphs_of(result) == ["compiled graph 0 (2 operators)"]


def test_what_is_compiled_into_a_file_is_not_compared():
    x = torch.ones(4, device=DEVICE)
    with compare(device=DEVICE) as result:
        function = torch.compile(lambda x: x.sin() * 2, fullgraph=True).aot_compile(((x,), {}))
        assert torch.equal(function(x), x.sin() * 2)
    assert "into a file" in " ".join(result.skipped.values())


def test_a_function_draws_its_own_numbers_after_compare():
    function, x = torch.compile(lambda x: nn.functional.dropout(x, 0.5)), torch.ones(64, device=DEVICE)

    def drawn():
        torch.manual_seed(0)
        return function(x)

    plain = drawn()
    with compare(device=DEVICE):
        drawn()
    assert torch.equal(drawn(), plain)


def test_compare_in_compare():
    function, x = compiled(lambda x: x.sin() * 2), torch.ones(4, device=DEVICE)
    with compare(device=DEVICE) as outer, compare(device=DEVICE) as inner:
        function(x)
    for result in (outer, inner):
        assert not result.differences and graphs_of(result)
