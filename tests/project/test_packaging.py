"""What is packaged, and what happens when the package is imported."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from processes import python as forked

import openreg_ops
from openreg_ops import environment, fallback
from openreg_ops.device import faults
from openreg_ops.tools.new import FILES, PACKAGE_FILES

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree"),
]
autoload = pytest.mark.skipif(
    "openreg" not in importlib.metadata.entry_points(group="torch.backends").names,
    reason="openreg_ops is on the path but not installed, so torch does not know of it",
)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new interpreter that finds the same openreg_ops, for what happens as torch is imported."""
    path = str(Path(openreg_ops.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error", **environment}
    if environment["PYTHONPATH"] != path:  # the entry point is found in either case
        environment["PYTHONPATH"] += os.pathsep + path
    return subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)


def printed(code: str, **environment: str) -> str:
    result = python(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def setup(*arguments: str) -> None:
    """Runs setup.py away from the source tree's own metadata."""
    result = subprocess.run([sys.executable, "setup.py", "-q", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- what is packaged ----


def test_sdist_has_all_that_a_build_needs(tmp_path):
    setup("egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path), "--formats", "gztar")
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        assert not [member.name for member in tar if member.issym()], "a link may lead out of the archive"
    for pattern in (
        "csrc/**/*.cpp",
        "csrc/**/*.h",
        "meta/*.py",
        "tests/**/*.py",
        "openreg_ops/*.py",
        "openreg_tools/**/*.py",
        "examples/*.py",
    ):
        missing = {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)} - names - {"openreg_ops/_build.py"}
        assert not missing
    assert {
        "setup.py",
        "pyproject.toml",
        "openreg_tools/pyproject.toml",
        "openreg_tools/check/checker.md",
        "build_backend.py",
        "Makefile",
        "LICENSE",
    } <= names
    assert not {name for name in names if name.endswith(".so") or name == "openreg_ops/_build.py"}
    assert not {name for name in names if name.startswith("openreg_ops/meta/")}, "meta/ is there twice"


def test_wheel_has_every_module(tmp_path):
    setup("egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib"))
    built = {str(path.relative_to(tmp_path / "lib")) for path in (tmp_path / "lib").rglob("*") if path.is_file()}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "openreg_ops").rglob("*.py")}
    meta = {f"openreg_ops/{path.relative_to(ROOT)}" for path in (ROOT / "meta").glob("*.py")}
    templates = {
        f"openreg_ops/tools/templates/{file}" for file in (*FILES, *(f"package/{file}" for file in PACKAGE_FILES))
    }
    interface = {
        str(path.relative_to(ROOT)) for path in (ROOT / "openreg_ops").rglob("*") if path.suffix in (".h", ".cmake")
    }
    assert len(interface) == 6
    typed = {"openreg_ops/py.typed", "openreg_ops/_C.pyi"}
    outside = {"openreg_device.py", "pytest_openreg_ops.py"}  # Python and pytest import them where torch is not loaded
    assert modules | meta | templates | interface | typed | outside | {"openreg_ops/_build.py"} == built | {
        "openreg_ops/_build.py"
    }


def test_wheel_of_the_tools(tmp_path):
    """Built from a copy, which a build leaves files in; everything of the folder is in it, and it is pure Python."""
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    source = shutil.copytree(ROOT / "openreg_tools", tmp_path / "a folder" / "openreg_tools", ignore=ignored)
    files = {f"openreg_tools/{path.relative_to(source)}" for path in source.rglob("*") if path.is_file()}
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("openreg_tools-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert names == files - {"openreg_tools/pyproject.toml", "openreg_tools/README.md"}
    assert "openreg-tools = openreg_tools.__main__:main" in metadata


@autoload
def test_the_version_has_one_place(tmp_path, monkeypatch):
    version = tomllib.loads((ROOT / "openreg_tools" / "pyproject.toml").read_text())["project"]["version"]
    assert openreg_ops.__version__ == importlib.metadata.version("openreg_ops") == openreg_ops._build.VERSION == version
    monkeypatch.setenv("OPENREG_RELEASE", "1")
    label = f"torch{torch.__version__.partition('+')[0]}"
    for value, expected in ((None, f"{version}+{label}"), ("", version)):
        monkeypatch.delenv("OPENREG_LABEL", raising=False) if value is None else monkeypatch.setenv(
            "OPENREG_LABEL", value
        )
        said = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True)
        assert said.stdout.split()[-1] == expected, said.stderr


def test_the_repository_has_one_address():
    tables = [
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["urls"]
        for folder in (".", "openreg_tools")
    ]
    assert tables[0] == tables[1], "openreg_tools/pyproject.toml repeats project.urls of pyproject.toml"
    assert all(url.startswith(tables[0]["Repository"]) for name, url in tables[0].items() if name != "Documentation")


def test_an_index_shows_the_whole_readme(tmp_path):
    """The descriptions of both packages have no relative links; those of README.md lead to the version's tag."""
    setup("egg_info", "--egg-base", str(tmp_path))
    text = (tmp_path / "openreg_ops.egg-info" / "PKG-INFO").read_text()
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    for path in (
        "blob/v{}/LICENSE)",
        "blob/v{}/docs/getting-started.md",
        "raw/v{}/docs/figures/",
        "actions/workflows/",
    ):
        assert f"{address}/{path}".format(openreg_ops._build.VERSION) in text
    for description in (text, (ROOT / "openreg_tools" / "README.md").read_text()):
        assert not re.findall(r"""(?:\]\(|href="|src=")(?!https:|#).*""", description)


def test_meta_is_part_of_the_package():
    assert openreg_ops.meta.__name__ == "openreg_ops.meta"
    files = {path.name for path in Path(openreg_ops.meta.__file__).parent.glob("*.py")}
    assert files == {path.name for path in (ROOT / "meta").glob("*.py")}


# ---- import ----


@autoload
def test_import_torch_is_enough():
    assert printed("import torch; print(torch.ones(2, device='openreg:1').device)") == "openreg:1"


@autoload
def test_autoload_can_be_turned_off():
    code = "import sys, torch; print('openreg_ops' in sys.modules); import openreg_ops; print(torch.openreg.device_count())"
    assert printed(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0", OPENREG_DEVICE_COUNT="1").split() == ["False", "1"]


def test_openreg_ops_may_be_imported_first():
    assert printed("import openreg_ops, torch; print(torch.zeros(1, device='openreg').item())") == "0.0"


@pytest.fixture
def built_for_another_torch(tmp_path):
    """openreg_ops as built for torch 2.0.0; its extension could not be loaded."""
    package = tmp_path / "openreg_ops"
    package.mkdir()
    (package / "__init__.py").write_text((ROOT / "openreg_ops" / "__init__.py").read_text())
    (package / "_build.py").write_text('VERSION, TORCH_VERSION = "9.9", "2.0.0+cpu"\n')
    (package / "_C.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    return str(tmp_path)


SENTENCE = (
    f"openreg_ops was built for torch 2.0.0+cpu but torch {torch.__version__} is installed; "
    "rebuild it with `pip install --force-reinstall --no-deps --no-build-isolation .` in its source, "
    f"or install the wheel for that torch, openreg_ops==9.9+torch{torch.__version__.partition('+')[0]}, or torch==2.0.0"
)


def test_another_torch_is_named_with_the_remedy(built_for_another_torch):
    result = forked("-c", "import openreg_ops", PYTHONPATH=built_for_another_torch, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [SENTENCE]
    assert "undefined symbol" not in result.stderr


@autoload
def test_another_torch_is_named_by_autoload_too(built_for_another_torch):
    result = python("import torch", PYTHONPATH=built_for_another_torch)
    assert SENTENCE in result.stderr.splitlines()


def test_not_built_says_what_to_do(built_for_another_torch):
    # Not removed: an editable install's finder would bring the checkout's.
    (Path(built_for_another_torch) / "openreg_ops" / "_build.py").write_text("raise ModuleNotFoundError('_build')\n")
    result = forked("-c", "import openreg_ops", PYTHONPATH=built_for_another_torch, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    remedy = "run `pip install --no-build-isolation -e .` in its source"
    assert result.stderr.splitlines() == [f"openreg_ops is not built here: {remedy}"]


# ---- environment variables ----

PROPERTIES = "import torch, openreg_ops as _; print(torch.openreg.device_count(), torch.openreg.mem_get_info()[1]);"


def test_device_count_and_memory():
    settings = {"OPENREG_DEVICE_COUNT": "3", "OPENREG_DEVICE_MEMORY": "64 MiB"}
    result = forked("-c", PROPERTIES + "torch.empty(65 << 20, dtype=torch.uint8, device='openreg')", **settings)
    assert result.stdout.split() == ["3", str(64 << 20)]
    assert result.stderr.splitlines()[-1].startswith("torch.OutOfMemoryError")


def test_a_value_that_makes_no_sense_is_an_error(monkeypatch):
    """The error has the same form for every variable: name, rule, value and remedy."""
    for name in environment.VARIABLES:
        for other in environment.VARIABLES:
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, "much")
        with pytest.raises(
            environment.WrongVariable,
            match=f"^{name}: expected .*, but got 'much'.*; set it to one of these, or unset it$",
        ):
            environment.check()
            {"OPENREG_FAULTS": faults, "OPENREG_FALLBACK_ALLOW": fallback, "OPENREG_FALLBACK_DENY": fallback}[
                name
            ]._from_environment()
        monkeypatch.setenv(name, "")
        environment.check()
    rules = {
        "OPENREG_DEVICE_COUNT": ("many", "expected a number from 0 to 64, but got 'many'; set it to one of these"),
        "OPENREG_FALLBACK_DENY": ("aten::nosuch", ", but got 'aten::nosuch' (no operator matches 'aten::nosuch'; "),
    }
    for name, (value, sentence) in rules.items():  # checked before anything is loaded, and when it is read
        code = "try: import torch\nexcept RuntimeError as error: print(type(error.__cause__).__name__); raise"
        result = python(code, **{name: value})  # torch loads the device
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "WrongVariable\n", 1)
        assert result.stderr.startswith(f"openreg_ops: {name}: expected ") and sentence in result.stderr
    result = forked("-c", "raise ValueError('another')", OPENREG_DEVICE_COUNT="1")
    assert result.stderr.startswith("Traceback")


@pytest.mark.parametrize("good", ["1048576", "8GiB", "0.5 g", "512 MB", "1e9", "2t", "1b"])
@pytest.mark.parametrize("bad", ["", "0", "-1", "nan", "8GiBs", "GiB", "1e30"])
def test_sizes(good, bad):
    assert environment._is_size(good) and not environment._is_size(bad)
