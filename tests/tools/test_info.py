"""`python -m openreg_ops info`: what it says is so, and what is wrong is found, and its remedy works."""

import importlib.metadata
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import command as run
from processes import python

import openreg_ops
from openreg_ops import environment
from openreg_ops.environment import VARIABLES
from openreg_tools import info

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
REBUILD = "pip install --force-reinstall --no-deps --no-build-isolation ."


def command(*arguments, package="openreg_ops", **environment):
    return python("-m", package, "info", *arguments, cwd=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **environment)


def problems(report):
    return [what for what, _ in report.problems]


def test_says_what_is_so():
    kept = torch.empty(3 << 20, dtype=torch.uint8, device="openreg:1")
    report = info.collect()
    assert report.sections["devices"]["count"] == str(torch.openreg.device_count())
    in_tensors = re.search(r"([\d.]+) MiB in tensors", report.sections["devices"]["openreg:1"])
    assert float(in_tensors[1]) == pytest.approx(torch.openreg.memory_allocated(1) / (1 << 20), abs=0.01)
    assert torch.openreg.memory_allocated(1) >= kept.nbytes
    assert report.sections["devices"]["self-test"].startswith("passed")
    assert torch.__version__ in report.sections["software"]["torch"]
    package = report.sections["openreg_ops"]
    assert package["folder"] == str(Path(openreg_ops.__file__).parent)
    assert package["installed"].startswith(f"{importlib.metadata.version('openreg_ops')}, ")
    assert report.sections["settings"]["poison"].startswith("on")  # conftest.py fills memory
    with openreg_ops.fallback.policy("warn"):
        assert info.collect().sections["settings"]["fallback"].startswith("warn")
    settings = report.sections["settings"]
    assert (settings["sanitizer"], settings["faults"]) == ("off", "none armed")
    with torch.openreg._sanitizer.sanitize(), torch.openreg.faults.inject("copy", after=9999):
        settings = info.collect().sections["settings"]
    assert (settings["sanitizer"], settings["faults"]) == ("on", "copy")
    assert all(len(line) <= 80 or " " not in line[24:] for line in report.text().splitlines())


def test_command():
    result = command("--json", "-", OPENREG_DEVICE_COUNT="0", OPENREG_FALBACK="error", OPENREG_FAULTS="copy:after=9999")
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    assert report["devices"]["count"] == "0"
    assert {each["problem"] for each in report["problems"]} >= {
        "OPENREG_FALBACK is not a variable of openreg_ops",
        "OPENREG_FAULTS makes the device fail on purpose",
        "there is no device",
    }


def test_a_device_that_computes_wrongly_is_found(monkeypatch):
    monkeypatch.setattr(torch, "softmax", lambda x, dim: x if x.is_openreg else torch.nn.functional.softmax(x, dim))
    report = info.collect()
    assert report.sections["devices"]["self-test"] == "failed"
    assert any(what.startswith("the self-test, a small forward and backward, fails: ") for what in problems(report))


def test_runs_where_the_package_cannot_be_imported(tmp_path):
    package = tmp_path / "openreg_ops"
    package.mkdir()
    (package / "__init__.py").write_text((ROOT / "openreg_ops/__init__.py").read_text())
    shutil.copytree(ROOT / "openreg_tools", tmp_path / "openreg_tools")
    (package / "_build.py").write_text('VERSION, TORCH_VERSION = "9.9", "2.0.0+cpu"\n')
    result = run_in(tmp_path, "-m", "openreg_tools", "info", "--import", "openreg_ops")
    assert result.returncode == 1, result.stderr
    said = " ".join(result.stdout.split())
    assert "import openreg_ops fails: ImportError: openreg_ops was built for torch 2.0.0+cpu" in said
    assert REBUILD in said


@pytest.fixture
def not_built(tmp_path):
    """A copy of the package's Python without what a build adds."""
    ignore = shutil.ignore_patterns("_build.py", "*.so", "__pycache__")
    shutil.copytree(Path(openreg_ops.__file__).parent, tmp_path / "openreg_ops", ignore=ignore)
    # Not just missing: an editable install's finder would bring the checkout's.
    (tmp_path / "openreg_ops" / "_build.py").write_text("raise ModuleNotFoundError('_build')\n")
    shutil.copytree(ROOT / "openreg_tools", tmp_path / "openreg_tools")
    return tmp_path


def run_in(folder, *words):
    return python(*words, cwd=folder, PYTHONPATH=str(folder), TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_not_built_is_one_problem_with_the_remedy(not_built):
    said = run_in(not_built, "-m", "openreg_tools", "info", "--import", "openreg_ops", "--json", "-").stdout
    # Another copy may be installed, which is a problem of its own.
    (problem,) = [entry for entry in json.loads(said)["problems"] if "not the installed one" not in entry["problem"]]
    assert problem["problem"] == "import openreg_ops fails: ImportError: openreg_ops is not built here"
    assert problem["remedy"] == "run `pip install --no-build-isolation -e .` in its source"


def test_without_torch(not_built):
    (not_built / "openreg_ops/_build.py").write_text('VERSION, TORCH_VERSION = "9.9", "2.0.0"\n')
    # As in an environment without it: what Python finds is the standard library alone.
    result = run_in(not_built, "-S", "-m", "openreg_tools", "info", "--import", "openreg_ops", "--json", "-")
    assert result.returncode == 1 and not result.stderr
    problems = {problem["problem"]: problem["remedy"] for problem in json.loads(result.stdout)["problems"]}
    assert problems["torch is not installed"] == "pip install torch"
    assert not any("fails" in what for what in problems)


@pytest.mark.parametrize("name, value", [("OPENREG_FALLBACK", "bogus"), ("OPENREG_FAULTS", "bogus")])
def test_a_value_that_keeps_the_package_from_loading(name, value):
    """Said before anything is loaded, and found on the way."""
    result = command("--json", "-", package="openreg_tools", **{name: value})
    assert result.returncode == 1 and not result.stderr
    (found,) = [
        problem
        for problem in json.loads(result.stdout)["problems"]
        if problem["problem"].startswith(f"{name}: expected")
    ]
    assert f"but got {value!r}" in found["problem"] and found["remedy"] == "set it to one of these, or unset it"
    assert REBUILD not in result.stdout


@pytest.mark.skipif(not (ROOT / "docs/environment.md").exists(), reason="needs the source tree")
def test_every_variable_is_documented_and_read():
    documented = set(re.findall(r"`(OPENREG_\w+)`", (ROOT / "docs/environment.md").read_text()))
    of_the_build = set(re.findall(r'"(OPENREG_[A-Z_]+)"', (ROOT / "setup.py").read_text()))
    assert documented == set(VARIABLES) | of_the_build
    sources = {*ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("openreg_ops/**/*.py")} - {ROOT / "openreg_ops/environment.py"}
    read = {name for path in sources for name in re.findall(r'"(OPENREG_[A-Z_]+)"', path.read_text())}
    assert read == set(VARIABLES)


def test_numbers_of_devices(monkeypatch):
    for count in ("0", "1", "64", ""):
        monkeypatch.setenv("OPENREG_DEVICE_COUNT", count)
        environment.check()
    for count in ("65", "-1", "2.0", "two"):
        monkeypatch.setenv("OPENREG_DEVICE_COUNT", count)
        with pytest.raises(environment.WrongVariable, match=f"expected a number from 0 to 64, but got '{count}'"):
            environment.check()


def test_a_folder_without_the_package(monkeypatch, tmp_path):
    """Python finds a folder of the name, but no package in it; or no such name at all."""
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("only_a_folder", "no_such_package", "no_such.package"):
        found = info.Info()
        info._package(found, name, True)
        assert problems(found) == [f"{name} is not on Python's path"]


def test_another_copy_than_the_installed_one(monkeypatch, tmp_path):
    installed = importlib.metadata.Distribution.at(tmp_path / "openreg_ops-9.dist-info")
    (tmp_path / "openreg_ops-9.dist-info").mkdir()
    (tmp_path / "openreg_ops-9.dist-info" / "METADATA").write_text("Name: openreg_ops\nVersion: 9\n")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert any(f"not the installed one in {tmp_path}/openreg_ops" in what for what in problems(info.collect()))


def test_the_page_begins_with_the_problems():
    found = info.Info()
    found.add("software", python="3 <a>")
    assert '<p class="verdict pass">no problems</p><section><h2>software</h2>' in found.html()
    found.problem("torch is <old>", "update it")
    page = found.html()
    order = [
        '<p class="verdict fail">1 problem</p>',
        "torch is &lt;old&gt;",
        "Remedy: update it",
        "python</th>",
        "3 &lt;a&gt;",
    ]
    assert sorted(order, key=page.index) == order


def package_of_a_device(tmp_path, monkeypatch, installed, text=""):
    """A package on the path; installed with an entry point, without one, or not at all."""
    name = f"device_{installed}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    if installed != "not":
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.5\n")
        if installed == "loads":
            (folder / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {name}:load\n")
    return name


@pytest.mark.parametrize(
    "installed, autoload, problem, remedy",
    [
        ("loads", True, None, None),
        ("loads", False, "TORCH_DEVICE_BACKEND_AUTOLOAD=0, so `import torch` does not load the device", "unset it, or "),
        ("lacks", True, "device_lacks is not installed, so `import torch` does not load", "import device_lacks in the"),
        ("lacks", False, "device_lacks is not installed, so `import torch` does not load", "import device_lacks in the"),
        ("not", True, "device_not is not installed, so `import torch` does not load", "import device_not in the"),
    ],
)  # fmt: skip
def test_a_device_that_import_torch_does_not_load(monkeypatch, tmp_path, installed, autoload, problem, remedy):
    name = package_of_a_device(tmp_path, monkeypatch, installed)
    found = info.Info()
    info._package(found, name, autoload)
    about = found.sections[name]
    assert about["folder"] == str(tmp_path / name)
    assert about["installed"].startswith("no: it is on the path only" if installed == "not" else "1.5, a copy in site")
    assert [what.startswith(problem) and fix.startswith(remedy) for what, fix in found.problems] == [True] * bool(
        problem
    )


@pytest.mark.parametrize(
    "error, problem, remedy",
    [
        ("ImportError('no lib')", "import device_loads fails: ImportError: no lib", "reinstall device_loads"),
        ("ImportError('old; rebuild with make')", "import device_loads fails: ImportError: old", "rebuild with make"),
        ("ValueError('LEVEL: got 9; set it to 1')", "LEVEL: got 9", "set it to 1"),
    ],
)
def test_a_package_that_raises(monkeypatch, tmp_path, error, problem, remedy):
    name = package_of_a_device(tmp_path, monkeypatch, "loads", f"raise {error}")
    found = info.Info()
    info._package(found, name, True)
    assert found.problems == [(problem, remedy)]


def test_variables_of_the_environment(monkeypatch):
    """Those of a device's package, and those of Python and PyTorch that matter."""
    names = ("MINE_LEVEL", "OMP_NUM_THREADS", "PYTHONPATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    for name in names:
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("MINEOTHER", "1")
    found = info.Info()
    info._environment(found, {"MINE_"})
    assert found.sections["environment"] == {name: f"value of {name}" for name in names}
    for name in names:
        monkeypatch.delenv(name)
    info._environment(found, {"MINE_"})
    assert found.sections["environment"] == {"variables": "none that matter here are set"}


def test_a_device_that_does_not_describe_itself(monkeypatch):
    """Its name, how many there are, and whether it computes."""
    monkeypatch.setattr(info.backends, "registered", list)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    devices = info.collect().sections["devices"]
    assert devices["accelerator"].startswith("openreg") and devices["count"] == str(torch.openreg.device_count())
    assert devices["self-test"].startswith("passed")


def test_the_status_says_whether_there_are_problems(monkeypatch, capsys):
    report = info.Info()
    monkeypatch.setattr(info, "collect", lambda modules: report)
    assert run("info") == 0 and "no problems" in capsys.readouterr().out
    report.problem("it is broken", "repair it")
    assert run("info") == 1 and "1 problem\n  - it is broken\n    Remedy: repair it" in capsys.readouterr().out
