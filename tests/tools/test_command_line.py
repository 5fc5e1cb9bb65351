"""The command line of the tools: each error is one sentence with a remedy, and options take what they should."""

import argparse
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys

import pytest
import torch
from commands import command

from openreg_ops import __main__ as ops_main
from openreg_tools import backends
from openreg_tools.core import device, options
from openreg_tools.core.options import Wrong

MODULE = """
import torch

@torch.library.custom_op("own_ops::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by
"""
DEVICES = "unknown device 'opnreg'; available: cpu, meta, openreg"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command_line")
    (folder / "own_ops.py").write_text(MODULE)
    (folder / "program.py").write_text("raise AssertionError('it does not run')\n")
    (folder / "needs_another.py").write_text("import a_missing_package\n")
    (folder / "raises.py").write_text("raise ValueError('why')\n")
    (folder / "file").touch()
    return folder


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["chek"], "unknown command 'chek'; did you mean 'check'? (--help lists all)"),
        (["operators", "--reqired"], "unknown option '--reqired'; did you mean '--required'? (--help lists all)"),
        (["operators", "--nosuch"], "unknown option '--nosuch'; --help lists all"),
        (["operators", "--nosuch=1"], "unknown option '--nosuch'; --help lists all"),
        (["info", "extra"], "unexpected argument 'extra'"),
        (["trace", "--calls"], "missing argument: SCRIPT.py"),
    ],
)
def test_words_that_the_parser_does_not_know(capsys, words, sentence):
    status, said = command(*words), capsys.readouterr().err
    program = "python -m openreg_ops" + f" {words[0]}" * (len(words) > 1)
    assert status == 2 and said.startswith(f"usage: {program} [-h]")
    assert said.splitlines()[-1] == f"{program}: error: {sentence}"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["operators", "--device", "opnreg"], DEVICES),
        (["explain", "abs", "--device", "opnreg"], DEVICES),
        (["explain", "abs", "--input", "f32[3]@opnreg"], DEVICES),
        (["drift", "2.13", "2.14", "--device", "opnreg"], DEVICES),
        (["trace", "--device", "opnreg", "program.py"], DEVICES),
        (["compare", "--device", "opnreg", "program.py"], DEVICES),
        (["compare", "--against", "opnreg", "program.py"], DEVICES),
        (["conformance", "--device", "opnreg"], DEVICES),
        (["check", "own_ops:scale", "--input", "f32[3], 2.0", "--device", "opnreg"], DEVICES),
        (["trace", "--device", "maia", "program.py"], "cannot use device 'maia': "),
        (
            ["trace", "--device", "openreg:64", "program.py"],
            "cannot use device 'openreg:64': openreg: invalid device ordinal 64; there are 2 devices, openreg:0 to "
            "openreg:1. Set OPENREG_DEVICE_COUNT",
        ),
        (["operators", "--key", "PrivatUse1"], "unknown dispatch key 'PrivatUse1'; did you mean 'PrivateUse1'?"),
        (["operators", "--namespaces", "opnreg"], "unknown namespace 'opnreg'; did you mean 'openreg'?"),
        (["explain", "relo"], "unknown operator 'aten::relo'; did you mean 'aten::relu'? (if another library defines"),
        (["explain", "add.Tensr"], "unknown operator 'aten::add.Tensr'; available: aten::add.Scalar, aten::add.Scalar_out, "),
        (["check", "own_ops:scal"], "own_ops has no attribute 'scal'; did you mean 'scale'?"),
        (["check", "own_ops:nosuch"], "own_ops has no attribute 'nosuch'; operators in it: scale"),
        (["check", "own_ops:scale.nosuch"], "own_ops:scale has no attribute 'nosuch'; define it there, or name another"),
        (["check"], "expected an operator before the options, such as my_ops:scale, or --explain CHECK"),
        (["check", "no_module:op"], "there is no module no_module in the current folder or on the path"),
        (["check", "own_ops:scale", "--only", "fake_layout"], "unknown check 'fake_layout'; did you mean 'fake_layouts'?"),
        (["check", "needs_another:op"], "importing needs_another failed: No module named 'a_missing_package'"),
        (["check", "raises:op"], "importing raises failed: ValueError: why"),
        (["check", "own_ops:scale", "--input", "f32[3], 2.0", "--samples", "own_ops:x"], "give --samples or --input, not both"),
        (["check", "own_ops:scale", "--input", "x32[3], 2.0"], "there is no dtype 'x32'; short names are f64, f32, "),
        (["check", "own_ops:scale", "--input", "f32[3]@(1, 2), 2.0"], "f32[3]@(1, 2): there are 2 strides for 1 dimensions"),
        (["check", "own_ops:scale", "--input", "f32[99999999999999], 2.0"], "f32[99999999999999]: "),
        (["compare", "program", "--against", "cpu"], "put --against before program"),
        (["new-backend", "zeta", "--into", "file/below"], "cannot write file/below/"),
        (["new", "mine", "--ops", "scale"], "--style stable and --ops are for packages: add --package"),
        (["new", "mine", "--style", "stable"], "--style stable and --ops are for packages: add --package"),
        (["check", "--explain", "fake_layout"], "unknown check 'fake_layout'; did you mean 'fake_layouts'?"),
        (["trace", "none.py"], "there is no file none.py"),
        (["operators", "--import", "missing"], "importing missing failed: ModuleNotFoundError: No module named 'missing'"),
        (["operators", "--ops", "nosuch"], "nothing matches --ops 'nosuch'"),
        (["operators", "--ops", "custom_abz"], "nothing matches --ops 'custom_abz'; did you mean 'custom_abs'?"),
    ],
)  # fmt: skip
def test_requests_that_are_wrong(capsys, monkeypatch, folder, words, sentence):
    monkeypatch.chdir(folder)
    status, said = command(*words), capsys.readouterr()
    assert status == 2 and said.err.startswith(f"{words[0]}: {sentence}") and said.err.count("\n") == 1 and not said.out


def test_a_name_that_is_unknown():
    assert options.unknown("check", "x", ["runs", "schema"]) == "unknown check 'x'; available: runs, schema"
    assert options.unknown("check", "x", []) == "unknown check 'x'; available: none"
    assert options.unknown("check", "x", map(str, range(13))) == "unknown check 'x'; --help lists all"
    operators = ["openreg::nms", "openreg::swiglu", *map(str, range(12))]
    assert options.unknown("operator", "openreg::x", operators, "") == "unknown operator 'openreg::x'"
    assert options.unknown("operator", "openrg::swigl", operators, "").endswith("did you mean 'openreg::swiglu'?")
    assert options.unknown("key", "sparse", ["sparse_", "dense"], "") == "unknown key 'sparse'; did you mean 'sparse_'?"


@pytest.mark.parametrize("package", ["openreg_ops", "openreg_tools"])
def test_version(monkeypatch, capsys, package):
    monkeypatch.setattr(sys, "argv", [package, "--version"])
    for sentence in (rf"{package} \d+\.\d+\.\d+\S*", f"{package} is not installed: it is on the path only"):
        with pytest.raises(SystemExit) as exit_:
            importlib.import_module(f"{package}.__main__").main()
        assert exit_.value.code == 0 and re.fullmatch(sentence, capsys.readouterr().out.strip())
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: importlib.metadata.distribution("no_such_package")
        )


def test_types_of_options(tmp_path):
    assert options.regex("a+") == "a+" and options.file("-") == "-"
    assert options.count("1") == 1 and options.duration("0.001") == 0.001 and type(options.duration("2")) is float
    assert options.file(str(tmp_path / "new.json")) == str(tmp_path / "new.json")
    assert options.split(["a,b", "c d", "e"]) == ["a", "b", "c", "d", "e"]
    for function, text, sentence in (
        (options.regex, "(", r"'\(' is not a regular expression: missing"),
        (options.file, "", "expected the name of a file, but got ''"),
        (options.file, str(tmp_path), "is a folder; name a file in it"),
        (
            options.file,
            str(tmp_path / "none" / "a.json"),
            "there is no folder .*none to write a.json to; make it first",
        ),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=sentence):
            function(text)


@pytest.mark.parametrize("name", ops_main.COMMANDS)
def test_numbers_and_defaults(name, capsys):
    """Every number of a command is above 0, but for the seed and the factor, and a default is the one in the help."""
    parser = argparse.ArgumentParser()
    importlib.import_module(ops_main.COMMANDS[name][0]).add_arguments(parser)
    for action in parser._actions:
        said = re.search(r"\(default ([\w.-]+)\)", action.help or "")
        if said and isinstance(action.default, (int, float, str)):
            assert type(action.default)(said[1]) == action.default, action.option_strings
        if action.type not in (int, float, options.count, options.duration):
            continue
        free = action.option_strings[0] in ("--seed", "--factor")
        for text in ("many",) if free else ("many", "0", "-1", "nan", "inf"):
            with pytest.raises(SystemExit) as exit_:
                parser.parse_args([f"{action.option_strings[0]}={text}"])
            said = capsys.readouterr().err
            assert exit_.value.code == 2 and f"argument {action.option_strings[0]}: " in said and text in said


def test_a_backend_that_cannot_be_loaded_leaves_a_line(monkeypatch, capsys):
    class Entry:
        name, module = "torch_bad", "torch_bad"

        def load(self):
            raise ImportError("libbad.so: no such file")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Entry()])
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    line = "openreg_tools: the backend torch_bad cannot be loaded; the tools run without it: libbad.so: no such file\n"
    device.load([])
    assert capsys.readouterr().err == line
    device.load(["json"], "openreg")  # which is there
    device.load(["json"])
    assert not capsys.readouterr().err
    device.load(["json"], "nosuch")
    assert capsys.readouterr().err == line
    with backends.without_autoload() as would:
        assert would and not list(backends.installed())
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    device.load([])
    assert not capsys.readouterr().err


def test_devices_that_are_available(monkeypatch):
    assert device.available() == ["cpu", "meta", "openreg"]
    assert device.target_of("openreg:1") == device.Target("openreg:1", "PrivateUse1")
    assert device.target_of(key="SparseCPU") == device.Target("sparsecpu", "SparseCPU")
    with pytest.raises(
        Wrong, match="'openreg:99': openreg: invalid device ordinal 99; .* Set OPENREG_DEVICE_COUNT [^;]*$"
    ):
        device.usable("openreg:99")
    with pytest.raises(
        Wrong, match=r"cannot use device 'maia': [^.]*'aten::empty.memory_format'.*; available: cpu, meta, openreg$"
    ):
        device.usable("maia")
    monkeypatch.setattr(backends, "registered", list)
    assert device.default() == "openreg"
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert device.available() == ["cpu", "meta"]
    with pytest.raises(Wrong, match="there is no accelerator here: import its package with --import, or name a device"):
        device.default()


@pytest.mark.processes
@pytest.mark.parametrize("typed, expected", [("inf", ["info"]), ("new-backend --in", ["--into"])])
def test_completion(typed, expected, tmp_path):
    """What argcomplete answers to the shell, which sets these variables."""
    pytest.importorskip("argcomplete", reason="argcomplete of requirements.txt is not installed")
    line, answer = f"openreg-tools {typed}", tmp_path / "answer"
    shell = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    shell |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    subprocess.run([sys.executable, "-m", "openreg_tools"], env={**os.environ, **shell}, check=True)
    assert answer.read_text().split() == expected
