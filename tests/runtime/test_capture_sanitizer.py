"""The sanitizer and graphs: each kind of mistake with a captured graph is found, and right patterns pass."""

import contextlib
import gc
from pathlib import Path

import pytest
import torch
import torch.openreg._sanitizer as sanitizer
from graph_kit import warmed_up
from patterns import HOST_READS, HOST_WAITS
from processes import python
from stream_kit import captured
from torch import nn

DEVICE = "openreg"

current = torch.openreg.current_stream


@pytest.fixture(autouse=True)
def sanitized(mode):
    with sanitizer.sanitize():
        yield


@contextlib.contextmanager
def caught(kind, *sentences):
    """The body is reported once, as this kind, in these words and with both stack traces."""
    with pytest.raises(sanitizer.OpenregSanitizerErrors) as error:
        yield
    (found,) = error.value.errors
    text = " ".join(str(found).split())
    if kind == "race":
        assert isinstance(found, sanitizer.UnsynchronizedAccessError)
    else:
        assert isinstance(found, sanitizer.GraphError) and found.kind == kind, text
        assert "the graph captured at tests/" in text
    for sentence in (*sentences, "Remedy: "):
        assert sentence in text, text
    assert text.count("with stack trace: File") + text.count("With stack trace: File") >= 2, text


def ones(*shape, device=DEVICE):
    return torch.ones(shape or (4,), device=device)


# ---- an input whose memory was freed or moved ----


def held(*shape, name="x"):
    return {name: ones(*shape, device=f"openreg:{torch.openreg.current_device()}")}


def freed():
    x = held()
    return lambda: x["x"] * 2, x.clear


def a_view():
    x = held(4, 4)
    return lambda: x["x"][1].view(2, 2).t() + 1, x.clear


def memory_of_another():
    x = held(1000)

    def change():
        address = x["x"].data_ptr()
        x.clear()
        x.update(held(1000))
        assert x["x"].data_ptr() == address

    return lambda: x["x"].sum(), change


def a_weight_of_backward():
    x, grad = held(2, 4)["x"], held(2, 4)["x"]
    model = nn.Linear(4, 4, device=x.device)

    def step():
        model.zero_grad()
        model(x).backward(grad)

    warmed_up(step)
    return step, lambda: delattr(model, "weight")


def of_a_custom_operator():
    x, y = held(), held()["x"]
    return lambda: torch.ops.capture_sanitizer.scale(y, x["x"]), x.clear


@torch.library.custom_op("capture_sanitizer::scale", mutates_args=())
def scale(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


def resized():
    x = held()["x"]
    return lambda: x + 1, lambda: x.resize_(1 << 20)


def another_storage():
    x = held()["x"]
    return lambda: x * 2, lambda: x.set_(held()["x"].untyped_storage())


FREED, MOVED = "freed since the capture", "was moved to other memory since the capture"
GONE = {
    freed: ("argument self of aten.mul.Tensor, captured at", FREED, "copy_()"),
    a_view: ("argument self of aten.add.Tensor", FREED),
    memory_of_another: ("argument self of aten.sum.default", "and another tensor has it now"),
    a_weight_of_backward: ("addmm", FREED),
    of_a_custom_operator: ("argument other of aten.mul.Tensor", FREED),
    resized: ("argument self of aten.add.Tensor", MOVED),
    another_storage: ("argument self of aten.mul.Tensor", FREED),
}


@pytest.mark.parametrize(("case", "device"), [*((case, 0) for case in GONE), (freed, 1)])
def test_an_input_is_gone_or_was_moved(case, device):
    with torch.openreg.device(device):
        body, change = case()
        graph, _ = captured(body)
        graph.replay()
        change()
        gc.collect()
        with caught("moved_input" if MOVED in GONE[case] else "freed_input", *GONE[case]):
            graph.replay()


def test_inputs_of_a_copy_to_another_device():
    x, y = ones(1000), ones(1000, device="openreg:1")
    graph, _ = captured(lambda: y.copy_(x + 1))
    with caught("race", "aten.copy_.default", "writing to argument(s) self"):
        graph.replay()  # does not wait for the stream that made y
    current().wait_stream(current(1))
    graph.replay()
    with caught("race", "reading from argument(s) self", "Previous access by the default stream of openreg:0"):
        y + 1
    x = None
    with caught("freed_input", "argument self of aten.add.Tensor"):
        graph.replay()


def test_a_parameter_has_other_memory():
    weight = nn.Parameter(ones())
    graph, y = captured(lambda: weight.detach() * 2)
    old = weight.data
    weight.data = torch.zeros(4, device=DEVICE)
    with caught("moved_input", "was moved to other memory since the capture", "weight.data = torch.zeros"):
        graph.replay()
    weight.data = old
    graph.replay()


# ---- pinned memory that a captured copy uses ----


def pinned(*shape, value=0.0):
    return torch.full(shape or (4,), value, pin_memory=True)


@pytest.mark.parametrize("read", HOST_READS)
def test_a_captured_copy_to_the_host_is_read_too_early(read):
    host, x = pinned(), ones()
    graph, _ = captured(lambda: host.copy_(x * 2, non_blocking=True))
    HOST_READS[read](host)  # the capture has copied nothing
    for _ in range(2):
        graph.replay()
        with caught("race", "in its node aten.copy_.default, captured at", "Before the host uses the tensor", "replay"):
            HOST_READS[read](host)
        current().synchronize()
        HOST_READS[read](host)


@pytest.mark.parametrize("wait", HOST_WAITS)
def test_a_captured_copy_to_the_host_is_read_in_time(wait):
    host, x = pinned(), ones()
    graph, _ = captured(lambda: host.copy_(x * 2, non_blocking=True))
    for read in HOST_READS.values():
        graph.replay()
        HOST_WAITS[wait]()
        read(host)


HOST_WRITES = {
    "fill": lambda host: host.fill_(2),
    "copy": lambda host: host.copy_(torch.ones(4)),
    "element": lambda host: host.__setitem__(3, 2.0),
    "view": lambda host: host.view(2, 2).mul_(2),
    "out": lambda host: torch.add(torch.ones(4), 1, out=host),
    "from the device": lambda host: host.copy_(ones(device="openreg:1"), non_blocking=True),
}


@pytest.mark.parametrize("write", HOST_WRITES)
def test_the_source_of_a_captured_copy_is_written_too_early(write):
    host = pinned()
    graph, _ = captured(lambda: host.to(DEVICE, non_blocking=True) * 2)
    HOST_WRITES[write](host)
    torch.openreg.synchronize(1)
    for wait in HOST_WAITS.values():
        graph.replay()
        host.sum()  # both read
        with caught("race", "in its node aten._to_copy.default, captured at", "reading from argument(s) self"):
            HOST_WRITES[write](host)
        wait()
        HOST_WRITES[write](host)
        torch.openreg.synchronize(1)


def test_each_of_several_pinned_tensors():
    hosts, xs = [pinned() for _ in range(3)], [ones() for _ in range(3)]

    def copies():
        torch._foreach_copy_(hosts[:2], xs[:2], non_blocking=True)
        return hosts[2].to(DEVICE, non_blocking=True)

    for run in (copies, captured(copies)[0].replay):
        for host in hosts[:2]:
            run()
            with pytest.raises(sanitizer.OpenregSanitizerErrors):
                host.sum()
            hosts[2].sum()
            current().synchronize()
            host.sum()
        run()
        with pytest.raises(sanitizer.OpenregSanitizerErrors):
            hosts[2].zero_()
        current().synchronize()
        hosts[2].zero_()


def test_a_pinned_result_of_a_capture():
    graph, host = captured(lambda: (ones() * 2).to("cpu", non_blocking=True))
    graph.replay()
    with caught("race", "in its node aten._to_copy.default"):
        host.sum()
    current().synchronize()
    assert host.sum() == 8


def test_another_part_of_the_pinned_memory_may_be_used():
    host, x = pinned(8), ones()
    graph, _ = captured(lambda: host[:4].copy_(x, non_blocking=True))
    graph.replay()
    assert host[4:].sum() == 0
    with caught("race"):
        host[3:].sum()


@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
def test_replays_on_another_stream_and_device(device):
    host, x = pinned(), ones(device=device)
    current(device).synchronize()
    with torch.openreg.device(device):
        graph, _ = captured(lambda: host.copy_(x, non_blocking=True))
        side = torch.openreg.Stream()
        with side:
            graph.replay()
        current().synchronize()  # another stream
        with caught("race"):
            host.sum()
        with torch.openreg.Stream(), caught("race", "writing to argument(s) self"):
            host.copy_(x, non_blocking=True)
        side.synchronize()
        assert host.sum() == 4


def test_a_pinned_tensor_in_a_child_graph():
    host, x = pinned(), ones()
    child, _ = captured(lambda: host.copy_(x, non_blocking=True))
    graph, _ = captured(child.replay)
    graph.replay()
    with caught("race"):
        host.sum()
    current().synchronize()
    assert host.sum() == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the second copy converts
@pytest.mark.parametrize("resize", [lambda x: x.untyped_storage().resize_(0), lambda x: x.resize_(100_000)])
def test_a_graph_keeps_its_pinned_memory(resize, dtype, mode):
    """A replay after the program has resized or freed a tensor writes to no other tensor's memory, and is reported."""
    host, x = torch.zeros(1000, dtype=dtype, pin_memory=True), torch.ones(1000, device=DEVICE)
    graph, _ = captured(lambda: host.copy_(x, non_blocking=True))
    resize(host)
    other = [torch.zeros(1000, dtype=dtype, pin_memory=True) for _ in range(4)]
    with caught("moved_input", "argument self of aten.copy_.default", "was moved to other memory since the capture"):
        graph.replay()
    sanitizer.disable_openreg_sanitizer()
    graph.replay()
    host = None
    graph.replay()
    current().synchronize()
    assert all(tensor.sum() == 0 for tensor in other)
    sanitizer.enable_openreg_sanitizer()


def test_pinned_memory_that_the_program_has_freed():
    host, x = pinned(), ones()
    graph, y = captured(lambda: (host.copy_(x, non_blocking=True), host.to(DEVICE, non_blocking=True))[1])
    host = None
    for _ in range(2):
        graph.replay()
        others = [pinned() for _ in range(4)]
        assert all(tensor.add_(1).sum() == 4 for tensor in others)
    assert y.sum().item() == 4


def test_double_buffers():
    """Two pinned tensors, each with an event of the replay that last read it."""
    hosts, inputs = [pinned(), pinned()], ones()
    graphs = [captured(lambda host=host: inputs.copy_(host, non_blocking=True).mul_(2))[0] for host in hosts]
    events, results = [None, None], []
    for i in range(6):
        if events[i % 2] is not None:
            events[i % 2].synchronize()
        hosts[i % 2].fill_(i)
        graphs[i % 2].replay()
        results.append(inputs.clone())
        events[i % 2] = current().record_event()
    assert torch.stack(results)[:, 0].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


# ---- an output that the next replay overwrote ----


def test_results_of_a_graphed_callable_are_overwritten():
    f = torch.openreg.make_graphed_callables(nn.Linear(4, 4, device=DEVICE), (ones(2, 4),))
    with torch.no_grad():
        first, second = f(ones(2, 4)), f(ones(2, 4) * 2)
        with caught(
            "overwritten_output",
            "aten::sub.Tensor",
            "reads a view of the output of aten.",
            "replay 2 has overwritten it",
            "Clone the output",
        ):
            first - second


READS = {
    "stacked": lambda view: torch.stack([view, view]),
    "all values": torch.Tensor.tolist,
    "a view of it": lambda view: view[0] + 1,
    "a value of it": lambda view: view[1].item(),
    "transformed": torch.func.vmap(torch.sin),
    "differentiated": torch.func.grad(torch.sum),
    "printed": repr,
}


@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
@pytest.mark.parametrize("read", READS)
def test_an_old_view_is_read(read, device):
    x, seen = ones(device=device), []
    with torch.openreg.device(device):
        graph, y = captured(lambda: x * 2)
        for _ in range(3):
            graph.replay()
            seen.append(y.view(4))
        for i in (0, 1):
            said = f"made after its replay {i + 1}, but replay 3 has overwritten it"
            with caught("overwritten_output", "reads a view of the output of aten.mul.Tensor", said):
                READS[read](seen[i])
        READS[read](seen[2])  # is not old
        seen[2].view_as(seen[0]) + 1  # only the shape of the old one


def test_an_output_that_backward_needs():
    x, weight = ones(), ones().requires_grad_()
    graph, y = captured(lambda: x * 2)
    graph.replay()
    loss = (weight * y).sum()
    graph.replay()
    with caught("overwritten_output", "in the backward of MulBackward0", "was saved for backward", "replay 2"):
        loss.backward()


@pytest.mark.parametrize("clone", [False, True])
def test_gradients_that_are_outputs_of_one_graph(clone):
    """PyTorch's issue 181723: the second backward adds the gradient to itself."""
    layer = torch.openreg.make_graphed_callables(nn.Linear(4, 4, bias=False, device=DEVICE), (ones(2, 4),))
    if clone:
        layer.weight.register_hook(torch.clone)
    layer(ones(2, 4)).sum().backward()
    if clone:
        layer(ones(2, 4) * 2).sum().backward()
        assert layer.weight.grad.eq(6).all()
    else:
        with caught("overwritten_output", "accumulates the output of aten.", "into a gradient", "replay 2", "Clone"):
            layer(ones(2, 4) * 2).sum().backward()
        layer.weight.grad = None
        layer(ones(2, 4) * 2).sum().backward()
        assert layer.weight.grad.eq(4).all()


# ---- values of the host ----


def test_a_cpu_scalar_has_changed():
    x, scale = ones(), torch.tensor(2.0)
    graph, y = captured(lambda: x * scale)
    graph.replay()
    scale.fill_(3.0)
    with caught("host_tensor", "aten.mul.Tensor", "as the constant 2.0, but its value is 3.0 now", "copy_()"):
        graph.replay()


def test_a_view_of_a_cpu_tensor_has_changed():
    x, table = ones(), torch.tensor([1.0, 2.0, 3.0])
    graph, y = captured(lambda: torch.add(x, table[1]))
    table[1] = 5
    with caught("host_tensor", "as the constant 2.0, but its value is 5.0 now"):
        graph.replay()


def test_a_learning_rate_has_changed():
    weight = nn.Parameter(ones())
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = ones()
    graph, _ = captured(optimizer.step)
    graph.replay()
    optimizer.param_groups[0]["lr"] = 0.25
    with caught("host_number", "the step of SGD", "param_groups[0]['lr'] of SGD as the constant 0.5, but it is 0.25"):
        graph.replay()


# ---- random state ----


@pytest.mark.parametrize(
    "number", ["torch.rand(())", "2 - torch.rand(()) * 3", "torch.rand(4).sum()", "torch.zeros(()).uniform_()"]
)
def test_a_random_number_of_the_host(number):
    x = ones()
    with caught("host_random", "drawn on the host during the capture"):
        captured(lambda: x * eval(number))


def test_random_numbers_that_no_node_takes():
    x = ones()
    captured(lambda: (torch.rand(4).to_sparse() * 2, x * torch.zeros_like(torch.rand(()))))


# ---- graphs that share a pool ----


def sharing(device=DEVICE):
    """Two graphs whose temporaries are at the same addresses, of one pool."""
    x = ones(1000, device=device)
    first, y = captured(lambda: ((x + 1) * 2).sum())
    second, z = captured(lambda: ((x + 3) * 4).sum(), pool=first.pool())
    return first, second, (x, y, z)


def test_graphs_of_one_pool_on_two_streams():
    first, second, kept = sharing()
    first.replay()
    side = torch.openreg.Stream()
    side.wait_event(torch.openreg.Event())
    with side, caught("shared_pool", "may run at the same time as the graph captured at", "They share the memory pool"):
        second.replay()


def test_the_first_graph_again_while_the_second_runs():
    with torch.openreg.device(1):
        first, second, kept = sharing("openreg:1")
        side = torch.openreg.Stream()
        first.replay()
        side.wait_stream(current())
        with side:
            second.replay()
        with caught("shared_pool", "its own pool"):
            first.replay()
        current().wait_stream(side)
        first.replay()


# ---- order ----


ORDER = [
    ("write", "replay", ("a replay of the graph captured at", "in its node aten.mul.Tensor", "aten::fill_.Scalar(")),
    ("replay", "write", ("aten::fill_.Scalar(", "in its node aten.mul.Tensor", "Captured with stack trace:")),
    (
        "replay",
        "read",
        ("aten::add.Tensor(", "reading from argument(s) self", "writing to the output", "a replay of the"),
    ),
    ("read", "replay", ("a replay of the graph", "Before this replay, have the default stream", "aten::add.Tensor(")),
    ("replay", "another", ("in its node aten.add.Tensor", "in its node aten.mul.Tensor", "Before this replay")),
    ("another", "replay", ("in its node aten.mul.Tensor", "in its node aten.add.Tensor", "Before this replay")),
]


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("first, second, sentences", ORDER, ids=[f"{first}-{second}" for first, second, _ in ORDER])
def test_a_replay_without_a_wait(first, second, sentences, device):
    """A graph and another one that reads its output, on two streams, with what is written before and read after them."""
    with torch.openreg.device(device):
        x = ones(device=f"openreg:{device}")
        graph, y = captured(lambda: x * 2)
        another, z = captured(lambda: y + 1)
        steps = {"write": lambda: x.fill_(3), "replay": graph.replay, "another": another.replay, "read": lambda: y + 1}
        side = torch.openreg.Stream()
        side.wait_stream(current())
        with side:
            steps[first]()
        now, then = f"the default stream of openreg:{device}", f"stream {side.stream_id} of openreg:{device}"
        with caught("race", f"Access by {now} during", f"Previous access by {then} during", *sentences):
            steps[second]()
        current().wait_stream(side)
        steps[second]()


def after_an_event(x, event, late=False):
    """Graphs that double x and record an event, and that wait for it and read x; `late`: x is doubled again after it."""

    def writes():
        x.mul_(2)
        event.record()
        if late:
            x.mul_(2)

    def reads():
        event.wait()
        return x + 1

    options = {"capture_error_mode": "relaxed"}
    return captured(writes, **options)[0], *captured(reads, **options)


def test_a_graph_writes_after_the_event_for_which_another_waits():
    x = ones()
    first, second, _ = after_an_event(x, torch.openreg.Event(external=True), late=True)
    first.replay()
    with torch.openreg.Stream(), caught("race", "in its node aten.add.Tensor", "in its node aten.mul_"):
        second.replay()


def test_a_graph_waits_for_an_event_that_is_recorded_later():
    x = ones()
    first, second, _ = after_an_event(x, torch.openreg.Event(external=True))
    side = torch.openreg.Stream()
    side.wait_stream(current())
    with side:
        second.replay()
    with caught("race", "in its node aten.mul_", "in its node aten.add.Tensor"):
        first.replay()


# ---- right patterns ----


@pytest.mark.parametrize("nested", [False, True])
def test_external_events_order_graphs(nested):
    """Each replay waits for what was recorded when it was launched."""
    x, done, read = ones(), torch.openreg.Event(external=True), torch.openreg.Event(external=True)
    first, second, y = after_an_event(x, done)
    if nested:
        first, second = (captured(graph.replay, capture_error_mode="relaxed")[0] for graph in (first, second))
    side = torch.openreg.Stream()
    for i in range(3):
        first.replay()
        with side:
            second.replay()
            read.record()
        read.wait()
        x.add_(0)
        read.synchronize()
        assert y.tolist() == [2.0 ** (i + 1) + 1] * 4


def test_a_pool_is_shared_behind_an_event():
    done = torch.openreg.Event(external=True)
    x = ones(1000)

    def body(scale, *events):
        for event, what in events:
            if what == "wait":
                event.wait()
        y = ((x + scale) * 2).sum()
        for event, what in events:
            if what == "record":
                event.record()
        return y

    first, _ = captured(lambda: body(1, (done, "record")), capture_error_mode="relaxed")
    second, y = captured(lambda: body(3, (done, "wait")), capture_error_mode="relaxed", pool=first.pool())
    torch.openreg.synchronize()
    first.replay()
    with torch.openreg.Stream() as side:
        second.replay()
        side.synchronize()
    assert y.item() == 8000


def training_step(capturable=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=capturable)
    x, target = ones(4, 4), ones(4, 1)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.openreg.Stream()
    side.wait_stream(current())
    with side:
        for _ in range(3):
            step()
    current().wait_stream(side)
    return x, target, step


def test_a_training_step():
    x, target, step = training_step()
    graph, loss = captured(step)
    kept = []
    for _ in range(4):
        x.copy_(torch.randn(4, 4))
        target.copy_(x.sum(1, keepdim=True))
        graph.replay()
        kept.append(loss.clone())
    torch.stack(kept).tolist()


def test_partial_graphs():
    x = ones()
    first, y = captured(lambda: x * 2)
    first.replay()
    z = y.cumsum(0)
    static = torch.empty_like(z)
    second, out = captured(lambda: static.exp().log(), pool=first.pool())
    for factor in range(3):
        x.fill_(factor)
        first.replay()
        if y.sum() >= 0:
            static.copy_(y.cumsum(0))
        second.replay()
        out.tolist()


def test_pools_that_share_no_memory_may_run_at_once():
    x = ones(1000)
    first, y = captured(lambda: x + 1)
    second, z = captured(lambda: x + 2, pool=first.pool())
    side = torch.openreg.Stream()
    side.wait_stream(current())
    first.replay()
    with side:
        second.replay()
    current().wait_stream(side)
    (y + z).tolist()


def test_a_copy_of_an_output_outlives_the_replay():
    x, weight = ones(), ones().requires_grad_()
    graph, y = captured(lambda: x * 2)
    row = None
    kept = []
    for _ in range(3):
        graph.replay()
        row = y[:2] if row is None else row  # a view that is used again
        kept.append((row.clone(), (weight * y.clone()).sum()))
    for copy, loss in kept:
        loss.backward()
        copy.tolist()


def test_a_graph_for_each_learning_rate():
    weight = nn.Parameter(ones())
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = ones()
    graphs = []
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        graphs.append(captured(optimizer.step)[0])
    for graph in graphs:
        graph.replay()


def test_transforms_and_other_layouts_beside_a_graph():
    x = ones()
    graph, y = captured(lambda: torch.func.vmap(torch.func.grad(lambda v: (v * v).sum()))(x.view(2, 2)))
    for _ in range(2):
        graph.replay()
        torch.func.vmap(lambda row: row.view(2, 1) * 2)(y).tolist()
        y.to_sparse().to_dense().tolist()
        torch.stack([y.t(), y]).tolist()
        torch.add(y, 1, out=torch.empty(2, 2, device=DEVICE).t())
        y[:0].sum().item()
        with torch.device(DEVICE):
            torch.zeros(2, 2).add_(y)


def test_a_compiled_function_beside_a_graph():
    x = ones()
    graph, y = captured(lambda: x * 2)
    compiled = torch.compile(lambda v: v.view(2, 2).sum(0) + 1, backend="aot_eager")
    for _ in range(2):
        graph.replay()
        compiled(y).tolist()


def test_graphs_in_graphs_and_what_is_gone():
    x = ones()
    inner, y = captured(lambda: x * 2)
    outer, z = captured(lambda: (inner.replay(), y + 1)[1])
    outer.replay()
    z.tolist()
    inner.reset()
    y = None
    gc.collect()
    again, w = captured(lambda: x * 3)
    again.replay()
    w.tolist()


def test_a_child_graph_keeps_its_inputs():
    x = ones()
    inner, y = captured(lambda: x * 2)
    outer, _ = captured(inner.replay)
    x = None
    with caught("freed_input", "aten.mul.Tensor"):
        outer.replay()


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch.accelerator.Graph came with torch 2.13")
def test_accelerator_graph():
    x = ones()
    graph = torch.accelerator.Graph()
    torch.openreg.synchronize()
    with torch.openreg.Stream(), graph:
        x += 1
    graph.replay()
    x = None
    with caught("freed_input", "aten.add_.Tensor"):
        graph.replay()


def test_a_void_capture_leaves_nothing():
    x = ones()
    graph = torch.openreg.Graph()
    with pytest.raises(torch.AcceleratorError), torch.openreg.graph(graph):
        x.sum().item()
    with torch.openreg.graph(graph):
        y = x * 2
    graph.replay()
    y.tolist()


def test_reports_go_to_a_function():
    found = []
    sanitizer.disable_openreg_sanitizer()
    sanitizer.enable_openreg_sanitizer(found.extend)
    x = ones()
    graph, y = captured(lambda: x * 2)
    x = None
    graph.replay()
    assert [error.kind for error in found] == ["freed_input"]


def test_graphs_have_their_own_methods_while_it_is_off():
    replay = torch.openreg.Graph.replay
    sanitizer.disable_openreg_sanitizer()
    assert torch.openreg.Graph.replay is not replay
    assert torch.openreg.Graph.replay is replay.__wrapped__


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["inline"], indirect=True)  # the program chooses its own
def test_the_tests_of_graphs_give_no_report(mode):
    files = [Path(__file__).with_name(f"test_{name}.py") for name in ("graphs", "graph_random", "graph_training")]
    chosen = "not process and not optimizers and not refuse and not are_registered and not scale_grows and not line"
    done = python("-m", "pytest", "-q", *files, "-k", chosen, cwd=files[0].parents[2], OPENREG_SANITIZER="1")
    assert done.returncode == 0, done.stdout
