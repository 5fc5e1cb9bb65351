"""The GitHub Action, the hooks of pre-commit and the workflows: what they run, without GitHub."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".github" / "action.sh"
ACTION = ROOT / "action.yml"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the source tree")


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """The commands that a step of the action runs: programs that write down their arguments replace them."""
    log = tmp_path / "log"
    for name in ("openreg-tools", "python"):
        # The step asks Python for facts with -c; it calls pytest and pip with -m.
        program = (
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"if sys.argv[1] == '-c': os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
            f"print(json.dumps([{name!r}, *sys.argv[1:]]), file=open({str(log)!r}, 'a'))\n"
            "sys.exit('fails' in sys.argv)\n"
        )
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def run(step, **inputs):
        done = subprocess.run(["bash", SCRIPT, step], env={**os.environ, **inputs}, capture_output=True, text=True)
        commands = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return done.returncode, commands

    return run


DEFAULTS = dict(CHECK="", PYTEST="", DEVICE="openreg", MISUSE="all", FORBID="", SARIF="found")


@pytest.mark.processes
def test_run_checks_every_operator_and_the_suite(recorded):
    check = "my_ops:scale --input 'f32[3,4], $HOME'\n\n  fails\nlast"
    status, commands = recorded("run", **{**DEFAULTS, "CHECK": check, "PYTEST": "tests -k 'a or b'", "FORBID": "race"})
    assert status == 1
    quiet = ["openreg-tools", "check", "--quiet", "--sarif"]
    assert commands == [
        [*quiet, "found/check-1.sarif", "my_ops:scale", "--input", "f32[3,4], $HOME"],
        [*quiet, "found/check-2.sarif", "fails"],
        [*quiet, "found/check-3.sarif", "last"],
        [
            *("python", "-m", "pytest", "--device", "openreg", "--device-misuse=all", "--device-forbid=race"),
            *("--device-sarif", "found/pytest.sarif", "tests", "-k", "a or b"),
        ],
    ]
    assert recorded("run", **DEFAULTS) == (0, [])


@pytest.mark.processes
def test_install_keeps_the_installed_torch(recorded):
    import torch

    import openreg_ops

    status, (command,) = recorded("install", TORCH="")
    version = openreg_ops._build.VERSION
    wheel = f"openreg_ops=={version}+torch{torch.__version__.partition('+')[0]}"
    assert status == 0 and command[:6] == ["python", "-m", "pip", "install", f"openreg_tools=={version}", wheel]
    assert command[-1].startswith("https://") and command[-1].endswith("/wheels/")
    status, commands = recorded("install", TORCH="2.14.0")
    assert commands[0][:5] == ["python", "-m", "pip", "install", "torch==2.14.0"]


def test_every_input_reaches_the_script():
    action = yaml.safe_load(ACTION.read_text())
    steps = action["runs"]["steps"]
    environment = {name: value for step in steps for name, value in step.get("env", {}).items()}
    variables = set(re.findall(r"\$\{?([A-Z]+)\b", SCRIPT.read_text()))
    assert set(environment) == variables
    used = set(re.findall(r"inputs\.(\w+)", ACTION.read_text()))
    assert used == set(action["inputs"])
    documented = (ROOT / "docs" / "testing.md").read_text()
    for name in action["inputs"]:
        assert f"\n| `{name}` |" in documented


def test_hooks_name_commands_that_exist():
    for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text()):
        assert {"id", "name", "entry", "language"} <= set(hook) and hook["pass_filenames"] is False
        assert hook["id"] in (ROOT / "docs" / "testing.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_run_targets_that_exist(path):
    """Each target is the Makefile's, and each job and local workflow that a job names exists."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    jobs = yaml.safe_load(path.read_text())["jobs"]
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)
        assert "uses" not in job or (ROOT / job["uses"]).is_file()
        for step in job.get("steps", []):
            assert set(re.findall(r"^make ([a-z0-9-]+)", step.get("run", ""), re.M)) <= targets
