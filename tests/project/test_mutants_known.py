"""tests/mutants_known.txt: what `make mutants` counts as known is a line that exists, with a reason."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = [block.splitlines() for block in (ROOT / "tests" / "mutants_known.txt").read_text().strip().split("\n\n")]


def wrong(block):
    """What is wrong with a block, or nothing."""
    reasons = [line for line in block if line.startswith("#")]
    at, *changes = block[len(reasons) :] or [""]
    before = [line[1:] for line in changes if line.startswith("-")]
    after = [line[1:] for line in changes if line.startswith("+")]
    if not "".join(reasons).strip("# ") or block[: len(reasons)] != reasons:
        return "no reason before the file"
    if not (ROOT / at).is_file():
        return f"no file {at}"
    if not before or before == after or changes != [f"-{line}" for line in before] + [f"+{line}" for line in after]:
        return "not lines, and what a mutant makes of them"
    if "\n".join(["", *before, ""]) not in "\n" + (ROOT / at).read_text():
        return f"{at} has no such lines"
    return ""


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_its_lines_exist(block):
    assert not wrong(block)


def test_each_is_listed_once():
    mutants = ["\n".join(line for line in block if not line.startswith("#")) for block in BLOCKS]
    assert len(set(mutants)) == len(mutants)


def test_what_is_wrong_is_found():
    reason, at, *changes = good = BLOCKS[-1]
    assert not wrong(good)
    assert wrong([at, *changes]) == wrong(["#", at, *changes]) == "no reason before the file"
    assert wrong([reason, "no/such.py", *changes]) == "no file no/such.py" and wrong([reason]) == "no file "
    assert wrong([reason, at]) == wrong([reason, at, "-  a", "+  a"]) == "not lines, and what a mutant makes of them"
    assert wrong([reason, at, "-    no such line", "+    another"]) == f"{at} has no such lines"
