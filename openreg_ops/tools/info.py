"""``python -m openreg_ops info``: versions, devices, what is switched on, what is wrong and how to mend it.

The first thing to ask of a bug report. Where `import openreg_ops` itself fails, `python -m openreg_tools info` runs this
file alone: it imports the package only inside `collect`, and reports the failure.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any

__all__ = ["Info", "collect"]

VARIABLES = runpy.run_path(str(Path(__file__).parents[1] / "environment.py"))["VARIABLES"]
EDITABLE = "run `pip install --no-build-isolation -e .`"
REBUILD = "pip install --force-reinstall --no-deps --no-build-isolation ."


class Info:
    """Sections of names and values, and the problems found: each a sentence and its remedy."""

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, str]] = {}
        self.problems: list[tuple[str, str]] = []

    def add(self, section: str, **values: Any) -> None:
        self.sections.setdefault(section, {}).update({k.replace("_", " "): str(v) for k, v in values.items()})

    def problem(self, what: str, remedy: str) -> None:
        self.problems.append((what, remedy))

    def dict(self) -> dict[str, Any]:
        problems = [{"problem": what, "remedy": remedy} for what, remedy in self.problems]
        return {**self.sections, "problems": problems}

    def text(self) -> str:
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
    # Not forms.wrapped: this file works where the package cannot be imported.
    return textwrap.wrap(text, 80, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def isolation(_C: Any) -> str:
    """The isolation mode: "off", "strict" or "keys"; a build whose extension cannot say has none."""
    mode = getattr(_C, "isolation_mode", None)
    return mode() if mode else "off"


def collect() -> Info:
    """What there is to know about this installation."""
    info = Info()
    _versions(info)
    _processor(info)
    if _package(info):
        _devices(info)
        _settings(info)
        _works(info)
    _environment(info)
    return info


def _versions(info: Info) -> None:
    info.add("software", python=f"{platform.python_version()}, {sys.executable}", system=platform.platform())
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # a package that fails would end `import torch` too
    try:
        import torch

        info.add("software", torch=f"{torch.__version__}, {Path(torch.__file__).parent}")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        info.problem("torch is not installed" if missing else f"torch cannot be imported: {error}", "pip install torch")
    finally:
        del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
        if autoload is not None:
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = autoload


def _processor(info: Info) -> None:
    names = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    info.add("processor", model=model, cores=f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    if torch := sys.modules.get("torch"):
        info.add("processor", capability=torch.backends.cpu.get_cpu_capability(), threads=torch.get_num_threads())


def _package(info: Info) -> bool:
    """Where the package is, what it was built for, and whether it can be imported."""
    spec = importlib.util.find_spec("openreg_ops")
    if spec is None or spec.origin is None:
        info.problem("openreg_ops is not on Python's path", "run `pip install .` in its source")
        return False
    folder = Path(spec.origin).parent
    info.add("package", folder=folder)
    build: dict[str, str] = {}
    built, another = (folder / "_build.py").exists(), False
    if built:
        exec((folder / "_build.py").read_text(), build)
        info.add("package", built_for=f"torch {build['TORCH_VERSION']}, {build.get('CPU_CAPABILITY', 'unknown')}")
    try:
        distribution = importlib.metadata.distribution("openreg_ops")
        info.add("package", installed=f"{distribution.version}, {_origin(distribution)[0]}")
        if another := (other := _origin(distribution)[1].resolve()) != folder.resolve():
            info.problem(
                f"Python imports the openreg_ops in {folder}, not the installed one in {other}",
                "start Python in another folder, take it off PYTHONPATH, or install that one",
            )
        installed = any(entry.group == "torch.backends" for entry in distribution.entry_points)
    except importlib.metadata.PackageNotFoundError:
        info.add("package", installed="no: it is on the path only")
        installed = False
    if not built:
        if not another:  # whose remedy helps here too
            info.problem(f"openreg_ops in {folder} is not built", f"{EDITABLE} in its source")
        return False
    if not installed:
        info.problem(
            "openreg_ops is not installed, so `import torch` does not load the device",
            f"import openreg_ops in the program, or {EDITABLE} in its source",
        )
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        info.problem(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0, so `import torch` does not load the device",
            "unset it, or import openreg_ops in the program",
        )
    library = next(folder.glob("_C*.so"), None)
    source = folder.parent / "csrc"
    if library and source.is_dir():
        newer = [path for path in source.rglob("*.[ch]*") if path.stat().st_mtime > library.stat().st_mtime]
        if newer:
            info.problem(
                f"{len(newer)} C++ files are newer than the extension, {min(newer).relative_to(folder.parent)} among them",
                "python setup.py build_ext --inplace",
            )
    if "torch" not in sys.modules:
        return False
    try:
        import openreg_ops  # noqa: F401
    except Exception as error:
        if type(error).__name__ == "WrongVariable":
            what, _, remedy = str(error).rpartition("; ")
            info.problem(what, remedy)
        else:
            info.problem(f"import openreg_ops fails: {type(error).__name__}: {error}", f"{REBUILD} in its source")
        return False
    return True


def _origin(distribution: importlib.metadata.Distribution) -> tuple[str, Path]:
    """How the package was installed, and the folder of its modules."""
    url = json.loads(distribution.read_text("direct_url.json") or "{}")
    if url.get("dir_info", {}).get("editable", False):
        source = url["url"].removeprefix("file://")
        return f"editable, from {source}", Path(source) / "openreg_ops"
    return "a copy in site-packages", Path(str(distribution.locate_file("openreg_ops")))


def _devices(info: Info) -> None:
    import torch

    from openreg_ops import _C
    from openreg_ops.tools.forms import size

    count = _C.device_count()
    info.add("devices", count=count, isolation=isolation(_C))
    if (name := torch._C._get_privateuse1_backend_name()) != "openreg":
        info.problem(f"PrivateUse1 is named {name}", "a process has one PrivateUse1 backend: import openreg_ops alone")
    if not count:
        info.problem("there is no device", "set OPENREG_DEVICE_COUNT to at least 1")
    for i in range(count):
        free, total = torch.openreg.mem_get_info(i)
        info.sections["devices"][f"openreg:{i}"] = (
            f"{size(total)}, {size(free)} free, {size(torch.openreg.memory_allocated(i))} in tensors"
        )


def _settings(info: Info) -> None:
    import openreg_ops
    from openreg_ops import _C, _sanitizer, faults

    fell = openreg_ops.fallback.report()
    info.add(
        "switched on",
        launch_mode=("inline", "async", "sync")[_C.launch_mode()],
        fallback=f"{openreg_ops.fallback.get_policy()}; {len(fell)} operators fell back so far",
        autograd_fallback=openreg_ops.autograd.get_fallback_mode(),
        poison="on: new device memory holds NaN" if _C.poison() else "off",
        sanitizer="on" if _sanitizer._races else "off",
        faults=", ".join(fault.kind for fault in faults._armed) or "none armed",
        kernels=f"{_C.native_kernels} of torch's CPU kernels shared",
    )


def _works(info: Info) -> None:
    """One forward and backward on the device against the CPU."""
    import torch

    if not torch.openreg.is_available():
        return
    try:
        gradients = []
        for device in ("cpu", "openreg"):
            x = torch.arange(6.0).view(2, 3).to(device).requires_grad_()
            torch.softmax(x @ x.t(), -1).square().sum().backward()
            gradients.append(x.grad.cpu())
        torch.testing.assert_close(*gradients)
        info.add("devices", works="yes: a small forward and backward equal the CPU's")
    except Exception as error:
        info.add("devices", works="no")
        info.problem(
            f"a small forward and backward fails: {type(error).__name__}: {str(error).splitlines()[0]}",
            "unset OPENREG_FAULTS if it is set; else report this, with the whole of `info`",
        )


def _environment(info: Info) -> None:
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith("OPENREG_")}
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "OMP_NUM_THREADS", "PYTHONPATH"):
        if name in os.environ:
            found[name] = os.environ[name]
    info.sections["environment"] = found or {"variables": "none that matter here are set"}
    for name in found:
        if name.startswith("OPENREG_") and name not in VARIABLES:
            info.problem(f"{name} means nothing here", f"unset it, or mend its name; there are {', '.join(VARIABLES)}")
    if os.environ.get("OPENREG_FAULTS"):
        info.problem("OPENREG_FAULTS makes the device fail on purpose", "unset it")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from openreg_ops.tools import forms

    forms.add_arguments(parser, page=False)


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing is wrong, 1 if something is."""
    from openreg_ops.tools import forms

    info = collect()
    forms.write(info, arguments)
    return 1 if info.problems else 0


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in the place of its own folder
    parser = argparse.ArgumentParser(prog="python -m openreg_tools info")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - is stdout, in the table's place")
    wanted = parser.parse_args(sys.argv[2:]).json  # behind "info"
    report = collect()
    if wanted and wanted != "-":
        Path(wanted).write_text(json.dumps(report.dict(), indent=1) + "\n")
    print(json.dumps(report.dict(), indent=1) if wanted == "-" else report.text())
    sys.exit(1 if report.problems else 0)
