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
from openreg_tools.trace import trace


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
        x.cpu(), x.to("cpu", non_blocking=True), x.to("openreg:1"), x[x > 0], x[[0, 1]]
        torch.openreg.synchronize()
        torch.accelerator.synchronize()
    why = Counter()
    for reason, where, count in recorded.waits():
        assert re.fullmatch(r".*test_trace\.py:\d+", where)
        why[reason] += count
    assert why == {"item": 2, "copy to the host": 1, "data-dependent size or value": 1, "synchronize": 2}
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
        sign = {"print": "str(x)", "item": "f", "data-dependent size or value": "equal"}.get(reason, "synchronize()")
        assert where.startswith(os.path.relpath(__file__)) and sign in line
    assert why == {
        "print": 2, "item": 1, "Event.synchronize": 1, "Stream.synchronize": 2, "data-dependent size or value": 1
    }  # fmt: skip


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
        def synchronize(self):
            pass

        def elapsed_time(self, _other):
            return 250.0  # milliseconds

    recorded = trace("openreg")
    x = torch.ones(4, device="openreg")
    with recorded:
        monkeypatch.setattr(Recorder, "_event", lambda self, on: Event())
        x.abs()
    (call,) = [call for call in recorded.calls if call.name == "aten::abs.out"]
    assert call.seconds == 0.25
    found = rows(recorded)
    assert found["aten::abs.out"].seconds == 0.25 and found["aten::abs"].total == 0.25


def test_an_error_passes_and_is_recorded():
    x = torch.ones(4, device="openreg")
    with pytest.raises(RuntimeError, match="mat1"), openreg_ops.trace() as recorded:
        x.view(2, 2) @ x.view(4, 1)
    assert "mat1 and mat2" in recorded.calls[-1].error


def test_compiled_functions(recwarn):
    """Dynamo does not compile the recorder, which would cause warnings. The calls match the eager function's."""
    torch.compiler.reset()
    function = torch.compile(lambda x: (x @ x).relu(), backend="eager")
    with openreg_ops.trace() as recorded:
        function(torch.ones(4, 4, device="openreg"))
    assert not [str(warning.message) for warning in recwarn if "Dynamo" in str(warning.message)]
    assert {"aten::mm", "aten::relu"} <= set(rows(recorded))


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
    page, data = (tmp_path / name for name in ("page.html", "data.json"))
    assert command("--html", page, "--json", data, script, "--steps", "2") == 3
    said = capsys.readouterr().out
    assert said.startswith("arguments --steps 2\nprogram.py on openreg")
    assert re.search(r"^aten::mm +shared +1 ", said, re.M) and re.search(r"^ +1 +item +.*program.py:8$", said, re.M)
    assert all(len(line) <= 80 or "program.py" in line for line in said.splitlines())
    report = json.loads(data.read_text())
    assert {row["operator"] for row in report["operators"]} >= {"aten::mm", "aten::sum", "aten::_local_scalar_dense"}
    assert "aten::mm" in page.read_text() and not re.search(r"(src|href)=", page.read_text())


def test_every_rank_writes_its_own_files(script, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command("--html", tmp_path / "a.html", "--json", tmp_path / "a.json", script) == 3
    assert {path.name for path in tmp_path.glob("a.*")} == {"a.rank1.html", "a.rank1.json"}
    assert "rank 1 of 2" in (tmp_path / "a.rank1.html").read_text()


PROGRAM_WITH_EXECUTORS = """
import time
from concurrent.futures import ThreadPoolExecutor
import torch

ThreadPoolExecutor(2).map(lambda i: (time.sleep(0.05), open("done", "a").write(str(i))), range(6))
torch.compile(lambda x: x * 2 + 1, dynamic=False)(torch.ones(3, device="openreg"))
"""


@pytest.mark.slow
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


@pytest.mark.slow
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
    with trace(device) as recorded:
        torch.ones(3, device="meta").sum()
    assert recorded.elsewhere and f"No operator touched a tensor of {device}." in recorded.html()
