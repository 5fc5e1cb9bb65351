"""`pytest --device`: the device that a test gets, and each kind of misuse: found at its line, and nowhere else."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from _pytest.pytester import SysModulesSnapshot
from processes import python

import openreg_ops
import openreg_tools.pytest_plugin
from openreg_tools.pytest_plugin import misuse, session, sources

pytest_plugins = ["pytester", "pytest_openreg_ops"]
PATH = os.pathsep.join({str(Path(module.__file__).parents[1]) for module in (openreg_ops, openreg_tools)})


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs pytest with the plugin on the files of the test's folder; `process=True` in a process of its own.

    The isolated process that it starts forks too, unless `forks` is false.
    """
    monkeypatch.setenv("PYTHONPATH", PATH)
    # A test writes its files again within the second, and Python knows what it has compiled by time and size.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    # pytester forgets all modules that a run imported; what torch imported meanwhile must not come twice.
    ours = lambda name: str(getattr(sys.modules[name], "__file__", "")).startswith(str(pytester.path))  # noqa: E731
    snapshot = functools.partial(SysModulesSnapshot, preserve=lambda name: not ours(name))
    monkeypatch.setattr(pytester, "_Pytester__take_sys_modules_snapshot", snapshot)
    pytester._sys_modules_snapshot = snapshot()

    def run(*arguments, process=False, forks=True, input=""):
        arguments = ("-p", "pytest_openreg_ops", "-p", "no:cacheprovider", "-W", "ignore", *arguments)
        if not process:
            return pytester.runpytest_inprocess(*arguments)
        own = f"--basetemp={pytester.path}/basetemp"
        path = os.pathsep.join([str(pytester.path), PATH])
        options = dict(cwd=pytester.path, dynamo=True, nested=forks, input=input, PYTHONPATH=path)
        done = python("-m", "pytest", own, *arguments, **options)
        print(done.stdout, done.stderr)
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)

    return run


# ---- which device a test gets ----

NAMES = """
import pytest, torch

def test_it(device, request):
    assert isinstance(device, torch.device)
    print("ran", request.node.name, torch.ones(2, device=device).device)
"""


def ran(result):
    return [line.split()[-2:] for line in result.outlines if "ran " in line]


def test_a_test_without_a_fixture_gets_the_device(pytester, run):
    pytester.makepyfile(NAMES)
    assert ran(run("-s", "--device", "openreg")) == [["test_it[openreg]", "openreg:0"]]
    assert ran(run("-s", "--device=cpu,openreg:1")) == [["test_it[cpu]", "cpu"], ["test_it[openreg:1]", "openreg:1"]]
    assert ran(run("-s")) == [["test_it", "cpu"]]


def test_a_fixture_of_the_suite_is_replaced(pytester, run):
    """Also where fixtures of a wide scope build on it."""
    pytester.makeconftest("""
        import pytest, torch
        @pytest.fixture(scope="session")
        def device(): return torch.device("cpu")
        @pytest.fixture(scope="session")
        def x(device): return torch.ones(2, device=device)
    """)
    pytester.makepyfile("def test_it(x, request): print('ran', request.node.name, x.device)")
    assert ran(run("-s")) == [["test_it", "cpu"]]
    assert ran(run("-s", "--device=openreg")) == [["test_it[openreg]", "openreg:0"]]


SIMILAR = """
    import pytest, torch

    class Case:
        def __init__(self, n): self.n = n
        def __repr__(self): return "Case"

    no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no cuda")

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_cuda)], ids=["host", "gpu"])
    @pytest.mark.parametrize("n", [1, 2])
    def test_strings(device, n): print("ran strings", torch.ones(n, device=device).is_openreg and repr(device))

    @pytest.mark.parametrize("device", [torch.device("cuda", 1)])
    def test_devices(device): print("ran torch.device", torch.ones(2, device=device).is_openreg)

    @pytest.mark.parametrize("device, case", [("cpu", Case(1)), ("cpu", Case(2)), ("cuda", Case(3))])
    def test_objects(device, case): print("ran objects", case.n)

    @pytest.mark.parametrize("device, n", [("cpu", 1), ("cpu", 1.0), ("cpu", True), ("cuda", 1), ("cpu", -0.0), ("cpu", 0.0)])
    def test_numbers(device, n): print("ran numbers", n)

    @pytest.mark.parametrize("device, shape", [("cpu", [2, 3]), ("cuda", [2, 3]), ("cuda", (2, 3))])
    def test_shapes(device, shape): print("ran shapes", str(shape).replace(" ", ""))

    @pytest.mark.parametrize("device", (name for name in ["phone", "tablet"]))
    def test_generator(device): print("ran generator", device)

    @pytest.mark.parametrize("device", (name for name in ["cpu", "cuda"]))
    def test_generator_of_devices(device): print("ran devices", device)

    @pytest.mark.parametrize("device", [None, "cpu", None])
    def test_none(device): print("ran none", repr(device))

    @pytest.mark.parametrize("device", [None, torch.device("cpu")])
    def test_none_and_a_device(device): print("ran both", device)

    @pytest.mark.parametrize("device", [None])
    def test_none_alone(device): print("ran alone", device)
"""


def test_parameters_of_the_suite_are_replaced(pytester, run):
    """Only rows that are surely the same run once; a row loses the mark that was for its device."""
    pytester.makepyfile(SIMILAR)
    assert ran(run("-s", "--device=openreg")) == [
        ["strings", "'openreg'"], ["strings", "'openreg'"], ["torch.device", "True"],
        *(["objects", n] for n in "123"),
        *(["numbers", n] for n in ("1", "1.0", "True", "-0.0", "0.0")),
        *(["shapes", shape] for shape in ("[2,3]", "(2,3)")),
        *(["generator", name] for name in ("phone", "tablet")),
        ["devices", "openreg"], ["none", "'openreg'"], ["both", "openreg"], ["alone", "None"],
    ]  # fmt: skip


def test_a_suite_that_generates_its_devices(pytester, run):
    pytester.makeconftest("""
        def pytest_generate_tests(metafunc):
            if "device" in metafunc.fixturenames:
                metafunc.parametrize("device", ["cpu", "cuda"])
    """)
    pytester.makepyfile("def test_it(device): assert device == 'openreg'")
    run("--device=openreg").assert_outcomes(passed=1)


def test_other_names_of_the_argument(pytester, run):
    pytester.makeini("[pytest]\ndevice_names = device torch_device\n")
    pytester.makepyfile("def test_it(torch_device): assert str(torch_device) == 'openreg'")
    run("--device=openreg").assert_outcomes(passed=1)


@pytest.mark.parametrize("testpaths", [True, False])
def test_a_suite_with_an_option_of_its_own(pytester, run, testpaths):
    """It keeps --device, with its meaning; --on-device is this plugin's then."""
    folder = pytester.mkdir("tests")
    (folder / "conftest.py").write_text(
        "import pytest, torch\n"
        "def pytest_addoption(parser): parser.addoption('--device', default='cpu', choices=('cpu', 'meta'))\n"
        "@pytest.fixture(scope='session')\n"
        "def device(pytestconfig): return torch.device(pytestconfig.getoption('--device'))\n"
    )
    (folder / "test_it.py").write_text(NAMES)
    where = () if testpaths else ("tests",)
    if testpaths:
        pytester.makeini("[pytest]\ntestpaths = tests\n")
    assert ran(run("-s", "--device", "meta", *where)) == [["test_it", "meta"]]
    assert ran(run("-s", "--on-device", "openreg", *where)) == [["test_it[openreg]", "openreg:0"]]


def test_a_wrong_device_or_kind_is_named(run):
    for arguments, sentence in (
        (["--device=nope"], "*--device nope: unknown device 'nope'; available: cpu, meta, openreg; if *-p PACKAGE*"),
        (["--device=openreg:64"], "*--device openreg:64: cannot use device 'openreg:64': *OPENREG_DEVICE_COUNT*"),
        (["--device=openreg", "--device-misuse=sinc"], "*--device-misuse: no kind sinc; there are all, host, race*"),
        (
            ["--device=cpu", "--device-forbid=race,cuda"],
            "*--device-forbid: race cannot be detected on cpu, which has cuda",
        ),
        (["--device-misuse=all"], "*--device-misuse and related options watch a device; name it with --device DEVICE*"),
    ):
        result = run(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([sentence])


def test_all_is_what_the_device_can_report(pytester, run):
    pytester.makepyfile("import torch\ndef test_it(device): torch.ones(3, device=device) + 1")
    result = run("--device=cpu", "--device-misuse=all")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["device: cpu; watched for: cuda", "none found in 1 test"])
    assert result.ret == 0


@pytest.mark.processes
def test_another_device_does_without_openreg(pytester, run, monkeypatch):
    pytester.makepyfile("""
        import sys, torch
        def test_it(device): assert torch.ones(3, device=device).is_meta and "openreg_ops" not in sys.modules
        def test_mixed(device): torch.ones(3, device=device) + torch.ones(3)
    """)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # by which torch itself would import it
    result = run("--device=meta", "--device-misuse=all", process=True)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["mixed: *", "* add of cpu and meta"])


def test_the_plugin_imports_no_torch_until_asked(pytester):
    pytester.makepyfile("import sys\ndef test_it(): assert not {'torch', 'openreg_ops', 'numpy'} & set(sys.modules)")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pytest_openreg_ops", "-q"],
        check=True, env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip


# ---- misuse ----

# In each library, a comment "# ! …" says what is found in its line, and nothing else is found.
WAITS = """
    mine = torch.library.Library("test_plugin", "DEF")
    mine.define("twice(Tensor x) -> Tensor")
    mine.impl("twice", lambda x: x * 2, "CPU")

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, grad): return grad * grad.sum().item()  # ! item

    def reads(x):
        if x.sum() > 0:  # ! bool
            print(x)  # ! print
        x.tolist()  # ! tolist
        return x.max().item()  # ! item
    def depends_on_data(x): return x[x > 0]  # ! index.Tensor: data-dependent size or value
    def copies(x): return x.cpu()  # ! copy to the host
    def synchronizes(x): torch.openreg.synchronize(device=x.device)  # ! synchronize
    def synchronizes_any(x): torch.accelerator.synchronize()  # ! synchronize
    def synchronizes_a_stream(x): torch.openreg.current_stream().synchronize()  # ! Stream.synchronize
    def synchronizes_an_event(x):
        event = torch.openreg.Event()
        event.record()
        event.synchronize()  # ! Event.synchronize
    def falls_back(x): return torch.ops.test_plugin.twice(x)  # ! test_plugin::twice falls back to the CPU
    def in_backward(x): Waits.apply(x.requires_grad_()).sum().backward()
    def of_a_node(x):
        y = x.cpu().pin_memory().requires_grad_().to(x.device, non_blocking=True).sum()  # ! copy to the host
        torch.autograd.backward(  # ! copy to the host
            [y]
        )
    def of_a_node_in_async(x):
        with torch.openreg.launch_mode("async"):
            y = x.cpu().pin_memory().requires_grad_().to(x.device, non_blocking=True).sum()  # ! copy to the host
            y.backward()  # ! copy to the host
            torch.openreg.synchronize()  # ! synchronize
    def not_pinned(x):
        torch.empty(3).copy_(x, non_blocking=True)  # ! non_blocking copy to unpinned memory
    def pinned(x): torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)
    def right(x): return torch.where(x.sum() > 0, x + 1, x[[0, 1, 2]]).to(x.device)
"""
MIXED = """
    def raises(x): return x + torch.ones(3)  # ! add of cpu and openreg:0
    def raises_otherwise(x): return x + torch.ones(2, device=x.device)
    def expected(x):
        try: x + torch.ones(3)
        except RuntimeError: pass
    def number(x): return x + torch.tensor(1.0)
"""
PINNED = """
    def from_the_host(x):
        return torch.ones(8).to(x.device, non_blocking=True)  # ! non_blocking copy of memory that is not pinned: the host copies it to a buffer first
    def to_the_host(x):
        return torch.empty(3).copy_(x, non_blocking=True)  # ! non_blocking copy to memory that is not pinned: the host waits
    def written(x):
        host = torch.ones(1 << 18).pin_memory()
        y = host.to(x.device, non_blocking=True)
        host.zero_()  # ! written while aten::_to_copy may read it
        return y
    class Copies(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, grad):
            return grad * torch.ones(1).to(grad.device, non_blocking=True)  # ! non_blocking copy of memory that is not pinned: the host copies it to a buffer first
    def in_backward(x): Copies.apply(x.requires_grad_()).sum().backward()

    def blocking(x): return torch.ones(8).to(x.device)
    def right(x):
        host = torch.ones(1 << 18).pin_memory()
        y = host.to(x.device, non_blocking=True)
        torch.accelerator.synchronize()
        host.zero_()
        return y, torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)
"""
RACES = """
    def host(x):
        y = x.to("cpu", non_blocking=True)
        return y.sum()  # ! the host did not wait for aten::_to_copy
    def stream(x):
        with torch.openreg.Stream(): return x * 2  # ! a side stream did not wait for aten::ones
    def arguments(x):
        with torch.openreg.Stream(): y, z = torch.zeros(3, device=x.device), torch.zeros(3, device=x.device)
        return torch.cat([y, z, z])  # ! the default stream did not wait for aten::zeros
    def reuse(x):
        y, side = x.repeat(1 << 16), torch.openreg.Stream()
        side.wait_stream(torch.openreg.current_stream())
        with side: z = y * 2
        del y
        return x.repeat(1 << 16), z  # ! the default stream reuses memory freed before aten::mul.Tensor ran
    def right(x):
        side, y = torch.openreg.Stream(), x.to("cpu", non_blocking=True)
        torch.openreg.current_stream().synchronize()
        y.sum()
        side.wait_stream(torch.openreg.current_stream())
        with side: return x * 2
"""
LEAKS = """
    cache = {}
    def cached(x):
        y = x * 2  # ! 12 bytes
        cache["last"] = y
    def view(x): cache["view"] = (x * 3)[:1]  # ! 12 bytes
    def shape(x): cache["shape"] = (x * 2).shape
    def cycle(x):
        cycle = [x * 2]
        cycle.append(cycle)
"""
DRAWS = """
    import torch.distributions as D
    import torch.nn.functional as F
    def rand(x): return x + torch.rand(x.shape).to(x.device)  # ! rand on the CPU, in the library
    def in_place(x): return x * torch.empty(x.shape).bernoulli_(0.5).to(x.device)  # ! bernoulli_ on the CPU, in the library
    def indices(x): return x[torch.multinomial(torch.ones(3), 3)]  # ! multinomial on the CPU, in the library
    def dropout(x): return x * F.dropout(torch.ones(3)).to(x.device)  # ! bernoulli_ on the CPU, in the library
    def normal(x): return x * D.Normal(0.0, 1.0).sample(x.shape).to(x.device)  # ! normal on the CPU, in the library
    def value(x): return x * torch.rand(1).item()  # ! rand on the CPU, in the library
    def out(x):
        y = torch.empty(3)
        torch.normal(0.0, 1.0, (3,), out=y)  # ! normal on the CPU, in the library
        return x * y.to(x.device)

    def on_the_device(x): return F.dropout(x) + torch.empty_like(x).bernoulli_() + D.Normal(x, 1 + x.abs()).sample()
    def own(x): return x * torch.rand(3, generator=torch.Generator().manual_seed(0)).to(x.device)
    def nothing_drawn(x): return x * F.dropout(torch.ones(3), training=False).to(x.device)
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = torch.nn.Parameter(torch.empty(3)), torch.nn.Parameter(torch.randn(3))
            self.w.data.uniform_(-1, 1)
            self.linear = torch.nn.Linear(3, 3)
        def forward(self, x): return self.linear(x * self.w + self.v)
    def moved(x): return Module().to(x.device)(x)
    def initialized(x): return x + torch.nn.init.normal_(torch.empty(3)).to(x.device)
    def shuffled(x):
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 3)), shuffle=True)
        return sum(x + batch.to(x.device) for (batch,) in data)
"""
RIGHT = """
    def train(x):
        side, current = torch.openreg.Stream(), torch.openreg.current_stream()
        x = torch.eye(8, device=x.device)
        sparse, mask = x.to_sparse_csr(), x > 0
        side.wait_stream(current)
        with side:
            y = (sparse * 2).to_dense()
            x[:4].add_(y[:4])
        x[4:].mul_(2)
        current.wait_stream(side)
        x[mask] = 1
        x.masked_fill_(~mask, 0.5)
        side.wait_stream(current)
        with side: x[:, ::2].add_(1)
        x[:, 1::2].sub_(1)
        current.wait_stream(side)
        y.record_stream(side)
        host = torch.empty(8, 8, pin_memory=True)
        host.copy_(x, non_blocking=True)
        current.synchronize()
        assert host.sum().item() == 36
"""


@pytest.mark.parametrize(
    ("kinds", "library"),
    [("sync", WAITS), ("mixed", MIXED), ("pinned", PINNED), ("race", RACES), ("leak", LEAKS), ("seed", DRAWS),
     ("race,mixed,leak,pinned,seed", RIGHT)],
    ids=["sync", "mixed", "pinned", "race", "leak", "seed", "right"],
)  # fmt: skip
def test_what_a_library_does_is_found_at_its_line(pytester, run, kinds, library):
    library = f"import torch\n{textwrap.dedent(library)}"
    pytester.makepyfile(
        library=library,
        test_it="""
        import inspect, library, pytest, torch
        @pytest.mark.parametrize("name", [name for name, value in vars(library).items() if inspect.isfunction(value)])
        def test_it(device, name):
            torch.rand(3)
            getattr(library, name)(torch.ones(3, device=device))
        """,
    )
    result = run("--device=openreg", f"--device-misuse={kinds}", "--device-report=out.json", "--tb=no", "-rN")
    names = re.findall(r"^def (\w+)\(", library, re.M)
    failed = sum(name.startswith("raises") for name in names)
    result.assert_outcomes(passed=len(names) - failed, failed=failed)
    assert all(len(line) <= 80 for line in result.outlines if line.startswith("    "))
    rows = json.loads((pytester.path / "out.json").read_text())["findings"]
    assert {row["kind"] for row in rows} <= {kinds} and all(row["remedy"] and row["tests"] for row in rows)
    found = {(row["where"], row["what"]) for row in rows}
    lines = [line.partition("# ! ")[2] for line in library.splitlines()]
    assert kinds != "race" or {row["count"] for row in rows} == {1}, "once for each operator, whatever it accesses"
    assert found == {(f"library.py:{i}", line) for i, line in enumerate(lines, 1) if line}


def test_a_value_that_pytest_shows_is_no_wait(pytester, run):
    pytester.makepyfile("import torch\ndef test_it(device): assert not [torch.ones(3, device=device)]")
    result = run("--device=openreg", "--device-misuse=sync")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["none found in 1 test"])


TRACEBACKS = """
    import pytest, torch
    from torch import nn

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, grad): return grad.view(7)

    def test_operator(device): torch.ones(2, device=device) + torch.ones(3, device=device)
    def test_method(device): torch.ones(2, device=device).view(3)
    def test_module(device): nn.Linear(3, 4, device=device)(torch.ones(2, device=device))
    def test_function(device): nn.functional.gumbel_softmax(torch.ones(2, device=device), dim=3)
    def test_backward(device): torch.ones(2, 2, device=device, requires_grad=True).exp().backward()
    def test_node(device): Fails.apply(torch.ones(3, device=device, requires_grad=True)).sum().backward()
    def test_numpy(device): torch.ones(2, device=device).numpy()
    def test_cause(device):
        try: torch.ones(2, device=device).view(3)
        except RuntimeError as error: raise ValueError from error
    def test_expected(device):
        with pytest.raises(ValueError): torch.ones(2, device=device).view(3)
    def test_vmap(device): torch.func.vmap(lambda x: x.view(7))(torch.ones(2, 2, device=device))
"""


@pytest.mark.slow
def test_a_traceback_ends_at_the_programs_line(pytester, run):
    """What watches the calls is not part of the test that fails."""
    pytester.makepyfile(TRACEBACKS)
    result = run("--device=openreg", "--tb=short", "--show-capture=no", "--device-misuse=all", "-p", "no:randomly")
    result.assert_outcomes(failed=10)
    text = result.stdout.str()
    for name in re.findall(r"def (test_\w+)", TRACEBACKS):
        traceback = text.split(f"_ {name}")[1].split("\n____")[0]
        assert "watch" not in traceback and "test_a_traceback_ends" in traceback, traceback


# ---- cuda ----

ASKS = '''
"""device.type == "cuda", x.is_cuda, ("cpu", "cuda")"""
from typing import Literal
import torch
from torch.cuda import amp, synchronize  # ! torch.cuda.amp, torch.cuda.synchronize
from torch.profiler import ProfilerActivity
# device.type == "cuda", x.is_cuda, ("cpu", "cuda")
ALL, SOME = ("cpu", "cuda", "openreg"), ["cpu", "cuda", "mps"]  # ! allow-list ["cpu", "cuda", "mps"]

def never_called(x, device, name, function: Literal["cpu", "cuda"]):
    text = 'device.type == "cuda", x.is_cuda'
    if device.type == "cuda": pass  # ! device.type == "cuda"
    if torch.device("cuda") != device: pass  # ! torch.device("cuda")
    if device not in ("cpu", "cuda"): raise ValueError  # ! device not in ("cpu", "cuda")
    if x.is_cuda and str(device).startswith("cuda"): pass  # ! is_cuda | str(device).startswith("cuda")
    if "cuda" in str(device): pass  # ! "cuda" in str(device)
    match device.type:
        case "cpu": pass
        case "cuda": pass  # ! case "cuda"
    torch.Generator(device="cuda")  # ! torch.Generator(device="cuda")
    torch.ones(2).to(f"cuda:{1}")  # ! f"cuda:{1}"
    x.cuda(), torch.cuda.amp.autocast(), torch.cuda  # ! .cuda() | torch.cuda.amp.autocast | torch.cuda
    if torch.is_autocast_enabled(): torch.get_autocast_gpu_dtype()  # ! torch.is_autocast_enabled() | torch.get_autocast_gpu_dtype()
    torch.set_autocast_enabled(True)  # ! torch.set_autocast_enabled(True)
    torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype("cpu"), name.set_autocast_enabled(True)
    torch.amp.GradScaler(), torch.amp.GradScaler("cpu"), torch.amp.GradScaler(device)  # ! torch.amp.GradScaler()
    x.type("torch.cuda.FloatTensor"), x.type("torch.FloatTensor")  # ! x.type("torch.cuda.FloatTensor")
    prof.table(sort_by="cuda_time_total"), prof.table(sort_by="device_time_total")  # ! prof.table(sort_by="cuda_time_total")
    init_process_group("nccl"), init_process_group("cpu:gloo,cuda:nccl"), init_process_group("gloo")  # ! init_process_group("nccl") | init_process_group("cpu:gloo,cuda:nccl")
    profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])  # ! ProfilerActivity.CUDA
    profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.PrivateUse1])
    save_on_cpu(pin_memory=True)  # ! save_on_cpu(pin_memory=True)
    save_on_cpu(pin_memory=True, device_type="openreg"), save_on_cpu(pin_memory=False)
    device = "cuda:1" if x else "cpu"  # ! "cuda:1"
    x.device.type != "cpu", name in ("adam", "cuda"), name.startswith("c"), torch.version.cuda, "cuda" in {}
    if device.type == "cuda": x.cuda()  # cuda only
    if device.type in {"cpu", "cuda", "openreg"}: pass

def default(x, device="cuda"): return "cuda"  # ! "cuda"

@torch.amp.custom_fwd(device_type="cuda")  # ! torch.amp.custom_fwd(device_type="cuda")
def forward(ctx, x): pass

@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it(device): pass
'''


def test_source_that_works_on_cuda_only():
    marked = [line.partition("  # ! ")[2].split(" | ") for line in ASKS.splitlines()]
    expected = {(i, what) for i, line in enumerate(marked, 1) for what in line if what}
    assert {*sources.asks_for_cuda(ASKS, {"openreg"})} == expected
    (list_with_mps,) = {what for _, what in expected} - {what for _, what in sources.asks_for_cuda(ASKS, {"mps"})}
    assert list_with_mps == 'allow-list ["cpu", "cuda", "mps"]'


def test_the_source_of_the_program(pytester, run):
    """Modules that the run has imported, also installed ones whose source is here, but no others."""
    site = pytester.mkdir("site-packages")
    for name in ("installed", "of_the_suite"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("def f(x): return x.is_cuda")
    (pytester.mkdir("src") / "of_the_suite").mkdir()
    (pytester.path / "src/of_the_suite/__init__.py").write_text("def f(x): return x.is_cuda")
    pytester.makepyfile(
        library="def f(x): return x.is_cuda",
        never_imported="def f(x): return x.is_cuda",
        test_it="""
        import sys
        sys.path.append("site-packages")
        import installed, library, of_the_suite, pytest
        def test_it(device): assert device.type != "cuda"
        @pytest.mark.skipif(True, reason="needs a GPU")
        def test_gpu(): pass
        @pytest.mark.skipif(True, reason="takes hours")
        def test_slow(): pass
        """,
    )
    result = run("--device=openreg", "--device-misuse=cuda", "--device-report=out.json")
    result.assert_outcomes(passed=1, skipped=2)
    rows = json.loads((pytester.path / "out.json").read_text())["findings"]
    assert {(row["where"], row["what"], row["count"], row["in_tests"]) for row in rows} == {
        ("library.py:1", "is_cuda", 1, False),
        ("site-packages/of_the_suite/__init__.py:1", "is_cuda", 1, False),
        ("test_it.py:4", 'device.type != "cuda"', 1, True),
        ("test_it.py:5", "needs a GPU", 1, True),
    }
    remedies = {row["what"]: row["remedy"] for row in rows}
    assert remedies["is_cuda"] == 'x.device.type != "cpu" is true on every accelerator'
    result.stdout.fnmatch_lines([f"         Remedy: {remedies['is_cuda']}"])
    assert run("--device=cpu", "--device-forbid=cuda").ret == 1


# ---- host: in a process of its own ----


@pytest.mark.processes
@pytest.mark.parametrize("isolation", ["auto", "strict"])
def test_host_access(pytester, run, monkeypatch, isolation):
    """It fails its test, and the run goes on, in any isolation of the run."""
    monkeypatch.setenv("OPENREG_ISOLATION", isolation)
    pytester.makepyfile(
        library="""
        import ctypes
        def first(x):
            host = x
            return ctypes.c_float.from_address(host.data_ptr()).value
        """,
        test_it="""
        import ctypes, library, pytest, torch
        @pytest.fixture
        def x(device): return torch.ones(3, device=device)
        def test_before(x, capsys): print("said"); assert capsys.readouterr().out == "said\\n"
        def test_reads(x): library.first(x)
        def test_numpy(x): x.numpy()
        def test_fails(x): print("kept"); assert 0
        def test_writes(x): ctypes.memset(x.data_ptr(), 0, 4)
        @pytest.mark.skip(reason="not today")
        def test_skipped(): pass
        @pytest.mark.xfail(reason="to be fixed")
        def test_known(x): ctypes.memset(x.data_ptr(), 0, 4)
        @pytest.mark.xfail(raises=ValueError)
        def test_of_another_kind(x): ctypes.memset(x.data_ptr(), 0, 4)
        @pytest.mark.parametrize("i", range(20), ids=lambda i: f"{i}" * 8192)  # more than a variable holds
        def test_many(i): pass
        def test_after(x, record_property):
            record_property("device", x.device)
            assert library.first(x.cpu()) == 1
        """,
    )
    options = ("--device-misuse=host,leak", "--junitxml=out.xml", "--device-report=out.json", "-v", "-ra")
    result = run("--device=openreg", *options, process=True)
    result.assert_outcomes(passed=22, failed=5, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines([
        "openreg: the host read device memory: address *", "*/library.py:4: in first", "*/test_it.py:5: in test_reads",
        "*Captured stdout call*", "kept", "openreg: the host wrote to device memory: address *",
        "host: the host reads or writes device memory",
        "leak: unknown for the tests that ran before *::test_reads* crashed the process", "SKIPPED * not today",
        "XFAIL *::test_known* - to be fixed",
    ])  # fmt: skip
    rows = json.loads((pytester.path / "out.json").read_text())["findings"]
    assert {(row["where"], row["what"]) for row in rows if row["kind"] == "host"} == {
        ("library.py:4", "read device memory"), ("test_it.py:6", "numpy() of a tensor on openreg:0"),
        *((f"test_it.py:{line}", "wrote to device memory") for line in (8, 12, 14)),
    }  # fmt: skip
    assert '<property name="device" value="openreg:0"' in (pytester.path / "out.xml").read_text()


@pytest.mark.parametrize("option, isolated", [("--pdb", False), ("--trace", False), ("-s", True)])
@pytest.mark.processes
def test_a_debugger_has_the_terminal(pytester, run, option, isolated):
    """Its tests run without isolation; isolated ones have no input."""
    pytester.makepyfile(f"""
        import os
        def test_it(device):
            assert (os.environ.get("OPENREG_ISOLATION") == "strict") == {isolated}
            if {isolated}: assert os.read(0, 9) == b""
    """)
    result = run("--device=openreg", "--device-misuse=host", option, process=True, input="continue\n")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "body, status, sentence",
    [
        ("pytest.exit('enough', returncode=0)", 0, "*Exit: enough*"),
        ("raise KeyboardInterrupt", 2, "*KeyboardInterrupt*"),
        ("request.session.shouldstop = 'enough'", 2, "*enough*"),
        ("request.session.shouldfail = 'enough'", 1, "*enough*"),
    ],
    ids=["exit", "interrupt", "shouldstop", "shouldfail"],
)
@pytest.mark.processes
def test_a_test_that_stops_the_run(pytester, run, body, status, sentence):
    """It stops the one that shows the reports, with the same status."""
    pytester.makepyfile(f"""
        import pytest
        def test_before(device): pass
        def test_stops(device, request): {body}
        def test_after(device): assert 0
    """)
    result = run("--device=openreg", "--device-misuse=host", process=True)
    assert result.ret == status
    result.assert_outcomes(passed=2 if "should" in body else 1)
    result.stdout.fnmatch_lines([sentence])


OTHER_IDS = "@pytest.mark.parametrize('n', [os.getpid()])"


@pytest.mark.parametrize(
    "code, count, said",
    [
        (
            "HOST = ctypes.c_float.from_address(0).value if strict else 0",
            "1 of 1",
            "signal 11: Fatal Python error: Segmentation fault",
        ),
        (f"{OTHER_IDS}\ndef test_other(device, n): pass", "1 of 2", "*2 passed*"),
        (f"{OTHER_IDS}\ndef test_other(device, n): os.abort()", "2 of 2", "signal 6: Fatal Python error: Aborted"),
    ],
    ids=["crash", "ids", "ids-crash"],
)
@pytest.mark.processes
def test_tests_that_an_isolated_process_cannot_run(pytester, run, code, count, said):
    pytester.makepyfile(
        f"import ctypes, os, pytest\nstrict = os.environ.get('OPENREG_ISOLATION') == 'strict'\n{code}\n"
        "def test_it(device): pass"
    )
    result = run("--device=openreg", "--device-misuse=host", process=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *did not run {count} tests, as *", said])
    assert result.parseoutcomes().get("failed", 0) == ("abort" in code)  # else it ended before the first


# ---- leaks ----


def test_memory_of_fixtures_is_not_leaked(pytester, run):
    """Gradients that a test leaves in a module of a wide scope, a cycle, and what a failed test's traceback holds."""
    pytester.makeconftest("""
        import pytest, torch
        @pytest.fixture(scope="session")
        def model(device): return torch.nn.Linear(3, 3).to(device)
    """)
    pytester.makepyfile("""
        import torch
        def test_gradients(model, device): model(torch.ones(3, device=device)).sum().backward()
        def test_cycle(device): cycle = [torch.ones(3, device=device)]; cycle.append(cycle)
        def test_fails(device): x = torch.ones(3, device=device); assert 0
    """)
    run("--device=openreg", "--device-misuse=leak").stdout.fnmatch_lines(["none found in 3 tests"])


# ---- the page ----


PAGE = Path(__file__).parents[2] / "docs/testing-your-library.md"


@pytest.mark.processes
@pytest.mark.skipif(not PAGE.exists(), reason="needs the source tree")
def test_the_page_shows_what_its_command_prints(pytester, run):
    """Runs the page's own example; tests/suites/test_suites.py runs the open-source suite."""
    text = PAGE.read_text()
    for name, code in re.findall(r"```python\n# (\S+)\n(.*?)```", text, re.S):
        (pytester.path / name).write_text(f"# {name}\n{code}")
    ((command, shown),) = re.findall(r"```console\n\$ pytest ([^\n]*)\n(.*?)```", text, re.S)
    result = run(*command.split(), process=True, forks=False)
    drop_time = lambda line: re.sub(r" in [\d.]+s.*", "", line)  # noqa: E731
    assert [*map(drop_time, result.outlines)] == [*map(drop_time, shown.splitlines())]


@pytest.mark.skipif(not PAGE.exists(), reason="needs the source tree")
def test_the_page_has_every_kind_and_option():
    text = PAGE.read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == [*misuse.KINDS]
    options = re.findall(r'"(--(?:on-)?device[a-z-]*)"', Path(openreg_tools.pytest_plugin.__file__).read_text())
    assert options and all(option in text for option in options)


# ---- budgets ----

WAITING = "import torch\ndef step(x, times):\n    for _ in range(times): x.sum().item()\n"


def test_budgets(pytester, run):
    """Waits in the tests' own code are free."""
    pytester.makepyfile(
        library=WAITING,
        test_it="""
        import pytest, torch, library
        @pytest.fixture
        def x(device): return torch.ones(3, device=device)
        @pytest.mark.device_syncs(max=3)
        def test_marked(x): library.step(x, 3); x.cpu(); x.cpu()
        @pytest.mark.device_syncs(max=1)
        def test_marked_too_many(x): library.step(x, 2)
        """,
    )
    for options in ([], ["--device-misuse=sync"]):
        result = run("--device=openreg", *options)
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(
            ["the library waited for the device 2 times, and the budget is 1:", "      2  library.py:3  item"]
        )
        assert ("device misuse" in result.stdout.str()) == bool(options)  # a budget reports nothing else
    run("--device=cpu").assert_outcomes(passed=2)


def test_a_region(pytester, run):
    pytester.makepyfile("""
        import torch
        def test_it(device_syncs):
            x = torch.ones(3, device="openreg")
            with device_syncs(max=1) as waits: x.sum().item()
            assert waits == ["test_a_region.py:4  item"]
            with device_syncs(max=0): x.sum().item()
    """)
    for options in ([], ["--device=openreg", "--device-misuse=sync"]):
        result = run(*options)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["the body of device_syncs waited for the device 1 times, and the budget is 0:"])


def test_a_region_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with session.device_syncs(max=0) as waits:
        torch.ones(1).item()
    assert waits == []


# ---- the report ----


def test_lines_that_share_a_remedy_say_it_once():
    assert set(misuse._REMEDIES) == set(misuse.KINDS)
    found = misuse.Misuses()
    for i, what in enumerate(("item", "synchronize", "bool")):
        found.add(misuse.Misuse("sync", what, f"library.py:{i}", "test"))
    assert found.text()[1:] == [
        "      1  library.py:0  item",
        "      1  library.py:2  bool",
        "         Remedy: keep it in a tensor (torch.where for if), or read it later",
        "      1  library.py:1  synchronize",
        "         Remedy: let a stream wait with wait_stream(), or wait later",
    ]


RACE = """
import torch

def test_reads_early(device):
    host = torch.empty(100, pin_memory=True)
    host.copy_(torch.ones(100, device=device), non_blocking=True)
    assert host.numpy()[0] == 1

def test_waits(device):
    torch.ones(2, device=device).sum().item()
"""


def test_the_page_begins_with_what_was_found(pytester, run):
    """The verdict, the order in which a test fails, then the lines of each kind, with the remedy and the test."""
    pytester.makepyfile(test_race=RACE)
    result = run("--device=openreg", "--device-misuse=race,sync", "--device-schedules=9", "--device-html=out.html")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*      1  test_race.py:* the host did not wait for aten::copy_"])  # not once an order
    page = (pytester.path / "out.html").read_text(encoding="utf-8")
    order = ['<p class="verdict fail">2 tests on openreg, 1 failed; lines with misuse: race (1)</p>',
             "FAIL test_race.py::test_reads_early[openreg]: the result depends on the order", "Missing: ",
             "<figcaption>The order of seed", "test_race.py:5</text>", "--device-schedules ", "race: used before the work",
             "Remedy: call torch.accelerator.synchronize()", "test_race.py::test_reads_early[openreg]</td>",
             "in test code (not counted)", "watched for: race, sync"]  # fmt: skip
    assert sorted(order, key=page.index) == order
    assert "watch.py" not in page and not re.search(r"None|\[&#x27;|\{&#x27;", page)


def test_the_page_of_a_run_that_found_nothing(pytester, run):
    pytester.makepyfile("def test_it(device): pass")
    assert run("--device=openreg", "--device-html=out.html").ret == 0
    page = (pytester.path / "out.html").read_text(encoding="utf-8")
    assert '<p class="verdict pass">1 test on openreg, none failed; no misuse found</p>' in page
    assert "nothing; see --device-misuse" in page


def test_forbidden_kinds_fail_the_run(pytester, run):
    pytester.makepyfile(library=WAITING, test_it="""
        import torch, library
        def test_it(device): library.step(torch.ones(3, device=device), 1)
    """)  # fmt: skip
    assert run("--device=openreg", "--device-misuse=sync", "--device-forbid=leak,cuda").ret == 0
    result = run("--device=openreg", "--device-forbid=sync", "--device-sarif=out.sarif")
    result.assert_outcomes(passed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["--device-forbid: found sync"])
    (found,) = json.loads((pytester.path / "out.sarif").read_text())["runs"][0]["results"]
    assert (found["ruleId"], found["level"]) == ("sync", "error")


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_workers_of_xdist_report_together(pytester, run):
    pytester.makepyfile(library=WAITING + "cache = []\n", test_it="""
        import pytest, torch, library
        @pytest.mark.parametrize("i", range(4))
        def test_it(device, i):
            x = torch.ones(3, device=device)
            library.step(x, 1)
            library.cache.append(x + 1)
    """)  # fmt: skip
    options = ("--device=openreg", "--device-misuse=sync,leak", "--device-report=out.json", "-n2")
    result = run(*options, process=True)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*4  test_it.py:6  12 bytes", "*4  library.py:3  item"])
    rows = json.loads((pytester.path / "out.json").read_text())["findings"]
    (waits,) = (row for row in rows if row["kind"] == "sync")
    assert waits["tests"] == {f"test_it.py::test_it[{i}-openreg]": 1 for i in range(4)}


def test_watching_changes_no_result(pytester, run):
    """Subclasses, transforms, fake tensors and compiled functions run as without the watch."""
    pytester.makepyfile("""
        import torch
        from torch._subclasses import FakeTensorMode
        from torch.testing._internal.two_tensor import TwoTensor
        def test_it(device):
            x = torch.arange(6.0, device=device).view(2, 3)
            assert torch.func.vmap(torch.sum)(x).tolist() == [3, 12]
            assert torch.func.grad(lambda x: x.square().sum())(x).equal(2 * x)
            with FakeTensorMode(): assert torch.empty(2, device=device).sum().shape == ()
            assert (TwoTensor(x, x) + 1).a.sum().item() == 21
            assert torch.compile(lambda x: x.sin() + 1, backend="eager")(x).shape == (2, 3)
            sparse = x.to_sparse()
            assert (sparse @ x.t()).shape == (2, 2)
    """)
    run("--device=openreg", "--device-misuse=race,mixed,cuda,pinned,leak,seed,sync").assert_outcomes(passed=1)
