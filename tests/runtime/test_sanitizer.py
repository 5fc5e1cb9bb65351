"""The race detector: each kind of race is caught in every launch mode, its fixed version and PyTorch's patterns pass."""

import gc
import itertools
import operator
import random
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.openreg._sanitizer as sanitizer
from patterns import HOST_READS, HOST_WAITS, Prefetcher, model
from processes import python
from schedule_programs import PROGRAMS
from schedule_programs import UNSEEN as UNSEEN_PROGRAMS
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from openreg_ops import _C
from openreg_ops.meta import op
from openreg_ops.sanitizer import history
from openreg_ops.schedules.results import values_of

DEVICE = "openreg"
MS = 1_000_000  # cycles
N = 1 << 18  # elements of 1 MiB, a copy that is queued

current = torch.openreg.current_stream


@pytest.fixture(params=["inline", "async"], autouse=True)
def mode(request):
    with torch.openreg.launch_mode(request.param):
        yield request.param
        torch.openreg.synchronize(0)
        torch.openreg.synchronize(1)


EVERY_MODE = pytest.mark.parametrize("mode", ["inline", "async", "sync"], indirect=True)
ONE_MODE = pytest.mark.parametrize("mode", ["async"], indirect=True)


@pytest.fixture
def older(mode):
    """A tensor from before the sanitizer was on."""
    return [torch.zeros(2, N, device=DEVICE)]


@pytest.fixture(autouse=True)
def sanitized(mode, request):
    if "older" in request.fixturenames:
        request.getfixturevalue("older")
    with sanitizer.sanitize():
        yield


def caught():
    return pytest.raises(sanitizer.OpenregSanitizerErrors)


def busy(stream):
    """Keep a stream busy, so that what is queued on it comes late."""
    with stream:
        torch.openreg._sleep(20 * MS)


def message(error) -> str:
    """The report, in one line."""
    return " ".join(str(error.value).split())


# ---- races ----

WAITS = {
    "stream": lambda side, y: side.wait_stream(current()),
    "event": lambda side, y: side.wait_event(current().record_event()),
    "value": lambda side, y: y.sum().item(),
    "asked": lambda side, y: (event := current().record_event()).query() or event.synchronize(),
    **{f"host, {name}": lambda side, y, wait=wait: wait() for name, wait in HOST_WAITS.items()},
}


def use_after(wait):
    x = torch.ones(N, device=DEVICE)
    side = torch.openreg.Stream()
    busy(current())
    y = torch.ops.openreg.custom_abs(x)
    wait(side, y)
    with side:
        z = y + 1
    current().wait_stream(side)
    return z


def test_the_text_of_a_report():
    with caught() as error:
        use_after(lambda side, y: None)
    text = message(error)
    assert "a possible data race on the tensor with data pointer 0x" in text
    assert "of openreg:0 during: aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1)" in text
    assert "-> Tensor reading from argument(s) self With stack trace:" in text
    assert "Previous access by the default stream of openreg:0 during: openreg::custom_abs(Tensor" in text
    assert "-> Tensor writing to the output With stack trace:" in text
    assert text.count("in use_after z = y + 1") == 1
    assert text.count("in use_after y = torch.ops.openreg.custom_abs(x)") == 2  # the access and the allocation
    assert "Tensor was allocated with stack trace:" in text and "history.py" not in text
    assert "call its wait_stream() with the default stream of openreg:0, or its wait_event()" in text


def test_the_report_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs/streams.md").read_text().partition("## A report")[2]
    _, code, _, report, _ = text.split("```", 4)
    with caught() as error:
        exec(compile(code.removeprefix("python\n"), "example.py", "exec"), {})
    (race,) = error.value.errors
    report = report.replace("stream 1", f"stream {race.current_access.stream[1]}")
    for line in report.splitlines():
        if not any(part in line for part in ("0x", "…", " = ")):  # an address, what is left out, a line of the file
            assert " ".join(line.split()) in message(error)


# Each access of a program's race: device and stream, operator, arguments, and the line. A program's first stream is 1.
FOUND = {
    "use_on_another_stream": ("0:1 aten::add.Tensor reads self: z = y + 1",
        "0:0 openreg::custom_abs writes the output: y = torch.ops.openreg.custom_abs(x)"),
    "graph_replayed_on_a_stream_that_does_not_wait": ("0:1 a replay of aten.mul.Tensor reads self: graph.replay()",
        "0:0 aten::fill_.Scalar writes self: x.fill_(5)"),
    "reuse_without_record_stream": ("0:0 aten::fill_.Scalar writes self: again = torch.empty(N, device=DEVICE).fill_(2)",
        "0:1 openreg::custom_abs reads input, before the memory was freed: y = torch.ops.openreg.custom_abs(x)"),
    "host_reads_a_copy_too_early": ("host Tensor.tolist reads self: return copied(fixed).tolist()",
        "0:0 aten::copy_ writes the output: host.copy_(torch.ones(N, device=DEVICE), non_blocking=True)"),
    "collective_read_before_its_wait": ("0:0 aten::mul.Tensor reads self: z = y * 2",
        "collective of 0:0 c10d::_allgather_base_ writes output_tensor: "
        "work = torch.distributed.all_gather_into_tensor(y.view(-1), x, async_op=True)"),
}  # fmt: skip
REMEDIES = {
    "freed": "Call its record_stream() with {then}, or have",
    "collective": "call wait() on the Work that the collective returned with async_op=True",
    "host": "Before the host uses the tensor, call synchronize() on {then}",
    "stream": "have {now} wait: call its wait_stream() with {then}, or its wait_event()",
}


def said(access):
    """An access as FOUND has it."""
    if isinstance(access.stream, tuple):
        where = "{}:{}".format(*access.stream)
    else:
        where = "collective of {}:{}".format(*access.stream.started_on) if access.stream else "host"
    name = f"a replay of {access.node.name}" if access.node else str(access.operator).partition("(")[0]
    what = "reads" if access.type.name == "READ" else "writes"
    arguments = " ".join(access.aliases) or "the output"
    lines = "".join(access.stack_trace.format()).splitlines()
    places = [i for i, line in enumerate(lines) if "schedule_programs.py" in line or "patterns.py" in line]
    line = lines[places[-1] + 1].strip() if places else ""
    return f"{where} {name} {what} {arguments}{', before the memory was freed' * bool(access.freed)}: {line}"


def named(access):
    """The stream of such an access, as a report has it."""
    device, _, number = access.split()[0].partition(":")
    return f"stream {number} of openreg:{device}" if number != "0" else f"the default stream of openreg:{device}"


@EVERY_MODE
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - UNSEEN_PROGRAMS))
def test_programs_that_lack_a_wait(name):
    """The programs whose orders test_schedules.py tries: streams, memory, the host, graphs and collectives."""
    values_of(PROGRAMS[name](True))
    torch.openreg.synchronize()
    _C.set_next_streams([0] * len(_C.next_streams()))
    with torch.openreg.device(0), caught() as error:
        values_of(PROGRAMS[name](False))
    found = [said(access) for race in error.value.errors for access in (race.current_access, race.previous_access)]
    assert len(found) == {"lists_of_tensors": 6, "bucket_without_a_wait_after": 4}.get(name, 2), found
    # The comment marks the line of a race. The comparison of results reads the output of a side stream, outside the program.
    assert all(access.endswith("# race" if name != "output_of_a_side_stream" else ": ") for access in found[::2]), found
    assert all(map(str.startswith, found, FOUND.get(name, ()))), found
    for race, now, then in zip(error.value.errors, found[::2], found[1::2], strict=True):
        kinds = {
            "freed": race.previous_access.freed,
            "collective": then.startswith("collective"),
            "host": now.startswith("host"),
        }
        remedy = REMEDIES[next((kind for kind, found in kinds.items() if found), "stream")]
        assert remedy.format(now=named(now), then=named(then)) in " ".join(str(race).split())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@EVERY_MODE
@pytest.mark.parametrize("wait", WAITS)
def test_use_on_another_stream_with_a_wait(wait):
    assert use_after(WAITS[wait])[-1] == 2


def recorded(stream, **options):
    with torch.openreg.device(stream.device):
        event = torch.openreg.Event(**options)
    event.record(stream)
    return event


ASKED = {
    "event": lambda stream: stream.record_event(),
    "stream": lambda stream: stream,
    "external event": lambda stream: recorded(stream, external=True),
    "interprocess event": lambda stream: recorded(stream, interprocess=True),
}


@EVERY_MODE
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
def test_a_query_whose_answer_is_ignored_is_no_wait(asked, device):
    """The first answer is that the work still runs, in every mode, although it has run in the mode inline."""
    host, x = torch.zeros(4, pin_memory=True), torch.ones(4, device=device)
    stream = current(device)
    host.copy_(x, non_blocking=True)
    ASKED[asked](stream).query()
    with caught():
        host.sum()
    host.copy_(x, non_blocking=True)
    if not ASKED[asked](stream).query():
        stream.synchronize()
    assert host.sum() == 4


@EVERY_MODE
@pytest.mark.parametrize("asked", ASKED)
def test_a_query_after_a_wait_is_true(asked):
    stream = torch.openreg.Stream()
    assert stream.query() and current().query()  # they have no work
    with stream:
        x = torch.ones(4, device=DEVICE)
    for wait in (stream.synchronize, torch.openreg.synchronize, lambda: stream.record_event().synchronize()):
        with stream:
            x.add_(1)
        end = ASKED[asked](stream)
        wait()
        assert [end.query() for _ in range(3)] == [True] * 3
    with stream:
        y = x.sum()
        end = ASKED[asked](stream)
        y.item()
    assert end.query()


def copied_to_host(wait=lambda: None, pinned=True, non_blocking=True):
    x = torch.ones(N, device=DEVICE)
    busy(current())
    host = torch.zeros(N, pin_memory=pinned)
    host.copy_(x, non_blocking=non_blocking)
    wait()
    return host


@pytest.mark.parametrize("read", HOST_READS)
def test_the_host_reads_a_non_blocking_copy_too_early(read):
    host = copied_to_host()
    assert host.is_pinned() and host.shape == (N,)  # ask for no values
    with caught() as error:
        HOST_READS[read](host)
    text = message(error)
    assert ("writing to" if read == "write" else "reading from") + " argument(s) self" in text
    assert "Previous access by the default stream of openreg:0 during: aten::copy_(Tensor(a!) self, Tensor src" in text
    assert "in copied_to_host host.copy_(x, non_blocking" in text
    current().synchronize()
    HOST_READS[read](host)


IN_TIME = {name: dict(wait=wait) for name, wait in HOST_WAITS.items()}
IN_TIME |= {"blocking": dict(non_blocking=False), "pageable": dict(pinned=False)}


@EVERY_MODE
@pytest.mark.parametrize("case", IN_TIME)
def test_the_host_reads_a_copy_in_time(case):
    host = copied_to_host(**IN_TIME[case])
    assert host.is_pinned() == (case != "pageable") and host[-1] == 1
    for read in HOST_READS.values():
        read(host)


def test_the_host_has_waited_after_a_copy_to_pageable_memory():
    x = torch.ones(N, device=DEVICE)
    pinned, host = torch.zeros(N, pin_memory=True), torch.zeros(N)
    side = torch.openreg.Stream()
    busy(current())
    pinned.copy_(x, non_blocking=True)
    x.mul_(2)
    host.copy_(x, non_blocking=True)  # and so has what was queued before
    with side:
        x + 1
    assert pinned.sum() == N and host.sum() == 2 * N
    current().wait_stream(side)
    x.mul_(2)
    host.to(DEVICE, non_blocking=True)  # from pageable memory, it does not wait
    with side, caught():
        x + 1


def test_lists_of_pinned_and_pageable_tensors():
    xs = [torch.ones(4, device=DEVICE) for _ in range(2)]
    host = [torch.zeros(4, pin_memory=True), torch.zeros(4)]
    torch._foreach_copy_(host, xs, non_blocking=True)
    assert host[1].sum() == 4
    assert host[0].sum() == 4  # before the other
    host = [torch.zeros(4), torch.zeros(4, pin_memory=True)]
    torch._foreach_copy_(host, xs, non_blocking=True)
    assert host[0].sum() == 4
    with caught():  # behind the other
        host[1].sum()


@EVERY_MODE
def test_the_race_is_real(mode):
    """What the detector says can be wrong is wrong, where the host runs ahead."""
    sanitizer.disable_openreg_sanitizer()
    host = copied_to_host()
    assert host[-1] == (1 if mode == "sync" else 0)
    current().synchronize()
    assert host[-1] == 1


def test_another_part_of_the_host_memory_may_be_used():
    host = torch.zeros(8, pin_memory=True)
    host[:4].copy_(torch.ones(4, device=DEVICE), non_blocking=True)
    assert host[4:].sum() == 0
    with caught():
        host[3:].sum()


def test_the_host_uses_what_a_copy_reads():
    """It may read what the copy still reads, and write to pageable memory, which the copy has read when it returns."""
    host, pageable = torch.ones(N, pin_memory=True), torch.ones(N)
    busy(current())
    x = host.to(DEVICE, non_blocking=True)
    assert host.sum() == N
    y = pageable.to(DEVICE, non_blocking=True)
    pageable.zero_()
    assert x[-1] == y[-1] == 1


def test_host_memory_that_is_freed_is_forgotten():
    for _ in range(10):
        torch.ones(100, device=DEVICE).to("cpu", non_blocking=True)
        torch.zeros(100, pin_memory=True)
        host = torch.zeros(100)
        host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
        del host
        torch.zeros(100)


def test_memory_that_is_reused_before_its_stream_waits():
    """The wait comes before the first access, which is in order. Filling new memory would be one."""
    gc.collect()  # what earlier tests left behind is freed before, not in between
    torch.openreg.synchronize()
    torch.openreg.empty_cache()  # nor does the stream keep other memory of that size
    _C.set_poison(False)
    x, side = torch.ones(N, device=DEVICE), torch.openreg.Stream()
    address = x.data_ptr()
    side.wait_stream(current())
    busy(side)
    with side:
        y = torch.ops.openreg.custom_abs(x)
    del x
    again = torch.empty(N, device=DEVICE)
    assert again.data_ptr() == address
    current().wait_stream(side)
    again.fill_(2)
    assert y.sum().item() == N


def test_idle_memory_of_another_stream_is_in_order():
    """Here an idle stream's memory is anybody's, and the allocator has seen that the stream is idle."""
    for _ in range(8):
        stream = torch.openreg.Stream()
        with stream:
            x = torch.ones(N, device=DEVICE)
            x.add_(1)
        del x
        stream.synchronize()


def test_what_autograd_passes_between_streams_is_recorded(monkeypatch):
    """The engine records, through the device guard, the stream that continues with another stream's gradient."""
    recorded = []
    monkeypatch.setattr(history.Races, "stream_recorded", lambda self, address, stream: recorded.append(stream))
    side = torch.openreg.Stream()
    x = torch.ones(N, device=DEVICE, requires_grad=True)
    y = x * 2
    side.wait_stream(current())
    with side:
        z = (y * y).sum()
    current().wait_stream(side)
    z.backward()
    assert x.grad[0] == 8
    assert {(0, 0), (0, side.stream_id)} <= set(recorded)


def test_a_backward_under_anomaly_mode_names_its_forward():
    with torch.autograd.detect_anomaly(check_nan=False):
        w = torch.ones(4, device=DEVICE)
        x = torch.ones(4, device=DEVICE, requires_grad=True)
        loss = (x * w).sum()
        with torch.openreg.Stream() as side:
            side.wait_stream(torch.openreg.default_stream())
            w.data.mul_(2)
        with caught() as error:
            loss.backward()
    text = message(error)
    assert "in the backward of MulBackward0 whose forward was called here:" in text
    assert "loss.backward()" in text and "loss = (x * w).sum()" in text


def test_views_race_where_they_overlap():
    x = torch.ones(8, 8, device=DEVICE)
    side = torch.openreg.Stream()
    side.wait_stream(current())
    x[2:5].zero_()
    x[:, 5].zero_()
    with side:
        for apart in (x[:2, :5], x[5:, 6:], x[5:, :4].t(), x[:, :5][5]):
            apart.add_(1)
        for meets in (x[4:], x[0], x[:2, 3:6], x.diagonal(), x[7, 5:6], x.t()):
            with caught():
                meets.add_(1)


def test_copies_between_devices_are_ordered_on_both():
    x = torch.ones(N, device="openreg:0")
    y = x.to("openreg:1", non_blocking=True)
    x.zero_()
    y.add_(1)
    y.copy_(x, non_blocking=True)
    x.add_(1)
    assert y.sum().item() == 0
    y = x.to("openreg:1", non_blocking=True)
    with torch.openreg.Stream(device="openreg:1"), caught():
        y.add_(1)
    torch.openreg.set_device(0)
    with torch.openreg.Stream(device="openreg:0"), caught():
        x.zero_()


def test_an_inner_dispatch_is_seen():
    """The tensors in a subclass; what a transform runs."""
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE))
    side = torch.openreg.Stream()
    with side, caught():
        x.add_(1)
    y = torch.ones(4, 4, device=DEVICE)
    with side, caught():
        torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(y)


def test_factories_read_only_shapes():
    x = torch.ones(4, device=DEVICE)
    with torch.openreg.Stream():
        torch.zeros_like(x), x.new_ones(3), torch.empty_like(x), x.view(2, 2).t().detach()


def test_the_program_goes_on_after_a_report():
    x = torch.ones(4, device=DEVICE)
    side = torch.openreg.Stream()
    for _ in range(2):
        with side, caught():
            x.add_(1)
    side.wait_stream(current())
    with side:
        assert x.tolist() == [1, 1, 1, 1]  # what raced has not run


def test_errors_are_those_of_cudas_sanitizer():
    from torch.cuda import _sanitizer as csan

    x = torch.ones(4, device=DEVICE)
    with torch.openreg.Stream(), pytest.raises(csan.CUDASanitizerErrors) as error:
        x.add_(1)
    (race,) = error.value.errors
    assert isinstance(race, sanitizer.UnsynchronizedAccessError) and isinstance(race, csan.UnsynchronizedAccessError)
    assert race.data_ptr == x.data_ptr() and race.current_access.stream != race.previous_access.stream


# ---- PyTorch's own patterns, without a report ----


def loader(**options):
    data = torch.utils.data.TensorDataset(torch.rand(48, 16, dtype=torch.float64), torch.randint(4, (48,)))
    return torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True, **options)


@ONE_MODE
@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_with_a_prefetcher(workers):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.openreg.synchronize()
    losses = []
    for x, target in Prefetcher(loader(num_workers=workers)):
        loss = nn.functional.cross_entropy(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert torch.stack(losses).isfinite().all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    net = model()
    x = torch.randn(8, 16, device=DEVICE, requires_grad=True)
    for _ in range(2):
        checkpoint(lambda x: nn.functional.dropout(net(x), 0.5), x, use_reentrant=use_reentrant).sum().backward()
    assert x.grad.isfinite().all()


@ONE_MODE
def test_cpu_offload():
    net = model()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = net(torch.randn(8, 16, device=DEVICE)).square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


@ONE_MODE
def test_transforms():
    x = torch.randn(5, 3, device=DEVICE)
    f = lambda x: (x.sin() * x).sum()  # noqa: E731
    torch.func.vmap(torch.func.grad(f))(x)
    torch.func.hessian(f)(x[0])
    torch.func.jvp(f, (x,), (x,))
    torch.func.functionalize(lambda x: x.clone().add_(1))(x)


@ONE_MODE
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_optimizers(options):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(8, 16, device=DEVICE)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()


@ONE_MODE
def test_autocast_and_grad_scaler():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE)
    for _ in range(2):
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = net(torch.randn(8, 16, device=DEVICE)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def test_two_devices():
    a, b = nn.Linear(8, 8, device="openreg:0"), nn.Linear(8, 8, device="openreg:1")
    x = torch.randn(4, 8).pin_memory().to("openreg:0", non_blocking=True)
    for _ in range(2):
        b(a(x).relu().to("openreg:1", non_blocking=True)).sum().backward()
    assert a.weight.grad.isfinite().all()


def test_graphs_on_side_streams():
    """Forward on two streams; autograd runs each node's backward where its forward ran, and orders them."""
    net, other = model(), model()
    x = torch.randn(8, 16, device=DEVICE)
    sides = [torch.openreg.Stream() for _ in range(2)]
    for _ in range(3):
        outputs = []
        for side, module in zip(sides, (net, other), strict=True):
            side.wait_stream(current())
            with side:
                outputs.append(module(x))
            current().wait_stream(side)
            outputs[-1].record_stream(current())
        sum(outputs).square().mean().backward()
        for parameter in (*net.parameters(), *other.parameters()):
            parameter.data.sub_(parameter.grad)
            parameter.grad = None


DIFFERENTIABLE = {name for name in op.SAMPLES if f"{name}_backward" in op.SAMPLES} | {
    "custom_autograd_fn_aliasing", "custom_autograd_fn_returns_self", "linear_cross_entropy", "scale_gradient", "swiglu",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(op.SAMPLES))
def test_openreg_operators(name):
    """Forward, and backward where the operator has one, on a stream that waits for the inputs."""
    side = torch.openreg.Stream()
    for sample in [*op.SAMPLES[name](DEVICE, torch.float32)][:2]:
        args, kwargs = (sample, {}) if isinstance(sample, tuple) else (sample.args, sample.kwargs)
        if name in DIFFERENTIABLE:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_leaf:
                    x.requires_grad_()
        side.wait_stream(current())
        with side:
            out = getattr(torch.ops.openreg, name)(*args, **kwargs)
            leaves = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
            assert bool(leaves) == (name in DIFFERENTIABLE)
            if leaves:
                torch.autograd.backward(leaves, [torch.ones_like(x) for x in leaves])
        current().wait_stream(side)


@ONE_MODE
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    torch._dynamo.reset()
    compiled = []
    counting = lambda graph, inputs: compiled.append(graph) or torch._dynamo.lookup_backend(backend)(graph, inputs)  # noqa: E731
    net = torch.compile(model(), backend=counting, fullgraph=True)
    x = torch.randn(8, 16, device=DEVICE)
    net(x).sum().backward()
    assert compiled
    side = torch.openreg.Stream()
    with side, caught():
        net(x)
    torch._dynamo.reset()


@ONE_MODE
def test_higher_order_operators():
    """Functions in torch.cond are checked, and what torch.compile makes of a mutation passes."""
    cache, new = (torch.zeros(2, 4, 1, 3, device=DEVICE) for _ in range(2))
    add = torch.compile(lambda x, y: torch.ops.aten.add_(x, y) * 2, backend="aot_eager", fullgraph=True)
    assert add(cache, new).sum().item() == 0
    out = torch.cond(torch.tensor(True, device=DEVICE), lambda x: x + 1, lambda x: x - 1, (cache,))
    assert out.sum().item() == cache.numel()
    cache = torch.zeros(4, device=DEVICE)
    with torch.openreg.Stream(), caught():
        torch.cond(torch.tensor(True, device=DEVICE), lambda x: x + 1, lambda x: x - 1, (cache,))
    torch._dynamo.reset()


@ONE_MODE
def test_character_transformer(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import train_char_transformer as example

    run = example.Run(50, DEVICE, torch.float32)
    for _ in range(2):
        run.step(torch.randint(50, (example.BATCH, example.CONTEXT + 1)))
    del sys.modules["train_char_transformer"]


# ---- the kernels of operators, which call other operators ----


def to_host(x, fixed):
    """The two lines that race: a copy to pinned memory, and a read of it."""
    host = torch.zeros(x.shape, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if fixed:
        current().synchronize()
    return host


def on_side(x, fixed):
    side = torch.openreg.Stream()
    if fixed:
        side.wait_stream(current())
    with side:
        y = x * 2
    current().wait_stream(side)
    return y


BODIES = {
    "item": lambda x, fixed: x + to_host(x, fixed)[1].item(),
    "tolist": lambda x, fixed: x + sum(to_host(x, fixed).tolist()),
    "numpy": lambda x, fixed: x + float(to_host(x, fixed).numpy().sum()),
    "to": lambda x, fixed: x + x.to("cpu", non_blocking=not fixed).sum().item(),
    "side stream": on_side,
}


@pytest.fixture(scope="module")
def library():
    library = torch.library.Library("sanitized", "DEF")
    for key in ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        library.define(f"{key}(Tensor x, str body, bool fixed) -> Tensor")
        library.impl(key, lambda x, body, fixed: BODIES[body](x, fixed), key)
    library.define("backward(Tensor x) -> Tensor")

    @torch.library.custom_op("sanitized::plain", mutates_args=())
    def plain(x: torch.Tensor, body: str, fixed: bool) -> torch.Tensor:
        return BODIES[body](x, fixed)

    @plain.register_fake
    def _(x, body, fixed):
        return torch.empty_like(x)

    @torch.library.custom_op("sanitized::outer", mutates_args=())
    def outer(x: torch.Tensor, body: str, fixed: bool) -> torch.Tensor:
        return plain(x, body, fixed) + 1

    @torch.library.custom_op("sanitized::number", mutates_args=())
    def number(x: torch.Tensor, body: str, fixed: bool) -> float:
        return BODIES[body](x, fixed)[0].item()

    @torch.library.custom_op("sanitized::made", mutates_args=())
    def made(body: str, fixed: bool, device: torch.device) -> torch.Tensor:
        return BODIES[body](torch.ones(4, device=device), fixed)

    @torch.library.custom_op("sanitized::differentiable", mutates_args=())
    def differentiable(x: torch.Tensor, body: str, fixed: bool) -> torch.Tensor:
        return x * 2

    def setup(ctx, inputs, output):
        ctx.body = inputs[1:]

    differentiable.register_autograd(
        lambda ctx, grad: (BODIES[ctx.body[0]](grad, ctx.body[1]), None, None), setup_context=setup
    )
    yield torch.ops.sanitized
    library._destroy()


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, body, fixed):
        return BODIES[body](x, fixed)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def in_backward(operators, x, *body):
    operators.differentiable(x.requires_grad_(), *body).sum().backward()


def replaced(_operators, x, *body):
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("erfinv", lambda x: BODIES[body[0]](x, body[1]), "PrivateUse1")
        x.erfinv()


CALLS = {
    "custom_op": lambda operators, *args: operators.plain(*args),
    "in another": lambda operators, *args: operators.outer(*args),
    "returns a number": lambda operators, *args: operators.number(*args),
    "takes no tensor": lambda operators, _x, *body: operators.made(*body, torch.device(DEVICE)),
    "device": lambda operators, *args: operators.PrivateUse1(*args),
    "all devices": lambda operators, *args: operators.CompositeExplicitAutograd(*args),
    "composite": lambda operators, *args: operators.CompositeImplicitAutograd(*args),
    "backward": in_backward,
    "replaces a kernel": replaced,
    "autograd.Function": lambda _operators, *args: Function.apply(*args),
    "compiled": lambda operators, *args: compiled(operators.plain)(*args),
    "inference": torch.inference_mode()(lambda _operators, x, body, fixed: BODIES[body](x, fixed)),
}


# Reads without an operator are not seen in what a function of torch calls itself: see docs/streams.md.
UNSEEN = {(call, body) for call in ("composite", "backward") for body in ("tolist", "numpy")}
UNSEEN |= {("compiled", body) for body in ("item", "tolist", "to")}  # which take as long as the others
IN_KERNELS = [(call, body) for call in CALLS for body in BODIES if (call, body) not in UNSEEN]


@ONE_MODE
@pytest.mark.parametrize(("call", "body"), IN_KERNELS)
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_in_the_kernel_of_an_operator(library, call, body):
    x = torch.ones(4, device=DEVICE)
    CALLS[call](library, x, body, True)
    current().synchronize()
    with caught():
        CALLS[call](library, torch.ones(4, device=DEVICE), body, False)


def test_an_operator_that_calls_none_uses_its_arguments():
    """A kernel that gets addresses, for example, shows no operator."""
    with torch.library._scoped_library("sanitized_too", "FRAGMENT") as library:
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", lambda x: x.view(-1), "PrivateUse1")
        x = torch.ones(4, device=DEVICE)
        with torch.openreg.Stream(), caught() as error:
            torch.ops.sanitized_too.f(x)
        assert "sanitized_too::f(Tensor x) -> Tensor reading from argument(s) x" in message(error)


def test_waits_between_an_operator_and_its_caller(library):
    """The caller may wait for what the kernel launched, and the kernel for what the caller launched."""
    side = torch.openreg.Stream()

    @torch.library.custom_op("sanitized::starts", mutates_args=())
    def starts(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(current())
        with side:
            return x * 2

    @torch.library.custom_op("sanitized::waits", mutates_args=("host",))
    def waits(x: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        current().wait_stream(side)
        side.synchronize()
        host.add_(1)
        return x + 1

    x, host = torch.ones(4, device=DEVICE), torch.zeros(4, pin_memory=True)
    y = starts(x)
    with side:
        host.copy_(y, non_blocking=True)
    assert waits(y, host).sum().item() == 12 and host.sum().item() == 12
    y = starts(x)
    with caught():
        y + 1


# ---- turning it on ----


def test_off_means_off():
    sanitizer.disable_openreg_sanitizer()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    x = torch.ones(4, device=DEVICE)
    assert _C.take_notices() == []
    with torch.openreg.Stream():
        x.add_(1)
    sanitizer.disable_openreg_sanitizer()


def test_on_twice_is_on_once():
    sanitizer.enable_openreg_sanitizer()
    with sanitizer.sanitize():
        assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 1
    with torch.openreg.Stream() as side:
        side.wait_stream(torch.openreg.default_stream())
        x = torch.ones(4, device=DEVICE)
    with caught():
        x.add_(1)


def test_another_thread_that_turns_it_on():
    x = torch.ones(4, device=DEVICE)
    errors = []

    def work():
        with sanitizer.sanitize(), torch.openreg.Stream():
            try:
                x.add_(1)
            except sanitizer.OpenregSanitizerErrors as error:
                errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == 1
    with torch.openreg.Stream(), caught():  # and it is on here still
        x.add_(1)


def test_what_was_there_before_is_taken_as_ready():
    sanitizer.disable_openreg_sanitizer()
    x = torch.ones(4, device=DEVICE)
    with sanitizer.sanitize(), torch.openreg.Stream():
        x.add_(1)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "value, mode, ends",
    [
        ("1", "inline", "Remedy: Before this access, have stream 1 of openreg:0 wait"),
        ("1", "sync", "OpenregSanitizerErrors"),
        ("0", "async", ""),
        ("yes", "inline", "OPENREG_SANITIZER: expected 0 or 1, but got 'yes'"),
    ],
    indirect=["mode"],
)
def test_environment(value, ends, mode):
    code = (
        "import torch, openreg_ops, sys\n"
        "assert ('torch.cuda._sanitizer' in sys.modules) == (sys.argv[1] == '1'), 'imported on demand'\n"
        "x = torch.ones(4, device='openreg')\n"
        "with torch.openreg.Stream(): x.add_(1)\n"
    )
    done = python("-c", code, value, OPENREG_SANITIZER=value, OPENREG_LAUNCH_MODE=mode)
    assert ends in done.stderr and (done.returncode != 0) == bool(ends), done.stderr


def test_a_report_in_place_of_an_exception():
    """The program continues, and every race is reported."""
    told = []
    torch.openreg._sanitizer.disable_openreg_sanitizer()  # which raises in these tests
    with torch.openreg._sanitizer.sanitize(told.extend):
        x = torch.ones(4, device="openreg")
        with torch.openreg.Stream():
            y = x + 1
            z = x.mul_(2)
    assert [str(error.current_access.operator).partition("(")[0] for error in told] == [
        "aten::add.Tensor",
        "aten::mul_.Tensor",
    ]
    assert y.shape == z.shape == (4,)


# ---- programs that are right, with rarer layouts ----

LAYOUTS = {
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "coo": lambda x: x.to_sparse(),
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1::2],
    "expanded": lambda x: x[:1].expand(8, 8),
    "conjugated": lambda x: x.to(torch.complex64).conj(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts(layout):
    """Both streams only read x, then one writes its values."""
    x = LAYOUTS[layout](torch.eye(8, device=DEVICE))
    side = torch.openreg.Stream()
    side.wait_stream(current())
    with side:
        y = x * 2
        back = y.to_dense() if y.layout != torch.strided else y.resolve_conj().clone()
    current().wait_stream(side)
    for made in (y, back):
        if made.layout == torch.strided:
            made.record_stream(side)
    z = (x * 3).to_dense() if x.layout != torch.strided else x * 3
    assert torch.equal(back.cpu() * 3, z.cpu() * 2)
    if (
        x.layout == torch.sparse_bsr or layout == "expanded"
    ):  # a product of blocks has no kernel; expanded is not written
        return
    values = x if x.layout == torch.strided else x._values() if layout == "coo" else x.values()
    values.mul_(2)
    with side, caught():
        _ = x * 3


def test_masks():
    """What a mask chooses is written on one stream, and read on another that waits."""
    x, mask = torch.arange(64.0, device=DEVICE), torch.arange(64, device=DEVICE) % 2 == 0
    side = torch.openreg.Stream()
    side.wait_stream(current())
    with side:
        chosen = x[mask]
        filled = x.masked_fill(mask, 0.0)
    y = x.masked_select(~mask)  # reads the same memory at the same time
    current().wait_stream(side)
    x[mask] = -1.0
    x.index_put_((mask.nonzero().squeeze(1),), chosen)
    assert torch.equal(x.cpu(), torch.arange(64.0)) and filled.sum() == y.sum()


def parts_until_reuse(address):
    """Smaller tensors, until one has a part of the memory of 2 N numbers that were at the address."""
    parts = []
    while not any(address <= part.data_ptr() < address + 8 * N for part in parts):
        assert len(parts) < 1000, "the allocator did not reuse the block"
        parts.append(torch.ones(N // 4, device=DEVICE))
    return parts


def test_partly_reused_memory():
    """Parts of one allocation on two streams; then the whole, after a wait; then its memory, by a smaller tensor."""
    x = torch.zeros(2, N, device=DEVICE)
    side = torch.openreg.Stream()
    side.wait_stream(current())
    with side:
        x[0].add_(1)
    x[1].add_(2)
    current().wait_stream(side)
    assert x.sum(1).tolist() == [N, 2 * N]
    address = x.data_ptr()
    del x
    parts = parts_until_reuse(address)
    side.wait_stream(current())
    with side:
        doubled = [part * 2 for part in parts]
    current().wait_stream(side)
    assert sum(tensor.sum().item() for tensor in doubled) == len(parts) * N // 2


def test_memory_from_before_the_sanitizer_reused_too_early(older):
    """Its size is known too: unawaited work on another stream races with any use of a part of the block."""
    x = older.pop()
    address, side = x.data_ptr(), torch.openreg.Stream()
    side.wait_stream(current())
    with side:
        x.add_(1)
    del x
    with caught() as error:
        parts_until_reuse(address)
    assert ", before the memory was freed, during: aten::add_" in message(error)
    current().wait_stream(side)


def test_memory_from_before_the_sanitizer_is_the_default_streams(older):
    """What any other stream, whichever its number, does to it without a wait races with its next use."""
    x = older.pop()
    sides = {side.stream_id: side for side in (torch.openreg.Stream() for _ in range(100))}
    for side, part in zip(sides.values(), x.flatten().chunk(len(sides)), strict=True):
        side.wait_stream(current())
        with side:
            part.add_(1)
    address = x.data_ptr()
    del part, x
    again, reused = [], 0
    while reused < 8 * N:
        assert len(again) < 1000, "the allocator did not reuse the block"
        again.append(torch.empty(N // 4, device=DEVICE))
        start = again[-1].data_ptr()
        reused += max(0, min(start + N, address + 8 * N) - max(start, address))
    with caught() as error:
        torch._foreach_zero_(again)
    assert {race.previous_access.stream for race in error.value.errors} == {(0, number) for number in sides}
    for side in sides.values():
        current().wait_stream(side)


def addresses(x):
    """The offsets in its storage of a tensor's bytes."""
    places = {sum(map(operator.mul, index, x.stride())) for index in itertools.product(*map(range, x.shape))}
    return {x.element_size() * (x.storage_offset() + place) + i for place in places for i in range(x.element_size())}


def test_spans_of_two_dtypes_meet_where_they_share_a_byte():
    """Views of one storage in two dtypes, in either order; a span covers another only if it has all of its bytes."""
    chosen, counts = random.Random(0), [0, 0, 0]
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.int8]
    with torch._C._DisableTorchDispatch():
        storage = torch.zeros(240, dtype=torch.int8)
        for _ in range(200):
            views = []
            for dtype in chosen.choices(dtypes, k=2):
                shape = (chosen.randint(1, 3), chosen.randint(1, 3))
                strides, start = (chosen.randint(1, 4), chosen.randint(1, 3)), chosen.randint(0, 10)
                views.append(storage.view(dtype).as_strided(shape, strides, start))
            (one, other), (here, there) = map(addresses, views), map(history.Span.of, views)
            assert here.meets(there) == there.meets(here) == bool(one & other), [(x.dtype, x.stride()) for x in views]
            assert here.covers(here) and (not here.covers(there) or one >= other)
            counts = [counts[0] + bool(one & other), counts[1] + (not one & other), counts[2] + here.covers(there)]
    assert min(counts) > 2


@pytest.mark.parametrize("second", [torch.float32, torch.int64, torch.uint8], ids=str)
def test_a_race_of_two_dtypes(second):
    """One storage that another stream uses in another dtype: a race where the bytes meet, and none beside them."""
    x = torch.zeros(64, dtype=torch.int16, device=DEVICE)
    side = torch.openreg.Stream()
    side.wait_stream(current())
    x[:16].add_(1)  # the first 32 bytes
    item = second.itemsize
    other = x.view(second)
    with side:
        other[32 // item :].zero_()
        with caught():
            other[32 // item - 1].zero_()
    current().wait_stream(side)


@pytest.mark.parametrize("first, second", [(0, 1), (1, 0)])
def test_two_races_are_reported_with_their_devices(first, second):
    """The second report is about the second race, on the device that it is on."""
    for number in (first, second):
        name = f"openreg:{number}"
        x = torch.ones(N, device=name)
        busy(current(number))
        x.add_(1)
        side = torch.openreg.Stream(number)
        with caught() as error, side:
            x.mul_(2)
        assert f"of {name}" in message(error) and f"of openreg:{1 - number}" not in message(error)
