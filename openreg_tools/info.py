"""``openreg-tools info``: versions, devices, what is switched on, what is wrong and how to fix it.

The first thing to ask for in a bug report. It imports each package that provides a device and reports failures, so it
runs without torch and, under ``python -m openreg_tools``, even if a package cannot be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openreg_tools import backends, forms
from openreg_tools.backends import AUTOLOAD

__all__ = ["Info", "collect"]

GROUP = "torch.backends"  # of the entry points that `import torch` loads


class Info:
    """Sections of names and values, and the problems found: each a sentence and its remedy."""

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, str]] = {}
        self.problems: list[tuple[str, str]] = []

    def add(self, section: str, **values: Any) -> None:
        """Add values to a section."""
        self.sections.setdefault(section, {}).update({k.replace("_", " "): str(v) for k, v in values.items()})

    def problem(self, what: str, remedy: str) -> None:
        """Add a problem and its remedy."""
        self.problems.append((what, remedy))

    def works(self, device: str, remedy: str) -> None:
        """Compare one forward and backward on the device with the CPU."""
        import torch

        try:
            gradients = []
            for each in ("cpu", device):
                x = torch.arange(6.0).view(2, 3).to(each).requires_grad_()
                torch.softmax(x @ x.t(), -1).square().sum().backward()
                gradients.append(x.grad.cpu())
            torch.testing.assert_close(*gradients)
            self.add("devices", works="yes: a small forward and backward equal the CPU's")
        except Exception as error:
            self.add("devices", works="no")
            self.problem(
                f"a small forward and backward fails: {type(error).__name__}: {str(error).splitlines()[0]}", remedy
            )

    def dict(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        problems = [{"problem": what, "remedy": remedy} for what, remedy in self.problems]
        return {**self.sections, "problems": problems}

    def text(self) -> str:
        """The report for a terminal of 80 columns."""
        lines = []
        for section, values in self.sections.items():
            lines.append(section)
            for name, value in values.items():
                lines += _wrapped(value, f"  {name:19} ", " " * 22) or [f"  {name}"]
        lines += ["", f"{len(self.problems) or 'no'} problem{'' if len(self.problems) == 1 else 's'}"]
        for what, remedy in self.problems:
            lines += [*_wrapped(what, "  - ", "    "), *_wrapped(f"Remedy: {remedy}", "    ", "    ")]
        return "\n".join(lines)


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def collect(packages: list[str] | None = None) -> Info:
    """Collect everything about this installation.

    Args:
        packages: modules that provide a device; by default, the installed ones that torch loads.
    """
    info = Info()
    group = importlib.metadata.entry_points(group=GROUP)
    loads = {each.value.partition(":")[0].partition(".")[0]: each.name for each in group}
    with _no_autoload() as autoload:  # a package that fails would break `import torch` too
        _software(info)
        _processor(info)
        told = [backend.package for backend in backends.registered()]
        for package in dict.fromkeys([*told, *(packages or loads)]):
            _package(info, package, autoload)
    for backend in backends.registered():
        backend.info(info)
    if "torch" in sys.modules and not backends.registered():
        _accelerator(info)
    _environment(info, {f"{name.upper()}_" for name in loads.values()})
    return info


@contextlib.contextmanager
def _no_autoload() -> Iterator[bool]:
    """Yields whether `import torch` would have loaded backends."""
    before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        yield before != "0"
    finally:
        del os.environ[AUTOLOAD]
        if before is not None:
            os.environ[AUTOLOAD] = before


def _software(info: Info) -> None:
    info.add("software", python=f"{platform.python_version()}, {sys.executable}", system=platform.platform())
    try:
        import torch

        info.add("software", torch=f"{torch.__version__}, {Path(torch.__file__).parent}")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        info.problem("torch is not installed" if missing else f"torch cannot be imported: {error}", "pip install torch")


def _processor(info: Info) -> None:
    names = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    info.add("processor", model=model, cores=f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    if torch := sys.modules.get("torch"):
        info.add("processor", capability=torch.backends.cpu.get_cpu_capability(), threads=torch.get_num_threads())


def _package(info: Info, package: str, autoload: bool) -> None:
    """Where the package of a device is, how it was installed, and whether it can be imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of the package that the module is in
        spec = None
    if spec is None or spec.origin is None:
        info.problem(f"{package} is not on Python's path", "install it, or run `pip install .` in its source")
        return
    folder = Path(spec.origin).parent
    info.add(package, folder=folder)
    try:
        distribution = importlib.metadata.distribution(package)
        info.add(package, installed=f"{distribution.version}, {_origin(distribution, package)[0]}")
        if (other := _origin(distribution, package)[1].resolve()) != folder.resolve():
            info.problem(
                f"Python imports the {package} in {folder}, not the installed one in {other}",
                "start Python in another folder, take it off PYTHONPATH, or install that one",
            )
        loads = any(entry.group == GROUP for entry in distribution.entry_points)
    except importlib.metadata.PackageNotFoundError:
        info.add(package, installed="no: it is on the path only")
        loads = False
    if "torch" not in sys.modules:
        return
    try:
        importlib.import_module(package)
    except Exception as error:
        # A message that ends with a remedy is split.
        what, remedy = re.fullmatch(r"(.*?)(?:[:;] ((?:run|rebuild|set|unset) .*))?", str(error), re.S).groups()
        if not isinstance(error, ValueError):  # an error in a setting, which needs no prefix
            what = f"import {package} fails: {type(error).__name__}: {what}"
        info.problem(what, remedy or f"reinstall {package}")
        return
    if not loads:
        info.problem(
            f"{package} is not installed, so `import torch` does not load the device",
            f"import {package} in the program, or run `pip install --no-build-isolation -e .` in its source",
        )
    elif not autoload:
        info.problem(
            f"{AUTOLOAD}=0, so `import torch` does not load the device", f"unset it, or import {package} in the program"
        )


def _origin(distribution: importlib.metadata.Distribution, package: str) -> tuple[str, Path]:
    """How the package was installed, and the folder of its modules."""
    url = json.loads(distribution.read_text("direct_url.json") or "{}")
    if url.get("dir_info", {}).get("editable", False):
        source = url["url"].removeprefix("file://")
        return f"editable, from {source}", Path(source) / package
    tags = re.findall(r"^Tag: (.*)", distribution.read_text("WHEEL") or "", re.M)
    how = f"the wheel for {' and '.join(tags)}" if tags else "a copy in site-packages"
    return how, Path(str(distribution.locate_file(package)))


def _accelerator(info: Info) -> None:
    """A device whose package does not describe it to the tools, or one of torch itself."""
    import torch

    found = torch.accelerator.current_accelerator()
    info.add("devices", accelerator=found or "none", count=torch.accelerator.device_count())
    if found and torch.accelerator.is_available():
        info.works(found.type, "report this, with the full output of `info`")


def _environment(info: Info, prefixes: set[str]) -> None:
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(tuple(prefixes))}
    for name in (AUTOLOAD, "OMP_NUM_THREADS", "PYTHONPATH"):
        if name in os.environ:
            found[name] = os.environ[name]
    info.sections["environment"] = found or {"variables": "none that matter here are set"}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE",
                        help="also check this package, which provides a device")  # fmt: skip
    forms.add_arguments(parser, page=False)


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing is wrong, 1 if something is."""
    if arguments.modules and "" not in sys.path and "." not in sys.path:
        sys.path.append("")  # python -P leaves it out
    info = collect(arguments.modules)
    forms.write(info, arguments)
    return 1 if info.problems else 0
