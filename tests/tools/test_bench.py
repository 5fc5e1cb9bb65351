"""benchmarks/: both sides of a case compute the same, each suite runs, and a slower figure is found."""

import json
import math
import platform
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as for `python benchmarks/bench.py`
import bench
import report
import timing
from suites import compiled, device, graphs, models, operators, scaling

SMALL = dict(BATCH=2, SEQUENCE=8, WIDTH=64, VOCABULARY=50, HEADS=4, ROWS=16, COPY=2**16)


# ---- what is timed ----


@pytest.mark.parametrize("name", device.OPERATORS)
def test_operators_of_pytorch(name):
    x = torch.randn(8, 8)
    on_cpu, on_device = device.OPERATORS[name](x)(), device.OPERATORS[name](x.to("openreg"))()
    if name == "item":
        assert on_cpu == on_device == x[-1, -1].item()
    else:
        assert on_device.device.type == "openreg" and on_cpu.device.type == "cpu" and on_device.shape == on_cpu.shape
        assert name == "empty" or not assert_close(on_device.cpu(), on_cpu)


@pytest.mark.parametrize("name", operators.OPERATORS)
def test_operators_of_the_suite(monkeypatch, name):
    """Outputs and gradients; the random one drops the same share, and the optimizer updates the same parameters."""
    for constant, value in SMALL.items():
        monkeypatch.setattr(operators, constant, value)
    case = operators.OPERATORS[name]
    host = list(case.inputs(torch.float32))
    given = operators.on_device(host)
    if name == "adamw_step_":
        ours, theirs = ([p for g in step.__self__.param_groups for p in g["params"]] for step in (given[1], host[0]))
        for p, q in zip(ours, theirs, strict=True):
            p.data.copy_(q), p.grad.copy_(q.grad)
        case.eager(*host), case.operator(*given)
        assert_close([p.detach().cpu() for p in ours], [q.detach() for q in theirs])
    elif name == "dropout_add":
        for function, inputs in ((case.eager, host), (case.operator, given)):
            assert 0.85 < (function(*inputs) != inputs[1]).float().mean() < 0.95
    else:
        on_cpu, on_device = tree_leaves(case.eager(*host)), tree_leaves(case.operator(*given))
        if name == "quantize_rowwise":  # eager arithmetic may round a value to its neighbor
            assert (on_device.pop(0).cpu().int() - on_cpu.pop(0).int()).abs().max() <= 1
        assert_close([y.cpu() for y in on_device], on_cpu)
        if case.backward_bytes is not None:
            monkeypatch.setattr(torch, "randn_like", torch.ones_like)
            pair = [operators.training(*side)() for side in ((case.operator, given), (case.eager, host))]
            assert_close(*(tree_map(torch.Tensor.cpu, list(side)) for side in pair), rtol=1e-4, atol=1e-5)
    assert {x.dtype for x in tree_leaves(case.inputs(torch.bfloat16)) if isinstance(x, torch.Tensor)} <= {
        torch.bfloat16,
        torch.int64,
    }


MODELS = {"mlp": partial(models.mlp, 8), "lstm": models.lstm, "resnet": models.resnet_block, "gpt": models.transformer}


@pytest.mark.parametrize("name", MODELS)
def test_training_steps(monkeypatch, name):
    made = []

    class SGD(torch.optim.SGD):
        def __init__(self, parameters, **options):
            super().__init__(parameters, **options)
            made.append(self.param_groups[0]["params"])

    monkeypatch.setattr(torch.optim, "SGD", SGD)
    for where in ("cpu", "openreg"):
        step = models.training(MODELS[name], where)
        before = [p.detach().clone() for p in made[-1]]
        step(), step()
        assert not any(torch.equal(p, q) for p, q in zip(made[-1], before, strict=True))
    assert {p.device.type for p in made[1]} == {"openreg"}
    assert_close([p.detach().cpu() for p in made[1]], [p.detach() for p in made[0]], rtol=1e-3, atol=1e-5)


CALLS = {
    **{name: partial(make, n=sizes[0]) for name, (make, sizes, _) in scaling.CALLS.items() if name != "all-reduce"},
    **{name: make for name, (make, _) in compiled.GRAPHS.items() if not name.endswith("-step")},
    **{name: make for name, (make, _) in graphs.CALLS.items() if name in ("chain", "mlp-step")},
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(monkeypatch, name):
    monkeypatch.setattr(torch, "compile", lambda body, **_: body)  # tests/graph compares the compiler with eager mode
    on_cpu, on_device = CALLS[name]("cpu")(), CALLS[name](device="openreg")()
    assert on_cpu is None or not assert_close(on_device.cpu(), on_cpu, rtol=1e-4, atol=1e-4)
    assert on_cpu is None or on_device.device.type == "openreg"


def test_operators_in_models():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total, normed = compiled.norm_of_sum(x, residual, weight)
    assert_close((total, normed), (x + residual, operators.rms_norm(x + residual, weight)))
    assert_close(compiled.swiglu_of_halves(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
    heads, table = torch.randn(4, 512, 3072), operators.angles(torch.float32)
    q, k, _v = heads.view(4, 512, 3, 16, 64).unbind(2)
    expected = sum(operators.rotary_embedding(half.transpose(1, 2), *table) for half in (q, k))
    assert_close(compiled.rotary_of_heads(heads, *table), expected)


# ---- how it is timed and judged ----


def test_batches_alternate(monkeypatch):
    calls = []
    sides = [lambda: calls.append(0), lambda: calls.append(1)]
    assert [len(times) for times in timing.alternate(sides, 4, number=2)] == [4, 4]
    assert calls == [0, 1] + [1, 1, 0, 0, 0, 0, 1, 1] * 2
    assert len(timing.alternate(sides, 1000, 0.0)[0]) == timing.LEAST
    monkeypatch.setattr(timing, "PATIENCE", 0.0)
    assert len(timing.alternate(sides, 1000, 1000.0)[0]) == 1


def test_a_batch_ends_with_its_work(monkeypatch):
    """In async mode, a call returns before its work ends."""
    clock, late = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: late and clock.__setitem__(0, clock[0] + late.pop()))
    on_cpu, on_device = timing.alternate([lambda: None, lambda: late.append(3.0)], 2, number=1)
    assert on_cpu == pytest.approx([0.0] * 2, abs=0.1) and on_device == pytest.approx([3.0] * 2, abs=0.1)


def test_intervals_and_verdicts():
    generator, inside = torch.Generator().manual_seed(0), 0
    for _ in range(200):
        found = timing.compared([1.0] * 101, torch.randn(101, generator=generator).mul(0.2).exp().tolist())
        inside += found.low <= 1 <= found.high
    assert inside >= 180, "of 200 intervals of 95 % confidence"
    slowed = timing.compared([1.0, 2.0, 3.0] * 20, [2.0, 4.0, 6.0] * 20)  # a busy machine slows both sides
    assert (slowed.low, slowed.ratio, slowed.high, slowed.measured) == (2, 2, 2, 4)
    few = timing.compared([1.0] * 5, [0.5] * 5)
    average = timing.mean([timing.Speeds(1, 2, 1.9, 2.1), timing.Speeds(1, 0.5, 0.45, 0.55)])
    assert average.ratio == pytest.approx(1) and 0.93 < average.low < 1 < average.high < 1.06
    for found, target, said in (
        (slowed, 2.0, "reached"),
        (slowed, 1.9, "missed"),
        (average, 1.0, f"too noisy to tell, {average.low:.2f} to {average.high:.2f}"),
        (few, 1.0, "too few rounds to tell"),
        (timing.mean([few, slowed]), 1.0, "too few rounds to tell"),
    ):
        assert timing.verdict(found, target) == said


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_no_side_has_wider_instructions(monkeypatch):
    from torch._inductor import config

    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    for name in timing.SETTINGS:
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    with config.patch({"cpp.march": None}):
        timing.limit_instructions()
        assert config.cpp.march == "x86-64-v3"
    assert [timing.os.environ[name] for name in timing.SETTINGS] == ["AVX2", "AVX2", "x86-64-v3"]


# ---- the command ----

RUNS = {
    "device": ["add", "custom_abs"],
    "operators": ["quantize_rowwise"],
    "compiled": ["sum"],
    "steps": ["mlp"],
    "graphs": ["chain", "node"],
    "scaling": ["add"],
}


@pytest.mark.processes
@pytest.mark.parametrize("suite", bench.SUITES)
def test_each_suite_runs(monkeypatch, capsys, tmp_path, suite):
    for constant, value in SMALL.items():
        monkeypatch.setattr(operators, constant, value)
    monkeypatch.setattr(scaling, "PROCESSES", (2,))
    path = tmp_path / "it.json"
    words = [suite, "--only", *RUNS[suite], "--rounds", "6", "--seconds", "0.05"]
    assert bench.main([*words, "--processes", "1", "--json", str(path)]) == 0
    said, results = capsys.readouterr().out, json.loads(path.read_text())
    assert results["suite"] == suite and results["threads"] == torch.get_num_threads() and results["rounds"] == 6
    names = [found["name"] for found in results["figures"]]
    assert names and all(f"\n{name} " in said for name in names)
    for found in results["figures"]:
        assert 0 < found["low"] <= found["ratio"] <= found["high"] < math.inf
        assert found["ratio"] == pytest.approx(found["openreg_s"] / found["cpu_s"])
    assert {found["case"] for found in results["figures"]} - {"geometric mean"} == set(RUNS[suite])
    if suite == "operators":
        assert "of a copy's bandwidth" in said
        assert bench.main([*words, "--against", "best", "--dtype", "float32", "--threads", "1"]) == 0
        assert "quantize_rowwise, float32, forward, 1 thread, best" in capsys.readouterr().out


@pytest.mark.processes
def test_several_processes(capsys, tmp_path):
    path = tmp_path / "it.json"
    words = ["device", "--only", "add", "--rounds", "6", "--seconds", "0.05"]
    with pytest.raises(SystemExit, match="a process that measures ended with 1"):
        bench.in_a_process(bench.parse(words), ["no-such"])
    assert bench.main([*words, "--processes", "2", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "the medians of 2 processes" in said and json.loads(path.read_text())["processes"] == 2


def figures(*ratios, **more):
    """One process's figures."""
    names = ("add", "mul")
    return [
        {"name": name, "case": name, "cpu_s": 2.0, "openreg_s": 2 * ratio, "ratio": ratio, **more}
        for name, ratio in zip(names, ratios, strict=False)
    ]


def test_processes_together():
    runs = [figures(float(n), 1.0) for n in range(1, 7)]
    add, mul = report.together(runs)
    assert (add["ratio"], add["low"], add["high"], add["openreg_s"], mul["low"]) == (3.5, 1, 6, 7, 1)
    assert "low" not in report.together(runs[:5])[0]
    add, mul = report.together([*runs, figures(1.0)])
    assert "low" in add and "low" not in mul
    assert "low" not in report.together([*runs, figures(1.0, of=["eager"])])[0]


def test_against_an_earlier_run(monkeypatch, capsys, tmp_path):
    path, now = tmp_path / "it.json", [1.0, 1.0]
    monkeypatch.setattr(bench, "in_a_process", lambda *_, **__: figures(*now))
    assert bench.main(["--json", str(path)]) == 0
    assert bench.main(["--against", str(path)]) == 0
    assert "0 of 2 figures slower beyond the noise, 0 missing" in capsys.readouterr().out
    now[1] = 1.1
    assert bench.main(["--against", str(path)]) == 1
    assert "slower: mul: 1.10 (1.10 to 1.10), was 1.00 (1.00 to 1.00)" in capsys.readouterr().out
    assert bench.main(["--only", "add", "--against", str(path)]) == 0
    del now[1]
    assert bench.main(["--against", str(path)]) == 1
    assert "missing: mul" in capsys.readouterr().out
    other = json.loads(path.read_text()) | {"threads": 77}
    path.write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="was measured with threads 77, but this run has"):
        bench.main(["--against", str(path)])
    path.write_text("{}")
    with pytest.raises(SystemExit, match="expected a file that --json of this version wrote"):
        bench.main(["--against", str(path)])


def test_wrong_requests(capsys):
    for words, why in (
        (["--rounds", "0"], "--rounds: expected a number above 0, but got 0"),
        (["--against", "best"], "--against best is for the suite operators, but got device"),
        (["steps", "--against", "a", "b"], "--against takes one file, but got a b"),
        (["steps", "--dtype", "float16"], "unrecognized arguments: --dtype"),
        (["stepz"], "invalid choice: 'stepz'"),
    ):
        with pytest.raises(SystemExit):
            bench.main(words)
        assert why in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no case no-such in steps; there are mlp, transformer"):
        bench.main(["steps", "--only", "no-such"])
