"""Faults at random places of five programs: a sample of what ``python tests/tools/compare_faults.py`` runs."""

import compare_faults
import pytest

LOCAL = ["mlp", "transformer", "rnn"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "names, count", [(LOCAL, 12), (["compiled"], 2), (["ddp"], 2)], ids=["eager", "compiled", "ddp"]
)
def test_faults_are_located(names, count, monkeypatch):
    monkeypatch.setenv("OPENREG_POISON", "0")
    for place in compare_faults.places(count, 3, names):  # raises where a clean run differs
        found = compare_faults.strike(place)
        assert found is not None and found["struck"] == 1 and compare_faults.located(place[-1], found), (place, found)
