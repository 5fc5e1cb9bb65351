"""Writes the pages that come from the source: the reference, the commands, the errors, the notes and the list of files."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import errors

__all__ = ["GENERATED", "notes", "write"]

GENERATED = (
    "notes.md",
    "source.md",
    "reference/commands.md",
    "reference/errors.md",
    "reference/openreg-ops.md",
    "reference/openreg-tools.md",
    "reference/operators.md",
    "reference/torch-openreg.md",
)


def write(docs: Path) -> None:
    """Write each page that has changed, so that a second build reads those alone."""
    root = docs.parent
    texts = (
        notes_page(root),
        source_page(root),
        commands_page(),
        errors.page(root),
        *reference_pages(),
    )
    for name, text in zip(GENERATED, texts, strict=True):
        path = docs / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


# ---- notes ----


def sources(root: Path) -> Iterator[Path]:
    """The C++ and Python files of the package, in the order of their names."""
    for folder, suffixes in (
        ("csrc", (".h", ".cpp")),
        ("openreg_ops", (".h", ".py")),
        ("openreg_tools", (".py",)),
        ("meta", (".py",)),
    ):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and "openreg_ops/meta" not in str(path) and path.name != "_build.py":
                yield path


def notes(root: Path) -> list[tuple[str, str, list[str]]]:
    """Each ``Note [Title]`` with the file that has it and the lines of its text."""
    found = []
    for path in sources(root):
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            match = re.fullmatch(r"\s*(//|#)? ?Note \[([^\]]+)\]", line)
            if not match:
                continue
            comment, body = match[1], []
            for text in lines[i + 1 :]:
                if comment and not text.strip().startswith(comment):
                    break
                text = re.sub(rf"^\s*{comment} ?", "", text) if comment else text
                if not comment and '"""' in text:
                    break
                body.append(text)
            body = textwrap.dedent("\n".join(body)).splitlines()
            found.append((match[2], str(path.relative_to(root)), body))
    return sorted(found)


def _escaped(text: str) -> str:
    """Text of a comment as Markdown; what looks like code becomes code."""
    parts = re.split(r"(`[^`]+`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*<>|$])|(?<!\w)_|_(?!\w)", lambda m: "\\" + m[0], parts[i])
        parts[i] = re.sub(r"(?<![\w`:.])((?:\w+::)*\w+\(\))", r"`\1`", parts[i])
    return "".join(parts)


def _paragraphs(lines: list[str]) -> str:
    """Reflows a comment: an indented line continues the one before, and a list of ``word: text`` stays a list."""
    listed = {i for i, line in enumerate(lines) if re.match(r"[\w() /,:]{1,40}: \S", line) and _continues(lines, i)}
    if len(listed) < 2:
        listed = set()
    out: list[str] = []
    inside = False
    for i, line in enumerate(lines):
        if i in listed:
            word, _, rest = line.partition(": ")
            out.append(f"{'' if inside else chr(10)}- **{_escaped(word)}**: {_escaped(rest)}")
            inside = True
        elif not line.strip():
            out.append("")
            inside = False
        elif inside and line.startswith(" "):
            out.append("  " + _escaped(line.strip()))
        elif line.startswith("  "):
            first, last = not lines[i - 1].startswith("  "), i + 1 == len(lines) or not lines[i + 1].startswith("  ")
            out += ["", "```output"] * first + [line[2:]] + ["```", ""] * last
        else:
            out.append(("\n" if inside else "") + _escaped(line.strip()))
            inside = False
    return "\n".join(out)


def _continues(lines: list[str], i: int) -> bool:
    """Returns true if line i begins an item: the next line is indented, another item, or the end."""
    return i + 1 == len(lines) or lines[i + 1].startswith("  ") or bool(re.match(r"[\w() ]{1,40}: ", lines[i + 1]))


def notes_page(root: Path) -> str:
    text = [
        "# Notes",
        "",
        "A note explains something that several parts of the source rely on. Comments refer to it by name. This page collects "
        "the notes from the source.",
        "",
    ]
    for title, path, lines in notes(root):
        text += [f"## {title}", "", f"`{path}`", "", _paragraphs(lines), ""]
    return "\n".join(text)


# ---- source files ----


def purpose(path: Path) -> str:
    """The first sentence of a file's comment or docstring."""
    text = path.read_text()
    if path.suffix == ".py":
        match = re.match(r'"""(.*?)"""', text, re.S)
        words = match[1].strip().partition("\n\n")[0] if match else ""
    else:
        lines = []
        for line in text.splitlines():
            if not line.startswith(("//", "/*", " *")):
                break
            lines.append(line.lstrip("/* "))
        words = " ".join(lines)
    sentences = re.split(r"(?<=\.)\s+(?=[A-Z])", " ".join(words.split()))
    return next((sentence for sentence in sentences if not sentence.startswith("See ")), "")


def source_page(root: Path) -> str:
    text = ["# Source files", "", "Every source file, with the first sentence of its documentation.", ""]
    files: dict[str, list[Path]] = {}
    for path in sources(root):
        files.setdefault(str(path.parent.relative_to(root)), []).append(path)
    for folder, paths in files.items():
        rows = [(path.name, purpose(path)) for path in paths]
        shown = {name: words for name, words in rows if words}
        if not shown:
            continue
        text += [f"## {folder}", "", "| File | Purpose |", "|---|---|"]
        for name, words in shown.items():
            stem = name.removesuffix(".h") + ".cpp"
            both = (
                f"`{name}`, `.cpp`" if name.endswith(".h") and stem in dict(rows) and stem not in shown else f"`{name}`"
            )
            text.append(f"| {both} | {_escaped(words)} |")
        text.append("")
    return "\n".join(text)


# ---- commands ----


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "\\<").replace("*", "\\*")


def _rows(actions: list[argparse.Action]) -> list[str]:
    rows = []
    for action in actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
        value = " ".join(value) if isinstance(value, tuple) else value
        if action.choices and not action.metavar:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        takes = "" if action.nargs == 0 else f" {value}" + (" …" if action.nargs in ("*", "+") else "")
        name = ", ".join(f"`{option}{takes}`" for option in action.option_strings) or f"`{value}`"
        default = action.default if action.default not in (None, False, argparse.SUPPRESS, []) else ""
        words = (action.help or "") % {**vars(action), "prog": "openreg-tools"} if action.help else ""
        words, said, rest = words.partition(" (default ")  # the column says it
        default = rest.removesuffix(")") if said else "" if "(default:" in words else str(default)
        shown = f"`{_cell(default)}`" if default and " " not in default else _cell(default)
        rows.append(f"| {_cell(name)} | {_cell(words)} | {shown} |")
    return rows


class _Options:
    """Takes what a pytest plugin adds."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def getgroup(self, *_: Any, **__: Any) -> _Options:
        return self

    def addoption(self, *names: str, **options: Any) -> None:
        takes = "" if options.get("action", "").startswith("store_") else f" {options.get('metavar', 'VALUE')}"
        shown = ", ".join(f"`{name}{takes}`" for name in names)
        self.rows.append(f"| {shown} | {_cell(options.get('help', ''))} | |")

    def addini(self, name: str, help: str, **_: Any) -> None:
        self.rows.append(f"| `{name}` (configuration) | {_cell(help)} | |")


def commands_page() -> str:
    from openreg_ops.__main__ import COMMANDS, OWN

    head = ["| Option | Meaning | Default |", "|---|---|---|"]
    text = [
        "# Commands",
        "",
        '`python -m openreg_ops COMMAND` runs each command with the openreg device. Unless a command is marked "Only with '
        'openreg_ops", `openreg-tools COMMAND` runs it for any device. The exit status is 0 on success, 1 if the command '
        "found a problem, and 2 if the command line is wrong.",
        "",
    ]
    for name, (module, words) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=name)
        importlib.import_module(module).add_arguments(parser)
        only = " Only with openreg_ops." if name in OWN else ""
        text += [f"## {name}", "", words[0].upper() + words[1:] + "." + only, ""]
        commands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        rows = _rows([a for a in parser._actions if a not in commands])
        text += [*head, *rows, ""] if rows else []
        for action in commands:
            for sub, subparser in action.choices.items():
                text += [f"### {name} {sub}", "", *head, *_rows(subparser._actions), ""]
    from openreg_tools import pytest_plugin

    options = _Options()
    pytest_plugin.pytest_addoption(options)
    text += ["## pytest", "", "The options of the pytest plugin ([Test your library](../testing-your-library.md)).", ""]
    text += [*head, *options.rows, ""]
    return "\n".join(text)


# ---- the reference ----


def _automatic(module: str, names: list[str], options: str = "") -> list[str]:
    """Directives of autodoc for names of a module."""
    lines = []
    for name in names:
        value = getattr(importlib.import_module(module), name)
        kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
        if kind == "data":
            lines += [f".. py:data:: {module}.{name}", "", f"   {DATA[name]}", ""]
            continue
        lines += [f".. auto{kind}:: {module}.{name}"]
        if kind == "class":
            members = [key for key in vars(value) if not key.startswith("_")]
            lines += ["   :members:"] if members else []
        lines += [options, ""]
    return lines


def _section(title: str, *lines: str, words: str = "") -> list[str]:
    return [f"## {title}", "", *([words, ""] if words else []), "```{eval-rst}", *lines, "```", ""]


def _module(title: str, module: str, names: list[str] | None = None) -> list[str]:
    """A section for a module: its docstring, then its public names."""
    names = names if names is not None else list(importlib.import_module(module).__all__)
    return _section(title, f".. automodule:: {module}", "   :no-members:", "", *_automatic(module, names))


def _each_name_once(lines: list[str]) -> list[str]:
    """The directives, with only the first class of each name as a link target, because links give just the name."""
    out, seen = [], set()
    for line in lines:
        out.append(line)
        if line.startswith(".. autoclass::"):
            name = line.rpartition(".")[2]
            out += ["   :no-index:"] * (name in seen)
            seen.add(name)
    return out


def reference_pages() -> tuple[str, str, str, str]:
    """In the order of GENERATED: openreg_ops, openreg_tools, the operators, torch.openreg."""
    import torch

    import openreg_ops
    from openreg_ops import meta

    own = ["# openreg_ops", "", "The Python package. [Operators](operators.md) has its operators.", ""]
    own += _module("Fallback", "openreg_ops.fallback")
    own += _module("Autograd fallback", "openreg_ops.autograd_fallback")
    own += _section("Optimizer", *_automatic("openreg_ops", ["AdamW"]))
    own += _section("Building packages", *_automatic("openreg_ops", ["include_paths", "library_paths"]))
    own[-2:-2] = [".. autodata:: openreg_ops.cpp_extension.cmake_prefix_path", "   :no-value:", ""]
    own += _module("Device-type tests", "openreg_ops.testing.device_type", ["OpenregTestBase", "install"])

    tools = ["# openreg_tools", "", "Pure Python, for PyTorch 2.10 to 2.15 and any device.", ""]
    tools += _section(
        "The checker",
        *_automatic("openreg_tools.check", ["check", "Sample", "Report"]),
        words="`openreg_ops.testing` has the same names. [The checker](../checker.md) explains each check.",
    )
    for title, module in TOOLS:
        tools += _module(title, module)
    tools = _each_name_once(tools)

    operators = [
        "# Operators",
        "",
        "Each operator is available as `openreg_ops.NAME` and `torch.ops.openreg.NAME`.",
        "",
    ]
    for name in sorted(meta.__all__):
        if callable(getattr(openreg_ops, name)):
            operators += _section(name, *_automatic("openreg_ops", [name]))

    device = ["# torch.openreg", "", "Python interface to the device. Names are the same as in `torch.cuda`.", ""]
    parts = importlib.import_module("openreg_ops.device")
    for title, part in (
        ("Devices", parts.devices),
        ("Streams and events", parts.streams),
        ("Memory", parts.memory),
        ("Graphs", parts.graphs),
        ("Random numbers", parts.random),
        ("Mixed precision", parts.amp),
        ("Use of the device", parts.usage),
        ("Waits of the host", parts.sync_debug),
    ):
        flat = [name for name in part.__all__ if hasattr(torch.openreg, name)]
        device += _section(title, *_automatic("torch.openreg", flat))
    device += _section(
        "Orders of streams",
        *_automatic("torch.openreg", ["schedules"]),
        *_automatic("openreg_ops.schedules", ["Schedules", "Difference", "ScheduleError"]),
    )
    shown = {name for line in device for name in re.findall(r"torch\.openreg\.(\w+)$", line)}
    device += ["## Types", "", "| Name | What it is |", "|---|---|"]
    for name in sorted(set(torch.openreg.__all__) - shown):
        first = (inspect.getdoc(getattr(torch.openreg, name)) or "").partition("\n")[0]
        device.append(f"| `torch.openreg.{name}` | {_cell(first).replace('``', '`')} |")
    device.append("")
    for title, module in (
        ("Memory history", "torch.openreg.memory"),
        ("Faults", "torch.openreg.faults"),
        ("NVTX", "torch.openreg.nvtx"),
        ("Sanitizer", "torch.openreg._sanitizer"),
    ):
        names = None if title != "Memory history" else ["_dump_snapshot", "_record_memory_history", "_snapshot"]
        device += _module(title, module, names)
    return tuple("\n".join(page) for page in (own, tools, operators, device))


DATA = {"default_generators": "The default generator of each device, a tuple of ``torch.Generator``."}
TOOLS = (
    ("Operators", "openreg_tools.operators"),
    ("Explain", "openreg_tools.explain"),
    ("Trace", "openreg_tools.trace"),
    ("Compare", "openreg_tools.compare"),
    ("Drift", "openreg_tools.drift"),
    ("Info", "openreg_tools.info"),
    ("Backends", "openreg_tools.backends"),
)
