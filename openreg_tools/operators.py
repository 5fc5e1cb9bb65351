"""``openreg-tools operators``: every operator of the installed torch by class, and what a device has for it."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch

from openreg_tools import dispatch, manifest
from openreg_tools.core.blocks import Block, Cell, Section, Table
from openreg_tools.core.device import Target, add_device, load, target_of
from openreg_tools.core.options import Wrong, nothing_matches, regex, unknown
from openreg_tools.core.report import Report, add_output, write
from openreg_tools.dispatch import HAS

__all__ = ["Entry", "Operators", "operators"]

CLASSES = {
    "required": "a backend must register a kernel",
    "structured": "only the out variant is needed, which this one runs",
    "explicit": "optional: composed of other operators, with its own derivative",
    "implicit": "optional: composed of other operators, which provide the derivative",
    "elsewhere": "for one library, vendor or layout, such as cuDNN, MPS or sparse: a new backend does not need it",
}
OPTIONAL = ("explicit", "implicit")
TRAITS = {
    "backward": "its derivative calls an operator that a backend must register too",
    "view": "returns a view",
    "inplace": "changes an argument and returns it",
    "out": "writes its result into an argument",
    "random": "draws random numbers",
    "data": "the shape or value of a result depends on the data (a synchronization)",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One operator."""

    name: str  # "aten::add.Tensor"
    kind: str  # one of CLASSES
    has: str  # one of dispatch.HAS
    why: str
    where: str  # of the registration that serves it
    traits: tuple[str, ...]  # of TRAITS
    needs: tuple[str, ...]  # the out variant, or the backward operators, that it runs
    schema: str

    @property
    def missing(self) -> bool:
        """True if the device falls back or raises."""
        return self.has in ("fallback", "refused")


@dataclasses.dataclass
class Operators(Report):
    """The selected entries, and their totals."""

    target: Target
    entries: list[Entry]

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"operators on {self.target.device}"

    def totals(self) -> dict[str, Counter[str]]:
        """Operators by class and by what the device has."""
        found = {kind: Counter() for kind in CLASSES}
        for entry in self.entries:
            found[entry.kind][entry.has] += 1
        return found

    def blocks(self, page: bool = False, totals: bool = False) -> Iterator[Block]:
        """The operators and their totals, which a page begins with; with `totals`, these alone."""
        if page:
            yield self._totals()
        if self.entries and not totals:
            rows = [["operator", "class", self.target.device, "traits"]]
            rows += [
                [Cell(e.name, hint=e.schema), Cell(e.kind, hint=CLASSES[e.kind]),
                 Cell(e.has, STYLES[e.has], f"{e.why} {e.where}".strip()), ", ".join(e.traits)]
                for e in self.entries
            ]  # fmt: skip
            yield Table(rows, left=4, fit=True)
        if not page:
            yield self._totals()

    def _totals(self) -> Section:
        counts = self.totals()
        rows = [["", *HAS, "all"]]
        for kind, of_kind in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
            if of_kind.total() or kind == "all":
                rows.append([kind, *(of_kind[has] for has in HAS), of_kind.total()])
        return Section(f"{len(self.entries)} operators of torch {torch.__version__}; {self.target.key}:", [Table(rows)])

    def dict(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "device": self.target.device,
            "key": self.target.key,
            "totals": self.totals(),
            "operators": [dataclasses.asdict(entry) for entry in self.entries],
        }


STYLES = {"own": "pass", "shared": "pass", "composite": "skip", "fallback": "warn", "refused": "fail"}


def operators(
    device: str | None = None,
    key: str | None = None,
    *,
    namespaces: Collection[str] = ("aten",),
    pattern: str = "",
    kinds: Collection[str] = (),
    has: Collection[str] = (),
    traits: Collection[str] = (),
    missing: bool = False,
) -> Operators:
    """The operators of `namespaces` (all, where empty) whose name matches `pattern`, on `device` or at `key`.

    Args:
        kinds, has: one of these; traits: all of these. An empty filter passes everything. "optional" is two kinds.
        missing: only those that fall back or are refused.
    Raises:
        Wrong: no such device, key or namespace, or `pattern` matches no operator.
    """
    target = target_of(device, key)
    kinds = {*kinds, *OPTIONAL} if "optional" in kinds else kinds
    found, known, matched = [], set(), False
    for name in dispatch.names():
        known.add(name.partition("::")[0])
        if namespaces and name.partition("::")[0] not in namespaces or not re.search(pattern, name):
            continue
        matched = True
        entry = _entry(name, target.key)
        if (
            (not kinds or entry.kind in kinds)
            and (not has or entry.has in has)
            and set(traits) <= set(entry.traits)
            and (entry.missing or not missing)
        ):
            found.append(entry)
    for name in sorted(set(namespaces) - known):
        raise Wrong(unknown("namespace", name, sorted(known), ""))
    if not matched:
        raise Wrong(nothing_matches(pattern, dispatch.names()))
    return Operators(target, found)


def _entry(name: str, key: str) -> Entry:
    schema, tags = dispatch.schema(name), dispatch.tags(name)
    short = name.removeprefix("aten::")
    native = manifest.installed().operators.get(short) if name.startswith("aten::") else None
    backward = manifest.installed().backward.get(short, ()) if native else ()
    traits = []
    if backward:
        traits.append("backward")
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        traits.append("view")
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written:
        traits.append("out" if all(a.is_out for a in written) else "inplace")
    if torch.Tag.nondeterministic_seeded in tags:
        traits.append("random")
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        traits.append("data")
    here = dispatch.has(name, key)
    needs = tuple(f"aten::{needed}" for needed in ((native.delegate,) if native and native.delegate else ()) + backward)
    kind = native.kind_at(key) if native else _kind(name)
    return Entry(name, kind, here.kind, here.why, here.where, tuple(traits), needs, str(schema))


def _kind(name: str) -> str:
    """The class of an operator that is not in torch's own lists, from its registrations for all devices."""
    for key, kind in (
        ("CompositeImplicitAutograd", "implicit"),
        ("CompositeExplicitAutograd", "explicit"),
        ("CompositeExplicitAutogradNonFunctional", "explicit"),
    ):
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            return kind
    return "required"


# ---- the command ----

_HAS = {
    "own": "the device has its own kernel",
    "shared": "the CPU's kernel runs on device memory",
    "composite": "the operator decomposes into others",
    "fallback": "the operator runs on copies on the CPU",
    "refused": "the operator raises an error",
}
_OPTIONAL = "explicit and implicit"
_GROUPS = (
    ("kinds", "class; several: any of them", CLASSES | {"optional": _OPTIONAL}),
    ("has", "what the device has; several: any of them", _HAS),
    ("traits", "traits; several: all of them", TRAITS),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--ops", type=regex, default="", metavar="REGEX", help="only operators whose name matches")
    parser.add_argument("--namespaces", nargs="+", default=["aten"], metavar="NS",
                        help="namespaces of operators, or `all` (default aten)")  # fmt: skip
    for destination, title, names in _GROUPS:
        group = parser.add_argument_group(title)
        for name, text in names.items():
            group.add_argument(f"--{name}", dest=destination, action="append_const", const=name, default=[], help=text)
    parser.add_argument(
        "--missing", action="store_true", help="fallback or refused; with --required: a backend's to-do list"
    )
    parser.add_argument("--totals", action="store_true", help="print only the totals")
    add_output(parser)


def main(arguments: argparse.Namespace) -> int:
    """0, or 2 if the request is wrong."""
    load(arguments.modules, arguments.device)
    found = operators(
        arguments.device, arguments.key,
        namespaces=() if arguments.namespaces == ["all"] else arguments.namespaces,
        pattern=arguments.ops, kinds=arguments.kinds, has=arguments.has, traits=arguments.traits,
        missing=arguments.missing,
    )  # fmt: skip
    return write(found, arguments, totals=arguments.totals)
