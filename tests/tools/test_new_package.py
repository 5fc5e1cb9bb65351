"""`new --package`: a package of each style is built, and its kernel is right whatever the device does.

pip installs one of the three styles that only the kernel's code distinguishes, and "stable", whose wheel is another one. It starts
several processes that import torch, so the other two are built without it.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import python

import openreg_ops
from openreg_ops.tools.new import PACKAGE_FILES, add_arguments, main, new_package
from openreg_tools.core import about
from openreg_tools.core.options import Wrong

STYLES = ["forward-only", "separate", "function", "stable"]
PATH = str(Path(openreg_ops.__file__).parents[1])
# One process for each setting of the device, and in it every package: loading torch is most of what a process costs.
USE = """
import sys, torch
from torch.nn.functional import silu
from torch.testing import assert_close

def uses(package, differentiable):
    x = torch.randn(3, 1000)
    for op in (getattr(package, name) for name in package.__all__):
        y = x.to("openreg").requires_grad_(differentiable)
        torch.openreg._sleep(20_000_000)  # the stream is busy: what is launched now runs behind the sleep
        twice = y * 2
        assert_close(op(twice).detach().cpu(), silu(2 * x))
        z = x.clone().requires_grad_(differentiable)
        if differentiable:
            op(twice).sum().backward()
            silu(2 * z).sum().backward()
            assert_close(y.grad.cpu(), z.grad)
        with torch.openreg.stream(torch.openreg.Stream()):
            other = op(x.to("openreg"))
            torch.openreg.current_stream().synchronize()
        assert_close(other.cpu(), silu(x))
"""
COMPILED = """
def compiles(package):
    x = torch.randn(3, 1000)
    compiled = torch.compile(lambda x: package.weigh(x + 1) * 2, fullgraph=True)
    assert_close(compiled(x.to("openreg")).cpu(), silu(x + 1) * 2)
"""
PROFILED = """
from torch.profiler import ProfilerActivity, profile

def is_profiled(package):
    x = torch.randn(3, 1000)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as prof:
        package.weigh(x.to("openreg"))
        torch.openreg.synchronize()
    names = {event.name for event in prof.events()}
    assert f"{package.__name__}::weigh kernel" in names, names
"""
FAULTY = """
def fails(package):
    x = torch.randn(3, 1000)
    y = x.to("openreg")
    with torch.openreg.faults.inject("kernel"):
        try:
            package.weigh(y)
            torch.openreg.synchronize()
        except torch.AcceleratorError as error:
            assert f"in {package.__name__}::weigh" in str(error), error
        else:
            raise AssertionError("nothing was raised")
    with torch.openreg.faults.inject("lost"):
        try: package.weigh(y)
        except torch.AcceleratorError as error: assert "openreg:0 is lost" in str(error)
        else: raise AssertionError("nothing was raised")
    torch.openreg.reset_device(0)
    assert_close(package.weigh(y).cpu(), silu(x))
"""


def install(style, folder):
    """A package, built: its style, name, folder, and where it is installed."""
    name = f"trial_{style.replace('-', '_')}"
    operators = ["weigh", "exp"] if style == "stable" else ["weigh"]
    assert len(new_package(name, style, operators, folder)) == len(PACKAGE_FILES) + 3 * (len(operators) - 1)
    without_debugging = {"CFLAGS": "-g0"}  # symbols take a fifth of the compiler's time
    if style in ("separate", "stable"):
        words = "-m pip install --no-deps --no-build-isolation --target".split()
        command, env = [sys.executable, *words, folder / "site", folder / name], {**os.environ, **without_debugging}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    else:
        words = ("setup.py", "build", "--build-lib", folder / "site")
        done = python(*words, cwd=folder / name, PYTHONPATH=PATH, **without_debugging)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning: " not in done.stdout.replace("UserWarning: ", "")
    return style, name, folder / name, folder / "site"


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return {style: install(style, tmp_path_factory.mktemp("package")) for style in STYLES}


@pytest.fixture(params=STYLES)
def package(packages, request):
    return packages[request.param]


def run(package, *arguments, **options):
    _, _, folder, site = package
    done = python(*arguments, cwd=folder, PYTHONPATH=f"{PATH}{os.pathsep}{site}", **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


pytestmark = [pytest.mark.compiles, pytest.mark.processes]


def test_one_library_for_every_python(packages):
    _, name, _, site = packages["stable"]
    assert [path.name for path in (site / name).glob("*.so")] == ["_C.abi3.so"]


def test_its_own_tests_pass(package):
    """The checker takes most of the time: it runs for one operator of each style, and on the CPU for one style."""
    style, *_ = package
    left_out = ["tests/test_exp.py::test_checker"] + ["tests/test_weigh.py::test_checker[cpu]"] * (style != "separate")
    deselected = [word for test in left_out for word in ("--deselect", test)]
    done = run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", *deselected, dynamo=True)
    assert "passed" in done.stdout and "skipped" not in done.stdout


def test_a_failing_test_prints_no_log_of_the_compiler(tmp_path):
    new_package("mine", "separate", ["weigh"], tmp_path)
    test = "import torch\ndef test_it(): assert torch.compile(torch.sin, backend='eager')(torch.ones(1)) == 7\n"
    (tmp_path / "mine/tests/test_it.py").write_text(test)
    command = ("-m", "pytest", "-p", "no:cacheprovider", "tests/test_it.py")
    done = python(*command, cwd=tmp_path / "mine", dynamo=True, PYTHONPATH=PATH)
    assert done.returncode == 1 and "1 failed" in done.stdout and "DEBUG" not in done.stdout
    assert len(done.stdout.splitlines()) < 40, done.stdout


def test_it_loads_and_computes_without_the_device(package):
    code = "import torch; from {1} import weigh; assert weigh(torch.zeros(3)).sum() == 0; import sys; assert 'openreg_ops' not in sys.modules"
    run(package, "-c", code.format(*package), TORCH_DEVICE_BACKEND_AUTOLOAD="0")


CASES = {
    "inline": ([USE, FAULTY], {}),
    "async": ([USE, COMPILED, PROFILED, FAULTY], {"OPENREG_LAUNCH_MODE": "async"}),
    "isolated, async": ([USE], {"OPENREG_ISOLATION": "strict", "OPENREG_LAUNCH_MODE": "async"}),
    "sanitizer": ([USE], {"OPENREG_SANITIZER": "1"}),
}
CALLS = {
    USE: "uses(package, {differentiable})",
    COMPILED: "compiles(package)",
    PROFILED: "is_profiled(package)",
    FAULTY: "fails(package)",
}


@pytest.mark.parametrize("case", CASES)
def test_right_whatever_the_device_does(packages, case):
    parts, environment = CASES[case]
    code = [*parts]
    for style, name, *_ in packages.values():
        code.append(f"import {name} as package; print(package.__name__)")
        code += [CALLS[part].format(differentiable=style != "forward-only") for part in parts]
    sites = os.pathsep.join([PATH, *(str(site) for *_, site in packages.values())])
    done = python("-c", "\n".join(code), PYTHONPATH=sites, PYTHONWARNINGS="ignore", **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.split() == [name for _, name, *_ in packages.values()]
    if case == "sanitizer":
        assert not done.stderr, done.stderr  # where its report would be


@pytest.mark.parametrize(
    ("name", "operators", "message"),
    [
        ("Mine", ["weigh"], "expected a name of lower-case words"),
        ("mine", ["weigh", "a-b"], "expected a name of lower-case words"),
        ("mine", ["weigh", "class"], "class is a reserved word in Python or C++"),
        ("mine", ["mine"], "mine is needed twice"),
        ("mine", ["weigh", "weigh"], "weigh is needed twice"),
        ("mine", ["weigh_backward", "weigh"], "weigh_backward is needed twice"),
        ("mine", ["weigh", ""], "expected a name of lower-case words .* got ''"),
        ("mine", ["check"], "check already has a meaning in the code of a package"),
        ("mine", ["torch"], "torch already has a meaning"),
        ("mine", ["tensor"], "tensor already has a meaning"),
        ("double", ["weigh"], "double is a reserved word in Python or C++"),
        ("aten", ["weigh"], "the namespace aten already has operators"),
        ("torch", ["weigh"], "the Python package torch already exists"),
        ("taken", ["weigh"], "already exists"),
    ],
)
def test_refused(tmp_path, name, operators, message):
    (tmp_path / "taken").mkdir()
    with pytest.raises(Wrong, match=message):
        new_package(name, "separate", operators, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def arguments(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_no_operators_is_refused(tmp_path, capsys):
    assert main(arguments("mine", "--package", "--ops", "", "--root", str(tmp_path))) == 2
    assert "new: expected a name of lower-case words" in capsys.readouterr().err


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_folder_that_cannot_be_written(root, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(arguments("mine", "--package", "--root", str(tmp_path / root))) == 2
    assert f"new: cannot write {tmp_path}/file" in capsys.readouterr().err


@pytest.mark.parametrize("root, path", [(".", "./mine"), ("a b", "'./a b/mine'"), ("/there", "/there/mine")])
def test_the_command_says_how_to_go_on(root, path, tmp_path, monkeypatch, capsys):
    """With a path that pip does not take for the name of a package on PyPI."""
    monkeypatch.chdir(tmp_path)
    root = Path(str(tmp_path) + root if root.startswith("/") else root)
    assert main(arguments("mine", "--package", "--root", str(root))) == 0
    path = str(root / "mine") if root.is_absolute() else path
    assert f"pip install --no-build-isolation {path}`, `pytest {path}`" in capsys.readouterr().out


def test_its_workflow_installs_the_wheel_for_its_torch(tmp_path):
    """The release's wheel has the version of torch that the step before installs, so pip replaces nothing."""
    new_package("its_workflow", "separate", ["weigh"], tmp_path)
    text = (tmp_path / "its_workflow" / ".github" / "workflows" / "tests.yml").read_text()
    torch = openreg_ops._build.TORCH_VERSION.partition("+")[0]
    wheel = f"openreg_ops=={openreg_ops._build.VERSION}+torch{torch}"
    assert f"- run: pip install torch=={torch} --index-url https://" in text
    assert f"- run: pip install {wheel} --extra-index-url {about.address('Documentation')}wheels/ #" in text
    readme = (tmp_path / "its_workflow" / "README.md").read_text()
    assert f"pip install {wheel} --extra-index-url " in readme
