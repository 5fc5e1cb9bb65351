"""Collects the errors of the source: each sentence, what it says to do, and where it is raised."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Error", "collect", "page"]

CHECKS = re.compile(r"\b(TORCH_CHECK(?:_\w+)?|throw [\w:]+)\s*\(")
RAISED = re.compile(r"^[A-Za-z]\w*(?<!Attribute)(?<!Key)Error$|^Wrong$|^WrongVariable$")
HOLE = "…"
# A remedy after a period or a colon starts with one of these.
VERBS = (
    "add|allocate|call|capture|copy|do|free|give|import|install|keep|look|make|mark|move|name|pass|pip|raise|record|"
    "register|run|save|seed|set|use|wait"
)
REMEDY = re.compile(rf"[.:] (?=(?:{VERBS})\b)", re.I)


class Error(NamedTuple):
    """One sentence; HOLE stands for what is known only when it is raised."""

    sentence: str
    joined: str  # what stands between the sentence and its remedy, such as "; "
    remedy: str  # the part after the last semicolon, or from the first imperative on, or ""
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
    argument = re.sub(r"//[^\n]*", "", argument).strip().replace("\\n", " ")
    argument = re.sub(r"\bstd::string\((?=\s*\")", "", argument)
    pieces = re.findall(r'"((?:[^"\\]|\\.)*)"', argument)
    if pieces and re.fullmatch(r'(\s*"(?:[^"\\]|\\.)*")+\s*', argument):
        return "".join(pieces).replace('\\"', '"')
    if "+" in argument and pieces:  # std::string("...") + what
        words = re.split(r'"((?:[^"\\]|\\.)*)"', argument)
        return "".join(
            word.replace('\\"', '"') if i % 2 else HOLE if re.search(r"\w{2,}\s*[+)(]|\+\s*\w", word) else ""
            for i, word in enumerate(words)
        )
    return HOLE


def of_cpp(text: str) -> Iterator[tuple[str, int]]:
    for match in CHECKS.finditer(text):
        if text.rfind("//", text.rfind("\n", 0, match.start()) + 1, match.start()) >= 0:
            continue
        arguments = _arguments(text, match.end())
        condition = 2 if match[1] == "TORCH_CHECK_WITH" else 1
        words = arguments[condition:] if match[1].startswith("TORCH") else arguments
        sentence = "".join(_literal(word) for word in words)
        yield sentence, text.count("\n", 0, match.start()) + 1


def _python_text(node: ast.expr, names: dict[str, str]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_python_text(value, names) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _python_text(left, names) + _python_text(right, names)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name):
            return names.get(name, HOLE)
        case _:
            return HOLE


def of_python(text: str) -> Iterator[tuple[str, int]]:
    tree = ast.parse(text)
    names = {}  # variables that hold part of a sentence
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(said))) if ": " in said:
                names[name] = said
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]) if RAISED.search(name):
                yield _python_text(first, names), node.lineno
            case ast.Call(func=ast.Attribute(attr="_check"), args=[_, ast.Lambda(body=body)]):
                yield _python_text(body, names), node.lineno


def collect(root: Path) -> list[Error]:
    """The errors of the device, its operators and its Python side, in the order of the files."""
    import pages

    found = []
    for path in pages.sources(root):
        name = str(path.relative_to(root))
        if name.startswith("openreg_tools/conformance"):
            continue
        read = of_python if path.suffix == ".py" else of_cpp
        for sentence, line in sorted(read(path.read_text()), key=operator.itemgetter(1)):
            sentence = re.sub(rf"{HOLE}+", HOLE, " ".join(sentence.split()))
            if (
                len(re.findall(r"[A-Za-z]{2,}", sentence)) < 3
                or sentence.startswith(f"{HOLE}. ")
                or "Exception raised" in sentence
            ):
                continue  # passes on what another said
            if sentence.startswith(f"{HOLE}: "):
                sentence = "NAME" + sentence.removeprefix(HOLE)
            found.append(Error(*_parts(sentence), f"{name}:{line}"))
    return found


def _parts(sentence: str) -> tuple[str, str, str]:
    """What was wrong, what stands between, and what to do about it."""
    said, joined, remedy = sentence.rpartition("; ")
    if remedy.startswith(HOLE):
        said = ""  # a further part of the sentence
    if not said and (found := REMEDY.search(sentence)):
        said, joined, remedy = sentence[: found.start()], found[0], sentence[found.end() :]
    return (said, joined, remedy) if said else (sentence, "", "")


def _cell(text: str) -> str:
    return re.sub(r"([|*<>_\[\]$`])", r"\\\1", text)


def page(root: Path) -> str:
    """The page of errors: a list for each part of the source, with the remedy of a message in bold."""
    text = [
        "# Errors",
        "",
        "Every error message of the package. Search for words that stay the same: NAME is the operator or the function that "
        "raises the message, and … stands for a part that changes, such as a shape or a device. The part in bold says what to "
        "do. A message without it names the rule that the call broke.",
        "",
    ]
    groups: dict[str, dict[str, None]] = {}
    for error in collect(root):
        said, joined = _cell(error.sentence), _cell(error.joined)
        line = f"{said}{joined}**{_cell(error.remedy)}**" if error.remedy else said
        groups.setdefault(error.where.rpartition(":")[0], {})[line] = None  # each once
    folder = ""
    for name, lines in groups.items():
        if folder != (folder := str(Path(name).parent)):
            text += [f"## {folder}", ""]
        text += [f"`{Path(name).name}`", "", *(f"- {line}" for line in lines), ""]
    return "\n".join(text)
