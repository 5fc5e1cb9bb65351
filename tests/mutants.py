"""``make mutants``: how many small faults, put into the Python sources on purpose, do the tests notice?

The faults are mutmut's (a changed operator, number, argument, condition, return value), without faults in strings, which
are mostly messages. mutmut itself cannot run them here: it replaces functions with trampolines, which Dynamo cannot trace,
and skips decorated ones, which is what most of meta/ is. So this samples mutants with a seed, writes each into a copy of
the tree, and runs the tests that cover its line there, the quickest of each test function first.

The first run measures which test covers which line (``--measure`` renews that). What has survived is printed as a diff, and
kept in ``out/mutants/results.jsonl``; ``tests/mutants_known.txt`` lists the survivors that no test can notice, with the reason.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import difflib
import functools
import itertools
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import coverage
import libcst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "mutants"
KNOWN = ROOT / "tests" / "mutants_known.txt"
PACKAGES = ("meta", "openreg_ops", "openreg_tools")
OPERATORS = [each for each in mutation_operators if each[1] is not operator_string]
# Written by setup.py; a table of arguments, of which others do as well.
EXCLUDED = {ROOT / "openreg_ops" / "_build.py", ROOT / "openreg_tools" / "conformance" / "recipes.py"}
# What is not there to be run twice: annotations, decorators, and what names a module's interface.
SKIPPED = libcst.Annotation | libcst.Decorator | libcst.Import | libcst.ImportFrom
COPY_NOT = shutil.ignore_patterns(".git", ".venv*", "build", "out", "*.egg-info", "__pycache__", ".*_cache")
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
    """What became of a mutant. `tests` of `covering` tests ran."""

    file: str
    line: int
    outcome: str  # noticed, survived, known (survived, with a reason in mutants_known.txt)
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
    if subprocess.run(command, cwd=ROOT, env={**os.environ, "COVERAGE_PROCESS_START": f"{OUT}/coveragerc"}).returncode:
        raise SystemExit("mutants: the tests fail without a mutant; make them pass first")
    combine = [sys.executable, "-m", "coverage", "combine", "--append", f"--rcfile={OUT}/coveragerc"]
    subprocess.run(combine, cwd=ROOT, check=False)  # of processes that were still running when pytest-cov did it


@functools.cache
def _contexts(file: str) -> dict[int, set[str]]:
    """The tests that run each line of a file."""
    data = coverage.CoverageData(str(OUT / "coverage"))
    data.read()
    found = collections.defaultdict(set)
    for line, contexts in data.contexts_by_lineno(str(ROOT / file)).items():
        for context in contexts:
            for part in context.split("|"):
                test, _, phase = part.partition(" (")
                found[line].add(test)
                if phase == "setup)":  # a process that a fixture starts serves every test of the file
                    found[line].update(_tests_of(test.partition("::")[0]))
    return {line: {test for test in tests if "::" in test} for line, tests in found.items()}


@functools.cache
def _tests_of(file: str) -> list[str]:
    return [test for test in _seconds() if test.startswith(f"{file}::")]


@functools.cache
def _seconds() -> dict[str, float]:
    cases = xml.etree.ElementTree.parse(OUT / "times.xml").iter("testcase")
    return {f"{case.get('file')}::{case.get('name')}": float(case.get("time")) for case in cases if case.get("file")}


def covering(mutant: Mutant, budget: float) -> tuple[list[str], int]:
    """The tests to run, the quickest of each function first, until `budget` seconds are spent; and how many cover it."""
    lines = _contexts(mutant.file)
    # A line that runs at import, such as a default, counts as run by every test that uses the file.
    tests = lines.get(mutant.line, ()) or (set().union(*lines.values()) if mutant.line in lines else ())
    every = sorted(tests, key=lambda test: (_seconds().get(test, 1.0), test))
    seen: collections.Counter[str] = collections.Counter()
    turns = []
    for test in every:
        function = test.partition("[")[0]
        turns.append((seen[function], test))
        seen[function] += 1
    chosen, spent = [], 0.0
    for _turn, test in sorted(turns, key=lambda each: each[0]):
        if chosen and spent + _seconds().get(test, 1.0) > budget:
            break
        chosen.append(test)
        spent += _seconds().get(test, 1.0)
    return chosen, len(every)


def run(mutant: Mutant, folder: Path, budget: float) -> Result:
    """Run the tests that cover the mutant's line in a copy of the tree that has it."""
    tests, count = covering(mutant, budget)
    began, target = time.monotonic(), folder / mutant.file
    kept = target.read_text()
    noticed = False
    if tests:
        target.write_text(mutant.source)
        (folder / "mutant_tests.txt").write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", "-xq", "-pno:cacheprovider", "-pno:cov", "-pno:xdist"]
        process = subprocess.Popen(
            [*command, "@mutant_tests.txt"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            noticed = process.wait(30 + 4 * sum(_seconds().get(test, 1.0) for test in tests)) != 0
        except subprocess.TimeoutExpired:
            noticed = True  # it hangs
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            target.write_text(kept)
    outcome = "noticed" if noticed else "known" if _key(mutant.file, mutant.diff) in _known() else "survived"
    return Result(mutant.file, mutant.line, outcome, len(tests), count, time.monotonic() - began, mutant.diff)


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
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.measure or not (OUT / "times.xml").exists():
        measure(arguments.tests, arguments.workers)

    files = sorted({file for path in arguments.paths for file in _python_files(ROOT / path)})
    every = [place for file in files for place in places(file)]
    random.Random(arguments.seed).shuffle(every)
    sample = [*itertools.islice(filter(None, (place() for place in every)), arguments.sample)]
    print(f"about {len(every):,} mutants of {len(files)} files; {len(sample)} with seed {arguments.seed}", flush=True)

    folders: queue.Queue[Path] = queue.Queue()
    for i in range(arguments.workers):
        folder = OUT / f"tree{i}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ROOT, folder, symlinks=True, ignore=COPY_NOT)
        folders.put(folder)

    def one(mutant: Mutant) -> Result:
        folder = folders.get()
        try:
            return run(mutant, folder, arguments.budget)
        finally:
            folders.put(folder)

    results = []
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool, open(OUT / "results.jsonl", "w") as log:
        for done in concurrent.futures.as_completed([pool.submit(one, mutant) for mutant in sample]):
            results.append(result := done.result())
            log.write(json.dumps(asdict(result)) + "\n")
            log.flush()
            head = f"[{len(results)}/{len(sample)}] {result.outcome} {result.file}:{result.line}"
            ran = f"{result.tests} of {result.covering} tests, {result.seconds:.0f} s"
            print(f"{head}  ({ran})", *([result.diff] if result.outcome == "survived" else []), sep="\n", flush=True)

    rows = collections.defaultdict(collections.Counter)
    for result in results:
        rows[package(result.file)][result.outcome] += 1
        rows["all"][result.outcome] += 1
    print(f"\n{'':32}  mutants  noticed  known  survived  score")
    for name, row in sorted(rows.items(), key=lambda each: (each[0] == "all", each[0])):
        score = row["noticed"] / max(1, row.total() - row["known"])
        counts = f"{row['noticed']:9}{row['known']:7}{row['survived']:10}"
        print(f"{name:32}{row.total():9}{counts}{score:7.0%}  {'#' * round(20 * score)}")
    return 0


def _python_files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else path.rglob("*.py")
    return [file for file in found if file not in EXCLUDED and not file.is_relative_to(ROOT / "openreg_ops" / "meta")]


if __name__ == "__main__":
    sys.exit(main())
