"""Every command of docs/tools.md runs, and prints what the document shows, but for numbers."""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from processes import python

import openreg_ops
from openreg_ops import __main__

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/tools.md"
pytestmark = [pytest.mark.processes, pytest.mark.skipif(not DOCUMENT.exists(), reason="needs the source tree")]
SHOWN = "2.13.0"  # the torch of the outputs
# Which operators take most time, and save most, is the machine's affair.
ROW = re.compile(r"^(aten|mine)::.* (ns|us|ms|s)\b")
FAILS = {
    "drift 2.13 2.14 --sources backend",
    "explain nonzero_static --device mps",
    "compare --against cpu --html errors.html model.py",
}  # fmt: skip -- as the document says


def normal(line):
    return " ".join(re.sub(r"\d[\d.,]*( (ns|us|ms|s|B|KiB|MiB|GiB)\b)?", "#", line).split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the document's files are."""
    for language, name, text in re.findall(r"```(python|cpp)\n(?:#|//) (\S+)\n(.*?)```", DOCUMENT.read_text(), re.S):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{'#' if language == 'python' else '//'} {name}\n{text}")
    monkeypatch.chdir(tmp_path)
    # For processes that a command starts, wherever this package is.
    monkeypatch.setenv("PYTHONPATH", str(Path(openreg_ops.__file__).parents[1]))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    return tmp_path


def run(monkeypatch, command):
    monkeypatch.setattr(sys, "argv", ["openreg_ops", *shlex.split(command)])
    if command.startswith(("trace", "compare")):  # the program defines a library, once for a process
        result = python("-m", "openreg_ops", *shlex.split(command), dynamo=True)
        return result.returncode, result.stdout
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = __main__.main()
    return status, out.getvalue()


def test_every_command(folder, monkeypatch):
    blocks = re.findall(r"```console\n\$ python -m openreg_ops ([^\n]*)\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert {command.split()[0] for command, _ in blocks} == {
        "info", "operators", "explain", "trace", "compare", "drift", "conformance"
    }  # fmt: skip
    for command, shown in blocks:
        status, out = run(monkeypatch, command)
        # An installation that `info` finds wanting, such as a checkout on the path, is no failure of this test.
        assert status == (1 if command in FAILS else 0) or command == "info", (command, out)
        if torch.__version__.partition("+")[0] != SHOWN:
            continue
        printed = {normal(line) for line in out.splitlines()}
        lines = [line for line in shown.splitlines() if line != "…" and not ROW.match(line)]
        missing = [line for line in lines if normal(line) not in printed]
        assert not missing, (command, missing, out)
    assert (folder / "errors.html").exists() and (folder / "map.html").exists()


def test_python_of_the_document():
    for line in re.findall(r"`(from openreg_\S* import \w+)`", DOCUMENT.read_text()):
        exec(line, {})
