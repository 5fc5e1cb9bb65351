"""``make mutants``: how many small faults, put into the sources on purpose, do the tests notice?

It draws statements of Python and C++, each equally likely wherever it stands, and makes one change to each:

- delete: a statement, a decorator, or what an `if` or a loop does; `return x` returns None, or a default value in C++
- drop: an operand of `and` or `or`, a condition, a conversion such as `sorted()`, a value of a format string
- swap: two names of a statement, or two arguments of a call, change places
- boundary: `<` and `<=`, a number and the next one, True and False

Imports, annotations, docstrings, declarations and the arguments in IGNORED stay. All changes of C++ are compiled into one
library, in which OPENREG_MUTANT selects the one that takes effect; those that do not compile are left out. Everything
happens in a copy, out/mutants, so an interrupted run leaves the checkout as it is.

tests_of() says which tests run for a file: first those that belong to `make test-fast`, then the others. A mutant
counts as noticed if one of them fails that passes without a mutant, or if they take several times their usual time.
``tests/mutants_known.txt`` lists survivors that no test can notice, with the reason; the report counts them both ways.
"""

import argparse
import ast
import bisect
import collections
import contextlib
import functools
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "mutants"
PATHS = ("csrc", "meta", "openreg_ops", "openreg_tools")
FAST = "fast or not (slow or processes or compiles or conformance)"  # `make test-fast`
# The tests of a file: those of the longest beginning of its path. For openreg_tools, see tests_of().
TESTS = {
    "": "tests/runtime tests/backend tests/aten tests/ops tests/graph tests/tools",  # `make test-fast`
    "csrc/aten/": "tests/aten",
    "csrc/backend/": "tests/backend tests/runtime",
    "csrc/bindings/": "tests/backend tests/runtime tests/graph",
    "csrc/kernels/": "tests/ops tests/aten",
    "csrc/ops/": "tests/ops",
    "csrc/runtime/": "tests/runtime",
    "meta/": "tests/ops",
    "openreg_ops/fallback.py": "tests/aten",
    "openreg_ops/device/": "tests/runtime tests/backend",
    "openreg_ops/distributed/": "tests/backend",
    "openreg_ops/inductor/": "tests/graph",
    "openreg_ops/sanitizer/": "tests/runtime tests/backend",
    "openreg_ops/schedules/": "tests/runtime",
    "openreg_ops/tools/": "tests/tools/test_new_package.py",
    "openreg_ops/torch_patches/": "tests/backend",
    "openreg_tools/": "tests/tools",
    "openreg_tools/conformance/": "tests/tools/test_conformance*.py tests/tools/test_schemas.py tests/tools/test_generated.py",
}
# Written by setup.py, a link, code of other packages, and a table of arguments, of which others do as well.
EXCLUDED = re.compile("openreg_ops/(_build.py|meta/|include/|tools/templates/)|openreg_tools/conformance/recipes.py")
IGNORED = {"strict", "flush", "help", "metavar", "description"}  # change no result
CONVERSIONS = "abs bool clone contiguous copy detach int list reversed set sorted tuple".split()
SWITCH = """// Written by tests/mutants.py: returns true for the mutant that takes effect.
#pragma once
#include <cstdlib>
inline const int openreg_chosen = std::atoi(std::getenv("OPENREG_MUTANT") ? std::getenv("OPENREG_MUTANT") : "0");
inline bool openreg_mutant(int number) { return number == openreg_chosen; }
"""


@dataclass(frozen=True)
class Mutant:
    """One change. Each edit replaces text[start:end] of the file; "@" in C++ stands for the switch."""

    file: str
    line: int
    change: str  # such as "delete", "drop x", "swap x, y" and "0 -> 1"
    edits: tuple[tuple[int, int, str], ...]

    @property
    def lines(self) -> range:
        """Where it is in the file with all mutants, which has one line more before it."""
        return range(self.line + 1, self.line + 2 + _text(self.file).count("\n", self.edits[0][0], self.edits[-1][1]))

    @property
    def key(self) -> str:
        """What mutants_known.txt calls it, wherever its line moves."""
        return f"{self.file}: {_text(self.file).splitlines()[self.line - 1].strip()}  =>  {self.change}"


@functools.cache
def _text(file: str) -> str:
    return (ROOT / file).read_text()


@functools.cache
def _starts(file: str) -> list[int]:
    """Where each line starts, and the last one ends."""
    return [0, *itertools.accumulate(len(line) for line in _text(file).splitlines(keepends=True))]


def edited(text: str, edits: tuple[tuple[int, int, str], ...]) -> str:
    """The text with these edits, in order of their starts."""
    ends = [0, *(end for _, end, _ in edits)]
    return "".join(text[at:start] + new for at, (start, _, new) in zip(ends, edits, strict=False)) + text[ends[-1] :]


# ---- Python ----


def python_places(file: str) -> Iterator[Callable[[], list[Mutant]]]:
    """For each statement, what makes its changes."""
    scopes: list[tuple[ast.AST, collections.Counter[str]]] = [(ast.parse(_text(file)), collections.Counter())]
    while scopes:
        node, bound = scopes.pop()
        if isinstance(node, ast.stmt):
            yield functools.partial(_python_mutants, file, node, bound)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):  # how often it binds each name
            inside = [*ast.walk(node)]
            bound = collections.Counter(each.arg for each in inside if isinstance(each, ast.arg))
            bound.update(each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                scopes.append((child, bound))


def _python_mutants(file: str, statement: ast.stmt, bound: collections.Counter[str]) -> list[Mutant]:
    """Each replaces the lines of the statement, or of its head, by one line."""
    decorators, body = getattr(statement, "decorator_list", []), getattr(statement, "body", [])
    first = min([statement.lineno, *(each.lineno for each in decorators)])
    inner = [each.lineno for line in body for each in (line, *getattr(line, "decorator_list", []))]
    last = min(inner) - 1 if inner else statement.end_lineno
    line = _text(file).splitlines()[first - 1]
    indent, is_elif = line[: statement.col_offset], line.startswith("elif", statement.col_offset)
    if last < statement.lineno or indent.strip():
        return []  # it shares a line
    head = _with(statement, body=[ast.Pass()], orelse=[], finalbody=[], handlers=[]) if body else statement
    start, end, found = _starts(file)[first - 1], _starts(file)[last], []
    for change, new in _changes(head, bound):
        text = ast.unparse(_replaced(head, new))
        text = text.removesuffix("pass").rstrip() if body else text
        text = indent + "el" * is_elif + (text.replace("\n", f"\n{indent}") if decorators else text)
        text += "\n" * max(1, last - first + 1 - text.count("\n"))
        found.append(Mutant(file, statement.lineno, change, ((start, end, text),)))
    return found


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A shallow copy with other values of the fields that it has."""
    return type(node)(**{name: fields.get(name, value) for name, value in ast.iter_fields(node)}, lineno=0)


def _replaced(node: object, new: dict[int, ast.AST]) -> object:
    """A copy of the tree with new nodes, by the id() of the old ones."""
    if id(node) in new:
        return new[id(node)]
    if isinstance(node, ast.AST):
        return _with(node, **{name: _replaced(value, new) for name, value in ast.iter_fields(node)})
    return [_replaced(each, new) for each in node] if isinstance(node, list) else node


def _changes(head: ast.stmt, bound: collections.Counter[str]) -> Iterator[tuple[str, dict[int, ast.AST]]]:
    """What each change says, and its new nodes by the id() of the old ones."""
    match head:
        case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Match() | ast.Try() | ast.Pass():
            return
        case ast.Expr(ast.Constant()) | ast.Assign([ast.Name("__all__")]) | ast.If(ast.Name("TYPE_CHECKING")):
            return
        case ast.Return() if ast.unparse(head) != "return None":
            yield "delete", {id(head): ast.parse("return None").body[0]}
        case ast.If(test) | ast.While(test):
            yield "delete", {id(test): ast.Constant(False)}
            yield "drop the condition", {id(test): ast.Constant(True)}
        case ast.For(iter=values):
            yield "delete", {id(values): ast.Tuple([], ast.Load())}
        case ast.Assign(targets):
            if all(isinstance(each, ast.Attribute | ast.Subscript) or bound[ast.unparse(each)] > 1 for each in targets):
                yield "delete", {id(head): ast.Pass()}
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Assert() | ast.Delete() | ast.Break() | ast.Continue():
            yield "delete", {id(head): ast.Pass()}
    for each in getattr(head, "decorator_list", []):
        kept = [other for other in head.decorator_list if other is not each]
        yield f"delete @{ast.unparse(each)}", {id(head): _with(head, decorator_list=kept)}

    ignored = [getattr(node, "annotation", None) or getattr(node, "returns", None) for node in ast.walk(head)]
    ignored += [node for node in ast.walk(head) if isinstance(node, ast.keyword) and node.arg in IGNORED]
    skipped = {id(inner) for node in filter(None, ignored) for inner in ast.walk(node)}
    nodes = [node for node in ast.walk(head) if id(node) not in skipped]
    for node in nodes:
        match node:
            case ast.BoolOp(op, values):
                for each in values:
                    kept = [other for other in values if other is not each]
                    yield f"drop {ast.unparse(each)}", {id(node): ast.BoolOp(op, kept) if kept[1:] else kept[0]}
            case ast.comprehension(ifs=[condition, *kept]):
                yield f"drop {ast.unparse(condition)}", {id(node): _with(node, ifs=kept)}
            case ast.UnaryOp(ast.Not(), operand):
                yield "drop not", {id(node): operand}
            case ast.IfExp(body=body):
                yield f"drop all but {ast.unparse(body)}", {id(node): body}
            case ast.Call(ast.Name(name), [value], []) | ast.Call(ast.Attribute(value, name), [], []):
                if name in CONVERSIONS:
                    yield f"drop {name}()", {id(node): value}
            case ast.JoinedStr(parts):
                for each in parts:
                    if isinstance(each, ast.FormattedValue):
                        kept = [other for other in parts if other is not each]
                        yield f"drop {{{ast.unparse(each.value)}}}", {id(node): ast.JoinedStr(kept)}
            case ast.Compare(ops=ops):
                for op in ops:
                    if new := {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}.get(type(op)):
                        kept = [new() if other is op else other for other in ops]
                        yield f"{type(op).__name__} -> {new.__name__}", {id(node): _with(node, ops=kept)}
            case ast.Constant(bool() | int() as value):
                new = not value if isinstance(value, bool) else 0 if value == 1 else value + 1
                yield f"{value} -> {new}", {id(node): ast.Constant(new)}
    fixed = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    fixed |= {id(node.value) for node in nodes if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred)}
    names = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    pairs = [*itertools.pairwise(node for node in names if id(node) not in fixed)]
    pairs += [pair for node in nodes if isinstance(node, ast.Call) for pair in itertools.pairwise(node.args)]
    for a, b in pairs:
        if ast.unparse(a) != ast.unparse(b) and not {ast.Starred, ast.Constant} & {type(a), type(b)}:
            yield f"swap {ast.unparse(a)}, {ast.unparse(b)}", {id(a): b, id(b): a}


# ---- C++ ----

TOKEN = re.compile(r"""(?smx) //[^\n]* | /\*.*?\*/ | ^[ \t]*\#(?:\\\n|[^\n])*  # comments and directives, which are skipped
    | R"(\w*)\(.*?\)\1" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | [A-Za-z_]\w* | \d[\w.']* | -> | :: | && | \|\|
    | << | [<>=!+\-*/%&|^]= | \+\+ | -- | \S""")  # fmt: skip
CONTROLS = {"if", "for", "while", "switch", "else", "do"}
DECLARES = "auto class const constexpr enum static static_assert struct thread_local typedef using case default".split()
BLOCK = re.compile(r"(\)|\belse|\bdo|\btry|;)(\s|\b(const|noexcept|override|mutable)\b)*(->[^;{}()]*)?$")
DECLARATION = re.compile(r"(?:[\w:]+\s+)*[\w:]+(?:<.*>)?(?:::\w+)*[\s&*]+\w+", re.DOTALL)


class Source:
    """The tokens of a C++ file. Positions are indices of tokens."""

    def __init__(self, file: str) -> None:
        self.file, self.text = file, _text(file)
        found = [match for match in TOKEN.finditer(self.text) if not re.match(r"//|/\*|\s*#", match[0])]
        self.words, self.spans = [match[0] for match in found], [match.span() for match in found]
        self.partner: dict[int, int] = {}  # of each bracket
        self.blocks: set[int] = set()  # braces of statements, as opposed to those of types, namespaces and lists
        opened: list[int] = []
        for i, word in enumerate(self.words):
            if word in "([{":
                opened.append(i)
                self.blocks |= {i} if word == "{" and BLOCK.search(self.text[: self.spans[i][0]][-200:]) else set()
            elif word in ")]}":
                self.partner[i] = opened.pop()
                self.partner[self.partner[i]] = i

    def piece(self, first: int, last: int) -> str:
        return self.text[self.spans[first][0] : self.spans[last][1]]

    def around(self, first: int, last: int, before: str, after: str, change: str) -> Mutant:
        """The mutant that has this before and after these tokens."""
        start, end = self.spans[first][0], self.spans[last][1]
        line = bisect.bisect_right(_starts(self.file), start)
        return Mutant(self.file, line, " ".join(change.split()), ((start, start, before), (end, end, after)))

    def statements(self, brace: int) -> Iterator[tuple[int, int]]:
        """The first and the last token of each statement of a block; the last is its semicolon."""
        start = i = brace + 1
        while i < self.partner[brace]:
            if self.words[i] == ";" or (self.words[i] == ":" and self.words[start] in ("case", "default")):
                if self.words[i] == ";" and start < i:
                    yield start, i
                start = i + 1
            elif self.words[i] in "([{":
                was, i = i, self.partner[i]
                start = i + 1 if was in self.blocks and self.words[i + 1] not in (";", ",", ")", ".", "(") else start
            i += 1

    def mutants(self) -> Iterator[Mutant]:
        for brace in sorted(self.blocks):
            for first, last in self.statements(brace):
                yield from self.deleted(first, last)
            i = brace + 1
            while i < self.partner[brace]:
                i = self.partner[i] if i in self.blocks else i  # which has its own turn
                yield from self.changed(i)
                i += 1

    def deleted(self, first: int, last: int) -> Iterator[Mutant]:
        while self.words[first] in CONTROLS:
            first += 1 + (self.words[first + 1] == "constexpr")
            first = self.partner[first] + 1 if self.words[first] == "(" else first
        word = self.words[first]
        if word == "return" and first + 1 < last:
            yield self.around(first, last, "{ if (@) return {}; ", " }", "delete")
        elif first < last and word not in DECLARES and re.match(r"\w|\*|\+\+|--|::", word):
            stop = next(i for i in range(first, last + 1) if self.words[i] in ("=", "(", "{", ".", "->", "[", ",", ";"))
            before = self.piece(first, stop - 1) if stop > first else ""
            if word in ("delete", "throw", "return") or not DECLARATION.fullmatch(before):
                yield self.around(first, last, "{ if (!@) { ", " } }", "delete")

    def changed(self, i: int) -> Iterator[Mutant]:
        """The changes of one token and what it joins."""
        word, before, after = self.words[i], self.words[i - 1], self.words[i + 1]
        spaced = (self.text[self.spans[i][0] - 1] + self.text[self.spans[i][1]]).isspace()
        if word in ("&&", "||") and spaced:
            on, off = ("(@ || (", "))") if word == "&&" else ("(!@ && (", "))")
            for first, last in ((self.operand(i, -1), i - 1), (i + 1, self.operand(i, 1))):
                yield self.around(first, last, on, off, f"drop {self.piece(first, last)}")
        elif word in ("if", "while") and after == "(":
            first, last = i + 2, self.partner[i + 1] - 1
            if not {";", "=", "auto"} & {*self.words[first : last + 1]}:
                yield self.around(first, last, "(!@ && (", "))", "delete")
                yield self.around(first, last, "(@ || (", "))", "drop the condition")
        elif word in ("<", "<=", ">", ">=") and spaced:  # the other operator is this one with the next number
            other, shift = {"<": ("<=", ""), "<=": ("<", "-"), ">": (">=", "-"), ">=": (">", "")}[word]
            yield self.around(i, i, "", f" {shift}@ +", f"{word} -> {other}")
        elif re.fullmatch(r"\d+[uUlL]*", word) and before not in ("case", "<"):
            new, shift = (0, "-") if word == "1" else (int(word.rstrip("uUlL")) + 1, "+")
            yield self.around(i, i, "(", f" {shift} @)", f"{word} -> {new}")
        elif word in ("true", "false"):
            yield self.around(i, i, "(", " != @)", f"{word} -> {'false' if word == 'true' else 'true'}")
        elif word == "(" and re.match(r"\w|>", before) and before not in {*CONTROLS, "catch", "return", "sizeof"}:
            yield from self.swapped(i)

    def operand(self, operator: int, step: int) -> int:
        """The last token of the operand in this direction."""
        i, opens = operator + step, "([{" if step > 0 else ")]}"
        while self.words[i] in opens or self.words[i] not in set("([{}]),;?:=") | {"return", "&&", "||"}:
            i = (self.partner[i] if self.words[i] in opens else i) + step
        return i - step

    def swapped(self, bracket: int) -> Iterator[Mutant]:
        """Two neighbors among the arguments of a call: names, members and calls without commas."""
        bounds, i = [bracket], bracket + 1
        while i < self.partner[bracket]:
            i = self.partner[i] if self.words[i] in "([{" else i
            bounds += [i] * (self.words[i] == ",")
            i += 1
        arguments = [(a + 1, b - 1) for a, b in itertools.pairwise([*bounds, self.partner[bracket]]) if a + 1 < b]
        for a, b in itertools.pairwise(arguments):
            x, y = self.piece(*a), self.piece(*b)
            if x != y and not any(re.search(r'[<>{}"]|\w[\s&*]+\w|^[\d-]|\[\W', each) for each in (x, y)):
                edits = self.around(*a, f"(@ ? {y} : ", ")", "").edits + self.around(*b, f"(@ ? {x} : ", ")", "").edits
                yield Mutant(self.file, self.around(*a, "", "", "").line, f"swap {x}, {y}", edits)


def cpp_places(file: str) -> Iterator[Callable[[], list[Mutant]]]:
    """For each line that has changes, what gives them."""
    found = collections.defaultdict(list)
    for mutant in Source(file).mutants():
        found[mutant.line].append(mutant)
    for mutants in found.values():
        yield functools.partial(list, mutants)


def switched(file: str, numbered: dict[Mutant, int]) -> str:
    """The C++ file with all of these mutants, each behind its number."""
    edits = []
    for mutant, number in numbered.items():
        switch = f"::openreg_mutant({number})"
        edits += [(start, end, new.replace("@", switch), mutant.line) for start, end, new in mutant.edits]
    edits.sort(key=lambda edit: (edit[0], -edit[3]))  # where ends meet, what began last ends first
    return '#include "openreg_mutant.h"\n' + edited(_text(file), tuple(edit[:3] for edit in edits))


def build(tree: Path, mutants: list[Mutant]) -> dict[Mutant, int]:
    """Compile all mutants into the library of the tree. Returns the numbers of those that compile."""
    (tree / "csrc/openreg_mutant.h").write_text(SWITCH)
    ninja = [sys.executable, "-m", "ninja", "-k", "0", "-f", next(tree.glob("build/*/build.ninja"))]
    numbers = {mutant: number for number, mutant in enumerate(mutants, 1)}
    while True:
        for file in {mutant.file for mutant in mutants}:
            here = {mutant: number for mutant, number in numbers.items() if mutant.file == file}
            if (tree / file).read_text() != (new := switched(file, here)):
                (tree / file).write_text(new)
        print(f"compiling {len(numbers)} mutants of C++", flush=True)
        said = subprocess.run(ninja, cwd=tree, stdout=subprocess.PIPE, text=True)
        if not said.returncode:
            subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True)
            return numbers
        wrong: set[Mutant] = set()
        for lines in (re.findall(r".* error: .*", said.stdout), said.stdout.splitlines()):
            found = {place for line in lines for place in re.findall(r"(csrc/[\w/.]+):(\d+)[:,]", line)}
            at = {(file, int(line)) for file, line in found}
            wrong = wrong or {mutant for mutant in numbers if at & {(mutant.file, line) for line in mutant.lines}}
        if not wrong:
            raise SystemExit(f"mutants: the build fails, and not at a mutant:\n{said.stdout[-5000:]}")
        numbers = {mutant: number for mutant, number in numbers.items() if mutant not in wrong}


@functools.cache
def without_mutant(tests: str, marker: str) -> tuple[float, list[str]]:
    """How long the tests take without a mutant, and which of them fail."""
    began = time.monotonic()
    failing = run(tests, marker, 0, 3600)
    print(*(f"Without a mutant {test} fails.\n" for test in failing), sep="", end="", flush=True)
    return time.monotonic() - began, failing


def noticed_by(mutant: Mutant, number: int, markers: list[str]) -> str:
    """The test that notices the mutant, or ""."""
    path, tests = OUT / mutant.file, tests_of(mutant.file)
    for marker in markers:
        seconds, failing = without_mutant(tests, marker)
        if not number:
            path.write_text(edited(_text(mutant.file), mutant.edits))
        failed = run(tests, marker, number, 60 + 4 * seconds, "-x", *(f"--deselect={test}" for test in failing))
        if not number:
            path.write_text(_text(mutant.file))
        if failed:
            return failed[0]
    return ""


def run(tests: str, marker: str, number: int, timeout: float, *options: str) -> list[str]:
    """Returns the tests that fail, or else why pytest did."""
    paths = [str(path.relative_to(OUT)) for each in tests.split() for path in OUT.glob(each)]
    command = [sys.executable, "-m", "pytest", "-qrfE", "-pno:cacheprovider", "-n3", "--dist=loadfile"]
    command += ["--no-loadscope-reorder", "-m", marker, *options, *paths]
    env = dict(os.environ, PYTHONPATH=str(OUT), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    env |= {
        "OPENREG_MUTANT": str(number),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    }  # which would keep other mutants' graphs
    process = subprocess.Popen(
        command, cwd=OUT, env=env, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return [f"timeout, {timeout:.0f} s"]
    finally:  # also after Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return []
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - |$)", said, re.MULTILINE)
    return failed or [f"pytest's exit status {process.returncode}"]


def tests_of(file: str) -> str:
    """The tests that run for a file: TESTS' row; of tests/tools those that have a file's or folder's name."""
    row = TESTS[max((start for start in TESTS if file.startswith(start)), key=len)]
    named = f"tests/tools/test_{file.removesuffix('.py').split('/')[1]}*.py"
    return named if row == "tests/tools" and [*ROOT.glob(named)] else row


def draw(paths: list[str], seed: int) -> Iterator[Mutant]:
    """One mutant of each statement, in random order. Each kind of change that it has is equally likely."""
    rng = random.Random(seed)
    found = {str(each.relative_to(ROOT)) for path in paths for each in [ROOT / path, *(ROOT / path).rglob("*")]}
    files = [name for name in sorted(found) if name.endswith((".py", ".cpp", ".h")) and not EXCLUDED.match(name)]
    places = [make for file in files for make in (python_places if file.endswith(".py") else cpp_places)(file)]
    rng.shuffle(places)
    for make in places:
        kinds = collections.defaultdict(list)
        for mutant in make():
            kinds["boundary" if "->" in mutant.change else mutant.change.split()[0]].append(mutant)
        with contextlib.suppress(SyntaxError), warnings.catch_warnings(action="ignore"):
            if kinds:
                mutant = rng.choice(kinds[rng.choice(sorted(kinds))])
                if mutant.file.endswith(".py"):  # C++ is compiled later
                    compile(edited(_text(mutant.file), mutant.edits), mutant.file, "exec")
                yield mutant


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__, formatter_class=raw)
    parser.add_argument("paths", nargs="*", default=PATHS, help=f"what to change (default: {' '.join(PATHS)})")
    parser.add_argument("--sample", type=int, default=100, help="how many mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="run only tests of `make test-fast`")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    arguments = parser.parse_args()

    drawn = [*itertools.islice(draw(arguments.paths, arguments.seed), arguments.sample)]
    if arguments.list:
        return print(*(f"{mutant.line:5} {mutant.key}" for mutant in drawn), sep="\n")
    shutil.rmtree(OUT, ignore_errors=True)
    ignored = shutil.ignore_patterns(".git", ".venv*", "out", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, OUT, symlinks=True, ignore=ignored)
    cpp = [mutant for mutant in drawn if not mutant.file.endswith(".py")]
    numbers = build(OUT, cpp) if cpp else {}
    sample = [mutant for mutant in drawn if mutant in numbers or mutant not in cpp]
    markers = [FAST] if arguments.quick else [FAST, f"not ({FAST})"]
    known = (ROOT / "tests/mutants_known.txt").read_text().splitlines()
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for count, mutant in enumerate(sample, 1):
        by = noticed_by(mutant, numbers.get(mutant, 0), markers)
        outcome = "noticed" if by else "known" if mutant.key in known else "survived"
        print(f"[{count}/{len(sample)}] {outcome}, line {mutant.line} of {mutant.key}  {by}", flush=True)
        for row in ("/".join(mutant.file.split("/")[:-1][:2]), "all"):
            rows[row][outcome] += 1
    print(f"\n{len(drawn)} statements with seed {arguments.seed}; {len(drawn) - len(sample)} changes do not compile")
    print(f"{'':32}  noticed  survived  known  noticed of all  of all but known")
    for name, row in sorted(rows.items(), key=lambda each: (each[0] == "all", each[0])):
        shares = f"{row['noticed'] / row.total():16.0%}{row['noticed'] / max(1, row.total() - row['known']):18.0%}"
        print(f"{name:32}{row['noticed']:9}{row['survived']:10}{row['known']:7}{shares}")


if __name__ == "__main__":
    main()
