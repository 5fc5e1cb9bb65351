"""What a tool found, for the pages that show a change: annotations of GitHub Actions, and SARIF 2.1.0. Without torch.

SARIF (Static Analysis Results Interchange Format) is a standard of OASIS; GitHub's code scanning reads it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

from openreg_tools.core import about
from openreg_tools.core.report import say

__all__ = ["Finding", "annotate", "sarif"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem at one line."""

    rule: str  # the check, or the kind of misuse
    level: str  # "error" or "warning"
    message: str  # what is wrong, and the remedy
    where: str = ""  # "file.py:12"; a place without a line, such as "in a backward pass", counts as none
    root: str = os.curdir  # the folder that `where` starts at

    @property
    def line(self) -> int:
        """The line in the file; 0 if it is not known."""
        found = re.search(r":(\d+)$", self.where)
        return int(found[1]) if found else 0

    @property
    def path(self) -> str:
        """The file as a path in the repository, or as `where` names it if it is elsewhere; "" if it is not known."""
        if not self.line:
            return ""
        name = self.where.rpartition(":")[0]
        file = Path(self.root, name).resolve()
        top = Path(os.environ.get("GITHUB_WORKSPACE") or os.curdir).resolve()
        return (file.relative_to(top) if file.is_relative_to(top) and file.is_file() else Path(name)).as_posix()


def annotate(findings: Iterable[Finding]) -> None:
    """In a step of GitHub Actions, print the commands that show the findings beside their lines. They go to stderr, so
    that a report on stdout stays as it is."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    for finding in findings:
        place = f"file={_escaped(finding.path, ':,')},line={finding.line}," if finding.path else ""
        say(f"::{finding.level} {place}title={_escaped(finding.rule, ':,')}::{_escaped(finding.message)}")


def _escaped(text: str, more: str = "") -> str:
    """Text in a command of GitHub Actions, where a line break would end it, and `more` has a meaning."""
    return "".join(f"%{ord(letter):02X}" if letter in "%\r\n" + more else letter for letter in text)


def sarif(tool: str, run: str, rules: Mapping[str, str], findings: Iterable[Finding], docs: str) -> str:
    """The findings of one run as a SARIF 2.1.0 file.

    Args:
        tool: the program that found them.
        run: distinguishes runs of the tool about one change, such as the operator that was checked.
        rules: for each rule that the tool applied, what it demands.
        docs: the section of the documentation about a rule, whose name replaces {}.
    """
    home = about.address("Documentation")
    driver = {
        "name": tool,
        "version": about.version(),
        "informationUri": home,
        "rules": [
            {"id": rule, "shortDescription": {"text": text}, "helpUri": f"{home}v{about.version()}/{docs.format(rule)}"}
            for rule, text in rules.items()
        ],
    }
    results = [
        {
            "ruleId": finding.rule,
            "ruleIndex": list(rules).index(finding.rule),
            "level": finding.level,
            "message": {"text": finding.message},
            # Code scanning needs a place; without a file, it is the name of the run.
            "locations": [{"physicalLocation": {
                "artifactLocation": {"uri": quote(finding.path or run)},
                "region": {"startLine": finding.line or 1},
            }}],
        }
        for finding in findings
    ]  # fmt: skip
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                # GitHub replaces the results of an earlier run that has the same name before the last slash.
                "automationDetails": {"id": f"{tool}/{run}/"},
                "columnKind": "unicodeCodePoints",
                "results": results,
            }
        ],
    }
    return json.dumps(log, indent=1) + "\n"
