"""tests/mutants.py: the changes that `make mutants` makes."""

import itertools
import subprocess
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[2]

PYTHON = '''
def area(width: int, height: int = 1) -> float:
    """Two."""
    if width < 0 and not height:
        raise ValueError(f"expected {width} by {height}")
    width = abs(width)
    self.area = width - height
    for side in sorted(sides):
        yield [side for side in sides if side]
    return scale(width, size=height)
'''
OF_PYTHON = {
    2: ["1 -> 0"],
    4: ["0 -> 1", "Lt -> LtE", "condition False", "condition True", "drop not", "drop not height", "drop width < 0",
        "swap width, height"],
    5: ["delete", "swap width, height"],
    6: ["drop abs()"],
    7: ["delete", "swap width, height"],
    8: ["delete", "drop sorted()"],
    9: ["delete", "drop side", "swap side, sides", "swap sides, side"],
    10: ["delete", "option size", "swap width, height"],
}  # fmt: skip

CPP = """#include <cstdio>
int minus(int a, int b) {
  return a - b;
}
int f(int a, int b) {
  if (a < b && b > 0) return 7;
  int c = 2;
  bool even = a % 2 == 0;
  for (int i = 0; i < a; ++i) {
    c += b;
  }
  return even ? minus(c, a) : minus(a, b);
}
int main() {
  for (int a = -2; a < 5; ++a)
    for (int b = -2; b < 5; ++b) std::printf("%d ", f(a, b));
}
"""
OF_CPP = {
    6: ["0 -> another", "7 -> another", "< -> <=", "> -> >=", "condition false", "condition true", "drop a < b",
        "drop b > 0"],
    7: ["2 -> another"],
    8: ["0 -> another", "2 -> another"],
    9: ["0 -> another", "< -> <="],
    10: ["delete"],
    12: ["swap a, b", "swap c, a"],
}  # fmt: skip


def found(monkeypatch, folder, name, text):
    """The mutants of a file, and what they say, by line."""
    (folder / name).write_text(text)
    monkeypatch.setattr(mutants, "ROOT", folder)
    mutants.text_of.cache_clear()
    places = mutants.of_python if name.endswith(".py") else mutants.of_cpp
    every = [mutant for make in places(name) for mutant in make()]
    by_line = {}
    for mutant in sorted(every, key=lambda each: (each.first, each.change)):
        by_line.setdefault(mutant.first, []).append(mutant.change)
    mutants.text_of.cache_clear()
    return every, by_line


def test_changes_of_python(monkeypatch, tmp_path):
    every, by_line = found(monkeypatch, tmp_path, "sample.py", PYTHON)
    assert by_line == OF_PYTHON
    for mutant in every:
        compile(after := mutants.applied(PYTHON, [mutant]), "sample.py", "exec")
        pairs = zip(PYTHON.split("\n"), after.split("\n"), strict=True)
        assert [i for i, (a, b) in enumerate(pairs, 1) if a != b] == [mutant.first]


@pytest.mark.compiles
def test_changes_of_cpp(monkeypatch, tmp_path):
    """With each of them, the program gives other numbers."""
    every, by_line = found(monkeypatch, tmp_path, "sample.cpp", CPP)
    every = [mutant for mutant in every if mutant.first < 14]
    assert {line: changes for line, changes in by_line.items() if line < 14} == OF_CPP
    (tmp_path / "openreg_mutant.h").write_text(mutants.SWITCH)
    same = []
    for turn in range(8):  # a program has one mutant of each line
        group = [[each for each in every if each.first == line][turn:][:1] for line in OF_CPP]
        numbered = {mutant: number for number, mutant in enumerate(itertools.chain(*group), 1)}
        (tmp_path / "all.cpp").write_text(mutants.switched("sample.cpp", numbered))
        subprocess.run(["g++", "-std=c++20", "-w", "-I.", "all.cpp", "-o", "all"], cwd=tmp_path, check=True)

        def said(number):
            return subprocess.check_output(tmp_path / "all", env={"CHOSEN_MUTANT": str(number)})

        same += [str(mutant) for mutant, number in numbered.items() if said(number) == said(0)]
    assert not same


@pytest.mark.parametrize("cpp", [False, True])
def test_a_seed_draws_the_same_mutants(cpp):
    paths = ["meta", "csrc/ops"]
    first, again, other = ([*map(str, itertools.islice(mutants.draw(paths, cpp, seed), 10))] for seed in (0, 0, 1))
    assert first == again != other
    assert {key.split("/")[0] for key in first + other} == {"csrc" if cpp else "meta"}


def test_every_source_has_tests():
    for folder in ("csrc", "meta", "openreg_ops", "openreg_tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h"):
                for tests in mutants.tests_of(str(path.relative_to(ROOT))).split():
                    assert [*ROOT.glob(tests)], tests
