"""``openreg-tools drift OLD NEW``: what changed between two versions of torch, and which registrations break."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from openreg_tools import backends, dispatch, manifest
from openreg_tools.core.blocks import Block, Lines, Section, Text, counted, hanging, wrapped
from openreg_tools.core.device import add_device, default, load, target_of
from openreg_tools.core.options import Wrong
from openreg_tools.core.report import Report, add_output, write
from openreg_tools.manifest import Manifest

__all__ = ["Drift", "Registration", "Trouble", "compare", "drift", "registered", "scan"]


@dataclasses.dataclass(frozen=True)
class Registration:
    """A backend's kernel for an operator of aten."""

    operator: str  # "add.out"
    where: str  # "csrc/aten/factory.cpp:128"
    boxed: bool = False  # takes any schema


@dataclasses.dataclass(frozen=True)
class Trouble:
    """A registration, or a missing one, that the new version affects."""

    operator: str
    where: str
    why: str
    breaks: bool  # else it needs a look

    @property
    def mark(self) -> str:
        """What the report calls it: BREAKS, MISSING or look at."""
        return ("BREAKS" if self.where else "MISSING") if self.breaks else "look at"

    def lines(self) -> list[str]:
        """The trouble for a terminal of 80 columns."""
        head = f"{self.mark} {self.operator}  {self.where}".rstrip()
        return [*hanging(head, "  ", "    "), *wrapped(self.why)]


@dataclasses.dataclass
class Drift(Report):
    """The differences of two versions; names without "aten::", pairs are (old, new)."""

    old: str
    new: str
    added: dict[str, str]  # name: "required: add.out(...) -> ..."
    removed: dict[str, str]
    signatures: dict[str, tuple[str, str]]  # C++ kernels take other types
    schemas: dict[str, tuple[str, str]]  # names, defaults and aliases alone
    required: list[str]  # newly
    optional: list[str]  # no longer required
    derivatives: dict[str, tuple[str, str]]
    backend: str = ""
    fallback: str = ""  # "the fallback in backend/fallback.cpp:12"
    troubles: list[Trouble] = dataclasses.field(default_factory=list)

    @property
    def broken(self) -> list[Trouble]:
        """What breaks; the rest needs a look."""
        return [trouble for trouble in self.troubles if trouble.breaks]

    def summary_of_changes(self) -> str:
        """One line: how much changed between the versions."""
        counts = [
            (self.added, "added"), (self.removed, "removed"), (self.signatures, "changed signatures"),
            (self.schemas, "changed names, defaults or aliases"), (self.required, "newly required"),
            (self.optional, "no longer required"), (self.derivatives, "changed derivatives"),
        ]  # fmt: skip
        said = ", ".join(f"{len(found)} {what}" for found, what in counts if found) or "no difference"
        return f"torch {self.old} to {self.new}: {said}"

    def verdict(self) -> str:
        """One line: what breaks in the backend; empty without a backend."""
        if not self.backend:
            return ""
        marks = Counter(trouble.mark for trouble in self.troubles)
        said = [f"{counted(marks['BREAKS'], 'registration')} break{'s' * (marks['BREAKS'] == 1)}"]
        if marks["MISSING"]:
            said.append(f"{marks['MISSING']} newly required {'is' if marks['MISSING'] == 1 else 'are'} missing")
        if marks["look at"]:
            said.append(f"{marks['look at']} to look at")
        return f"{self.backend}, {self.fallback or 'no fallback'}: {', '.join(said)}"

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"torch {self.old} to {self.new}"

    @property
    def passed(self) -> bool:
        """True if nothing breaks."""
        return not self.broken

    def blocks(self, page: bool = False, verbose: bool = False) -> Iterator[Block]:
        """The differences and what breaks; `verbose` adds the formulas of changed derivatives."""
        yield Text(self.summary_of_changes())
        schemas = (("Added", self.added.values()), ("Removed", self.removed.values()))
        for title, texts in schemas:
            if texts:
                yield Section(title, [Lines([line for text in texts for line in hanging(text, "  ", "    ")])])
        for title, names in (("Newly required", self.required), ("No longer required", self.optional)):
            if names:
                yield Section(title, [Text(", ".join(names), 2)])
        pairs = {"Changed signatures": self.signatures, "Changed names, defaults or aliases": self.schemas}
        if verbose or page:
            pairs["Changed derivatives"] = self.derivatives
        for title, changes in pairs.items():
            if changes:
                yield Section(title, [Lines([line for name, both in changes.items() for line in _change(name, *both)])])
        if self.derivatives and not (verbose or page):
            yield Section("Changed derivatives (--verbose shows them)", [Text(", ".join(self.derivatives), 2)])
        if self.backend:
            troubles = sorted(self.troubles, key=lambda trouble: not trouble.breaks)
            yield Section(self.verdict(), [Lines([line for trouble in troubles for line in trouble.lines()])])

    def dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "breaks": bool(self.broken)}


def _change(name: str, old: str, new: str) -> list[str]:
    """What changed of an operator: the lines of its schema or derivative that went and came."""
    gone, come = old.splitlines(), new.splitlines()
    lines = [line for text in gone if text not in come for line in hanging(text, "    - ")]
    return [f"  {name}", *lines, *(line for text in come if text not in gone for line in hanging(text, "    + "))]


# ---- comparing ----


def compare(old: Manifest, new: Manifest, key: str = "") -> Drift:
    """The differences of two manifests, from `old` to `new`.

    "Required" means that a backend at the dispatch key `key` (by default, for dense tensors) must register the
    operator.
    """
    kinds = [{name: op.kind_at(key) for name, op in of.operators.items()} for of in (old, new)]
    drift = Drift(old.torch, new.torch, {}, {}, {}, {}, [], [], {})
    for name, op in new.operators.items():
        if name not in old.operators:
            drift.added[name] = f"{kinds[1][name]}: {op.schema}"
        if kinds[1][name] == "required" != kinds[0].get(name):
            drift.required.append(name)
    for name, op in old.operators.items():
        after = new.operators.get(name)
        if after is None:
            drift.removed[name] = f"{kinds[0][name]}: {op.schema}"
            continue
        if kinds[0][name] == "required" != kinds[1][name]:
            drift.optional.append(name)
        if op.schema != after.schema:
            same = _signature(op.schema) == _signature(after.schema)
            (drift.schemas if same else drift.signatures)[name] = (op.schema, after.schema)
        if op.derivative != after.derivative:
            drift.derivatives[name] = (op.derivative, after.derivative)
    return drift


def _signature(schema: str) -> Any:
    """The parts of a schema that determine a kernel's C++ signature: types and mutations, not names or defaults."""
    parsed = torch._C.parse_schema(schema)
    # A kernel may take int64_t where the schema says SymInt.
    arguments = [(str(a.type), a.N, bool(a.alias_info and a.alias_info.is_write)) for a in parsed.arguments]
    return arguments, [str(r.type) for r in parsed.returns]


# ---- a backend's registrations ----


def registered(key: str) -> list[Registration]:
    """The kernels of aten operators registered for `key` in this process, except shared ones."""
    found = []
    pattern = re.compile(rf"^{key}: (.*?) :: (.*) \[", re.M)
    for op in dispatch.names():
        match = pattern.search(torch._C._dispatch_dump(op)) if op.startswith("aten::") else None
        if match and not backends.of_key(key).is_derived(op, key):
            short = op.removeprefix("aten::")
            found.append(Registration(short, _exact(dispatch.source_of(match[1]), short), match[2] == "(none)"))
    return found


def _exact(where: str, operator: str) -> str:
    """The line that names the operator, at or below the one where the block begins."""
    file, _, line = where.rpartition(":")
    for path in (Path(file), *(backend.source / file for backend in backends.registered() if backend.source)):
        if line.isdigit() and path.is_file():
            lines = path.read_text().splitlines()
            for number in range(int(line), len(lines) + 1):
                if f'"{operator}"' in lines[number - 1] or f'"aten::{operator}"' in lines[number - 1]:
                    return f"{file}:{number}"
    return where


_BLOCK = re.compile(r"\w*LIBRARY_IMPL\(\s*(aten|_)\s*,\s*(\w+)\s*,[^{]*\{")
_COMMENT = re.compile(
    r"""(R"(\w*)\(.*?\)\2"|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])')|//[^\n]*|/\*.*?\*/""", re.S
)  # or a string, which contains none
_IMPL = re.compile(r"""\.impl\(\s*["'](?:aten::)?([\w.]+)["'].*?["'](\w+)["']\s*\)""", re.S)
_NAME = re.compile(r'"(?:aten::)?([\w.]+)"')
_FALLBACK = re.compile(r"\.fallback\s*\((?![^;\n]*(makeFallthrough|fallthrough_kernel))")


def scan(folder: Path, key: str, known: Manifest, role: str = "") -> tuple[list[Registration], str]:
    """The registrations and the place of the fallback for `key` in the C++ and Python files below a folder.

    Nothing is run, so names that a macro assembles are not found: import the backend instead. In Python, a fallback
    counts if its file has a library of all operators, ``Library("_", ...)``, and names the key.

    Args:
        known: says which strings are names of operators.
        role: what a registration macro of the backend's own calls the key.
    Raises:
        Wrong: there is no such folder.
    """
    if not folder.is_dir():
        raise Wrong(f"there is no folder {folder}")
    found: list[Registration] = []
    fallback = ""
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".cpp", ".cc", ".cu", ".h", ".hpp", ".mm", ".py") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        if path.suffix == ".py":
            text = re.sub(r"#[^\n]*", "", text)
            names = [(m.start(1), m[1]) for m in _IMPL.finditer(text) if m[2] == key]
            of_all = re.search(r"""Library\(\s*["']_["']""", text) and re.search(rf"""["']{key}["']""", text)
            fallbacks = [m.start() for m in _FALLBACK.finditer(text)] if of_all else []
        else:
            text = _COMMENT.sub(lambda m: m[1] or "\n" * m[0].count("\n"), text)
            blocks = [(m[1], m.end(), _end(text, m.end())) for m in _BLOCK.finditer(text) if m[2] in (key, role)]
            of_aten = [m for name, *ends in blocks if name == "aten" for m in _NAME.finditer(text, *ends)]
            names = [(m.start(), m[1]) for m in of_aten if m[1] in known.operators]
            fallbacks = [m.start() for name, *ends in blocks if name == "_" for m in _FALLBACK.finditer(text, *ends)]
        line = lambda position, text=text: text.count("\n", 0, position) + 1  # noqa: E731
        found += [Registration(name, f"{path}:{line(position)}") for position, name in names]
        fallback = fallback or (f"{path}:{line(fallbacks[0])}" if fallbacks else "")
    return found, fallback


def _end(text: str, start: int) -> int:
    """Where the brace closes that opened just before `start`."""
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return match.start()
    return len(text)


def _troubles(found: Drift, registrations: list[Registration], old: Manifest, new: Manifest) -> list[Trouble]:
    out = []
    for r in registrations:
        op = new.operators.get(r.operator)
        if op is None:
            if r.operator in found.removed:
                out.append(Trouble(r.operator, r.where, f"torch {found.new} has no such operator", True))
            continue
        if r.operator in found.signatures:
            why = f"torch {found.new} calls it as {op.schema}"
            out.append(
                Trouble(r.operator, r.where, why + (", which a boxed kernel takes" if r.boxed else ""), not r.boxed)
            )
        if r.operator in found.schemas:
            out.append(Trouble(r.operator, r.where, f"its schema is now {op.schema}", False))
        if r.operator in found.derivatives:
            why = "its derivative has changed: see that the kernel's results are what it uses"
            out.append(Trouble(r.operator, r.where, why, False))
        before = old.operators.get(r.operator)
        if op.kind == "implicit" and before and before.kind in ("required", "elsewhere"):
            why = "it is CompositeImplicitAutograd now: a kernel for a backend's key cuts off its derivative"
            out.append(Trouble(r.operator, r.where, why, True))
    have = {r.operator for r in registrations}
    for name in found.required:
        if name not in have:
            why = "newly required" + (f": {found.fallback} serves it until then" if found.fallback else "")
            out.append(Trouble(name, "", why, not found.fallback))
    return out


def drift(
    old: str,
    new: str,
    *,
    device: str | None = None,
    key: str | None = None,
    sources: list[Path] | None = None,
    role: str = "",
) -> Drift:
    """Compare two versions, and report what breaks in a backend: the backend of `device` or `key` in this process, or
    `sources`.

    Args:
        old, new: as `manifest.read` takes them: "2.13.0", "installed", a wheel, an environment's folder, a manifest.
        sources: folders whose files are searched for registrations and a fallback, instead of those in the process.
        role: what a registration macro of the backend's own calls the key, as in MY_LIBRARY_IMPL(aten, ROLE, m).
    Raises:
        Wrong: one of these does not exist.
    """
    before, after = manifest.read(old), manifest.read(new)
    if not (device or key or sources):
        return compare(before, after)
    target = target_of(device, key or (None if device else "PrivateUse1"))
    found = compare(before, after, target.key)
    if sources:
        scanned = [scan(folder, target.key, before, role) for folder in sources]
        registrations = [registration for found_here, _ in scanned for registration in found_here]
        found.fallback = next((f"the fallback in {place}" for _, place in scanned if place), "")
    else:
        registrations = registered(target.key)
        if torch._C._dispatch_has_backend_fallback(torch._C._parse_dispatch_key(target.key)):
            found.fallback = backends.of_device(target.device).fallback
    where = ", ".join(map(str, sources)) if sources else target.device
    found.backend = f"{where}, {counted(len(registrations), 'registration')}"
    found.troubles = _troubles(found, registrations, before, after)
    return found


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    versions = ", ".join(manifest.versions())
    parser.add_argument(
        "old", metavar="OLD", help=f"{versions}, installed, a wheel, an environment or a saved manifest"
    )
    parser.add_argument("new", metavar="NEW", nargs="?", help="the same")
    parser.add_argument("--sources", nargs="+", type=Path, metavar="FOLDER",
                        help="folders to search for the backend's registrations and fallback, instead of importing it")  # fmt: skip
    parser.add_argument("--role", default="", metavar="NAME",
                        help="what the sources' own macro calls the key: MY_LIBRARY_IMPL(aten, NAME, m)")  # fmt: skip
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the manifest of OLD, as .json or .json.gz")
    parser.add_argument("--verbose", action="store_true", help="show the derivatives that changed")
    add_device(parser, default="")
    add_output(parser)


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing breaks, 1 if something does, 2 if the request is wrong."""
    if arguments.save:
        manifest.save(manifest.read(arguments.old), arguments.save)
        return 0
    if not arguments.new:
        raise Wrong("give OLD and NEW, or OLD and --save FILE")
    load(arguments.modules)
    device = arguments.device
    if not (device or arguments.key or arguments.sources) and backends.registered():
        device = default()
    named = {"device": device, "key": arguments.key, "sources": arguments.sources, "role": arguments.role}
    return write(drift(arguments.old, arguments.new, **named), arguments, verbose=arguments.verbose)
