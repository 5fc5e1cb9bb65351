"""``openreg-tools info``: versions, devices, what is switched on, what is wrong and how to fix it.

The first thing to ask for in a bug report. It imports each package that provides a device and reports failures, so it
runs without torch and, under ``python -m openreg_tools``, even if a package cannot be imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from pathlib import Path

from openreg_tools import backends
from openreg_tools.backends import AUTOLOAD
from openreg_tools.core.info import Info
from openreg_tools.core.options import search_here
from openreg_tools.core.report import add_output, write

__all__ = ["Info", "collect"]

GROUP = "torch.backends"  # of the entry points that `import torch` loads


def collect(packages: list[str] | None = None) -> Info:
    """Collect everything about this installation.

    Args:
        packages: modules that provide a device; by default, the installed ones that torch loads.
    """
    info = Info()
    group = importlib.metadata.entry_points(group=GROUP)
    loads = {entry.value.partition(":")[0].partition(".")[0]: entry.name for entry in group}
    with backends.without_autoload() as autoload:
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
        info.test(found.type, "report this, with the full output of `info`")


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
    add_output(parser)


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing is wrong, 1 if something is."""
    if arguments.modules:
        search_here()
    return write(collect(arguments.modules), arguments)
