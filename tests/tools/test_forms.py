"""The forms of the tools' reports: numbers with their units, and tables."""

import argparse
import importlib
import re

import pytest

from openreg_ops import __main__ as ops_main
from openreg_tools import __main__, forms


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0 ns"), (2.5e-9, "2.5 ns"), (999e-9, "999 ns"), (1e-6, "1 us"), (12.34e-6, "12.34 us"), (1e-3, "1 ms"),
        (0.25, "250 ms"), (1, "1 s"), (90.5, "90.5 s"),
        # On both sides of each unit's end, also where only rounding crosses it.
        (999.9e-9, "999.9 ns"), (999.96e-9, "1 us"), (1.001e-6, "1.001 us"), (999.9e-6, "999.9 us"),
        (999.96e-6, "1 ms"), (1.001e-3, "1.001 ms"), (0.9999, "999.9 ms"), (0.99996, "1 s"),
    ],
)  # fmt: skip
def test_seconds(value, text):
    assert forms.seconds(value) == text


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (-2048, "-2 KiB"), (1 << 20, "1 MiB"),
        (5 << 30, "5 GiB"), (3 << 40, "3 TiB"), (4096 << 40, "4096 TiB"),
        *((1000 * 1024**p, f"1000 {unit}") for p, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))),
        *((1023 * 1024**p, f"1023 {unit}") for p, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))),
        *((1024 ** (p + 1) - 1, f"1 {unit}") for p, unit in enumerate(("MiB", "GiB", "TiB"), 1)),
    ],
)  # fmt: skip
def test_size(count, text):
    assert forms.size(count) == text


def test_cut():
    assert forms.cut("aten::add", 9) == "aten::add"
    assert forms.cut("aten::a_name_of_an_operator", 12) == "aten::...tor"
    assert all(len(forms.cut("x" * 40, width)) == width for width in range(6, 40))


def test_table():
    rows = [("name", "calls"), ("aten::add", 7), ("x" * 90, 1000)]
    wide = "x" * 90
    assert forms.table(rows[:2], left=1) == ["name       calls", "aten::add      7"]
    assert forms.table(rows[:2]) == ["     name  calls", "aten::add      7"]
    assert forms.table([("a", "b"), ("c", "")], left=2) == ["a  b", "c"]
    assert all(len(line) <= 80 for line in forms.table(rows, left=1, fit=True))
    assert wide in forms.table(rows, left=1)[2] and wide not in "".join(forms.table(rows, left=1, fit=True))


def test_wrapped():
    lines = forms.wrapped(["one " * 40, "two-hyphens " * 10, "x" * 100], 3)
    assert all(line.startswith("   ") and not line.startswith("    ") for line in lines)
    assert 76 < max(len(line) for line in lines if "xxx" not in line) <= 80 and "x" * 100 in lines[-1]
    assert all("two-" not in line.split() for line in lines)


def test_arguments(tmp_path):
    assert forms.regex("a+") == "a+" and forms.file("-") == "-"
    assert forms.count("1") == 1 and forms.duration("0.001") == 0.001 and type(forms.duration("2")) is float
    assert forms.file(str(tmp_path / "new.json")) == str(tmp_path / "new.json")
    for function, text, sentence in (
        (forms.regex, "(", r"'\(' is not a regular expression: missing"),
        (forms.file, str(tmp_path), "is a folder; name a file in it"),
        (forms.file, str(tmp_path / "none" / "a.json"), "there is no folder .*none to write a.json to; make it first"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=sentence):
            function(text)


@pytest.mark.parametrize("name", __main__.COMMANDS)
def test_defaults_are_those_that_the_help_names(name):
    parser = argparse.ArgumentParser()
    importlib.import_module(__main__.COMMANDS[name][0]).add_arguments(parser)
    for action in parser._actions:
        said = re.search(r"\(default (\S+)\)", action.help or "")
        if said and isinstance(action.default, (int, float, str)):
            assert type(action.default)(said[1]) == action.default, action.option_strings


@pytest.mark.parametrize("name", ops_main.COMMANDS)
def test_what_is_not_a_number_is_refused(name, capsys):
    """Every number of a command is above 0, but for the seed, and the factor that compare itself looks at."""
    parser = argparse.ArgumentParser()
    importlib.import_module(ops_main.COMMANDS[name][0]).add_arguments(parser)
    for action in parser._actions:
        if action.type not in (int, float, forms.count, forms.duration):
            continue
        free = action.option_strings[0] in ("--seed", "--factor")
        for text in ("many",) if free else ("many", "0", "-1", "nan", "inf"):
            with pytest.raises(SystemExit) as exit_:
                parser.parse_args([f"{action.option_strings[0]}={text}"])
            said = capsys.readouterr().err
            assert exit_.value.code == 2 and f"argument {action.option_strings[0]}: " in said and text in said
