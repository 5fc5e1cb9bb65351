"""setuptools' build backend, told which torch to build with: the one that the extension will run with.

An isolated build (plain `pip install .`) has an environment of its own, where pip would put the newest torch. The
environment that pip installs into is the one whose interpreter runs this, so its torch is asked for by version.

It also puts openreg_device.pth into the wheel, which setuptools has no option for.
"""

from __future__ import annotations

import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403
from wheel.wheelfile import WheelFile  # setuptools' own, which importing setuptools makes importable

SUPPORTED = "torch>=2.13,<2.16"


def _requires(config_settings: dict | None = None) -> list[str]:
    """The installed torch's version, or any supported one where none is installed (setup.py needs torch to run)."""
    paths = sysconfig.get_paths()
    for torch in metadata.distributions(name="torch", path=list({paths["purelib"], paths["platlib"]})):
        return [f"torch=={torch.version.split('+')[0]}"]
    return [SUPPORTED]


get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = _requires


def _with_startup(folder: str, wheel: str) -> str:
    """Rewrite the wheel with openreg_device.pth added and listed in RECORD."""
    path = Path(folder, wheel)
    whole = path.rename(path.with_suffix(".built"))
    with ZipFile(whole) as source, WheelFile(path, "w") as target:
        for file in source.infolist():
            if not file.filename.endswith(".dist-info/RECORD"):
                target.writestr(file, source.read(file))
        target.write("openreg_device.pth")
    whole.unlink()
    return wheel


def build_wheel(wheel_directory: str, *options: Any) -> str:
    return _with_startup(wheel_directory, build_meta.build_wheel(wheel_directory, *options))


def build_editable(wheel_directory: str, *options: Any) -> str:
    return _with_startup(wheel_directory, build_meta.build_editable(wheel_directory, *options))
