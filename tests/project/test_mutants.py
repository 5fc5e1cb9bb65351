"""tests/mutants.py: the changes that `make mutants` makes, and the list of those that no test can notice."""

import itertools
import subprocess
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[2]
KNOWN = [line for line in (ROOT / "tests/mutants_known.txt").read_text().splitlines() if line]

PYTHON = '''
@cached
def area(width: int, height: int = 1) -> float:
    """Two."""
    if width < 0 and not height:
        raise ValueError(f"expected {width} by {height}")
    width = abs(width)
    self.area = width - height
    for side in sorted(sides):
        yield [side for side in sides if side]
    return scale(width, height)
'''
OF_PYTHON = {
    3: ["1 -> 0", "delete @cached"],
    5: ["0 -> 1", "Lt -> LtE", "delete", "drop not", "drop not height", "drop the condition", "drop width < 0",
        "swap width, height"],
    6: ["delete", "drop {height}", "drop {width}", "swap width, height"],
    7: ["delete", "drop abs()"],
    8: ["delete", "swap width, height"],
    9: ["delete", "drop sorted()"],
    10: ["delete", "drop side", "swap side, sides", "swap sides, side"],
    11: ["delete", "swap width, height"],
}  # fmt: skip

CPP = """#include <cstdio>
#include <vector>
int minus(int a, int b) { return a - b; } // not (a, b)
struct Pair {
  std::vector<int> both{1, 2};
};
int f(int a, int b) {
  if (a < b && b > 0) return 7;
  int c = 2;
  bool even = a % 2 == 0, odd = false;
  for (int i = 0; i < a; ++i)
    c += b;
  if (even || odd) c *= -1;
  const auto g = [&](int x) -> int {
    return minus(x, b);
  };
  return g(c) +
      (odd ? 5 : 3);
}
int main() {
  for (int a = -2; a < 5; ++a)
    for (int b = -2; b < 5; ++b) std::printf("%d ", f(a, b));
}
"""
OF_CPP = {
    3: ["delete"],
    8: ["0 -> 1", "7 -> 8", "< -> <=", "> -> >=", "delete", "drop a < b", "drop b > 0", "drop the condition"],
    9: ["2 -> 3"],
    10: ["0 -> 1", "2 -> 3", "false -> true"],
    11: ["0 -> 1", "< -> <="],
    12: ["delete"],
    13: ["1 -> 0", "delete", "drop even", "drop odd", "drop the condition"],
    15: ["delete", "swap x, b"],
    17: ["delete"],
    18: ["3 -> 4", "5 -> 6"],
}


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Writes a file; returns its mutants up to this line."""

    def source(name, text, last):
        (tmp_path / name).write_text(text)
        places = mutants.python_places if name.endswith(".py") else mutants.cpp_places
        return [mutant for make in places(name) for mutant in make() if mutant.line <= last]

    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for cache in (mutants._text, mutants._starts):
        cache.cache_clear()
    yield source
    for cache in (mutants._text, mutants._starts):
        cache.cache_clear()


def by_line(found):
    return {
        line: sorted({each.change for each in found if each.line == line}) for line in sorted({x.line for x in found})
    }


def test_changes_of_python(source):
    found = source("sample.py", PYTHON, 100)
    assert by_line(found) == OF_PYTHON
    before = PYTHON.splitlines()
    for mutant in found:
        after = mutants.edited(PYTHON, mutant.edits)
        compile(after, "sample.py", "exec")
        changed = [i for i, pair in enumerate(zip(before, after.splitlines(), strict=True), 1) if pair[0] != pair[1]]
        assert changed == ([2, 3] if mutant.change == "delete @cached" else [mutant.line])


@pytest.mark.compiles
def test_changes_of_cpp(source, tmp_path):
    """One program has them all. With none of them it is the original; with each it gives other numbers."""
    found = source("sample.cpp", CPP, 18)
    assert by_line(found) == OF_CPP
    (tmp_path / "openreg_mutant.h").write_text(mutants.SWITCH)
    switched = mutants.switched("sample.cpp", {mutant: number for number, mutant in enumerate(found, 1)})
    assert len(switched.splitlines()) == len(CPP.splitlines()) + 1
    said = {}
    for name, text in (("original", CPP), ("all", switched)):
        (tmp_path / f"{name}.cpp").write_text(text)
        command = ["g++", "-std=c++20", "-w", "-I.", f"{name}.cpp", "-o", name]
        subprocess.run(command, cwd=tmp_path, check=True)
        numbers = range(len(found) + 1) if name == "all" else [0]
        for number in numbers:
            environment = {"OPENREG_MUTANT": str(number)}
            ran = subprocess.run(tmp_path / name, env=environment, capture_output=True, text=True, check=True)
            said[name, number] = ran.stdout
    assert said["all", 0] == said["original", 0]
    same = [mutant.key for number, mutant in enumerate(found, 1) if said["all", number] == said["original", 0]]
    # odd is false.
    assert same == ["sample.cpp: if (even || odd) c *= -1;  =>  drop odd", "sample.cpp: (odd ? 5 : 3);  =>  5 -> 6"]


def test_a_seed_draws_the_same_mutants():
    paths = ["meta/rms_norm.py", "csrc/ops/rms_norm.cpp"]
    first, again, other = (
        [mutant.key for mutant in itertools.islice(mutants.draw(paths, seed), 10)] for seed in (0, 0, 1)
    )
    assert first == again != other
    assert {key.partition(":")[0] for key in first + other} == {*paths}


def test_every_source_has_tests():
    for folder in mutants.PATHS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h"):
                for tests in mutants.tests_of(str(path.relative_to(ROOT))).split():
                    assert [*ROOT.glob(tests)], tests


def test_known_mutants_are_of_lines_that_exist():
    for before, line in itertools.pairwise(["", *KNOWN]):
        if not line.startswith("# "):
            file, _, text = line.rpartition("  =>  ")[0].partition(": ")
            assert before.startswith("# "), f"no reason before {line}"
            assert text in [each.strip() for each in (ROOT / file).read_text().splitlines()], line
    assert len({*KNOWN}) == len(KNOWN)
