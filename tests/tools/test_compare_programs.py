"""`compare`, `record` and their commands on programs with several threads, and on compiled models that train."""

import contextlib
import gc
import threading

import pytest
import torch
from functorch.compile import make_boxed_func
from processes import python
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from openreg_tools import threads
from openreg_tools.compare import compare, mark, record, regions
from openreg_tools.compare.regions import _Region
from openreg_tools.threads import Turn

DEVICE = "openreg"
KERNELS = (torch.exp, torch.sin, torch.tanh, torch.sigmoid)


library = torch.library.Library("compare_programs", "FRAGMENT")
library.define("empties(Tensor x) -> Tensor")
library.impl("empties", lambda x: x * 2, "CompositeExplicitAutograd")


def in_threads(*functions):
    started = [threading.Thread(target=each) for each in functions]
    [thread.start() for thread in started]
    [thread.join() for thread in started]


# ---- threads ----


@pytest.mark.parametrize("mode", ["inline", "async"])
@pytest.mark.parametrize("after", [0, 7, 19, 33])
def test_a_kernel_that_fails_in_one_of_several_threads(mode, after):
    failed, inputs = [], [torch.rand(200, 200, device=DEVICE) for _ in KERNELS]

    def work(kernel, x):
        try:
            for _ in range(10):
                kernel(x)
        except torch.AcceleratorError as error:
            failed.append((kernel.__name__, str(error).splitlines()[0]))

    work_of = [lambda kernel=kernel, x=x: work(kernel, x) for kernel, x in zip(KERNELS, inputs, strict=True)]
    with torch.openreg.launch_mode(mode), torch.openreg.faults.inject("kernel", after=after, times=1):
        with compare(device=DEVICE) as result:
            in_threads(*work_of)
    ((name, message),) = failed
    assert (
        f"aten::{name}" in message
        and result.first.operator.startswith(f"aten::{name}")
        and len(result.differences) == 1
    )


def test_turns_of_operators_that_wait_for_each_other(monkeypatch):
    """One holds its turn while it waits for the other, which goes on without."""
    monkeypatch.setattr(threads, "_PATIENCE", 0.1)
    turn, held, done = Turn(), threading.Event(), threading.Event()

    def first():
        with turn, turn:
            held.set()
            assert done.wait(30)

    def second():
        assert held.wait(30)
        for _ in range(50):  # waits once alone
            with turn:
                pass
        done.set()

    in_threads(first, second)
    with turn:
        assert not turn._stuck


def test_tasks_that_any_thread_of_a_pool_may_take(tmp_path):
    def run(path, order, factor=1.0):
        """Two threads take the tasks in this order, one after the other."""

        def task(i):
            x = torch.full((8, 8), float(i + 1), device=DEVICE)
            for _ in range(3 + i % 3):
                x = (x * 1.01 * (factor if i == 4 else 1)).tanh()
            return x.sum().item()

        with record(path) as recording:
            for thread in range(2):
                in_threads(lambda thread=thread: [task(i) for t, i in order if t == thread])
        return recording.path

    a = run(tmp_path / "a", [(i % 2, i) for i in range(8)])
    b = run(tmp_path / "b", [(i // 2 % 2, i) for i in (7, 6, 5, 4, 3, 2, 1, 0)])
    parting = compare(a, b)
    assert not parting.parted and not parting.only_a and not parting.only_b and all(x and y for x, y in parting.pairs)
    c = run(tmp_path / "c", [(i // 2 % 2, i) for i in (7, 6, 5, 4, 3, 2, 1, 0)], factor=1.5)
    parting = compare(a, c)
    assert parting.parted and parting.first.a.name == "aten::mul.Tensor" and parting.beyond < 16


def test_labels_of_several_threads(tmp_path):
    """A label set in the main thread applies to all threads; a label set in another thread applies there only."""

    def work(path, order):
        gates = [threading.Event() for _ in order]

        def of(k):
            for i, (thread, batch) in enumerate(order):
                if thread == k:
                    assert not i or gates[i - 1].wait(30)
                    with mark("batch", f"{k}.{batch}"):
                        torch.full((8,), float(k * 10 + batch), device=DEVICE).mul(2)
                        gates[i].set()

        with record(path) as recording, mark("epoch", 1):
            in_threads(lambda: of(0), lambda: of(1))
        return recording.path

    a = work(tmp_path / "a", [(0, 0), (1, 0), (0, 1), (1, 1)])
    b = work(tmp_path / "b", [(1, 0), (1, 1), (0, 0), (0, 1)])
    parting = compare(a, b)
    assert not parting.parted and not parting.only_a and not parting.only_b
    labels = {op.label for op, _ in parting.pairs}
    assert labels == {f"batch={k}.{i},epoch=1" for k in range(2) for i in range(2)}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        ("", 0, "Nothing differs"),
        ("sys.exit(0)", 0, "Nothing differs"),
        ("{}['key']", 1, "until the program raised KeyError"),
    ],
)
def test_the_command_waits_for_threads_as_python_does(ends, status, says, tmp_path):
    (tmp_path / "program.py").write_text(f"""
import sys, threading, time, torch
from concurrent.futures import ThreadPoolExecutor
def work(by):
    time.sleep(0.3)
    print((torch.ones(3, device="openreg") * by).sum().item())
threading.Thread(target=work, args=(2,)).start()
ThreadPoolExecutor(1).submit(work, 3)
{ends}
""")
    words = ["compare", "--device", "openreg", "program.py"]
    done = python("-m", "openreg_tools", *words, cwd=tmp_path, dynamo=True, timeout=100)
    assert done.returncode == status and "8 calls, 8 compared" in done.stdout, done.stdout + done.stderr
    assert says in " ".join(done.stdout.split()) and "6.0" in done.stdout and "9.0" in done.stdout
    assert done.stderr.count("KeyError: 'key'") == status


# ---- compiled models ----


def retained(model, x):
    loss = torch.compile(lambda x: model(x) * 2)(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def separately(model, x):
    a, b = torch.compile(lambda x: (model(x), model(x) * 2))(x)
    a.sum().backward(retain_graph=True)
    b.sum().backward()


def in_inference_mode(model, x):
    with torch.inference_mode():
        torch.compile(lambda x: x.clone().add_(1) + model(x))(torch.randn(4, 8, device=DEVICE))


def in_autocast(model, x):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = torch.compile(lambda x: nn.functional.layer_norm(model(x), (8,)))(x).float().square().mean()
    loss.backward()


def hooked(model, x):
    y = torch.compile(model)(x)
    y.register_hook(lambda grad: grad * 3)
    y.sum().backward()


def returns_views(model, x):
    y = x.clone().requires_grad_()
    a, b, c = torch.compile(lambda x: (model(x), x[0], x), backend="aot_eager")(y)
    (a.sum() + b.sum() + c.sum()).backward()


def half_inside(model, x):
    def forward(x):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return model(x).float().tanh()

    torch.compile(forward)(x).sum().backward()


def conjugated(model, x):
    y = torch.complex(x, x)
    torch.compile(lambda a, b: a * 2 + b, backend="aot_eager")(y.conj(), y.conj().imag)


def conjugated_without_aot(model, x):
    y = torch.complex(x, x)
    torch.compile(lambda a, b: a * 2 + b, backend="eager")(y.conj(), y.conj().imag)


def nested(model, x):
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, device=DEVICE)
    assert torch.compile(lambda x: x * 2, backend="aot_eager")(jagged).values().sum() == 36


def saved_tensor_hooks(model, x):
    def pack(saved):
        assert saved.device.type == DEVICE
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = torch.compile(lambda x: model(x).sin())(x).sum()
    loss.backward()


def checkpointed(model, x):
    torch.utils.checkpoint.checkpoint(torch.compile(model), x, use_reentrant=False).sum().backward()


def writes_a_tensor_in_the_graph(model, x):
    def double(y):
        return y.mul_(2).sin()

    torch.compile(double, backend="aot_eager")(model(x)).sum().backward()


def branches(model, x):
    def branch(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    torch.compile(branch, backend="aot_eager")(x)


def compiled_backward(model, x):
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        model(x).sum().backward()


def uninitialized(model, x):
    def function(x):
        padded = torch.empty(6, 8, device=DEVICE)
        padded[:4] = x
        return x * 2, torch.empty_like(x), padded

    junk = [torch.full((6, 8), each, device=DEVICE) for each in (7.0, 8.0, 9.0)]
    del junk
    torch.compile(function, backend="aot_eager")(x)


def uninitialized_by_method(model, x):
    junk = [torch.full((6, 8), each, device=DEVICE) for each in (7.0, 8.0, 9.0)]
    del junk
    torch.compile(lambda x: (x * 2, x.new_empty(6, 8)), backend="eager")(x)


def expects_an_error(model, x):
    torch.compile(model, backend="aot_eager")(x)
    with contextlib.suppress(torch.linalg.LinAlgError):
        torch.compile(torch.linalg.cholesky, backend="aot_eager")(-torch.eye(3, device=DEVICE))


def draws_numbers(model, x):
    def function(x):
        return nn.functional.dropout(x, 0.5) + torch.rand_like(x) * torch.randn(8, device=x.device)

    before = torch.openreg.get_rng_state()
    torch.compile(function, backend="aot_eager")(x)
    assert not torch.equal(before, torch.openreg.get_rng_state())


def gradients_that_are_rounding(model, x):
    attention, norm = nn.MultiheadAttention(16, 2, batch_first=True).to(DEVICE), nn.LayerNorm(16).to(DEVICE)
    x = torch.randn(2, 5, 16, device=DEVICE)
    torch.compile(lambda x: norm(x + attention(x, x, x, need_weights=False)[0]))(x).square().mean().backward()


def masks_that_are_rounding(model, x):
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()).to(DEVICE)
    torch.compile(layers)(torch.ones(4, 8, device=DEVICE)).sum().backward()


def of_numbers_alone(model, x):
    torch.compile(lambda n: (torch.arange(n, device=DEVICE) * 2.0, n + 1), backend="aot_eager", dynamic=True)(4)


def goes_backward_inside(model, x):
    @torch.compile(backend="aot_eager")
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    step(x)


def checkpointed_without_aot(model, x):
    layers = nn.Sequential(model, nn.Tanh(), model)
    torch.utils.checkpoint.checkpoint(torch.compile(layers, backend="eager"), x, use_reentrant=False).sum().backward()


def rounds_what_is_zero(model, x):
    layers = nn.Sequential(model, nn.BatchNorm1d(8), nn.ReLU(), model).to(DEVICE)
    torch.compile(lambda x: layers(x).square().mean())(torch.zeros(7, 8, device=DEVICE)).backward()


def rounds_equal_probabilities(model, x):
    def function(x):
        probabilities = (x * 0).softmax(-1)
        return probabilities - probabilities.mean(-1, keepdim=True)

    torch.compile(function)(torch.randn(16, 1000, device=DEVICE))


def writes_a_large_cache(model, x):
    def function(x, cache):
        cache.copy_(x)
        padded = torch.empty(6, 8, device=DEVICE)
        padded[:4] = x[:4, :8]
        return x.sum(), padded

    junk = [torch.full((6, 8), each, device=DEVICE) for each in (7.0, 8.0, 9.0)]
    del junk
    function = torch.compile(function, backend="aot_eager")
    for _ in range(2):  # the second call knows what the first has written
        function(torch.ones(512, 1024, device=DEVICE), torch.zeros(512, 1024, device=DEVICE))


def moves_by_method(model, x):
    torch.compile(lambda x: x.openreg() * 2, backend="eager")(torch.ones(3))


def computes_in_half_complex(model, x):
    torch.compile(lambda x: x * 2, backend="aot_eager")(torch.ones(8, dtype=torch.complex64, device=DEVICE).chalf())


def has_a_shape_that_is_rounding(model, x):
    def exact(graph, inputs):
        class Exact(torch.fx.Interpreter):
            def run_node(self, n):
                if "mean" not in str(n.target):
                    return super().run_node(n)
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                return n.target(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)

        return make_boxed_func(Exact(graph).run)

    x = torch.full((33,), 0.3)  # its mean in float32 is less, and in float64 equal
    assert x.mean() < x[0] == x.double().mean().float()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        backend = aot_autograd(fw_compiler=exact)
        torch.compile(lambda x: (x - x.mean()).relu().nonzero(), backend=backend)(x.to(DEVICE))


RIGHT = (goes_backward_inside, checkpointed_without_aot, rounds_what_is_zero, rounds_equal_probabilities,
         writes_a_large_cache, moves_by_method, computes_in_half_complex, has_a_shape_that_is_rounding, uninitialized, uninitialized_by_method, expects_an_error, draws_numbers, gradients_that_are_rounding, masks_that_are_rounding,
         of_numbers_alone, retained, separately, in_inference_mode, in_autocast, hooked, returns_views, half_inside, conjugated,
         conjugated_without_aot, nested, saved_tensor_hooks, checkpointed, writes_a_tensor_in_the_graph, branches,
         compiled_backward)  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize("program", RIGHT)
def test_right_programs_with_compiled_graphs(program):
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8).to(DEVICE), torch.randn(4, 8, device=DEVICE)
    with compare(device=DEVICE) as result:
        program(model, x)
    assert not result.differences and not result.skipped and any("compiled graph" in name for name in result._rows)


def step_of(model, backend):
    torch._dynamo.reset()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(3):
        model(torch.ones(4, 8, device=DEVICE)).sum().backward()
        step()
        optimizer.zero_grad()
    return [state["step"].item() for state in optimizer.state.values()], model.weight.sum().item()


@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_compiled_optimizer_steps_once(backend):
    """Its state is held by Dynamo's graph: the reference must not write to the program's own."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(DEVICE)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    plain = step_of(model, backend)
    model.load_state_dict(before)
    with compare(device=DEVICE) as result:
        assert step_of(model, backend) == plain
    assert plain[0] == [3, 3] and not result.differences and not result.skipped


@pytest.mark.compiles
def test_a_tensor_that_the_graph_holds_is_compared():
    model = nn.Linear(8, 8).to(DEVICE)

    def wrong(graph, inputs):
        def run(*args):
            out = graph(*args)
            with torch.no_grad():
                model.weight.add_(1)
            return out

        return run

    with compare(device=DEVICE) as result:
        step_of(model, wrong)
    assert "compiled graph" in result.first.operator and result.first.what.startswith("argument")


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


def loses_one(out, args):
    return [None, *out[1:]]


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("function", "change", "what"),
    [
        (lambda x: nn.functional.dropout(x, 0.5) * 2, adds_one, "result 0"),
        (lambda x: torch.arange(4, device=DEVICE) * 2.0, adds_one, "result 0"),
        (lambda x: (x.shape[0] + 1, x * 2), adds_one, "result 0"),
        (lambda x: x.argmax(), adds_one, "result 0"),
        (lambda x: x > 0, lambda out, args: [~out[0]], "result 0"),
        (lambda x: x * 2, loses_one, "result 0"),
        (lambda x: (x * 2, x * 3), lambda out, args: out[:1], "results"),
        (lambda x: x * 2, writes_its_input, "argument 1"),
        (lambda x: torch.empty_like(x).copy_(x), adds_one, "result 0"),
        (lambda x: torch.ops.compare_programs.empties(x).sin(), adds_one, "result 0"),
    ],
    ids=[
        "random",
        "no device inputs",
        "an integer",
        "indices",
        "a mask",
        "None",
        "fewer",
        "clobbers",
        "empty",
        "a name like empty",
    ],
)
def test_what_a_wrong_graph_does(function, change, what):
    x = torch.randn(4, 8, device=DEVICE)
    torch._dynamo.mark_dynamic(x, 0)
    with compare(device=DEVICE) as result, contextlib.suppress(Exception):  # what follows in PyTorch may raise
        torch.compile(function, backend=wrong_backend(change))(x)
    assert result.first.operator.startswith("compiled graph 0 of") and result.first.what.endswith(what), result.report()


@pytest.mark.compiles
def test_what_is_not_compared_is_listed(monkeypatch):
    """The program goes on, and the report says why."""

    def measure(*args):
        raise NotImplementedError("no such dtype")

    monkeypatch.setattr(regions, "measure", measure)
    x, pairs = torch.ones(8, dtype=torch.uint8, device=DEVICE), torch.float4_e2m1fn_x2
    total = torch.compile(lambda x: x.sin().sum(), backend="eager")
    for why, program in (
        ("a transform", lambda: torch.func.vmap(total)(torch.ones(5, 3, device=DEVICE))),
        ("no such dtype", lambda: torch.compile(lambda x: x * 2, backend=wrong_backend(adds_one))(x)),
        ("be copied", lambda: torch.compile(lambda x: x.view(pairs), backend="aot_eager")(x)),
    ):
        torch._dynamo.reset()
        with compare(device=DEVICE) as result:
            program()
        (reason,) = result.skipped.values()
        assert why in reason and not result.differences, reason


@pytest.mark.compiles
def test_compare_respects_a_stance():
    function, x = torch.compile(lambda x: x.sin() * 2, backend="aot_eager"), torch.ones(4, device=DEVICE)
    function(x)
    with torch.compiler.set_stance("fail_on_recompile"), compare(device=DEVICE) as result:
        function(x)
    assert not result.differences and any("fail_on_recompile" in note for note in result.notes)
    with compare(device=DEVICE) as result:
        function(x)
    assert any("compiled graph" in name for name in result._rows) and not result.notes


@pytest.mark.compiles
def test_a_backward_after_compare_is_not_compared():
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    with compare(device=DEVICE) as result:
        backend = wrong_backend(adds_one, "backward")
        loss = torch.compile(lambda x: x.sin() * 2, backend=backend)(x).sum()
    loss.backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * 2 + 1)  # the backend's wrong backward ran
    assert not result.differences and not result.skipped
    assert [name for name in result._rows if "compiled graph" in name] == ["compiled graph 0 of <lambda> (2 operators)"]


@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_without_the_device_is_not_compared(backend):
    with compare(device=DEVICE) as result:
        out = torch.compile(lambda x: x.sin() * 2, backend=backend)(torch.ones(4))
        assert torch.equal(out, torch.ones(4).sin() * 2)
    assert not result._rows and not result.skipped and not result.notes


@pytest.mark.compiles
def test_a_graph_runs_at_most_three_times_more(monkeypatch):
    """However many of its results are rounding alone."""
    count, run = [], _Region._run
    monkeypatch.setattr(_Region, "_run", lambda self, *args: count.append(self.name) or run(self, *args))
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())]
    model, x = nn.Sequential(*layers).to(DEVICE), torch.randn(16, 8, device=DEVICE)
    with compare(device=DEVICE) as result:
        torch.compile(model)(x).square().sum().backward()
    assert not result.differences and len({*count}) == 2 and 2 < len(count) <= 6


@pytest.mark.compiles
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


@pytest.mark.compiles
@pytest.mark.parametrize(
    "others",
    [lambda x: torch.rand_like(x), lambda x: torch.rand(8, device=f"{DEVICE}:1").to(DEVICE)],
    ids=["the host and the device", "the host and another device"],
)
def test_numbers_that_the_reference_does_not_draw(others):
    """The graph draws from two generators: a note, and no difference."""
    torch.rand(1)
    with compare(device=DEVICE) as result:
        function = torch.compile(lambda x: x + torch.rand(8).to(DEVICE) + others(x), backend="aot_eager")
        function(torch.ones(8, device=DEVICE))
    assert not result.differences and any("draws random numbers" in note for note in result.notes)


@pytest.mark.compiles
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("where", ["cpu", DEVICE, f"{DEVICE}:1"])
def test_numbers_of_one_generator_are_compared(where, wrong):
    def backend(graph, inputs):
        return make_boxed_func(lambda *args: [x * (1.01 if wrong else 1) for x in graph(*args)])

    torch.rand(1), torch.rand(1, device=f"{DEVICE}:1")
    with compare(device=DEVICE) as result:
        torch.compile(lambda x: x + torch.rand(8, device=where).to(DEVICE), backend=aot_autograd(fw_compiler=backend))(
            torch.ones(8, device=DEVICE)
        )
    assert len(result.differences) == wrong and not result.notes and not result.skipped


@pytest.mark.compiles
def test_compare_in_compare():
    function, x = torch.compile(lambda x: x.sin() * 2, backend="aot_eager"), torch.ones(4, device=DEVICE)
    with compare(device=DEVICE) as outer, compare(device=DEVICE) as inner:
        function(x)
    for result in (outer, inner):
        assert not result.differences and any("compiled graph" in row for row in result._rows)


@pytest.mark.compiles
def test_what_is_compiled_into_a_file_is_not_compared():
    x = torch.ones(4, device=DEVICE)
    with compare(device=DEVICE) as result:
        compiled = torch.compile(lambda x: x.sin() * 2, fullgraph=True).aot_compile(((x,), {}))
        assert torch.equal(compiled(x), x.sin() * 2)
    assert "into a file" in " ".join(result.skipped.values())


@pytest.mark.compiles
def test_a_function_draws_its_own_numbers_after_compare():
    function, x = torch.compile(lambda x: nn.functional.dropout(x, 0.5)), torch.ones(64, device=DEVICE)

    def drawn():
        torch.manual_seed(0)
        return function(x)

    plain = drawn()
    with compare(device=DEVICE):
        drawn()
    assert torch.equal(drawn(), plain)


def test_graphs_of_collectives_do_not_run_again():
    """The other ranks would not join in."""
    from openreg_tools.compare.lockstep import Lockstep
    from openreg_tools.compare.regions import Given, Regions, _Again, _Region
    from openreg_tools.compare.result import Result
    from openreg_tools.compare.tolerance import Tolerances

    def again():
        return _Again(region, about, [x], [x * 1e6, x])

    x = torch.rand(9)
    regions = Regions(Lockstep(DEVICE, "cpu", Tolerances(), Result(DEVICE, "cpu"), False))
    graph = torch.fx.symbolic_trace(lambda x: x * 1e6)
    region, about = _Region(regions, graph, "a graph"), Given([], 1, None)
    assert not region.collective and again().moves(0) > 0 and again().filled is not None
    region.collective = True
    assert again().filled is None and again().moved == [] and again().moves(0) == 0
    assert not region._raises_too([None], about, ValueError()), "the reference would raise for None"
    region.collective = False
    assert region._raises_too([None], about, ValueError())
    node = torch.fx.Graph().call_function(torch.ops._c10d_functional.all_reduce.default, ())
    node.graph.output(node)
    assert _Region(regions, torch.fx.GraphModule({}, node.graph), "a graph").collective


def test_parts_of_one_graph_have_names_of_their_own():
    """DistributedDataParallel splits a graph that Dynamo compiles."""
    from torch._functorch.aot_autograd import aot_module_simplified

    def backend(graph, inputs):
        compiled = [aot_module_simplified(graph, inputs, lambda gm, args: gm) for _ in range(2)]
        return lambda *args: compiled[0](*compiled[1](*args))

    with compare(device=DEVICE) as result, torch.no_grad():
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(4, device=DEVICE))
    assert {row for row in result._rows if "compiled" in row} == {
        "compiled graph 0 of <lambda> (1 operators)", "compiled graph 0 of <lambda>, part 2 (1 operators)"
    }  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize("wrong_in", ["forward", "backward"])
def test_a_wrong_graph_is_named(wrong_in):
    backend = wrong_backend(adds_one, wrong_in)
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with compare(device=DEVICE) as result:
        torch.compile(lambda x: x.sin(), backend=backend)(x).sum().backward()
    first = result.first
    assert first.operator.startswith(
        "backward of compiled graph 0 of" if wrong_in == "backward" else "compiled graph 0 of"
    )
    assert first.what == ("gradient 0" if wrong_in == "backward" else "result 0") and first.place.phase == wrong_in
    assert "test_compare_programs.py" in first.place.line()


@pytest.mark.compiles
def test_compiled_training_holds_no_memory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(DEVICE)
    compiled, used = torch.compile(model), []
    with compare(device=DEVICE) as result:
        for step in range(6):
            loss = compiled(torch.randn(128, 64, device=DEVICE)).sum()
            if step % 3:  # and a graph whose backward never runs
                loss.backward()
            del loss
            gc.collect()
            used.append(torch.openreg.memory_allocated())
    assert used[2] == used[-1] and not result.differences


# ---- results that cannot be read ----


class Wrapper(torch.Tensor):
    """Has no memory of its own."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(each.x if isinstance(each, Wrapper) else each for each in args), **(kwargs or {}))


def test_an_operator_that_returns_a_wrapper_is_skipped():
    with torch.library._scoped_library("test_compare_programs", "DEF") as library:
        library.define("wrap(Tensor x) -> Tensor")
        for key in ("CPU", "PrivateUse1"):
            library.impl("wrap", lambda x: Wrapper(x + 1), key)
        with compare(device=DEVICE) as result:
            out = torch.ops.test_compare_programs.wrap(torch.ones(3, device=DEVICE))
    assert out.x.tolist() == [2.0] * 3 and not result.differences
    assert "its results cannot be copied" in result.skipped["test_compare_programs::wrap"]


# ---- recurrent networks as a whole ----


def of_other_operators(factor=1.0):
    """A GRU that the device computes in float64: every operator is equal, and the result is not."""
    gru = torch._VF.gru

    def other(x, h, weights, *rest):
        if x.is_cpu:
            return gru(x, h, weights, *rest)
        out, last = gru(x.double(), h.double(), [each.double() for each in weights], *rest)
        return (out * factor).float(), last.float()

    return other


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_network_whose_operators_agree(monkeypatch, factor):
    """A note says that it differs as a whole; beyond the tolerance, it is the first difference."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch._VF, "gru", of_other_operators(factor))
    there = vars(torch._VF)["gru"]
    model, x = torch.nn.GRU(4, 16).to("openreg"), torch.randn(3, 2, 4).to("openreg")
    with compare(device="openreg") as result:
        model(x)[0].sum().backward()
    (note,) = [note for note in result.notes if "as a whole" in note]
    assert note.startswith("gru at ") and "its operators agree, but as a whole it differs from cpu by up to" in note
    assert (
        ", 0 results not equal bit for bit" in " ".join(result.report().split()) and note.split()[0] in result.report()
    )
    if factor == 1.0:
        assert result.first is None
    else:
        assert result.first.operator == "gru" and result.first.what == "result 0" and "test_compare" in result.report()
        with pytest.raises(ValueError, match="gru is not an operator whose inputs are known"):
            result.write_test("none.py")
    assert vars(torch._VF)["gru"] is there and "lstm" not in vars(torch._VF) and torch.lstm is torch._VF.lstm


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_networks_that_agree(dropout):
    """Padded and packed, with the dropout of the device's generator, as TorchScript, and under transforms and modes."""
    lstm, cell = torch.nn.LSTM(4, 5, 2, dropout=dropout).to("openreg"), torch.nn.RNNCell(4, 5).to("openreg")
    x = torch.randn(3, 2, 4).to("openreg")
    with compare(device="openreg") as result:
        lstm(x)[0].sum().backward()
        lstm(torch.nn.utils.rnn.pack_padded_sequence(x, [3, 3]))
        lstm(torch.nn.utils.rnn.pack_padded_sequence(x, [3, 1]))
        cell(x[0], hx=torch.ones(2, 5, device="openreg"))
        torch.jit.script(torch.nn.Sequential(lstm))(x)
        torch.vmap(cell)(x)
        with torch.inference_mode():
            lstm(x)
        with torch.autocast("openreg"):
            cell(x[0])
    assert result.first is None and not any("as a whole" in note for note in result.notes), result.report()
