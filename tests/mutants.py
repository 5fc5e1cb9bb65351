"""``make mutants``: how many small faults, put into the sources on purpose, do the tests notice?

It draws statements, each equally likely wherever it stands, and makes one change to each: deletes it, forces or drops a
condition, drops an option of a call or a conversion, swaps two names or arguments, or takes the next number. Imports,
annotations and docstrings stay. Everything happens in a copy, out/mutants, so the checkout stays as it is.

``--cpp`` changes C++ instead of Python. All changes are compiled into one library, in which CHOSEN_MUTANT selects the one
that takes effect; those that do not compile are left out.

First run the tests that have the file's name in theirs, then those that tests_of() says: of these, first those of
`make test-fast`, then the others. A fault is noticed if one of
them fails that passes without it, or if they take several times their usual time.
"""

import argparse
import ast
import collections
import contextlib
import copy
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
PROCESSES = os.environ.get("PROCESSES", "3")  # that run tests
FAST = "fast or not (slow or processes or compiles or conformance)"  # `make test-fast`
# The tests of a file: those of the longest beginning of its path. For openreg_tools, see tests_of().
TESTS = {
    "": "tests/runtime tests/backend tests/aten tests/ops tests/graph",
    "csrc/aten/": "tests/aten",
    "csrc/backend/": "tests/backend tests/runtime",
    "csrc/bindings/": "tests/backend tests/runtime tests/graph",
    "csrc/kernels/": "tests/ops tests/aten",
    "csrc/ops/": "tests/ops",
    "csrc/runtime/": "tests/runtime",
    "meta/": "tests/ops",
    "openreg_ops/cuda_operators/": "tests/aten/test_cuda_*.py tests/aten/test_flash_attention.py",
    "openreg_ops/device/": "tests/runtime tests/backend",
    "openreg_ops/distributed/": "tests/backend",
    "openreg_ops/fallback.py": "tests/aten",
    "openreg_ops/inductor/": "tests/graph",
    "openreg_ops/optim.py": "tests/ops/test_adamw_step_.py",
    "openreg_ops/sanitizer/": "tests/runtime/test_*sanitizer.py tests/backend/test_collectives.py",
    "openreg_ops/schedules/": "tests/runtime/test_schedule*.py tests/backend/test_schedules_of_ranks.py",
    "openreg_ops/tools/": "tests/tools/test_new_package.py",
    "openreg_ops/torch_patches/": "tests/backend",
    "openreg_tools/": "tests/tools",
    "openreg_tools/core/": "tests/tools/test_core.py tests/tools/test_child.py tests/tools/test_check*.py tests/tools/test_comp*.py",
    **dict.fromkeys(
        (f"openreg_tools/core/{name}.py" for name in ("blocks", "device", "options", "page", "report")),
        "tests/tools/test_report.py tests/tools/test_command_line.py",
    ),
    **dict.fromkeys(
        (
            f"openreg_tools/core/{name}.py"
            for name in ("attempts", "from_schema", "known_arguments", "opinfo", "variations")
        ),
        "tests/tools/test_schemas.py tests/tools/test_generated.py tests/tools/test_conformance*.py tests/tools/test_checker.py",
    ),
    "openreg_tools/core/info.py": "tests/tools/test_info.py",
    "openreg_tools/core/program.py": "tests/tools/test_trace.py",
    "openreg_tools/core/waits.py": "tests/tools/test_trace.py tests/tools/test_pytest_plugin.py",
    "openreg_tools/dispatch.py": "tests/tools/test_operators_command.py tests/tools/test_explain.py",
    "openreg_tools/manifest.py": "tests/tools/test_operators_command.py tests/tools/test_drift.py",
    "openreg_tools/recorder.py": "tests/tools/test_trace.py tests/tools/test_explain.py",
    "openreg_tools/check/": "tests/tools/test_check*.py tests/tools/test_mistakes.py",
    "openreg_tools/conformance/": "tests/tools/test_conformance*.py tests/tools/test_generated.py tests/tools/test_schemas.py",
}
EXCLUDED = re.compile("openreg_ops/(_build.py|meta/|include/|tools/templates/)")  # written by setup.py, or a link
IGNORED = {"strict", "flush", "help", "metavar", "description"}  # options that change no result
CONVERSIONS = "abs bool list reversed set sorted tuple".split()
SWITCH = """// Written by tests/mutants.py: true for the mutant that takes effect.
#pragma once
#include <cstdlib>
inline const int openreg_chosen = std::atoi(std::getenv("CHOSEN_MUTANT") ? std::getenv("CHOSEN_MUTANT") : "0");
inline bool openreg_mutant(int number) { return number == openreg_chosen; }
"""


@dataclass(frozen=True)
class Mutant:
    """One change: `new` replaces the lines from `first` to `last`. "@" in C++ stands for the switch."""

    file: str
    first: int
    last: int
    change: str  # such as "delete", "swap x, y" and "0 -> 1"
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.first}: {text_of(self.file).splitlines()[self.first - 1].strip()}  =>  {self.change}"


@functools.cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text()


def applied(text: str, mutants: list[Mutant], new: Callable[[Mutant], str] = lambda mutant: mutant.new) -> str:
    """The text with these changes, which keep the numbers of its lines."""
    lines = text.split("\n")
    for mutant in mutants:
        count = mutant.last - mutant.first + 1
        changed = new(mutant).split("\n")
        lines[mutant.first - 1 : mutant.last] = changed + [""] * (count - len(changed))
    return "\n".join(lines)


# ---- Python ----


def of_python(file: str) -> Iterator[Callable[[], list[Mutant]]]:
    """For each statement, what gives its changes, as they take a while."""
    for node in ast.walk(ast.parse(text_of(file))):
        if isinstance(node, ast.stmt) and not getattr(node, "decorator_list", []):
            yield functools.partial(of_statement, file, node)


def of_statement(file: str, statement: ast.stmt) -> list[Mutant]:
    """The changes of a statement, or of its head."""
    body, line = getattr(statement, "body", []), text_of(file).split("\n")[statement.lineno - 1]
    inner = [node.lineno for child in body for node in (child, *getattr(child, "decorator_list", []))]
    first, last = statement.lineno, min(inner) - 1 if inner else statement.end_lineno
    indent, is_elif = line[: statement.col_offset], line.strip().startswith("elif ")
    if last < first or indent.strip():
        return []  # it shares a line
    found = []
    for change, head in changes(without_body(statement)):
        if ast.dump(head) == ast.dump(without_body(statement)):
            continue  # `return None` with its value deleted
        text = ast.unparse(head).removesuffix("pass").rstrip() if body else ast.unparse(head)
        found.append(Mutant(file, first, last, change, indent + "el" * is_elif + text))
    return found


def without_body(statement: ast.stmt) -> ast.stmt:
    """A copy of the statement's head."""
    parts = {"body": [ast.Pass()], "orelse": [], "finalbody": [], "handlers": []}
    parts = parts if getattr(statement, "body", None) else {}
    fields = {name: parts.get(name, value) for name, value in ast.iter_fields(statement)}
    return copy.deepcopy(type(statement)(**fields, lineno=0))


def changes(head: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """What each change says, and the changed head."""
    match head:
        case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Match() | ast.Try() | ast.Pass():
            return
        case ast.Expr(ast.Constant()) | ast.Assign([ast.Name("__all__")]) | ast.If(ast.Name("TYPE_CHECKING")):
            return
        case ast.Return(ast.expr()):
            yield "delete", ast.parse("return None").body[0]
        case ast.Assign(targets) if all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            yield "delete", ast.Pass()
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Assert() | ast.Delete() | ast.Break() | ast.Continue():
            yield "delete", ast.Pass()
    nodes = [*ast.walk(head)]
    parts = [getattr(node, "annotation", None) or getattr(node, "returns", None) for node in nodes]
    annotations = {id(inner) for node in filter(None, parts) for inner in ast.walk(node)}
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred)}
    owners |= annotations | {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    owners |= {id(node) for node in nodes if not isinstance(getattr(node, "ctx", None), ast.Load)}
    names = [i for i, node in enumerate(nodes) if isinstance(node, ast.Name) and id(node) not in owners]
    for i, node in enumerate(nodes):
        for change, make in () if id(node) in annotations else changes_of(node):
            changed = copy.deepcopy(head)
            make([*ast.walk(changed)][i])
            yield change, changed
    for i, j in itertools.pairwise(names):
        changed = copy.deepcopy(head)
        a, b = ([*ast.walk(changed)][k] for k in (i, j))
        if a.id != b.id:
            a.id, b.id = b.id, a.id
            yield f"swap {b.id}, {a.id}", changed


def changes_of(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], object]]]:
    """What each change of a node says, and a function that makes it."""
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            yield "condition False", lambda n: setattr(n, "test", ast.Constant(False))
            yield "condition True", lambda n: setattr(n, "test", ast.Constant(True))
        case ast.For():
            yield "delete", lambda n: setattr(n, "iter", ast.Tuple([], ast.Load()))
        case ast.comprehension(ifs=[condition, *_]):
            yield f"drop {ast.unparse(condition)}", lambda n: n.ifs.pop(0)
        case ast.BoolOp(values=values):
            for i, value in enumerate(values):
                yield f"drop {ast.unparse(value)}", lambda n, i=i: n.values.pop(i)
        case ast.UnaryOp(ast.Not()):
            yield "drop not", lambda n: setattr(n, "operand", ast.UnaryOp(ast.Not(), n.operand))
        case ast.Compare(ops=ops):
            others = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
            for i, op in enumerate(ops):
                if other := others.get(type(op)):
                    yield f"{type(op).__name__} -> {other.__name__}", lambda n, i=i, o=other: n.ops.__setitem__(i, o())
        case ast.Constant(bool() | int() as value):
            new = not value if isinstance(value, bool) else 0 if value == 1 else value + 1
            yield f"{value} -> {new}", lambda n: setattr(n, "value", new)
        case ast.Call(func, args, keywords):
            if isinstance(func, ast.Name) and func.id in CONVERSIONS and len(args) == 1:
                yield f"drop {func.id}()", lambda n: setattr(n.func, "id", "(lambda x: x)")
            for i, option in enumerate(keywords):
                if option.arg and option.arg not in IGNORED:
                    yield f"option {option.arg}", lambda n, i=i: n.keywords.pop(i)
            for i, (a, b) in enumerate(itertools.pairwise(args)):
                if not {ast.Starred, ast.Constant, ast.Name} & {type(a), type(b)}:
                    pair = f"{ast.unparse(a)}, {ast.unparse(b)}"
                    yield f"swap {pair}", lambda n, i=i: n.args.__setitem__(slice(i, i + 2), n.args[i : i + 2][::-1])


# ---- C++ ----

STATEMENT = re.compile(r"(?!return|throw|case|using|break|continue)[\w:.>\[\]*&()-]+(\(.*\)| [-+*/|&]?= .*|\+\+|--);")
SKIPPED = re.compile(r"\s*(//|#|case |template|static_assert|using |enum |constexpr |static |TORCH_)|.*[\"'\\]")


def of_cpp(file: str) -> Iterator[Callable[[], list[Mutant]]]:
    """For each line, what gives its changes. Our C++ is formatted, so that most statements are a line."""
    lines = text_of(file).split("\n")
    for number, (before, line) in enumerate(itertools.pairwise(lines), 2):
        if SKIPPED.match(line) or not line.startswith("  "):
            continue
        code = line.partition("//")[0].rstrip()
        found = []
        if STATEMENT.fullmatch(code.strip()) and re.search(r"[;{}]\s*(//.*)?$", before) and balanced(code):
            found.append(("delete", f"if (!@) {{ {code.strip()} }}"))
        if (match := re.match(r"(.*\bif \()(.*?)(\) [^)]*)$", code)) and ";" not in match[2] and balanced(match[2]):
            start, condition, rest = match.groups()
            found.append(("condition false", f"{start}!@ && ({condition}){rest}"))
            found.append(("condition true", f"{start}@ || ({condition}){rest}"))
            for part in condition.split(" && ") if "||" not in condition else ():
                if part != condition and balanced(part):
                    found.append((f"drop {part}", f"{start}{condition.replace(part, f'(@ || ({part}))', 1)}{rest}"))
        for match in re.finditer(r" (<=?|>=?) |(?<![\w.<])(\d+)(?![\w.>])|\b(true|false)\b|\((\w+), (\w+)\)", code):
            operator, integer, truth, a, b = match.groups()
            if operator:
                other, shift = {"<": ("<=", ""), "<=": ("<", "-"), ">": (">=", "-"), ">=": (">", "")}[operator]
                change, new = f"{operator} -> {other}", f"{match[0]}{shift}@ + "
            elif integer or truth:
                change, new = f"{match[0]} -> another", f"({integer} + @)" if integer else f"({truth} != @)"
            else:
                change, new = f"swap {a}, {b}", f"(@ ? {b} : {a}, @ ? {a} : {b})"
            found.append((change, code[: match.start()] + new + code[match.end() :]))
        yield functools.partial(list, [Mutant(file, number, number, change, new) for change, new in found])


def balanced(text: str) -> bool:
    return all(text.count(a) == text.count(b) for a, b in ("()", "{}", "[]")) and not text.startswith(")")


def switched(file: str, numbered: dict[Mutant, int]) -> str:
    """The C++ file with all of these mutants, each behind its number, and one line before the first."""
    return '#include "openreg_mutant.h"\n' + applied(
        text_of(file), [*numbered], lambda mutant: mutant.new.replace("@", f"::openreg_mutant({numbered[mutant]})")
    )


def build(tree: Path, mutants: list[Mutant]) -> dict[Mutant, int]:
    """Compile all mutants into the library of the tree. Returns the numbers of those that compile."""
    (tree / "csrc/openreg_mutant.h").write_text(SWITCH)
    ninja = [sys.executable, "-m", "ninja", "-k", "0", "-f", next(tree.glob("build/*/build.ninja"))]
    numbers = {mutant: number for number, mutant in enumerate(mutants, 1)}
    while True:
        for file in {mutant.file for mutant in mutants}:
            new = switched(file, {mutant: number for mutant, number in numbers.items() if mutant.file == file})
            if (tree / file).read_text() != new:
                (tree / file).write_text(new)
        print(f"compiling {len(numbers)} mutants of C++", flush=True)
        said = subprocess.run(ninja, cwd=tree, stdout=subprocess.PIPE, text=True)
        if not said.returncode:
            subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True)
            return numbers
        at = {(file, int(line) - 1) for file, line in re.findall(r"(csrc/[\w/.]+):(\d+)[:,]", said.stdout)}
        wrong = {mutant for mutant in numbers if (mutant.file, mutant.first) in at}
        if not wrong:
            raise SystemExit(f"mutants: the build fails, and not at a mutant:\n{said.stdout[-5000:]}")
        numbers = {mutant: number for mutant, number in numbers.items() if mutant not in wrong}


# ---- running ----


def draw(paths: list[str], cpp: bool, seed: int) -> Iterator[Mutant]:
    """One mutant of each statement, in random order. Each kind of change that it has is equally likely."""
    rng = random.Random(seed)
    found = {str(file.relative_to(ROOT)) for path in paths for file in [ROOT / path, *(ROOT / path).rglob("*")]}
    endings = (".cpp", ".h") if cpp else ".py"
    files = [name for name in sorted(found) if name.endswith(endings) and not EXCLUDED.match(name)]
    statements = [make for file in files for make in (of_cpp if cpp else of_python)(file)]
    rng.shuffle(statements)
    for make in statements:
        kinds = collections.defaultdict(list)
        for mutant in make():
            kinds["boundary" if "->" in mutant.change else mutant.change.split()[0]].append(mutant)
        if not kinds:
            continue
        mutant = rng.choice(kinds[rng.choice(sorted(kinds))])
        with contextlib.suppress(SyntaxError), warnings.catch_warnings(action="ignore"):
            if not cpp:  # which is compiled later
                compile(applied(text_of(mutant.file), [mutant]), mutant.file, "exec")
            yield mutant


def tests_of(file: str) -> str:
    """The tests that run for a file: TESTS' row; of tests/tools those that have a file's or folder's name."""
    row = TESTS[max((start for start in TESTS if file.startswith(start)), key=len)]
    named = f"tests/tools/test_{file.removesuffix('.py').split('/')[1]}*.py"
    return named if row == "tests/tools" and [*ROOT.glob(named)] else row


def named_after(file: str) -> str:
    """The tests whose files have the file's name in theirs, such as tests/runtime/test_graph_memory.py for memory.py."""
    return " ".join(str(path.relative_to(ROOT)) for path in ROOT.glob(f"tests/*/test_*{Path(file).stem}*.py"))


@functools.cache
def without_mutant(tests: str, marker: str) -> tuple[float, list[str]]:
    """How long the tests take without a mutant, and which of them fail."""
    began = time.monotonic()
    failing = run(tests, marker, 0, 3600)
    print(*(f"Without a mutant {test} fails.\n" for test in failing), sep="", end="", flush=True)
    return time.monotonic() - began, failing


def noticed_by(mutant: Mutant, number: int, markers: list[str]) -> str:
    """The test that notices the mutant, or ""."""
    path = OUT / mutant.file
    for tests, marker in [(named_after(mutant.file), ""), *((tests_of(mutant.file), marker) for marker in markers)]:
        seconds, failing = without_mutant(tests, marker)
        if not number:
            path.write_text(applied(text_of(mutant.file), [mutant]))
        failed = run(tests, marker, number, 60 + 4 * seconds, "-x", *(f"--deselect={test}" for test in failing))
        if not number:
            path.write_text(text_of(mutant.file))
        if failed:
            return failed[0]
    return ""


def run(tests: str, marker: str, number: int, timeout: float, *options: str) -> list[str]:
    """Returns the tests that fail, or else why pytest did."""
    paths = [str(path.relative_to(OUT)) for pattern in tests.split() for path in OUT.glob(pattern)]
    if not paths:
        return []
    command = [sys.executable, "-m", "pytest", "-qrfE", "-pno:cacheprovider", f"-n{PROCESSES}", "--dist=loadfile"]
    command += ["--no-loadscope-reorder", "-m", marker, *options, *paths]
    env = dict(os.environ, PYTHONPATH=str(OUT), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    # CHOSEN_MUTANT does not begin with OPENREG_, because tests keep such variables from programs. The cache would keep
    # other mutants' graphs. It is off by default only, as some tests turn it on.
    env |= {"CHOSEN_MUTANT": str(number), "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT": "0"}
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


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__, formatter_class=raw)
    parser.add_argument("paths", nargs="*", help="what to change (default: all of the product)")
    parser.add_argument("--cpp", action="store_true", help="change C++ instead of Python")
    parser.add_argument("--sample", type=int, default=100, help="how many mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="run only tests of `make test-fast`")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    arguments = parser.parse_args()

    paths = arguments.paths or (["csrc"] if arguments.cpp else ["meta", "openreg_ops", "openreg_tools"])
    drawn = [*itertools.islice(draw(paths, arguments.cpp, arguments.seed), arguments.sample)]
    if arguments.list:
        return print(*drawn, sep="\n")
    shutil.rmtree(OUT, ignore_errors=True)
    ignored = shutil.ignore_patterns(".git", ".venv*", "out", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, OUT, symlinks=True, ignore=ignored)
    numbers = build(OUT, drawn) if arguments.cpp else dict.fromkeys(drawn, 0)
    markers = [FAST] if arguments.quick else [FAST, f"not ({FAST})"]
    rows: dict[str, collections.Counter[bool]] = collections.defaultdict(collections.Counter)
    for count, (mutant, number) in enumerate(numbers.items(), 1):
        by = noticed_by(mutant, number, markers)
        print(f"[{count}/{len(numbers)}] {'noticed' if by else 'SURVIVED'} {mutant}  {by}", flush=True)
        for row in ("/".join(mutant.file.split("/")[:-1][:2]), "all"):
            rows[row][bool(by)] += 1
    print(f"\nseed {arguments.seed}; {len(drawn) - len(numbers)} changes do not compile")
    for name, row in sorted(rows.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{name:32}{row[True]:6} of {row.total():3} noticed, {row[True] / row.total():.0%}")


if __name__ == "__main__":
    main()
