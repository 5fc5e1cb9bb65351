"""``openreg-tools drift OLD NEW``: what changed between two versions of torch, and which registrations break."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import html
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from openreg_tools import backends, dispatch, forms, manifest, pages
from openreg_tools.forms import Wrong
from openreg_tools.manifest import Manifest

__all__ = ["Drift", "Registration", "Trouble", "compare", "drift", "registered", "scan", "scan_fallback"]


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


@dataclasses.dataclass
class Drift:
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

    def summary(self) -> str:
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
        said = [f"{marks['BREAKS'] or 'no'} registration{'s break' if marks['BREAKS'] > 1 else ' breaks'}"]
        if marks["MISSING"]:
            said.append(f"{marks['MISSING']} newly required {'is' if marks['MISSING'] == 1 else 'are'} missing")
        if marks["look at"]:
            said.append(f"{marks['look at']} to look at")
        return f"{self.backend}, {self.fallback or 'no fallback'}: {', '.join(said)}"

    def text(self, verbose: bool = False) -> str:
        """The differences and troubles for a terminal; `verbose` adds the formulas of changed derivatives."""
        lines = forms.wrapped([self.summary()], 0)
        for title, schemas in (("Added", self.added), ("Removed", self.removed)):
            if schemas:
                lines += ["", title, *(line for text in schemas.values() for line in _hanging(text, "  "))]
        for title, names in (("Newly required", self.required), ("No longer required", self.optional)):
            if names:
                lines += ["", title, *forms.wrapped([", ".join(names)], 2)]
        for title, pairs in (
            ("Changed signatures", self.signatures),
            ("Changed names, defaults or aliases", self.schemas),
            ("Changed derivatives", self.derivatives if verbose else {}),
        ):
            if pairs:
                lines += ["", title]
            for name, (old, new) in pairs.items():
                lines.append(f"  {name}")
                gone, come = old.splitlines(), new.splitlines()
                lines += [line for text in gone if text not in come for line in _hanging(text, "    - ")]
                lines += [line for text in come if text not in gone for line in _hanging(text, "    + ")]
        if self.derivatives and not verbose:
            lines += [
                "",
                "Changed derivatives (--verbose shows them)",
                *forms.wrapped([", ".join(self.derivatives)], 2),
            ]
        if self.backend:
            lines += ["", *forms.wrapped([self.verdict()], 0)]
            for trouble in sorted(self.troubles, key=lambda t: not t.breaks):
                lines += _hanging(f"{trouble.mark} {trouble.operator}  {trouble.where}".rstrip(), "  ")
                lines += forms.wrapped([trouble.why])
        return "\n".join(lines)

    def dict(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        return {**dataclasses.asdict(self), "breaks": bool(self.broken)}

    def html(self) -> str:
        """One self-contained page."""
        e = html.escape
        parts = [*map(pages.text, filter(None, (self.summary().partition(": ")[2], self.verdict())))]
        if self.troubles:
            rows: list[list[Any]] = [["operator", "where", "why", ""]]
            rows += [
                [t.operator, t.where, (t.why, {"class": "words"}), (t.mark.lower(), {"class": MARKED.get(t.mark)})]
                for t in self.troubles
            ]
            parts.append(pages.section("What it means for the backend", pages.table(rows, left=2)))
        found: list[str] = []

        def details(title: str, items: list[str]) -> None:
            if items:
                found.append(pages.details(f"{len(items)} {title}", f"<ul>{''.join(items)}</ul>"))

        for title, schemas in (("added", self.added), ("removed", self.removed)):
            details(title, [f"<li><code>{e(text)}</code></li>" for text in schemas.values()])
        for title, names in (("newly required", self.required), ("no longer required", self.optional)):
            details(title, [f"<li><code>{e(name)}</code></li>" for name in names])
        for title, pairs in (
            ("changed signatures", self.signatures),
            ("changed names, defaults or aliases", self.schemas),
            ("changed derivatives", self.derivatives),
        ):
            items = [
                f'<li>{e(name)}<pre class="fail wrapped">{e(old)}</pre><pre class="pass wrapped">{e(new)}</pre></li>'
                for name, (old, new) in pairs.items()
            ]
            details(title, items)
        parts.append(pages.section("What changed", "".join(found) or pages.text("Nothing.")))
        title = f"torch {self.old} to {self.new}"
        return pages.page(title, title, "".join(parts))


MARKED = {"BREAKS": "fail", "MISSING": "fail", "look at": "warn"}  # classes of the page's style


def _hanging(text: str, mark: str) -> list[str]:
    first, *more = forms.wrapped([text], len(mark) + 2) or [""]
    return [mark + first.strip(), *more] if first else []


# ---- comparing ----


def compare(old: Manifest, new: Manifest, key: str = "") -> Drift:
    """The differences of two manifests, from `old` to `new`.

    "Required" means that a backend at the dispatch key `key` (by default, for dense tensors) must register the
    operator.
    """
    kinds = [{name: op.kind_at(key) for name, op in each.operators.items()} for each in (old, new)]
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
    typed = lambda each: (str(each.type), each.N, bool(each.alias_info and each.alias_info.is_write))  # noqa: E731
    return [typed(a) for a in parsed.arguments], [str(r.type) for r in parsed.returns]


# ---- a backend's registrations ----


def registered(key: str) -> list[Registration]:
    """The kernels of aten operators registered for `key` in this process, except shared ones."""
    found = []
    pattern = re.compile(rf"^{key}: (.*?) :: (.*) \[", re.M)
    for op in dispatch.names():
        match = pattern.search(torch._C._dispatch_dump(op)) if op.startswith("aten::") else None
        if match and not backends.of_key(key).is_derived(op, key):
            short = op.removeprefix("aten::")
            found.append(Registration(short, _exact(dispatch.place(match[1]), short), match[2] == "(none)"))
    return found


def _exact(where: str, operator: str) -> str:
    """The line that names the operator, at or below the one where the block begins."""
    file, _, line = where.rpartition(":")
    for path in (Path(file), *(each.source / file for each in backends.registered() if each.source)):
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


def scan(folder: Path, key: str, known: Manifest, role: str = "") -> list[Registration]:
    """The registrations for `key` in the C++ and Python files below a folder, without running anything.

    `known` says which strings are operator names. Names that a macro assembles are not found: import the backend
    instead. `role` is what a registration macro of the backend's own calls the key.
    """
    found = []
    for path, text in _files(folder):
        if path.suffix == ".py":
            places = [(m.start(1), m[1]) for m in _IMPL.finditer(text) if m[2] == key]
        else:
            places = [
                (start + m.start(), m[1])
                for start, end in _blocks(text, "aten", (key, role))
                for m in re.finditer(r'"(?:aten::)?([\w.]+)"', text[start:end])
                if m[1] in known.operators
            ]
        for position, name in places:
            found.append(Registration(name, f"{path}:{text.count(chr(10), 0, position) + 1}"))
    return found


def scan_fallback(folder: Path, key: str, role: str = "") -> str:
    """The place of the fallback for `key` in the files below a folder, in C++ or in Python; empty if there is none.

    `role` is what a registration macro of the backend's own calls the key.
    """
    for path, text in _files(folder):
        if path.suffix == ".py":
            found = [node.lineno for node in _python_fallbacks(text, key)]
        else:
            found = [
                text.count("\n", 0, start + m.start()) + 1
                for start, end in _blocks(text, "_", (key, role))
                for m in re.finditer(r"\.fallback\s*\([^;]*", text[start:end])
                if "makeFallthrough" not in m[0]
            ]
        if found:
            return f"{path}:{found[0]}"
    return ""


def _python_fallbacks(text: str, key: str) -> list[ast.Call]:
    """The calls of ``torch.library.Library("_", ...).fallback`` for `key`, which either of the two may name."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return []
    named = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in nodes if isinstance(node, ast.Assign)}
    found = []
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fallback":
            library = ast.unparse(node.func.value)
            library = named.get(library, library)
            asked = ast.unparse(node)[len(ast.unparse(node.func)) :]
            keys = re.findall(r"'(\w+)'", asked) or re.findall(r"'(\w+)'", library)
            if re.search(r"Library\('_'", library) and key in keys and "fallthrough_kernel" not in asked:
                found.append(node)
    return found


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """The C++ and Python files below a folder; C++ without comments, with the same line numbers."""
    if not folder.is_dir():
        raise Wrong(f"there is no folder {folder}")
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".cpp", ".cc", ".cu", ".h", ".hpp", ".mm", ".py") and path.is_file():
            text = path.read_text(errors="replace")
            yield path, text if path.suffix == ".py" else _COMMENT.sub(lambda m: m[1] or "\n" * m[0].count("\n"), text)


def _blocks(text: str, namespace: str, keys: tuple[str, str]) -> list[tuple[int, int]]:
    """Where the blocks TORCH_LIBRARY_IMPL(namespace, key, m) { ... } of a file begin and end."""
    return [(m.end(), _end(text, m.end())) for m in _BLOCK.finditer(text) if m[1] == namespace and m[2] in keys]


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
    target = dispatch.target(device, key or (None if device else "PrivateUse1"))
    found = compare(before, after, target.key)
    if sources:
        registrations = [r for folder in sources for r in scan(folder, target.key, before, role)]
        place = next(filter(None, (scan_fallback(folder, target.key, role) for folder in sources)), "")
        found.fallback = f"the fallback in {place}" if place else ""
    else:
        registrations = registered(target.key)
        if torch._C._dispatch_has_backend_fallback(torch._C._parse_dispatch_key(target.key)):
            found.fallback = backends.of_device(target.device).fallback
    found.backend = f"{', '.join(map(str, sources)) if sources else target.device}, {len(registrations)} registrations"
    found.troubles = _troubles(found, registrations, before, after)
    return found


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    versions = ", ".join(sorted(p.name.removesuffix(".json.gz") for p in manifest.SHIPPED.glob("*.json.gz")))
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
    dispatch.add_arguments(parser, default="")
    forms.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing breaks, 1 if something does, 2 if the request is wrong."""
    try:
        if arguments.save:
            manifest.save(manifest.read(arguments.old), arguments.save)
            return 0
        if not arguments.new:
            raise Wrong("give OLD and NEW, or OLD and --save FILE")
        dispatch.load(arguments.modules)
        device = arguments.device
        if not (device or arguments.key or arguments.sources) and backends.registered():
            device = dispatch.default()
        named = {"device": device, "key": arguments.key, "sources": arguments.sources, "role": arguments.role}
        report = drift(arguments.old, arguments.new, **named)
    except Wrong as error:
        print(f"drift: {error}", file=sys.stderr)
        return 2
    forms.write(report, arguments, verbose=arguments.verbose)
    return 1 if report.broken else 0
