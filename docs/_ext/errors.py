"""Collects the errors of the source: each sentence, what it says to do, and where it is raised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Error", "collect", "page"]

CHECKS = re.compile(r"\b(TORCH_CHECK(?:_\w+)?|throw [\w:]+)\s*\(")
RAISED = re.compile(r"(?<!Attribute)(?<!Key)Error$|^Wrong$|^WrongVariable$")
HOLE = "…"


class Error(NamedTuple):
    """One sentence; HOLE stands for what is known only when it is raised."""

    sentence: str
    remedy: str  # the part behind the last semicolon, or ""
    where: str  # file:line


def _arguments(text: str, start: int) -> list[str]:
    """The arguments of a C++ call, whose parenthesis opens before `start`."""
    parts, depth, begin, i = [], 0, start, start
    while True:
        char = text[i]
        if char in "\"'":
            i += 1
            while text[i] != char:
                i += 2 if text[i] == "\\" else 1
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            if depth == 0:
                return [*parts, text[begin:i]]
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
        elif text.startswith("//", i):
            i = text.index("\n", i)
        i += 1


def _literal(argument: str) -> str:
    """What an argument of a message says: its literals, and HOLE for the rest."""
    argument = re.sub(r"//[^\n]*", "", argument).strip()
    pieces = re.findall(r'"((?:[^"\\]|\\.)*)"', argument)
    if pieces and re.fullmatch(r'(\s*"(?:[^"\\]|\\.)*")+\s*', argument):
        return "".join(pieces).replace('\\"', '"').replace("\\n", " ")
    if "+" in argument and pieces:  # std::string("...") + what
        words = re.split(r'"((?:[^"\\]|\\.)*)"', argument)
        return "".join(
            word if i % 2 else HOLE if re.search(r"\w{2,}\s*[+)(]|\+\s*\w", word) else ""
            for i, word in enumerate(words)
        )
    return HOLE


def of_cpp(text: str) -> Iterator[tuple[str, int]]:
    for match in CHECKS.finditer(text):
        if text.rfind("//", text.rfind("\n", 0, match.start()) + 1, match.start()) >= 0:
            continue
        arguments = _arguments(text, match.end())
        words = arguments[1:] if match[1].startswith("TORCH") else arguments
        sentence = "".join(_literal(each) for each in words)
        yield sentence, text.count("\n", 0, match.start()) + 1


def _python_text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_python_text(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _python_text(left) + _python_text(right)
        case _:
            return HOLE


def of_python(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]) if RAISED.search(name):
                yield _python_text(first), node.lineno
            case ast.Call(func=ast.Attribute(attr="_check"), args=[_, ast.Lambda(body=body)]):
                yield _python_text(body), node.lineno


def collect(root: Path) -> list[Error]:
    """The errors of the device, its operators and its Python side, in the order of the files."""
    import pages

    found = []
    for path in pages.sources(root):
        name = str(path.relative_to(root))
        if name.startswith("openreg_tools/conformance"):
            continue
        read = of_python if path.suffix == ".py" else of_cpp
        for sentence, line in sorted(read(path.read_text()), key=lambda each: each[1]):
            sentence = re.sub(rf"{HOLE}+", HOLE, " ".join(sentence.split()))
            if len(re.findall(r"[A-Za-z]{2,}", sentence)) < 3:
                continue  # passes on what another said
            said, _, remedy = sentence.rpartition("; ")
            found.append(Error(said or sentence, remedy if said else "", f"{name}:{line}"))
    return found


def _cell(text: str) -> str:
    return re.sub(r"([|*<>_\[\]$`])", r"\\\1", text)


def page(root: Path) -> str:
    """The page of errors: a table for each part of the source."""
    text = [
        "# Errors",
        "",
        "Every error message of the package, with its remedy. … stands for a part that changes, such as a name, a shape or a "
        "device. Search for words that stay the same.",
        "",
    ]
    groups: dict[str, dict[tuple[str, str], None]] = {}
    for error in collect(root):
        groups.setdefault(error.where.rpartition(":")[0], {})[error.sentence, error.remedy] = None  # each once
    folder = ""
    for name, rows in groups.items():
        if folder != (folder := str(Path(name).parent)):
            text += [f"## {folder}", ""]
        text += [f"`{Path(name).name}`", "", "| Error | What to do |", "|---|---|"]
        text += [f"| {_cell(sentence)} | {_cell(remedy)} |" for sentence, remedy in rows]
        text.append("")
    return "\n".join(text)
