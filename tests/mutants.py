"""``make mutants``: how many small faults, put into the Python sources on purpose, do the tests notice?

The faults are mutmut's (a changed operator, number, argument, condition, return value), without faults in strings, which
are mostly messages. mutmut itself cannot run them here: it replaces functions with trampolines, which Dynamo cannot trace,
and skips decorated ones, which is what most of meta/ is. So this samples mutants with a seed, writes each into a copy of
the tree, and runs the tests that cover its line there, the quickest of each test function first. They run in a fork of a
process that has collected all tests, and that gives the functions of the changed file their new code. Where the line
runs at import, and for tests that fail in a fork without any mutant, a new process does.

A mutant counts as noticed when a test fails that passes without it, or when the tests take several times their usual
time: the output says so. The first run measures which test covers which line (``--measure`` renews that). What has
survived is printed as a diff. ``out/mutants/results.jsonl`` keeps every result, and ``--resume`` does not try these mutants
again. ``tests/mutants_known.txt`` lists the survivors that no test can notice, with the reason.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import difflib
import functools
import gc
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import coverage
import libcst
import pytest
from _pytest.runner import runtestprotocol
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "mutants"
RESULTS = OUT / "results.jsonl"
KNOWN = ROOT / "tests" / "mutants_known.txt"
PACKAGES = ("meta", "openreg_ops", "openreg_tools")
OPERATORS = [each for each in mutation_operators if each[1] is not operator_string]
# Written by setup.py; a table of arguments, of which others do as well.
EXCLUDED = {ROOT / "openreg_ops" / "_build.py", ROOT / "openreg_tools" / "conformance" / "recipes.py"}
# What is not there to be run twice: annotations, decorators, and what names a module's interface.
SKIPPED = libcst.Annotation | libcst.Decorator | libcst.Import | libcst.ImportFrom
COPY_NOT = shutil.ignore_patterns(".git", ".venv*", "build", "out", "*.egg-info", "__pycache__", ".*_cache")
OPTIONS = ["-pno:cacheprovider", "-pno:cov", "-pno:xdist"]
CO_NEWLOCALS = 2  # the flag of a function's code
UNFIT = 9  # the exit status of a fork that did not find what to change
# glibc's own, because the device refuses to work in a child of os.fork(), and the server has touched it when it collects.
FORK = ctypes.PyDLL(None)._Fork
COVERAGE = """[run]
source = {sources}
data_file = {data}
parallel = true
patch = _exit
context = ${{PYTEST_CURRENT_TEST-}}
"""


@dataclass
class Mutant:
    """One fault: the file, the line, and both versions of the whole source."""

    file: str
    line: int
    diff: str
    source: str


@dataclass
class Result:
    """What became of a mutant: `tests` were to run, and `covering` run the line."""

    file: str
    line: int
    outcome: str  # noticed, timeout, survived, known (survived, with a reason in mutants_known.txt)
    by: str  # the test that noticed it
    tests: int
    covering: int
    seconds: float
    diff: str


def places(path: Path) -> Iterator[Callable[[], Mutant | None]]:
    """Every mutant of one file, in the order of its nodes, made when called; None where nothing would change."""
    wrapper = MetadataWrapper(libcst.parse_module(path.read_text()), unsafe_skip_copy=True)
    positions = wrapper.resolve(PositionProvider)
    original = wrapper.module.code
    file = str(path.relative_to(ROOT))

    def walk(node: libcst.CSTNode) -> Iterator[libcst.CSTNode]:
        if isinstance(node, SKIPPED) or _is_dunder_all(node) or _makes_samples(node) or _asserts(node):
            return
        yield node
        for child in node.children:
            yield from walk(child)

    def mutant(node: libcst.CSTNode, changed: libcst.CSTNode) -> Mutant | None:
        source = wrapper.module.deep_replace(node, changed).code
        lines = difflib.unified_diff(original.splitlines(), source.splitlines(), file, file, "", "", 0, "")
        diff = "\n".join([*lines][2:])
        return Mutant(file, positions[node].start.line, diff, source) if diff else None

    for node in walk(wrapper.module):
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for changed in operator(node):
                    if not _same(node, changed):
                        yield functools.partial(mutant, node, changed)


def _is_dunder_all(node: libcst.CSTNode) -> bool:
    return isinstance(node, libcst.Assign) and libcst.Module([]).code_for_node(node.targets[0].target) == "__all__"


def _makes_samples(node: libcst.CSTNode) -> bool:
    """Whether it gives the sample inputs of an operator: other shapes and values there are no faults."""
    decorators = node.decorators if isinstance(node, libcst.FunctionDef) else ()
    return any("samples" in libcst.Module([]).code_for_node(each) for each in decorators)


def _asserts(node: libcst.CSTNode) -> bool:
    """Whether it is an argument that changes nothing in a right program: zip's strict=, print's flush=."""
    return isinstance(node, libcst.Arg) and node.keyword is not None and node.keyword.value in ("strict", "flush")


def _same(node: libcst.CSTNode, changed: libcst.CSTNode) -> bool:
    """Whether a call differs in such arguments only."""

    def text(call: libcst.Call) -> str:
        kept = [arg for arg in call.args if not _asserts(arg)]
        return libcst.Module([]).code_for_node(call.with_changes(args=kept)).replace(",", "").replace(" ", "")

    return isinstance(node, libcst.Call) and isinstance(changed, libcst.Call) and text(node) == text(changed)


def measure(tests: list[str], workers: int) -> None:
    """Run the tests once under coverage, to learn which of them run which line, and how long each takes."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    sources = "\n    ".join(str(ROOT / each) for each in PACKAGES)
    (OUT / "coveragerc").write_text(COVERAGE.format(sources=sources, data=OUT / "coverage"))
    command = [sys.executable, "-m", "pytest", f"-n{workers}", "--dist=worksteal", "-p", "no:cacheprovider", *tests]
    command += ["--cov", "--cov-context=test", f"--cov-config={OUT}/coveragerc", "--cov-report="]
    command += [f"--junitxml={OUT}/times.xml", "-o", "junit_family=xunit1"]
    # Processes that a test starts read the file themselves, so that their lines count for the test.
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "COVERAGE_PROCESS_START": f"{OUT}/coveragerc"})
    if ran.returncode not in (0, 1):
        raise SystemExit(f"mutants: pytest ended with {ran.returncode} without a mutant")
    suite = xml.etree.ElementTree.parse(OUT / "times.xml").find("testsuite")
    if int(suite.get("errors")) or "crashed while running" in (OUT / "times.xml").read_text():
        raise SystemExit("mutants: a test file was not measured, because it cannot be imported or ended its process")
    if failed := int(suite.get("failures")):  # a test is left out where it fails without a mutant
        print(f"mutants: {failed} tests fail without a mutant", flush=True)
    combine = [sys.executable, "-m", "coverage", "combine", "--append", f"--rcfile={OUT}/coveragerc"]
    subprocess.run(combine, cwd=ROOT, check=False)  # of processes that were still running when pytest-cov did it


@functools.cache
def _contexts(file: str) -> dict[int, set[str]]:
    """The tests that run each line of a file; "" stands for an import outside tests."""
    data = coverage.CoverageData(str(OUT / "coverage"))
    data.read()
    found = collections.defaultdict(set)
    for line, contexts in data.contexts_by_lineno(str(ROOT / file)).items():
        for context in contexts:
            parts = [part for part in context.split("|") if "::" in part]
            found[line].update({part.partition(" (")[0] for part in parts} or {""})
            for part in parts:
                if part.endswith(" (setup)"):  # a process that a fixture starts serves every test of the file
                    found[line].update(_tests_of(part.partition("::")[0]))
    return found


@functools.cache
def _tests_of(file: str) -> list[str]:
    return [test for test in _seconds() if test.startswith(f"{file}::")]


@functools.cache
def _seconds() -> dict[str, float]:
    cases = xml.etree.ElementTree.parse(OUT / "times.xml").iter("testcase")
    return {f"{case.get('file')}::{case.get('name')}": float(case.get("time")) for case in cases if case.get("file")}


def runs_at_import(mutant: Mutant) -> bool:
    return "" in _contexts(mutant.file).get(mutant.line, ())


def covering(mutant: Mutant, budget: float) -> tuple[list[str], int]:
    """The tests to run in `budget` seconds, and how many cover the line: of those, and then of others, first
    the tests that name the file, then the quickest of each function."""
    lines = _contexts(mutant.file)
    named = re.compile(f"(?<![a-z]){re.escape(Path(mutant.file).stem)}(?![a-z])")
    tests = lines.get(mutant.line, set()) - {""}
    # What runs at import, such as a default, may matter to every test that uses the file or names it. And coverage sees no
    # thread that C++ starts, such as autograd's.
    others = set().union(*lines.values()) - {""} - tests
    if runs_at_import(mutant):
        tests, others = tests | others | set(filter(named.search, _seconds())), set()
    seen: collections.Counter[str] = collections.Counter()
    turns = []
    for test in sorted(tests | others, key=lambda test: (_seconds().get(test, 1.0), test)):
        function = test.partition("[")[0]
        turns.append((test in others, not named.search(test), seen[function], test))
        seen[function] += 1
    chosen, spent = [], 0.0
    for *_turn, test in sorted(turns, key=lambda each: each[:-1]):
        takes = max(0.02, _seconds().get(test, 1.0))
        if not chosen or spent + takes <= budget:
            chosen.append(test)
            spent += takes
    return chosen, len(tests)


def new_code(path: Path, source: str, changed: str) -> dict[tuple[str, int, bytes], types.CodeType] | None:
    """The code in `changed` for each function of `source`; None if more than functions differs."""
    found = {}

    def walk(old: types.CodeType, new: types.CodeType) -> bool:
        if old.co_flags & new.co_flags & CO_NEWLOCALS and old.co_freevars == new.co_freevars:
            found[_name(old)] = new
        elif _alone(old) != _alone(new):  # a module or a class
            return False
        nested = [[each for each in code.co_consts if isinstance(each, types.CodeType)] for code in (old, new)]
        return len(nested[0]) == len(nested[1]) and all(itertools.starmap(walk, zip(*nested, strict=True)))

    both = [compile(text, str(path), "exec") for text in (source, changed)]
    return found if walk(*both) else None


def _alone(code: types.CodeType) -> types.CodeType:
    """Without the functions in it, and wherever its lines are."""
    consts = tuple(each for each in code.co_consts if not isinstance(each, types.CodeType))
    return code.replace(co_consts=consts, co_linetable=b"", co_firstlineno=1)


def _name(code: types.CodeType) -> tuple[str, int, bytes]:
    return code.co_qualname, code.co_firstlineno, code.co_code


def swap(path: Path, codes: dict[tuple[str, int, bytes], types.CodeType]) -> int:
    """Give the functions of the file this code; returns how many have it."""
    gc.unfreeze()
    is_path = functools.cache(lambda name: os.path.realpath(name) == os.path.realpath(path))  # meta/ has two names
    count = 0
    for each in gc.get_objects():
        if type(each) is types.FunctionType and is_path(each.__code__.co_filename):
            if code := codes.get(_name(each.__code__)):
                each.__code__ = code
                count += 1
    return count


class Server:
    """A plugin that runs the mutants' tests in place of all tests. An outcome is survived, noticed or timeout, or unfit,
    if this way to run the tests would not see the mutant; with it comes the test that failed."""

    def __init__(self, sample: list[Mutant], total: int, budget: float, folder: Path, out: TextIO) -> None:
        self.sample, self.total, self.budget, self.folder, self.out = sample, total, budget, folder, out
        # Whether a test passes without a mutant, in a fork and in a new process.
        self.passes: dict[tuple[str, str], bool] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        if len(tasks := [*Path("/proc/self/task").iterdir()]) > 1:  # tests would wait for them
            names = {(task / "comm").read_text().strip() for task in tasks}
            raise SystemExit(f"mutants: collecting the tests has started threads, which forks lack: {sorted(names)}")
        with open(RESULTS, "a", buffering=1) as log:  # other processes write their lines
            for mutant in self.sample:
                result = self.result(mutant)
                log.write(json.dumps(asdict(result)) + "\n")
                head = f"[{len(results())}/{self.total}] {result.outcome} {result.file}:{result.line}"
                by = f", by {result.by}" if result.by else ""
                ran = f"{result.tests} tests, {result.covering} cover it, {result.seconds:.1f} s{by}"
                diff = [result.diff] if result.outcome in ("survived", "timeout") else []
                print(f"{head}  ({ran})", *diff, sep="\n", file=self.out, flush=True)
        return True

    def result(self, mutant: Mutant) -> Result:
        began = time.monotonic()
        chosen, count = covering(mutant, self.budget)
        outcome, by, rest = self.run(self.fork, mutant, [test for test in chosen if test in self.items])
        if outcome == "survived" and rest:
            outcome, by, _ = self.run(self.process, mutant, rest)
        if outcome == "survived" and _key(mutant.file, mutant.diff) in _known():
            outcome = "known"
        seconds = time.monotonic() - began
        return Result(mutant.file, mutant.line, outcome, by, len(chosen), count, seconds, mutant.diff)

    def run(self, way: Callable, mutant: Mutant, tests: list[str]) -> tuple[str, str, list[str]]:
        """With the tests that say nothing this way, because they fail without the mutant too."""
        while these := [test for test in tests if self.passes.get((way.__name__, test), True)]:
            with self.written(mutant):
                outcome, by = way(mutant, these)
            if outcome == "unfit":
                return "survived", "", tests
            if outcome != "survived" and by and (way.__name__, by) not in self.passes:
                self.learn(way.__name__, by, these)
            if outcome == "survived" or self.passes.get((way.__name__, by), True):
                return outcome, by, [test for test in tests if test not in these]
        return "survived", "", tests

    def learn(self, way: str, by: str, tests: list[str]) -> None:
        """Whether `by` passes without a mutant. A new process says so of all tests at once: its start is what takes time."""
        if way == "fork":
            self.passes[way, by] = self.fork(None, [by])[0] == "survived"
            return
        unknown = [test for test in tests if (way, test) not in self.passes]
        outcome, failed = self.pytest(unknown)
        if outcome != "survived" and not failed:  # it hung, or ended before it said which
            unknown = failed = [by]
        self.passes.update(((way, test), test not in failed) for test in unknown)

    @contextlib.contextmanager
    def written(self, mutant: Mutant) -> Iterator[None]:
        """With the mutant in the copy of the tree, where new processes read it."""
        path = self.folder / mutant.file
        kept = path.read_text()
        path.write_text(mutant.source)
        try:
            yield
        finally:
            path.write_text(kept)

    def fork(self, mutant: Mutant | None, tests: list[str]) -> tuple[str, str]:
        codes = self.codes(mutant) if mutant else {}
        if codes is None:
            return "unfit", ""
        by = self.folder / "noticed_by.txt"
        by.write_text("")
        if not (pid := FORK()):
            status = 1
            try:
                os.setsid()
                if codes and not swap(self.folder / mutant.file, codes):
                    os._exit(UNFIT)
                items = [self.items[test] for test in tests]
                for item, following in itertools.zip_longest(items, items[1:]):
                    by.write_text(item.nodeid)
                    if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):
                        break
                else:
                    status = 0
            finally:
                os._exit(status)
        outcome = _outcome(pid, tests)
        return outcome, "" if outcome == "survived" else by.read_text()

    def codes(self, mutant: Mutant) -> dict[tuple[str, int, bytes], types.CodeType] | None:
        """What a fork replaces: nothing, if the file is imported only there; None if that does not have its effect."""
        if runs_at_import(mutant):
            return None
        path = (self.folder / mutant.file).resolve()
        files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
        if not any(Path(file).resolve() == path for file in files if file and Path(file).name == path.name):
            return {}
        return new_code(self.folder / mutant.file, (ROOT / mutant.file).read_text(), mutant.source)

    def process(self, mutant: Mutant, tests: list[str]) -> tuple[str, str]:
        outcome, failed = self.pytest(tests, "-x")
        return outcome, failed[0] if failed else ""

    def pytest(self, tests: list[str], *options: str) -> tuple[str, list[str]]:
        """Run the tests in a new process. Returns the outcome, and which have failed."""
        (self.folder / "mutant_tests.txt").write_text("\n".join(tests))
        output = self.folder / "output.txt"
        command = [sys.executable, "-m", "pytest", *OPTIONS, *options, "-qrfE", "@mutant_tests.txt"]
        opened = (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        file_actions = [opened, (os.POSIX_SPAWN_DUP2, 1, 2)]
        pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=file_actions, setsid=True)
        outcome = _outcome(pid, tests)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", output.read_text(errors="replace"), re.MULTILINE)
        return outcome, failed


def _outcome(pid: int, tests: list[str]) -> str:
    """When the process with the tests has ended, or taken several times as long as usual; none of its processes stays."""
    deadline = time.monotonic() + 30 + 6 * sum(_seconds().get(test, 1.0) for test in tests)
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not found[0]:
        os.waitpid(pid, 0)
        return "timeout"
    status = os.waitstatus_to_exitcode(found[1])
    return {0: "survived", UNFIT: "unfit"}.get(status, "noticed")


def _key(file: str, diff: str) -> str:
    """What names a mutant in mutants_known.txt, wherever its line moves: the file and the changed lines."""
    return " ".join([file, *(line for line in diff.splitlines() if not line.startswith("@@"))])


@functools.cache
def _known() -> set[str]:
    """Blocks of: a comment line with the reason, a line with the file, and the diff."""
    blocks = KNOWN.read_text().split("\n\n") if KNOWN.exists() else []
    lines = [[line for line in block.splitlines() if not line.startswith("#")] for block in blocks]
    return {" ".join(block) for block in lines if block}


def package(file: str) -> str:
    """The row that a file counts in."""
    parts = file.removesuffix(".py").split("/")
    return parts[0] if len(parts) == 2 and parts[0] == "meta" else "/".join(parts[:2])


def results() -> list[Result]:
    """Of every mutant that has been tried."""
    return [Result(**json.loads(line)) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def serve(sample: list[Mutant], total: int, budget: float, workers: int) -> None:
    """Run the tests of each mutant, in processes that share the sample."""
    processes = []
    for i in range(workers):
        if not (process := os.fork()):
            try:
                _serve(sample[i::workers], total, budget, OUT / f"tree{i}")
            finally:
                os._exit(1)
        processes.append(process)
    if any([os.waitpid(process, 0)[1] for process in processes]):
        raise SystemExit("mutants: a process ended before it had tried its mutants; --resume tries the rest")


def _serve(sample: list[Mutant], total: int, budget: float, folder: Path) -> None:
    """In a copy of the tree; ends the process."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, folder, symlinks=True, ignore=COPY_NOT)
    os.chdir(folder)
    sys.path[:] = [str(folder), *(each for each in sys.path if each not in ("", str(ROOT / "tests")))]
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=str(folder), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    files = sorted({test.partition("::")[0] for test in _seconds()})
    with os.fdopen(os.dup(1), "w") as out:  # pytest captures what it prints
        server = Server(sample, total, budget, folder, out)
        status = pytest.main(["-q", *OPTIONS, "--rootdir", str(folder), *files], plugins=[server])
    os._exit(status)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", default=PACKAGES, help="files or folders to change (default: all three packages)"
    )
    parser.add_argument("--sample", type=int, default=300, help="how many mutants (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests for each mutant (default: 60)")
    parser.add_argument("--measure", action="store_true", help="measure again which test covers which line")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="the tests to measure")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one for each core)")
    parser.add_argument("--resume", action="store_true", help="do not try again what the last run has tried")
    arguments = parser.parse_args()
    if arguments.measure or not (OUT / "times.xml").exists():
        measure(arguments.tests, arguments.workers)

    files = sorted({file for path in arguments.paths for file in _python_files(ROOT / path)})
    every = [place for file in files for place in places(file)]
    random.Random(arguments.seed).shuffle(every)
    sample = [*itertools.islice(filter(None, (place() for place in every)), arguments.sample)]
    print(f"about {len(every):,} mutants of {len(files)} files; {len(sample)} with seed {arguments.seed}", flush=True)

    if not arguments.resume:
        RESULTS.unlink(missing_ok=True)
    tried = {_key(result.file, result.diff) for result in results()}
    sample = [mutant for mutant in sample if _key(mutant.file, mutant.diff) not in tried]
    serve(sample, len(tried) + len(sample), arguments.budget, arguments.workers)
    rows = collections.defaultdict(collections.Counter)
    for result in results():
        rows[package(result.file)][result.outcome] += 1
        rows["all"][result.outcome] += 1
    print(f"\n{'':32}  mutants  noticed  timeout  known  survived  score")
    for name, row in sorted(rows.items(), key=lambda each: (each[0] == "all", each[0])):
        score = (row["noticed"] + row["timeout"]) / max(1, row.total() - row["known"])
        counts = f"{row['noticed']:9}{row['timeout']:9}{row['known']:7}{row['survived']:10}"
        print(f"{name:32}{row.total():9}{counts}{score:7.0%}  {'#' * round(20 * score)}")
    return 0


def _python_files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else path.rglob("*.py")
    return [file for file in found if file not in EXCLUDED and not file.is_relative_to(ROOT / "openreg_ops" / "meta")]


if __name__ == "__main__":
    sys.exit(main())
