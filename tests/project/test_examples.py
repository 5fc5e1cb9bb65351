"""The examples run and do what they claim, in a few steps; `make demo` runs the full one."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from processes import python

import openreg_ops

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
PATH = {**os.environ, "PYTHONPATH": str(Path(openreg_ops.__file__).parents[1])}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield __import__
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_train_char_transformer(example, tmp_path, capsys):
    status = example("train_char_transformer").main(["--steps", "3", "--dtype", "bfloat16", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "0 fell back" in out and "(within rounding)" in out
    assert openreg_ops.fallback.report() == []
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "train_char_transformer.png").stat().st_size > 1000


def test_the_terminal_curve(example):
    picture = example("train_char_transformer").draw([4.0, 3.0, 2.0, 1.5, 1.2, 1.1, 1.0], width=8, height=3)
    assert picture.splitlines()[0] == " 4.000 │⢇⠀⠀⠀⠀⠀⠀⠀" or picture.count("\n") == 4


def test_streams_and_isolation():
    done = python(EXAMPLES / "streams_and_isolation.py", **PATH)
    assert done.returncode == 0, done.stderr
    race, right, off, strict = done.stdout.splitlines()
    assert race.startswith("without the wait: Remedy: Before this access, have the default stream of openreg:0 wait")
    assert right == "with the wait: [0.0, 2.0, 4.0, 6.0]"
    assert off == "isolation off: the host read 1.0"
    assert strict.startswith("isolation strict: openreg: the host read device memory")
