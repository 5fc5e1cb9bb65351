"""Findings as annotations of GitHub Actions and as SARIF, from `check` and from pytest."""

import json
import re

import pytest
import torch
from commands import command

from openreg_tools.check.checker import definition
from openreg_tools.check.report import Report, Result
from openreg_tools.core.findings import Finding, annotate, sarif
from openreg_tools.pytest_plugin.misuse import Misuse, Misuses

OPERATOR = """
import torch

@torch.library.custom_op("found_ops::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x.contiguous() * by

@scale.register_fake
def fake(x, by):
    return torch.empty_like(x)
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that GitHub Actions has checked out, with a package in a folder of its own."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "found_ops.py").write_text(OPERATOR)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.chdir(tmp_path / "package")
    return tmp_path


def test_a_path_starts_at_the_repository(repository):
    inside = repository / "package" / "found_ops.py"
    for where, root in (("found_ops.py:5", "."), (f"{inside}:5", "."), ("package/found_ops.py:5", str(repository))):
        finding = Finding("race", "error", "", where, root)
        assert (finding.path, finding.line) == ("package/found_ops.py", 5)
    elsewhere = Finding("race", "error", "", "torch/nn/functional.py:12")
    assert (elsewhere.path, elsewhere.line) == ("torch/nn/functional.py", 12)
    assert Finding("leak", "warning", "", "in a backward pass").path == ""


def test_annotations(repository, capsys, monkeypatch):
    found = [
        Finding("race", "error", "100% wrong:\nwait", "found_ops.py:5"),
        Finding("a,b:c", "warning", "x: y, z", "in a backward pass"),
    ]
    annotate(found)
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "::error file=package/found_ops.py,line=5,title=race::100%25 wrong:%0Await",
        "::warning title=a%2Cb%3Ac::x: y, z",
    ]
    monkeypatch.delenv("GITHUB_ACTIONS")
    annotate(found)
    assert not out and capsys.readouterr() == ("", "")


def test_sarif_has_what_code_scanning_requires(repository):
    """The properties that SARIF 2.1.0 and GitHub's code scanning require, with the values that they allow."""
    found = [
        Finding("race", "error", "wait", "found_ops.py:5"),
        Finding("leak", "warning", "frees", "in a backward pass"),
    ]
    text = sarif("tool", "ns::op", {"leak": "frees memory", "race": "waits"}, found, "page.html#{}")
    log = json.loads(text)
    (run,) = log["runs"]
    driver, results = run["tool"]["driver"], run["results"]
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    assert driver["name"] == "tool" and driver["version"]
    assert run["automationDetails"]["id"] == "tool/ns::op/"
    assert [rule["id"] for rule in driver["rules"]] == ["leak", "race"]
    for rule in driver["rules"]:
        page = f"{driver['informationUri']}v{driver['version']}/page.html"
        assert rule["shortDescription"]["text"] and rule["helpUri"] == f"{page}#{rule['id']}"
    assert [result["level"] for result in results] == ["error", "warning"]
    for result, finding in zip(results, found, strict=True):
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == finding.rule
        assert result["message"]["text"] == finding.message
    places = [result["locations"][0]["physicalLocation"] for result in results]
    assert [place["artifactLocation"]["uri"] for place in places] == ["package/found_ops.py", "ns%3A%3Aop"]
    assert [place["region"]["startLine"] for place in places] == [5, 1]


def test_findings_of_an_operator():
    """A failure stands at the part that it is about, else where the operator is defined; a pass is not a finding."""
    report = Report(
        "ns::op", "", "cpu", "", ["x"], {"schema": "", "fake_layouts": "", "compile": "", "backward": ""},
        [
            Result("schema", 0, "pass"),
            Result("fake_layouts", 0, "fail", "strides differ", "allocate"),
            Result("backward", 0, "warn", "is slow"),
        ],
        definition={"kernel": "a.py:1", "fake kernel": "a.py:7"},
    )  # fmt: skip
    assert report.findings() == [
        Finding("fake_layouts", "error", "strides differ\nRemedy: allocate", "a.py:7"),
        Finding("backward", "warning", "is slow", "a.py:1"),
    ]


def test_definition_of_an_operator_in_cpp():
    found = definition(torch.ops.openreg.rms_norm.default)
    assert re.fullmatch(r"csrc/ops/rms_norm\.cpp:\d+", found["kernel"])


def test_findings_of_pytest():
    misuses = Misuses()
    for where, own in (("a.py:1", False), ("a.py:1", False), ("test_a.py:2", True)):
        misuses.add(Misuse("sync", "item", where, "test_a", own))
    misuses.add(Misuse("race", "the host did not wait", "a.py:3", "test_a"))
    race, wait = misuses.findings({"race"}, "/root")
    assert (race.rule, race.level, race.where, race.root) == ("race", "error", "a.py:3", "/root")
    assert (wait.rule, wait.level, wait.where) == ("sync", "warning", "a.py:1")
    assert "(2 times)\nRemedy: " in wait.message


def test_check_writes_both(repository, capsys):
    words = ("check", "found_ops:scale", "--input", "f32[3,4], 2.0", "--only", "schema", "fake_layouts", "--quiet")
    assert command(*words, "--sarif", "found.sarif") == 1
    assert "::error file=package/found_ops.py,line=8,title=fake_layouts::found_ops::scale: " in capsys.readouterr().err
    (run,) = json.loads((repository / "package" / "found.sarif").read_text())["runs"]
    (result,) = run["results"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["schema", "fake_layouts"]
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 8
