"""`python -m openreg_ops trace`: it counts what ran, where the host waited, and ranks what a kernel would save."""

import contextlib
import json
import os
import re
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import command as run
from processes import python

import openreg_ops
from openreg_tools.core import program as programs
from openreg_tools.recorder import Recorder
from openreg_tools.trace import Candidate, Row, Trace


@pytest.fixture(scope="module")
def library():
    """A fallback that takes 10 ms, a composite of fallbacks, and a fallback that takes no time."""
    library = torch.library.Library("test_trace", "DEF")
    for name in ("slow", "quick", "twice"):
        library.define(f"{name}(Tensor x) -> Tensor")
    library.impl("slow", lambda x: time.sleep(0.01) or x.clone(), "CPU")
    library.impl("quick", lambda x: x.clone(), "CPU")
    library.impl("twice", lambda x: x + x + x, "CompositeExplicitAutograd")
    yield library
    library._destroy()


def rows(recorded):
    return {row.operator: row for row in recorded.rows()}


def test_counts_times_and_bytes():
    x, y = torch.ones(32, 16, device="openreg"), torch.ones(16, 8, device="openreg")
    started = time.perf_counter()
    with openreg_ops.trace() as recorded:
        for _ in range(3):
            z = x @ y
        z.abs()
        torch.ones(4) + 1  # on the CPU
    wall = time.perf_counter() - started
    found = rows(recorded)
    assert {name: (row.calls, row.has) for name, row in found.items()} == {
        "aten::mm": (3, "shared"),
        "aten::abs": (1, "composite"),
        "aten::abs.out": (1, "own"),
        "aten::empty.memory_format": (1, "own"),
    }
    assert recorded.elsewhere == 2
    assert found["aten::mm"].bytes == 3 * (x.nbytes + y.nbytes + z.nbytes)
    assert 0 < sum(row.seconds for row in found.values()) < wall
    assert found["aten::abs"].total >= found["aten::abs.out"].total
    assert found["aten::abs"].total == pytest.approx(
        found["aten::abs"].seconds + found["aten::abs.out"].seconds + found["aten::empty.memory_format"].seconds
    )


@pytest.mark.parametrize("mode", ["inline", "async"])
def test_the_same_as_without(mode):
    """Recording changes neither results nor gradients, and sees the backward, on whichever thread it runs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Softplus(), torch.nn.LayerNorm(8)).to("openreg")
    x = torch.randn(5, 4, device="openreg")

    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with torch.openreg.launch_mode(mode), openreg_ops.trace() as recorded:
        got = gradients()
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert rows(recorded)["aten::softplus_backward"].calls == 1
    assert recorded.dict()["clock"] == ("events" if mode == "async" else "host")
    (backward,) = {call.thread for call in recorded.calls if call.name == "aten::softplus_backward"}
    assert (backward == recorded.calls[0].thread) == (mode == "inline")


def test_policies_that_change_meanwhile(library):
    x = torch.ones(4, device="openreg")
    with openreg_ops.trace() as recorded:
        torch.ops.test_trace.quick(x)
        with openreg_ops.fallback.share("test_trace::quick"):
            torch.ops.test_trace.quick(x)
        with openreg_ops.fallback.policy("error"), pytest.raises(NotImplementedError):
            torch.ops.test_trace.quick(x)
    assert [call.has for call in recorded.calls if call.depth == 0] == ["fallback", "shared", "refused"]


def test_waits():
    x = torch.ones(4, device="openreg")
    with openreg_ops.trace() as recorded:
        for _ in range(2):
            x.sum().item()
        x.cpu(), x.to("cpu", non_blocking=True), x.to("openreg:1"), x[x > 0]
        torch.openreg.synchronize()
        torch.accelerator.synchronize()
    why = Counter()
    for reason, where, count in recorded.waits():
        assert re.fullmatch(r".*test_trace\.py:\d+", where)
        why[reason] += count
    assert why == {"item": 2, "copy to host": 1, "shape from data": 1, "synchronize": 2}
    lines = {where for reason, where, _ in recorded.waits() if reason == "item"}
    (line,) = lines
    assert ".item()" in open(__file__).read().splitlines()[int(line.rpartition(":")[2]) - 1]


def test_waits_of_no_operator():
    x, event = torch.ones(4, device="openreg"), torch.openreg.Event()
    patched = [(torch.Stream, "synchronize"), (torch.Event, "synchronize"), (torch.Tensor, "__repr__")]
    before = [vars(kind)[name] for kind, name in patched]
    with openreg_ops.trace() as recorded:
        str(x), f"{x}"
        f"{x.sum():.2f}"  # reads the number
        event.record()
        event.synchronize()
        torch.openreg.current_stream().synchronize()
        torch.Stream("openreg").synchronize()
        torch.equal(x, x)
        str(torch.ones(4))  # no wait: on the CPU
    assert [vars(kind)[name] for kind, name in patched] == before
    event.synchronize(), str(x)  # after it
    lines = open(__file__).read().splitlines()
    why = Counter()
    for reason, where, count in recorded.waits():
        why[reason] += count
        line = lines[int(where.rpartition(":")[2]) - 1]
        sign = {"print": "str(x)", "item": "f", "value from data": "equal"}.get(reason, "synchronize()")
        assert where.startswith(os.path.relpath(__file__)) and sign in line
    assert why == {"print": 2, "item": 1, "Event.synchronize": 1, "Stream.synchronize": 2, "value from data": 1}


def record(stream):
    event = torch.openreg.Event()
    event.record(stream)
    return event


@pytest.mark.parametrize(
    "waits",
    [
        lambda side, default: side.wait_stream(default),
        lambda side, default: side.wait_event(default.record_event()),
        lambda side, default: side.wait_event(record(default)),
        lambda side, default: record(default).wait(side),
        lambda side, default: default.record_event().wait(side),
    ],
    ids=["stream", "record_event", "record", "wait of an event", "record_event and wait"],
)
def test_a_stream_that_waits_says_for_which_call(waits):
    x, side, default = torch.ones(4, 4, device="openreg"), torch.openreg.Stream(), torch.openreg.current_stream()
    for is_waiting in (True, False):
        with Trace("openreg", name="program") as recorded:
            x.neg_()
            if is_waiting:
                waits(side, default)
            with torch.openreg.stream(side):
                x @ x
        torch.openreg.synchronize()
        first, second = (next(c for c in recorded.calls if name in c.name) for name in ("::neg", "::mm"))
        assert (first.number in second.after) is is_waiting


def test_ranks_by_what_a_kernel_saves(library):
    x = torch.ones(4, device="openreg")
    with openreg_ops.trace() as recorded:
        for _ in range(2):
            torch.ops.test_trace.slow(x)
        for _ in range(3):
            torch.ops.test_trace.quick(x)
        torch.ops.test_trace.twice(x)
        x.cpu()
    first = recorded.candidates[0]
    assert first.operator == "test_trace::slow" and first.seconds > 0.01 and 0 < first.kernel < 0.01
    assert all(c.saved == pytest.approx(c.seconds - c.kernel) for c in recorded.candidates)
    assert [c.saved for c in recorded.candidates] == sorted((c.saved for c in recorded.candidates), reverse=True)
    assert {c.has for c in recorded.candidates} <= {"fallback", "composite"}


def test_first_calls_are_not_ranked(library):
    """They may load code. That holds for an operator, for each of its dtypes, and for what it is a part of."""
    x = torch.ones(4, device="openreg")
    with openreg_ops.trace() as recorded:
        torch.ops.test_trace.slow(x)
        torch.ops.test_trace.slow(x.int())
        torch.ops.test_trace.twice(x)
        torch.ops.test_trace.twice(x)
    firsts = [(call.name, call.first) for call in recorded.calls if call.name.startswith("test_trace")]
    assert firsts == [("test_trace::slow", True)] * 2 + [("test_trace::twice", True), ("test_trace::twice", False)]
    assert "test_trace::slow" not in {candidate.operator for candidate in recorded.candidates}
    said = " ".join(recorded.text().split())
    assert re.search(
        r"Not ranked: .*test_trace::slow.*\. Only first calls were recorded, and those may load code", said
    )
    assert "test_trace::slow" in rows(recorded), "its time is in the table all the same"
    with openreg_ops.trace() as recorded:
        x.neg_()
    assert "Every operator that takes time has a kernel." in recorded.text() and "Not ranked" not in recorded.text()


def test_calls_are_nested_as_in_the_dispatch_trace(library):
    x = torch.ones(4, device="openreg", requires_grad=True)
    with openreg_ops.trace() as recorded:
        x.abs()
    assert recorded.text(calls=True).splitlines()[:4] == [
        "[call] op=[aten::abs], key=[AutogradPrivateUse1]",
        " [redispatch] op=[aten::abs], key=[PrivateUse1]  composite",
        "  [call] op=[aten::empty.memory_format], key=[PrivateUse1]  own",
        "  [call] op=[aten::abs.out], key=[PrivateUse1]  own",
    ]


def test_times_of_events_are_seconds(monkeypatch):
    class Event:
        device = torch.device("openreg:0")

        def synchronize(self):
            pass

        def elapsed_time(self, _other):
            return 250.0  # milliseconds

    recorded = Trace("openreg")
    x = torch.ones(4, device="openreg")
    with recorded:
        monkeypatch.setattr(Recorder, "_event", lambda self, on: Event())
        monkeypatch.setattr(Recorder, "now", lambda self: 1.0)
        x.abs()
    (call,) = [call for call in recorded.calls if call.name == "aten::abs.out"]
    assert call.begins == 0.75
    found = rows(recorded)
    assert found["aten::abs.out"].seconds == 0.25 and found["aten::abs"].total == 0.25


def test_an_error_passes_and_is_recorded():
    x = torch.ones(4, device="openreg")
    with pytest.raises(RuntimeError, match="mat1"), openreg_ops.trace() as recorded:
        x.view(2, 2) @ x.view(4, 1)
    assert "mat1 and mat2" in recorded.calls[-1].error


def test_eighty_columns(monkeypatch):
    x = torch.ones(4, device="openreg")
    with openreg_ops.trace() as recorded:
        x.abs()
    name = "library::an_operator_of_a_long_name.with_a_long_overload"
    row = Row(name, "composite", 123456, 0.1234, 0.1234, 0.1, 123456789, 12345)
    monkeypatch.setattr(recorded, "rows", lambda: [row])
    recorded.candidates = [Candidate(name, "composite", 123456, 0.1234, 0.1234, 0.1234)]
    lines = recorded.text().splitlines()
    assert max(map(len, lines)) == 80, lines
    assert len([line for line in lines if re.match(r"library::\S+\.\.\.\S*load +composite ", line)]) == 2


# ---- where calls come from, streams and waits ----


def test_calls_say_inputs_module_and_stack():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softplus()).to("openreg")
    optimizer = torch.optim.SGD(model.parameters())
    with openreg_ops.trace() as recorded:
        model(torch.ones(3, 4, device="openreg")).sum().backward()
        optimizer.step()
    calls = {call.name: call for call in recorded.calls}
    line = {call.name: recorded.dict()["stacks"][call.stack][0] for call in recorded.calls}
    forward, backward = calls["aten::addmm"], calls["aten::softplus_backward"]
    assert forward.inputs == ("float32[2]", "float32[3, 4]", "float32[4, 2]")
    assert (forward.module, forward.phase) == ("Sequential.0", "forward")
    assert (backward.module, backward.phase) == ("Sequential.1", "backward of SoftplusBackward0")
    assert calls["aten::_foreach_add_.List"].phase == "optimizer"
    number = test_calls_say_inputs_module_and_stack.__code__.co_firstlineno
    for name, below in (("aten::addmm", 4), ("aten::softplus_backward", 4), ("aten::_foreach_add_.List", 5)):
        assert re.fullmatch(
            rf".*test_trace\.py:{number + below} in {test_calls_say_inputs_module_and_stack.__name__}", line[name]
        )


def check_events(document):
    """Checks Chrome's Trace Event Format as `trace` uses it; returns the slices by track, and the ends of the arrows."""
    document = json.loads(json.dumps(document, allow_nan=False))
    assert document["displayTimeUnit"] == "ns" and document["baseTimeNanoseconds"] > 1.7e18
    names, slices, arrows = {}, {}, {}
    for event in document["traceEvents"]:
        assert event["ts"] >= 0 and event["pid"] >= 0 and event["tid"] > 0, "viewers take thread 0 for the idle one"
        track = event["pid"], event["tid"]
        start = round(event["ts"] * 1e3)
        if event["ph"] == "M":
            names.setdefault(track, {})[event["name"]] = event["args"].get("name")
        elif event["ph"] == "X":
            slices.setdefault(track, []).append((start, start + round(event["dur"] * 1e3), event["name"]))
        else:
            assert event["ph"] == "s" or event["bp"] == "e"
            arrows.setdefault(event["id"], []).append((event["ph"], track, start))
    for found in slices.values():
        around = []
        for start, end, name in sorted(found, key=lambda each: (each[0], -each[1])):
            while around and around[-1] <= start:
                around.pop()
            assert start <= end and (not around or end <= around[-1]), (name, "slices of a track nest")
            around.append(end)
    for (first, a, start), (last, b, end) in arrows.values():
        assert (first, last) == ("s", "f") and start <= end
        for track, at in ((a, start), (b, end)):
            assert any(s <= at <= e for s, e, _ in slices[track]), "an arrow binds to a slice"
    titles = {track: f"{of['process_name']}, {of['thread_name']}" for track, of in names.items()}
    ends = [(titles[a], titles[b]) for (_, a, _), (_, b, _) in arrows.values()]
    return {titles[track]: found for track, found in slices.items()}, ends


@pytest.mark.parametrize("mode", ["inline", "async"])
def test_chrome_has_streams_and_waits(mode):
    """Rows for threads and streams, and an arrow from the last work of a stream to each wait for it."""
    x, y = torch.ones(64, 64, device="openreg"), torch.ones(64, 64, device="openreg:1")
    side = torch.openreg.Stream()
    default = torch.openreg.current_stream()
    with torch.openreg.launch_mode(mode):
        with Trace("openreg", name="program") as recorded:
            a = x @ x
            side.wait_stream(default)
            with torch.openreg.stream(side):
                b = a @ a
                done = side.record_event()
            done.wait()
            (b + b).sum().item()
            y @ y
            torch.openreg.synchronize()
        torch.openreg.synchronize()
    tracks, arrows = check_events(recorded.chrome())
    zero, one = (f"openreg:0, stream {stream.stream_id}" for stream in (default, side))
    assert set(tracks) == {"program, MainThread", zero, one, "openreg:1, stream 0"}
    assert [name for *_, name in tracks[one]] == ["aten::mm"]
    assert [name for *_, name in tracks["openreg:1, stream 0"]] == ["aten::mm"]
    assert "synchronize" in {name for *_, name in tracks["program, MainThread"]}
    assert (zero, one) in arrows and (one, zero) in arrows, "stream to stream"
    assert (zero, "program, MainThread") in arrows and ("openreg:1, stream 0", "program, MainThread") in arrows
    (start, *_), (end, *_) = tracks[zero][0], tracks[one][0]
    assert start <= end


def test_ranks_have_processes_of_their_own(monkeypatch):
    documents, times = [], []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        times.append(time.time_ns())
        monkeypatch.setenv("WORLD_SIZE", "2")
        with Trace("openreg", name="program") as recorded:
            torch.ones(3, device="openreg").sum().item()
        assert f"rank {rank} of 2" in recorded.text()
        documents.append(recorded.chrome())
    both = documents[0] | {"traceEvents": documents[0]["traceEvents"] + documents[1]["traceEvents"]}
    tracks, _ = check_events(both)
    names = [f"rank {rank}: program, MainThread" for rank in "01"]
    assert set(names) <= set(tracks)
    assert documents[0]["baseTimeNanoseconds"] == documents[1]["baseTimeNanoseconds"]
    since = [time - both["baseTimeNanoseconds"] for time in times]
    starts = [tracks[name][0][0] for name in names]
    assert since[0] < starts[0] < max(end for _, end, _ in tracks[names[0]]) < since[1] < starts[1]


def test_compiled_functions(recwarn):
    """Dynamo does not compile the recorder, which would cause warnings. The calls match the eager function's."""
    torch.compiler.reset()
    function = torch.compile(lambda x: (x @ x).relu(), backend="eager")
    with openreg_ops.trace() as recorded:
        function(torch.ones(4, 4, device="openreg"))
    assert not [str(each.message) for each in recwarn if "Dynamo" in str(each.message)]
    assert {"aten::mm", "aten::relu"} <= set(rows(recorded))


AFTERWARDS = """
import torch
from openreg_tools.trace import Trace

def function(x):
    torch.openreg.synchronize()
    torch.accelerator.synchronize()
    return x * 2 + torch.rand(3, device="openreg")

x = torch.ones(3, device="openreg")
with Trace("openreg"):
    torch.compile(lambda x: (x * 3, torch.accelerator.synchronize())[0], backend="eager")(x)  # Dynamo's first
print(torch.compile(function, backend="eager", fullgraph=True)(x).shape)
"""


@pytest.mark.slow
def test_dynamo_knows_the_functions_that_were_replaced():
    done = python("-c", AFTERWARDS)
    assert done.stdout.strip() == "torch.Size([3])", done.stderr


# ---- the command ----


def command(*words):
    return run("trace", *words)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            """
            import sys
            import torch

            def main():
                print("arguments", *sys.argv[1:])
                x = torch.ones(8, 8, device="openreg")
                (x @ x).sum().item()
                sys.exit(3)

            if __name__ == "__main__":
                main()
            """
        )
    )
    return path


def test_command(script, tmp_path, capsys):
    page, data, events = (tmp_path / name for name in ("page.html", "data.json", "events.json"))
    assert command("--html", page, "--json", data, "--chrome", events, script, "--steps", "2") == 3
    said = capsys.readouterr().out
    assert said.startswith("arguments --steps 2\nprogram.py on openreg")
    assert re.search(r"^aten::mm +shared +1 ", said, re.M) and re.search(r"^ +1 +item +.*program.py:8$", said, re.M)
    assert all(len(line) <= 80 or "program.py" in line for line in said.splitlines())
    report = json.loads(data.read_text())
    assert {row["operator"] for row in report["operators"]} >= {"aten::mm", "aten::sum", "aten::_local_scalar_dense"}
    tracks, _ = check_events(json.loads(events.read_text()))
    assert sum(map(len, tracks.values())) > len(report["calls"])
    assert "aten::mm" in page.read_text() and not re.search(r"(src|href)=", page.read_text())


def test_every_rank_writes_its_own_files(script, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command("--html", tmp_path / "a.html", "--chrome", tmp_path / "a.json", script) == 3
    assert {path.name for path in tmp_path.glob("a.*")} == {"a.rank1.html", "a.rank1.json"}


def test_the_rank_is_remembered_when_the_program_destroys_its_process_group(tmp_path):
    """Without torchrun, only the process group has it."""
    before = torch.distributed.destroy_process_group
    with Trace("openreg") as recorded:
        torch.distributed.init_process_group("fake", rank=1, world_size=2)
        torch.ones(2, device="openreg").add_(1)
        torch.distributed.destroy_process_group()
    assert (recorded.rank, recorded.ranks) == (1, 2) and not torch.distributed.is_initialized()
    assert torch.distributed.destroy_process_group is before


PROGRAM_WITH_EXECUTORS = """
import time
from concurrent.futures import ThreadPoolExecutor
import torch

ThreadPoolExecutor(2).map(lambda i: (time.sleep(0.05), open("done", "a").write(str(i))), range(6))
torch.compile(lambda x: x * 2 + 1, dynamic=False)(torch.ones(3, device="openreg"))
"""


def test_executors_of_the_caller_stay(tmp_path, monkeypatch):
    """The program's end when it has run what it was given, and what compiles works afterwards."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM_WITH_EXECUTORS)
    before = ThreadPoolExecutor(1)
    assert before.submit(lambda: 1).result() == 1
    with config.patch(compile_threads=2):  # with one, there is no executor
        for _ in range(2):
            torch.compiler.reset()
            AsyncCompile.pool.cache_clear()
            assert programs.run(["program.py"], contextlib.nullcontext()) == 0
            assert before.submit(lambda: 2).result() == 2
            assert AsyncCompile.pool().submit(lambda: 3).result() == 3
    before.shutdown()
    assert sorted(Path("done").read_text()) == sorted("012345" * 2)


def test_json_has_stdout_to_itself(tmp_path):
    """What the program, or a process that it starts, prints goes to stderr."""
    (tmp_path / "noisy.py").write_text(
        "import os, torch\nprint('from Python')\nos.system('echo from a child')\n"
        "torch.ones(2, device='openreg').add_(1)\n"
    )
    command = ("-m", "openreg_ops", "trace", "--json", "-", "noisy.py")
    done = python(*command, cwd=tmp_path, PYTHONPATH=str(Path(openreg_ops.__file__).parents[1]))
    assert done.returncode == 0, done.stderr
    assert "aten::add_.Tensor" in {row["operator"] for row in json.loads(done.stdout)["operators"]}
    assert "from Python\n" in done.stderr and "from a child\n" in done.stderr


def test_a_program_that_raises(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("import torch; torch.ones(2, device='openreg'); raise KeyError('x')")
    assert command(tmp_path / "bad.py") == 1
    said = capsys.readouterr()
    assert "KeyError: 'x'" in said.err and "aten::empty" in said.out


@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_a_recording_without_calls(device):
    with Trace(device) as recorded:
        torch.ones(3, device="meta").sum()
    assert check_events(recorded.chrome()) == ({}, [])
    assert recorded.elsewhere and f"No operator touched a tensor of {device}." in recorded.html()
