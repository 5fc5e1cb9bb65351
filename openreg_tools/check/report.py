"""The checker's results, and their output as a terminal table, JSON and an HTML page."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openreg_tools import pages
from openreg_tools.check.case import FAKE
from openreg_tools.forms import wrapped

DOCS = "docs/checker.md"
ENDED = "the process ends in this check"
MARKS = {"pass": ".", "fail": "FAIL", "warn": "warn", "known": "known", "refused": "ref", "limit": "lim", "skip": "-"}
MEANINGS = {
    "pass": "correct",
    "fail": "wrong",
    "warn": "works, but is slow or surprising",
    "known": "wrong, with a known cause",
    "refused": "raises an error that says that it is not supported",
    "limit": "PyTorch does not support it, whatever the operator does",
    "skip": "does not apply",
}


# Which part of an operator a check tests, in the order in which a report names one check for a cause. A check that is
# not listed tests what no other does.
PARTS = {
    "kernel": (
        "runs schema opcheck_schema state threads generator determinism poison stream devices layouts sizes large_strides "
        "empty zero_dim large half_precision reference"
    ).split(),
    "backward": (
        "saved_tensors backward gradcheck frozen_arguments broadcast_gradients gradient_layouts gradgradcheck forward_ad func_grad "
        "opcheck_autograd_registration"
    ).split(),
    "fake kernel": "fake_layouts fake_errors fake_dtypes fake_dynamic fake_numbers fake_unbacked".split(),
    # These run several parts, so they also fail where one of the parts is wrong.
    "program": (
        "opcheck_faketensor compile compile_unbacked export export_unbacked opcheck_aot_dispatch_dynamic functionalization vmap vmap_grad "
        "jit_trace jit_script copies dtensor"
    ).split(),
}
_PART = {check: part for part, checks in PARTS.items() for check in checks}
_ORDER = list(_PART)


@dataclasses.dataclass
class Result:
    """The result of one check for one sample."""

    check: str
    sample: int
    status: str  # one of MARKS
    sentence: str = ""  # which operator, the rule, what arrived; for a skip, why
    remedy: str = ""
    seconds: float = 0.0

    @property
    def docs(self) -> str:
        """The documentation of the check."""
        return f"{DOCS}#{self.check}"


def _part(result: Result) -> str:
    """The part of the operator that a failure is about."""
    if ENDED in result.sentence:  # whatever the check is about, it did not come to that
        return "fake kernel" if FAKE in result.sentence else "kernel" if "given " in result.sentence else "program"
    return _PART.get(result.check, result.check)


@dataclasses.dataclass
class Cause:
    """What is wrong with an operator: the failure that says it best, and the other checks that it makes fail."""

    result: Result
    samples: list[int]
    also: list[Result]


@dataclasses.dataclass
class Report:
    """Every result of one operator: `passed`, `failures`, and the forms `str(report)`, `json()` and `html()`."""

    operator: str
    schema: str
    device: str
    torch: str
    samples: list[str]
    about: dict[str, str]  # check -> what it verifies, in the order of the table
    results: list[Result] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[Result]:
        """The results that failed."""
        return self.of("fail")

    def of(self, status: str, check: str | None = None) -> list[Result]:
        """The results of a status (pass, fail, warn, refused, skip), of one check if `check` is given."""
        return [r for r in self.results if r.status == status and check in (None, r.check)]

    def row(self, check: str) -> list[Result]:
        """The results of a check, by sample."""
        return sorted((r for r in self.results if r.check == check), key=lambda r: r.sample)

    def planned(self) -> Iterator[tuple[int, str]]:
        """Each sample's number with each check."""
        return itertools.product(range(len(self.samples)), self.about)

    def finish(self, known: Mapping[str, str], may_pass: Collection[str]) -> None:
        """Mark what is known to fail, and what no longer fails; `may_pass` may do either."""
        for result in self.results:
            if result.check in known and result.status == "fail":
                result.status, result.remedy = "known", known[result.check]
        for name in known.keys() - set(may_pass):
            if (row := self.row(name)) and not any(result.status == "known" for result in row):
                for result in row:
                    result.status, result.remedy = "fail", "take it off the list of known failures"
                    result.sentence = f"{self.operator} was known to fail this check, but no longer does: {known[name]}"

        lacks = "the device lacks "
        if parts := dict.fromkeys(
            r.sentence.removeprefix(lacks) for r in self.results if r.status == "skip" and r.sentence.startswith(lacks)
        ):
            self.notes.append(
                f"The package of the device lacks {', '.join(parts)}: the checks that need them were skipped."
            )

    def raise_if_failed(self) -> None:
        """Raises:
        AssertionError: a check failed; its text is the report.
        """
        if not self.passed:
            raise AssertionError(f"{self.operator} fails {len(self.failures)} checks\n\n{self}")

    def grouped(self, *statuses: str) -> list[tuple[Result, list[int]]]:
        """Results with these statuses, in table order, each with the samples that share its message."""
        groups: dict[tuple[str, str], tuple[Result, list[int]]] = {}
        for status in statuses:
            for check in self.about:
                for r in self.row(check):
                    if r.status == status:
                        groups.setdefault((r.check, r.sentence), (r, []))[1].append(r.sample)
        return list(groups.values())

    def causes(self) -> list[Cause]:
        """The failures by cause.

        A wrong kernel also makes the checks of backward and of whole programs fail, and a wrong backward or fake kernel
        those of programs.
        """
        found: dict[str, Cause] = {}
        failed = [check for check in self.about if self.of("fail", check)]
        parts = {check: _part(self.of("fail", check)[0]) for check in failed}
        each_part = list(PARTS)
        failed.sort(
            key=lambda check: (
                each_part.index(parts[check]) if parts[check] in PARTS else -1,
                ENDED not in self.of("fail", check)[0].sentence,
                _PART.get(check) != parts[check],
                _ORDER.index(check) if check in _PART else len(_ORDER),
            )
        )
        for check in failed:
            results, part = self.of("fail", check), parts[check]
            if part == "backward" and "kernel" in found:
                part = "kernel"
            if part == "program":
                part = next((each for each in ("kernel", "backward", "fake kernel") if each in found), "program")
            if part in found:
                found[part].also += results[:1]
            else:
                found[part] = Cause(results[0], [result.sample for result in results], [])
        return list(found.values())

    def summary(self) -> str:
        """One line: the verdict, the counts of each status, and the seconds."""
        counts = Counter(r.status for r in self.results)
        text = ", ".join(f"{counts[status]} {status}" for status in MARKS if counts[status])
        return f"{self.operator} {'passes' if self.passed else 'FAILS'}: {text or 'nothing ran'}; {self.seconds:.1f} s"

    # ---- the three forms ----

    def __str__(self) -> str:
        return self.text()

    def text(self, verbose: bool = False) -> str:
        """The table for a terminal of 80 columns; verbose adds why checks were skipped and what passed."""
        lines = [f"{self.schema}", f"on {self.device}, torch {self.torch}", ""]
        lines += [f"  {i}  {text}" for i, text in enumerate(self.samples)]
        lines += [*wrapped(self.notes), ""]
        shown = [check for check in self.about if verbose or any(r.status != "skip" for r in self.row(check))]
        name = max(map(len, shown), default=0)
        narrow = 5 * len(self.samples) <= 78 - name  # else one letter a sample
        cells = len(self.samples)
        per_line = cells if narrow else min(cells, 76 - name)
        for start in range(0, cells, per_line or 1):
            block = range(start, min(start + per_line, cells))
            header = "".join(f"{i:>5}" if narrow else str(i % 10) for i in block)
            lines.append(f"{'':{name}}{'' if narrow else '  '}{header}")
            for check in shown:
                marks = {r.sample: MARKS[r.status] for r in self.row(check)}
                if marks:
                    row = "".join(f"{marks.get(i, ''):>5}" if narrow else marks.get(i, " ")[0] for i in block)
                    lines.append(f"{check:{name}}{'' if narrow else '  '}{row}")
            lines.append("")
        if hidden := [check for check in self.about if check not in shown]:
            lines += [*wrapped([f"Skipped for every sample (--verbose says why): {', '.join(hidden)}"]), ""]
        if limits := [result.check for result, _ in self.grouped("limit")]:
            lines += wrapped(
                [f"PyTorch's own limits, whatever the operator does (--verbose): {', '.join(dict.fromkeys(limits))}"]
            )
        for result, samples in self.grouped(
            *(("skip", "pass", "limit") if verbose else ()), "refused", "warn", "known"
        ):
            lines += self._said(result, samples)
        for cause in self.causes():
            lines += self._said(cause.result, cause.samples, most=None if verbose else _LINES)
            if cause.also and not verbose:
                lines += wrapped([f"Also fails: {', '.join(each.check for each in cause.also)} (--verbose shows them)"])
            for each in cause.also if verbose else ():
                lines += wrapped([f"Also fails {each.check}: {each.sentence}"])
            lines.append(f"    More: openreg-tools check --explain {cause.result.check}")
        lines += ["", self.summary()]
        return "\n".join(lines)

    def _said(self, result: Result, samples: list[int], most: int | None = None) -> list[str]:
        """What a check says, in at most `most` lines for the sentence and for the remedy each."""
        if not result.sentence:
            return []
        where = "" if len(samples) == len(self.samples) else f" (sample {', '.join(map(str, samples))})"
        lines = [f"{MARKS[result.status] if result.status == 'fail' else result.status} {result.check}{where}"]
        lines += _cut(wrapped([result.sentence]), most)
        if result.remedy:
            text, *commands = result.remedy.split("\n")  # commands can be copied as they are
            lines += _cut(wrapped([f"{'Cause' if result.status == 'known' else 'Remedy'}: {text}"]), most)
            lines += [f"    {command}" for command in commands]
        return lines

    def dict(self) -> dict[str, Any]:
        """What `json()` writes."""
        return {
            "operator": self.operator,
            "schema": self.schema,
            "device": self.device,
            "torch": self.torch,
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "notes": self.notes,
            "samples": self.samples,
            "checks": self.about,
            "causes": [
                {"check": each.result.check, "samples": each.samples, "also": [also.check for also in each.also]}
                for each in self.causes()
            ],
            "results": [{**dataclasses.asdict(r), "docs": r.docs} for r in self.results],
        }

    def json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.dict(), indent=1)

    def html(self) -> str:
        """One self-contained page: the matrix, expanded failures, and everything else collapsed."""
        e = html.escape
        rows: list[list[Any]] = [["check", *range(len(self.samples))]]
        for check, about in self.about.items():
            by_sample = {r.sample: r for r in self.row(check)}
            if by_sample:
                results = [by_sample.get(i, Result(check, i, "skip")) for i in range(len(self.samples))]
                cells = [(MARKS[r.status], {"class": r.status, "title": r.sentence}) for r in results]
                rows.append([(check, {"title": about}), *cells])

        def box(result: Result, samples: list[int], also: Sequence[Result] = ()) -> str:
            remedy = f"<p><b>Remedy.</b> {e(result.remedy)}</p>" if result.remedy else ""
            others = "".join(f"<p>Also fails {e(each.check)}: {e(each.sentence)}</p>" for each in also)
            about = f'<p>{e(self.about[result.check])} <a href="{_docs(result.check)}">{e(result.docs)}</a></p>'
            return pages.details(
                f"{result.status} {result.check}, sample {', '.join(map(str, samples))}",
                f"{pages.text(result.sentence)}{remedy}{others}{about}",
                result.status,
                is_open=result.status == "fail",
            )

        failures = [box(cause.result, cause.samples, cause.also) for cause in self.causes()]
        others = [
            box(result, samples)
            for result, samples in self.grouped("warn", "known", "limit", "refused", "pass", "skip")
            if result.sentence
        ]
        samples = "".join(f"<li><code>{e(text)}</code></li>" for text in self.samples)
        counts = Counter(r.status for r in self.results)
        body = [
            pages.text(self.summary()),
            *failures,
            f"<p><code>{e(self.schema)}</code> on {e(self.device)}, torch {e(self.torch)}</p>",
            pages.facts({status: counts[status] for status in MARKS if counts[status]}),
            pages.section("Samples", f'<ol start="0">{samples}</ol>{"".join(map(pages.text, self.notes))}'),
            pages.section(
                "Checks",
                pages.legend({s: (m, MEANINGS[s]) for s, m in MARKS.items()})
                + f'<div class="map">{pages.table(rows)}</div>',
            ),
            pages.section("Other results", "".join(others)),
        ]
        return pages.page(f"check of {self.operator}", self.operator, "".join(body))


_LINES = 6


def _cut(lines: list[str], most: int | None) -> list[str]:
    return lines if most is None or len(lines) <= most else [*lines[: most - 1], lines[most - 1][:76] + " …"]


def _docs(check: str) -> str:
    """The address of the section on this machine."""
    return html.escape(f"{Path(__file__).with_name('checker.md').as_uri()}#{check}")
