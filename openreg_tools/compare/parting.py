"""Two traces side by side: which operators correspond, where their results diverge, and where the error grows."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from openreg_tools import forms, pages
from openreg_tools.compare.recording import KIND, VERSION
from openreg_tools.compare.result import plot
from openreg_tools.compare.tolerance import Tolerances
from openreg_tools.forms import Wrong

__all__ = ["Op", "Parted", "Parting", "Trace", "part", "read"]

WINDOW = 400  # how many more operators one run may have at one place
PHASES = {"f": "forward", "b": "backward", "o": "optimizer"}


@dataclasses.dataclass
class Op:
    """One operator of a trace."""

    index: int
    name: str
    module: str
    line: str
    node: str
    label: str
    phase: str
    inputs: list[Any]
    prints: list[list[Any]]
    thread: str = ""  # its number, of a thread that the program started

    def key(self) -> tuple[Any, ...]:
        """The key by which operators correspond."""
        return (self.name, self.module, self.phase, self.node, str([p[:2] for p in self.prints]))

    def __str__(self) -> str:
        inputs = ", ".join(f"{dtype}{shape}" for dtype, shape in self.inputs)
        return f"{self.name}({inputs}) -> {', '.join(f'{p[0]}{p[1]}' for p in self.prints)}"


@dataclasses.dataclass
class Trace:
    """The recording of one run."""

    path: str
    header: dict[str, Any]
    ops: list[Op]
    truncated: bool = False  # what follows `ops` cannot be read
    draws: tuple[int, str, str] | None = None  # from which operator on both generators had drawn, and where first
    damaged: int = 0  # the line that is not one of a trace, although others follow it

    def __str__(self) -> str:
        h = self.header
        rank = f", rank {h['rank']} of {h['world']}" if h.get("world", 1) > 1 else ""
        on = f" on {h['device']}" if "device" in h else ""
        return f"{self.path}: {h.get('program') or 'a program'}{on}, torch {h.get('torch')}{rank}, {len(self.ops):,} operators"


def read(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from its file; a truncated file is read as far as possible.

    Raises:
        Wrong: there is no such file, or it is not a trace of `record`.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError as error:
        raise Wrong(f"{path} cannot be read: {error.strerror}") from None
    try:
        header = _object(lines[0])
        kind, version = header["kind"], header["version"]
        _of_type(str, kind)
        _of_type(int, version)
    except (IndexError, *DAMAGED):
        raise Wrong(f"{path} is not a trace of `record`: its first line is not a header") from None
    if kind != KIND:
        raise Wrong(f"{path} is a trace of {kind!r}, not of `record`")
    if version != VERSION:
        remedy = "update openreg_tools" if version > VERSION else "record it again"
        raise Wrong(f"{path} is of version {version}, but this reads version {VERSION}: {remedy}")
    try:
        for field in ("torch", "device", "program"):
            _of_type(str, header[field])
            header[field].encode()
        _of_type(int, header["rank"], header["world"])
    except DAMAGED:
        raise Wrong(f"{path} is damaged in line 1: its header lacks a field, or one has the wrong type") from None
    trace, names = Trace(str(path), header, []), []
    ended = False
    for number, line in enumerate(lines[1:], 2):
        try:
            words = _object(line)
            if "end" in words:
                ended = [*words.values()] == [len(trace.ops)] and number == len(lines)
                _of_type(int, words["end"])
                trace.damaged = 0 if ended else number
                break
            if "s" in words:
                _of_type(str, *words.values())
                words["s"].encode()  # not so a lone surrogate, which cannot be printed
                names.append(words["s"])
            elif "g" in words:
                host, device = (_text(each, names) for each in words["g"])
                trace.draws = trace.draws or (len(trace.ops), host, device)
            else:
                trace.ops.append(_operator(len(trace.ops), words, names))
        except DAMAGED:
            trace.damaged = number if number < len(lines) else 0
            break
    trace.truncated = not ended
    return trace


# What reading raises where a file holds something other than what `record` writes. Deep nesting is a RecursionError.
DAMAGED = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


def _object(line: str) -> dict[str, Any]:
    found = json.loads(line)
    _of_type(dict, found)
    return found


def _of_type(kind: type, *values: Any) -> None:
    """Raise TypeError unless the values are exactly of this type: no bool for an int."""
    for value in values:
        if type(value) is not kind:
            raise TypeError


def _text(number: Any, names: list[str]) -> str:
    _of_type(int, number)
    if not 0 <= number < len(names):
        raise ValueError
    return names[number]


def _operator(index: int, words: dict[str, Any], names: list[str]) -> Op:
    """The operator of a line.

    Raises:
        DAMAGED: the line is not one of `record`.
    """

    def text(key: str) -> str:
        return _text(words[key], names) if key in words else ""

    _of_type(list, words["i"], words["r"])
    inputs = []
    for dtype, shape in words["i"]:
        _of_type(str, dtype)
        inputs.append((dtype, _shape(shape)))
    if not words.keys() <= set("omwnltpir") or "o" not in words:
        raise ValueError
    prints = [_fingerprint(each) for each in words["r"]]
    module, line, node, label, thread = map(text, "mwnlt")
    return Op(index, text("o"), module, line, node, label, PHASES[words["p"]], inputs, prints, thread)


def _fingerprint(found: Any) -> list[Any]:
    """A fingerprint as `recording.fingerprint` makes it.

    Raises:
        DAMAGED: it is not one.
    """
    dtype, shape, digest, total, norm, largest, nans, infinities, samples = found
    _of_type(str, dtype)
    _of_type(int, digest, nans, infinities)
    _of_type(list, samples)
    if len(samples) > 4 or nans < 0 or infinities < 0:
        raise ValueError
    numbers = [_number(each) for each in (total, norm, largest)]
    return [dtype, _shape(shape), digest, *numbers, nans, infinities, [_number(each) for each in samples]]


def _shape(found: Any) -> list[int]:
    """A shape that a tensor can have; -1 where the parts of a nested tensor differ."""
    _of_type(list, found)
    _of_type(int, *found)
    if not all(-1 <= size < 2**63 for size in found) or math.prod(map(abs, found)) >= 2**63:
        raise ValueError
    return found


def _number(found: Any) -> float:
    if type(found) not in (int, float):
        raise TypeError
    return float(found)


def of_debug_mode(mode: Any, path: str = "DebugMode") -> Trace:
    """A trace from the log of torch.utils._debug_mode.DebugMode under `log_tensor_hashes`."""
    ops = []
    for call in mode.logs:
        hashes = (call.log or {}).get("hash") if hasattr(call, "log") else None
        if hashes is None or not hasattr(call, "op"):
            continue
        flat = torch.utils._pytree.tree_leaves(hashes)
        prints = []
        for value in (v for v in flat if v is not None):
            number = abs(float(value))
            prints.append(["float32", [], repr(value), 0.0, number, 0.0, 0, 0, []])
        ops.append(
            Op(
                len(ops),
                call.op.name() if hasattr(call.op, "name") else str(call.op),
                "",
                "",
                "",
                "",
                "forward",
                [],
                prints,
            )
        )
    return Trace(path, {"torch": torch.__version__, "program": path}, ops)


def _trace(given: Any) -> Trace:
    if isinstance(given, Trace):
        return given
    if hasattr(given, "logs"):
        return of_debug_mode(given)
    return read(given)


# ---- aligning ----


def align(a: list[Op], b: list[Op]) -> list[tuple[Op | None, Op | None]]:
    """Pairs of corresponding operators, in order; None if one run has none. Operators are matched within their thread,
    and labeled ones by label."""
    out: list[tuple[Op | None, Op | None]] = []
    for thread in dict.fromkeys(op.thread for op in [*a, *b]):
        groups_a, groups_b = (_groups([op for op in ops if op.thread == thread]) for ops in (a, b))
        for key, ops in groups_a.items():
            out += _in_order(ops, groups_b.pop(key, []))
        for ops in groups_b.values():
            out += [(None, op) for op in ops]
    return out


def align_by_values(a: list[Op], b: list[Op]) -> list[tuple[Op | None, Op | None]]:
    """Pairs of corresponding operators for programs whose threads take tasks as they come: those of one operator and
    place are matched by what they returned, whichever thread they ran in."""

    def numbers(op: Op) -> list[Any]:
        return [[x if x == x else math.inf for x in (*p[3:6], *p[8])] for p in op.prints]

    out: list[tuple[Op | None, Op | None]] = []
    of_a, of_b = (_grouped(ops, lambda op: (op.label, op.key())) for ops in (a, b))
    for key, ops in of_a.items():
        equal = _grouped(reversed(of_b.pop(key, [])), lambda op: str(op.prints))
        rest = []
        for op in ops:
            if same := equal.get(str(op.prints)):
                out.append((op, same.pop()))
            else:
                rest.append(op)
        others = sorted((op for same in equal.values() for op in same), key=numbers)
        out += itertools.zip_longest(sorted(rest, key=numbers), others)
    out += [(None, op) for ops in of_b.values() for op in ops]
    return sorted(out, key=lambda pair: (pair[0] or pair[1]).index)


def _grouped(ops: Iterable[Op], key: Callable[[Op], Any]) -> dict[Any, list[Op]]:
    groups: dict[Any, list[Op]] = {}
    for op in ops:
        groups.setdefault(key(op), []).append(op)
    return groups


def _groups(ops: list[Op]) -> dict[tuple[str, int], list[Op]]:
    """Runs of one label, by the label and how often it came before."""
    groups: dict[tuple[str, int], list[Op]] = {}
    times: dict[str, int] = {}
    label, key = None, ("", 0)
    for op in ops:
        if op.label != label:
            label = op.label
            key = (label, times.get(label, 0))
            times[label] = key[1] + 1
        groups.setdefault(key, []).append(op)
    return groups


def _in_order(a: list[Op], b: list[Op]) -> list[tuple[Op | None, Op | None]]:
    keys_a, keys_b = [op.key() for op in a], [op.key() for op in b]
    out: list[tuple[Op | None, Op | None]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if keys_a[i] == keys_b[j]:
            out.append((a[i], b[j]))
            i, j = i + 1, j + 1
            continue
        skip = _meet(keys_a, keys_b, i, j)
        if skip is None:
            out += [(a[i], None), (None, b[j])]
            i, j = i + 1, j + 1
        else:
            out += [(op, None) for op in a[i : i + skip[0]]] + [(None, op) for op in b[j : j + skip[1]]]
            i, j = i + skip[0], j + skip[1]
    return [*out, *((op, None) for op in a[i:]), *((None, op) for op in b[j:])]


def _meet(a: list[Any], b: list[Any], i: int, j: int, alike: int = 3) -> tuple[int, int] | None:
    """The fewest operators to skip in each run until both agree again, for as many as were skipped or at least 3."""
    for together in range(1, WINDOW):
        for more in range(together + 1):
            x, y = i + more, j + together - more
            if x >= len(a) or y >= len(b) or a[x] != b[y]:
                continue
            n = min(alike, together, len(a) - x, len(b) - y)
            if a[x : x + n] == b[y : y + n]:
                return more, together - more
    return None


# ---- comparing ----


@dataclasses.dataclass
class Parted:
    """Two corresponding operators whose results differ."""

    a: Op
    b: Op
    relative: float  # the difference of their fingerprints' numbers, relative to the size of the values
    allowed: float
    grown: float  # the ratio to the largest before it
    what: str  # of the numbers, with the largest difference

    def lines(self) -> list[str]:
        out = forms.wrapped([f"operator {self.a.index} and {self.b.index}: {self.a}"], 0)
        label = f", {self.a.label}" if self.a.label else ""
        node = f", backward of {self.a.node}" if self.a.node else ""
        places = self.a.line if self.a.line == self.b.line else f"{self.a.line} and {self.b.line}"
        out += forms.wrapped([f"{self.what}; relative difference {self.relative:.3g}, allowed {self.allowed:.3g}"], 2)
        where = f"at {places}" if places else ""
        where = f"{where}{', in ' + self.a.module if self.a.module else ''}{node}{label}".removeprefix(", ")
        return out + forms.wrapped([where] if where else [], 2)

    def dict(self) -> dict[str, Any]:
        return {
            "operator": self.a.name, "index": [self.a.index, self.b.index], "line": [self.a.line, self.b.line],
            "module": self.a.module, "phase": self.a.phase, "label": self.a.label, "relative": self.relative,
            "allowed": self.allowed, "what": self.what,
        }  # fmt: skip


class Parting:
    """Where two runs diverge: `first` beyond the tolerance, `first_bits` not equal, `ranked` by growth of the error."""

    def __init__(self, a: Trace, b: Trace, tolerances: Tolerances) -> None:
        self.a, self.b = a, b
        in_order = align(a.ops, b.ops)
        self._judge(in_order, tolerances)
        if any(op.thread for op in a.ops) and (unlike := self._unlike()):
            self._judge(align_by_values(a.ops, b.ops), tolerances)
            if self._unlike() >= unlike:
                self._judge(in_order, tolerances)

    def _unlike(self) -> int:
        return self.beyond + len(self.only_a) + len(self.only_b)

    def _judge(self, pairs: list[tuple[Op | None, Op | None]], tolerances: Tolerances) -> None:
        self.pairs = pairs
        self.only_a = [x for x, y in self.pairs if y is None]
        self.only_b = [y for x, y in self.pairs if x is None]
        self.first: Parted | None = None
        self.first_bits: Parted | None = None
        self.beyond = 0
        self._parted: list[Parted] = []
        self._points: list[tuple[int, float, float, str]] = []
        self._compare(tolerances)

    def _compare(self, tolerances: Tolerances) -> None:
        largest, common = 0.0, 0
        for x, y in self.pairs:
            if x is None or y is None:
                continue
            common += 1
            if [p[2] for p in x.prints] == [p[2] for p in y.prints] and _shapes(x) == _shapes(y):
                continue
            relative, what, eps = _difference(x, y)
            ulps = tolerances.of_name(x.name, _terms(x))
            # Before the first difference the inputs were equal; after it, the chain of operators is as long as the run.
            allowed = eps * (ulps if self.first_bits is None else max(ulps, 16 * tolerances.factor) * math.sqrt(common))
            parted = Parted(x, y, relative, allowed, relative / largest if largest else math.inf, what)
            self._parted.append(parted)
            self.first_bits = self.first_bits or parted
            if eps:
                self._points.append((x.index, relative / eps, allowed / eps, x.name))
            if relative > allowed:
                self.beyond += 1
                self.first = self.first or parted
            largest = max(largest, relative if math.isfinite(relative) else 0.0)

    @property
    def common(self) -> int:
        """How many operators of the two runs correspond."""
        return sum(x is not None and y is not None for x, y in self.pairs)

    @property
    def ranked(self) -> list[Parted]:
        return sorted(self._parted, key=lambda p: (-p.grown, -p.relative))

    @property
    def parted(self) -> bool:
        """Whether the runs diverge or have no operator in common, or a trace cannot be read to its end."""
        return self.a.truncated or self.b.truncated or self.first is not None or not self.common

    def assert_close(self) -> None:
        """Raise AssertionError with the report if `parted`."""
        if self.parted:
            raise AssertionError(self.report())

    def write_test(self, path: Any) -> str:
        raise ValueError("write_test: a trace keeps no inputs; run the program with `compare(against=…)` for a test")

    def report(self, top: int = 15) -> str:
        """The report as text."""
        return self.text(top)

    def __str__(self) -> str:
        return self.text()

    def text(self, top: int = 15) -> str:
        lines = self._summary()
        if self._parted:
            rows = self._growth(top)
            lines += ["", "Where the error grows, in times the largest before:", *forms.table(rows, left=1, fit=True)]
        return "\n".join(lines)

    def _growth(self, top: int) -> list[list[Any]]:
        rows: list[list[Any]] = [["operator", "index", "relative", "growth", "line"]]
        rows += [
            [p.a.name, p.a.index, f"{p.relative:.3g}", f"{p.grown:.3g}", p.a.line.rpartition("/")[2][-30:]]
            for p in self.ranked[:top]
        ]
        return rows

    def _summary(self) -> list[str]:
        lines = forms.wrapped([str(self.a), str(self.b)], 0)
        for trace in (self.a, self.b):
            if trace.truncated:
                how = f"damaged in line {trace.damaged}" if trace.damaged else "cut off"
                lines += forms.wrapped([f"{trace.path} is {how}: read up to operator {len(trace.ops)}"], 0)
        both = self.common
        lines += forms.wrapped(
            [
                f"{both:,} operators correspond, {len(self._parted):,} are not equal bit for bit, {self.beyond:,} beyond the tolerance"
            ],
            0,
        )
        for ops, trace in ((self.only_a, self.a), (self.only_b, self.b)):
            if ops:
                names = ", ".join(dict.fromkeys(f"{op.name} ({op.line})" for op in ops[:5]))
                lines += forms.wrapped([f"{len(ops):,} only in {trace.path}: {names}{', …' * (len(ops) > 5)}"], 0)
        lines.append("")
        if not both:
            lines += forms.wrapped(["The runs have no operator in common, so nothing is compared."], 0)
        elif self.first is None:
            cut = [trace.path for trace in (self.a, self.b) if trace.truncated]
            beyond = " beyond the tolerance" * bool(self._parted)
            lines += forms.wrapped(
                [f"The runs do not part{beyond}{', as far as ' + cut[0] + ' goes' if cut else ''}."], 0
            )
        else:
            lines += ["The runs part at", *self.first.lines()]
        if self.first_bits is not None and self.first_bits is not self.first:
            lines += ["", "Bits differ first at", *self.first_bits.lines()]
        if generators := self.generators():
            lines += ["", *forms.wrapped([generators], 0)]
        return lines

    def generators(self) -> str:
        """A sentence if the runs may part because one of them drew its random numbers from two generators, else ""."""
        of_a, of_b = (self.first_bits.a, self.first_bits.b) if self.first_bits else (None, None)
        for trace, op, other in ((self.a, of_a, self.b), (self.b, of_b, self.a)):
            if op is None or trace.draws is None or other.header.get("device") != "cpu":
                continue
            since, host, there = trace.draws
            device, program = trace.header["device"], trace.header["program"] or "the program"
            if op.index >= since:
                return (
                    f"Before its bits differ, {trace.path} has random numbers from two generators: the CPU's, first at "
                    f"{host}, and {device}'s, first at {there}. {other.path} draws both from one generator, which gives "
                    f"other numbers after the same seed. What differs only by that is no fault of {device}: `compare "
                    f"--against cpu {program}` gives both devices the same numbers, and finds an operator that differs."
                )
        return ""

    def dict(self) -> dict[str, Any]:
        return {
            "a": self.a.header | {"path": self.a.path, "operators": len(self.a.ops), "truncated": self.a.truncated},
            "b": self.b.header | {"path": self.b.path, "operators": len(self.b.ops), "truncated": self.b.truncated},
            "first": self.first.dict() if self.first else None,
            "first_bits": self.first_bits.dict() if self.first_bits else None,
            "generators": self.generators(), "parted": self.parted, "beyond": self.beyond, "only_a": len(self.only_a), "only_b": len(self.only_b),
            "ranked": [each.dict() for each in self.ranked[:1000]],
        }  # fmt: skip

    def html(self) -> str:
        body = [
            f'<pre class="wrapped">{html.escape(chr(10).join(self._summary()))}</pre>',
            pages.section("Errors over the calls", plot(self._points, len(self.a.ops))),
        ]
        if self._parted:
            title = "Where the error grows, in times the largest before"
            body.append(pages.section(title, pages.table(self._growth(1000))))
        return pages.page("compare of two traces", "compare of two traces", "".join(body))


def _shapes(op: Op) -> list[Any]:
    return [p[:2] for p in op.prints]


def _terms(op: Op) -> int:
    count = lambda shape: math.prod(shape) if shape else 1  # noqa: E731
    largest = max((count(shape) for _, shape in op.inputs), default=1)
    if op.name.partition("::")[2].partition(".")[0].rstrip("_") in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot"):
        return max((shape[-1] for _, shape in op.inputs[-2:-1] if shape), default=1)
    return max(1, largest // max(1, min((count(p[1]) for p in op.prints), default=1)))


def _difference(x: Op, y: Op) -> tuple[float, str, float]:
    """The largest relative difference of the numbers of two fingerprints, in words, and the dtype's epsilon."""
    worst, what, eps = 0.0, "the hashes differ", 0.0
    for i, (p, q) in enumerate(zip(x.prints, y.prints, strict=False)):
        if p[2] == q[2]:
            continue
        dtype = getattr(torch, p[0], torch.float32)
        floats = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
        eps = max(eps, torch.finfo(dtype).eps if floats else 0.0)
        if (p[6], p[7]) != (q[6], q[7]):
            return math.inf, f"result {i} has {p[6]} NaN and {p[7]} infinite numbers, then {q[6]} and {q[7]}", eps
        norm = max(p[4], q[4]) or 1.0
        scale = norm * math.sqrt(max(1, math.prod(p[1])))  # at least the sum of the absolute values
        top = max(p[5], q[5]) or 1.0
        found = [(abs(p[3] - q[3]) / scale, "sum", p[3], q[3]), (abs(p[4] - q[4]) / norm, "norm", p[4], q[4])]
        found.append((abs(p[5] - q[5]) / top, "largest value", p[5], q[5]))
        found += [(abs(s - t) / top, "sampled value", s, t) for s, t in zip(p[8], q[8], strict=False)]
        relative, name, s, t = max(found)
        relative = max(relative, 1e-300 if not floats else eps / 1e3)  # their hashes differ
        if relative > worst:
            worst, what = relative, f"result {i}: {name} {s:.6g} and {t:.6g}"
    return worst, what, eps


def part(a: Any, b: Any, tolerances: Tolerances | None = None) -> Parting:
    """Align two traces and compare them; each a path, a `Trace` or a DebugMode."""
    return Parting(_trace(a), _trace(b), tolerances or Tolerances())
