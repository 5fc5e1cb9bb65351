"""`pytest --device`: the device that a test gets, and each kind of misuse: caught, and its clean twin not reported."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from _pytest.pytester import SysModulesSnapshot
from processes import python

import openreg_ops
import openreg_tools.pytest_plugin
from openreg_tools.pytest_plugin import findings
from openreg_tools.pytest_plugin.misuse import Leaks

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

    def run(*arguments, process=False, forks=True):
        arguments = ("-p", "pytest_openreg_ops", "-p", "no:cacheprovider", "-W", "ignore", *arguments)
        if not process:
            return pytester.runpytest_inprocess(*arguments)
        own = f"--basetemp={pytester.path}/basetemp"
        path = os.pathsep.join([str(pytester.path), PATH])
        options = dict(cwd=pytester.path, dynamo=True, nested=forks, PYTHONPATH=path)
        done = python("-m", "pytest", own, *arguments, **options)
        print(done.stdout, done.stderr)
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)

    return run


@pytest.fixture
def found(pytester, run):
    """Runs one test, whose body is given, on openreg, and returns its findings: (what, where) by line of the report."""

    def found(kind, body, library="", device="openreg", passes=True, process=False):
        pytester.makepyfile(
            library="import torch\n" + textwrap.dedent(library),
            test_it="import pytest, torch, library\n\ndef test_it(device):\n"
            + textwrap.indent(textwrap.dedent(body), "    "),
        )
        result = run(f"--device={device}", f"--device-misuse={kind}", "--device-report=out.json", process=process)
        result.assert_outcomes(passed=int(passes), failed=int(not passes))
        assert all(len(line) <= 80 for line in result.outlines if line.startswith("    "))
        rows = json.loads((pytester.path / "out.json").read_text())["findings"]
        assert {row["kind"] for row in rows} <= {kind}
        return [(row["what"], row["where"]) for row in rows if not (row["in_tests"] and kind == "sync")]

    return found


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


PARAMETRIZED = """
    import pytest, torch
    no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no cuda")

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_cuda)], ids=["host", "gpu"])
    @pytest.mark.parametrize("n", [1, 2])
    def test_strings(device, n):
        assert isinstance(device, str) and torch.ones(n, device=device).is_openreg

    @pytest.mark.parametrize("device, dtype", [("cpu", torch.float64), ("cuda", torch.half), ("cuda", torch.float64)])
    def test_pairs(device, dtype):
        assert torch.ones(2, device=device, dtype=dtype).is_openreg

    @pytest.mark.parametrize("device", [torch.device("cuda", 1)])
    def test_devices(device):
        assert torch.ones(2, device=device).is_openreg

    @pytest.mark.parametrize("device", ["phone", "tablet"])
    def test_other_devices(device):
        assert device in ("phone", "tablet")
"""


def test_parameters_of_the_suite_are_replaced(pytester, run):
    pytester.makepyfile(PARAMETRIZED)
    # 2 numbers, 2 dtypes, 1 device, and the 2 that are no devices of torch
    run("--device=openreg").assert_outcomes(passed=7)


SIMILAR = """
    import pytest, torch

    class Case:
        def __init__(self, n): self.n = n
        def __repr__(self): return "Case"

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


def test_no_row_is_lost(pytester, run):
    """Only rows that are surely the same run once."""
    pytester.makepyfile(SIMILAR)
    assert ran(run("-s", "--device=openreg")) == [
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
        (["--device=nope"], "*--device nope: torch * cannot make a tensor there: *-p PACKAGE*"),
        (["--device=openreg:64"], "*--device openreg:64: torch * cannot make a tensor there: *OPENREG_DEVICE_COUNT*"),
        (["--device=openreg", "--device-misuse=sinc"], "*--device-misuse: no kind sinc; there are all, host, race*"),
        (["--device-misuse=all"], "*--device-misuse and related options watch a device; name it with --device DEVICE*"),
    ):
        result = run(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([sentence])


@pytest.mark.slow
def test_the_header_says_what_is_not_seen(pytester, run):
    pytester.makepyfile("def test_it(device): pass")
    for device, kinds, line in (
        ("openreg", "host,race", "device: openreg; watched for: host, race"),
        ("meta", "host,sync", "device: meta; watched for: sync; not seen there: host"),
        ("cpu", "sync", "device: cpu; not seen there: sync"),
        ("cpu", None, "device: cpu"),
    ):
        misuse = [f"--device-misuse={kinds}"] if kinds else []
        run(f"--device={device}", *misuse).stdout.fnmatch_lines([line])


UNSEEN = """
    import torch
    def test_it(device): torch.ones(3, device=device) + 1
"""


@pytest.mark.parametrize(
    ("options", "fails", "lines"),
    [
        (["--device-misuse=race"], True, ["cannot be watched on cpu: race", "         Remedy: run on openreg, *"]),
        (["--device-forbid=race,cuda"], True, ["none of cuda found in 1 test", "cannot be watched on cpu: race"]),
        (["--device-misuse=all"], True, ["none of cuda found *", "cannot be watched on cpu: host, race, mixed, *"]),
        (["--device-sync-budget=0"], True, ["cannot be watched on cpu: sync"]),
        (["--device-misuse=race", "--device-allow-unseen"], False, ["cannot be watched on cpu: race"]),
        (["--device-misuse=cuda"], False, ["none found in 1 test"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_a_kind_that_cannot_be_watched_fails_the_run(pytester, run, options, fails, lines):
    pytester.makepyfile(UNSEEN)
    result = run("--device=cpu", *options)
    result.assert_outcomes(passed=1)
    assert result.ret == int(fails)
    result.stdout.fnmatch_lines(lines)
    assert ("Remedy" in result.stdout.str()) == fails


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


def test_waits(found):
    library = """
        def step(x):
            if x.sum() > 0:
                print(x)
            torch.openreg.synchronize(device=x.device)
            return x.max().item(), x[x > 0], x.cpu(), x.tolist()
    """
    assert found("sync", "library.step(torch.ones(3, device=device))", library) == [
        ("bool", "library.py:4"),
        ("copy to the host", "library.py:7"),
        ("index.Tensor: a size or value that depends on data", "library.py:7"),
        ("item", "library.py:7"),
        ("print", "library.py:5"),
        ("synchronize", "library.py:6"),
        ("tolist", "library.py:7"),
    ]
    failing = "assert library.step(torch.ones(3, device=device)) is None"  # pytest shows what is not None
    assert found("sync", failing, "def step(x): return [x]", passes=False) == []
    clean = "def step(x): return torch.where(x.sum() > 0, x + 1, x[[0, 1, 2]]).to(x.device)"
    assert found("sync", "assert library.step(torch.ones(3, device=device)).cpu().sum() == 6", clean) == []


def test_a_backward_that_waits_and_a_fallback(found):
    library = """
        mine = torch.library.Library("test_plugin", "DEF")
        mine.define("twice(Tensor x) -> Tensor")
        mine.impl("twice", lambda x: x * 2, "CPU")
        class Waits(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x.clone()
            @staticmethod
            def backward(ctx, grad): return grad * grad.sum().item()
        def step(x):
            Waits.apply(x).sum().backward()
            return torch.ops.test_plugin.twice(x.detach())
    """
    assert found("sync", "library.step(torch.ones(3, device=device, requires_grad=True))", library) == [
        ("item", "library.py:10"),
        ("test_plugin::twice falls back to the CPU", "library.py:13"),
    ]


def test_mixed_devices(found):
    library = "def add(x): return x + torch.ones(3)"
    body = "library.add(torch.ones(3, device=device))"
    assert found("mixed", body, library, passes=False) == [("add of cpu and openreg:0", "library.py:2")]
    expected = f"with pytest.raises(RuntimeError, match='same device'):\n    {body}"
    assert found("mixed", expected, library) == []
    assert found("mixed", body, "def add(x): return x + torch.tensor(1.0)") == []


@pytest.mark.parametrize(
    ("kind", "body"),
    [("mixed", "torch.ones(2, device=device) + torch.ones(3, device=device)"), ("cuda", "torch.cuda.no_such_name")],
    ids=["call", "torch.cuda"],
)
def test_a_traceback_does_not_show_the_plugin(pytester, run, kind, body):
    """What watches the calls is not part of the test that fails."""
    pytester.makepyfile(f"import torch\ndef test_it(device):\n    {body}")
    result = run("--device=openreg", f"--device-misuse={kind}", "--tb=short")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_a_traceback_does_not_show_the_plugin.py:3: *"])
    result.stdout.no_fnmatch_line("*misuse.py*")


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


@pytest.mark.parametrize("budget", [False, True])
def test_tracebacks_are_as_without_the_watch(pytester, run, budget):
    pytester.makepyfile(TRACEBACKS)
    watched = ["--device-sync-budget=9"] if budget else ["--device-misuse=race,mixed,cuda,pinned,leak,seed,sync"]
    shown = []
    for options in ([], watched):
        result = run("--device=openreg", "--tb=short", "--show-capture=no", *options)
        result.assert_outcomes(failed=10)
        text = result.stdout.str()
        shown.append(text[text.index("= FAILURES") : re.search("=+ (device misuse|short test)", text).start()])
    assert shown[0] == shown[1]


def test_hard_coded_cuda(found):
    library = """
        def where(x):
            if x.is_cuda:
                return torch.device("cuda")
            with torch.autocast("cuda"):
                pass
            for make in (lambda: x.to("cuda"), lambda: torch.ones(2, device="cuda"), torch.cuda.current_device, x.cuda):
                try: make()
                except (AssertionError, RuntimeError): pass
    """
    body = "library.where(torch.ones(3, device=device))"
    assert {what for what, _ in found("cuda", body, library)} == {
        "is_cuda", 'autocast("cuda")', 'device "cuda"', "torch.cuda.current_device", "torch.cuda is used", ".cuda()"
    }  # fmt: skip
    clean = """
        def where(x):
            torch.accelerator.is_available(), torch.accelerator.device_count(), torch.openreg.memory_summary()
            torch.amp.GradScaler(x.device.type, enabled=False), torch.Generator(x.device), x.type(torch.float64)
            torch.manual_seed(0), torch.set_default_tensor_type("torch.FloatTensor")
            with torch.autocast(x.device.type), torch.random.fork_rng(device_type=x.device.type):
                torch.nn.MultiheadAttention(8, 2, device=x.device)(*[torch.ones(2, 1, 8, device=x.device)] * 3)
                return torch.ones(2, device=x.device).to("cpu"), torch.device("cpu")
    """
    assert found("cuda", body, clean) == []


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_cuda_device_that_was_made_before_the_test(found, device):
    """Each call that gets it is reported."""
    library = f"""
        CUDA = torch.device("{device}")
        def attempt(make):
            try: make()
            except (AssertionError, RuntimeError): pass
        def step(x):
            attempt(lambda: x.to(CUDA))
            attempt(lambda: torch.ones(2, device=CUDA))
            attempt(lambda: x.to(device=CUDA))
            attempt(lambda: x.cpu().is_pinned(CUDA))
            attempt(lambda: x.to(torch.device("cpu")) + torch.ones(3, device="cpu"))
    """
    expected = {(f'device "{device}"', f"library.py:{line}") for line in (8, 9, 10, 11)}
    assert {*found("cuda", "library.step(torch.ones(3, device=device))", library)} == expected


ASKS = "torch.cuda.{0}: torch.accelerator.{0} asks for any"


@pytest.mark.parametrize(
    "code, what",
    [
        ('torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu")', [ASKS.format("is_available")]),
        ('x.to("cuda:1")', ['device "cuda:1"']),
        ("torch.cuda.device_count()", [ASKS.format("device_count")]),
        ('torch.get_device_module("cuda").device_count()', ['device "cuda"', ASKS.format("device_count")]),
        ("from torch.cuda import device_count as count; count()", [ASKS.format("device_count")]),
        *(
            (f"torch.cuda.{call}", [f"torch.cuda.{call.partition('(')[0]}"])
            for call in (
                "manual_seed_all(0)", "manual_seed(0)", "empty_cache()", "synchronize()", "current_device()", "Stream()",
                "Event()", "FloatTensor(3)", "memory.memory_allocated()", 'nvtx.range_push("step")', "amp.custom_fwd",
            )
        ),
        ('torch.amp.GradScaler("cuda")', ['GradScaler("cuda")']),
        ("torch.amp.GradScaler()", ['GradScaler("cuda")']),
        ("torch.cuda.amp.GradScaler()", ['GradScaler("cuda")']),
        ("GradScaler()", ['GradScaler("cuda")']),
        ('torch.autocast("cuda").__enter__().__exit__(None, None, None)', ['autocast("cuda")']),
        ("torch.cuda.amp.autocast()", ['autocast("cuda")']),
        ("autocast()", ['autocast("cuda")']),
        ("synchronize()", ["torch.cuda is used"]),
        ('x.type("torch.cuda.FloatTensor")', ['"torch.cuda.FloatTensor"']),
        ('x.type(dtype="torch.cuda.HalfTensor")', ['"torch.cuda.HalfTensor"']),
        ('torch.set_default_tensor_type("torch.cuda.FloatTensor")', ['"torch.cuda.FloatTensor"']),
    ],
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="some of the calls work where there is CUDA")
def test_cuda_by_name(found, code, what):
    library = f"""
        from torch.cuda import synchronize
        from torch.cuda.amp import GradScaler, autocast
        def step(x):
            try:
                {code}
            except (AssertionError, RuntimeError, TypeError): pass
    """
    try:
        assert found("cuda", "library.step(torch.ones(3, device=device))", library) == [
            (each, "library.py:7") for each in what
        ]
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)  # CUDA's is taken where torch has CUDA and no GPU is there


FUNCTIONS = """
    import torch.distributed as dist
    from torch.amp import custom_bwd, custom_fwd
    from torch.autograd.graph import save_on_cpu
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.checkpoint import checkpoint

    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type={device!r}, cast_inputs=torch.float32)
        def forward(ctx, x): return x * 2

        @staticmethod
        @custom_bwd(device_type={device!r})
        def backward(ctx, grad): return grad * 2

    def attempt(make):
        try: return make()
        except (AssertionError, RuntimeError, ValueError): pass

    def run(x):
        x = x.requires_grad_()
        Double.apply(x).sum().backward()
        attempt(lambda: init_device_mesh({device!r}, (1,)))
        attempt(lambda: DeviceMesh({device!r}, [0]))
        attempt(lambda: dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1))
        with profile(activities=[ProfilerActivity.CPU, {activity}]) as prof:
            checkpoint(torch.sin, x, use_reentrant=False)
        attempt(lambda: prof.key_averages().table(sort_by={key!r}))
        attempt(lambda: x.detach().cpu().pin_memory({device!r}))
        with save_on_cpu({options}):
            attempt(lambda: x.sin())
        {autocast}
        if dist.is_initialized(): dist.destroy_process_group()
"""


def test_cuda_in_functions_that_no_mode_sees(found):
    body = "library.run(torch.ones(3, device=device))"
    cuda = {"device": "cuda", "backend": "nccl", "activity": "ProfilerActivity.CUDA", "key": "cuda_time_total"}
    autocast = "torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()"
    library = textwrap.dedent(FUNCTIONS.format(**cuda, options="pin_memory=True", autocast=autocast))
    lines = ["import torch", *library.splitlines()]
    line = lambda text: f"library.py:{next(i for i, each in enumerate(lines, 1) if text in each)}"  # noqa: E731
    assert {*found("cuda", body, library)} == {
        ('custom_fwd(device_type="cuda")', line("@custom_fwd")),
        ('custom_bwd(device_type="cuda")', line("@custom_bwd")),
        ('DeviceMesh("cuda")', line("init_device_mesh('cuda'")),
        ('DeviceMesh("cuda")', line("DeviceMesh('cuda'")),
        ('backend "nccl"', line("init_process_group")),
        ("ProfilerActivity.CUDA", line("with profile")),
        ('table(sort_by="cuda_time_total")', line("sort_by=")),
        ('device "cuda"', line("pin_memory('cuda')")),
        ("save_on_cpu(pin_memory=True)", line("with save_on_cpu")),
        ("torch.is_autocast_enabled()", line("is_autocast_enabled()")),
        ("torch.get_autocast_gpu_dtype()", line("get_autocast_gpu_dtype()")),
    }
    autocast = "torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)"
    device = {"device": "openreg", "backend": None, "key": "device_time_total", "autocast": autocast}
    activity, options = "ProfilerActivity.PrivateUse1", "pin_memory=True, device_type='openreg'"
    assert found("cuda", body, textwrap.dedent(FUNCTIONS.format(**device, activity=activity, options=options))) == []
    activity, options = "ProfilerActivity.PrivateUse1, ProfilerActivity.CUDA", ""  # every device's
    assert found("cuda", body, textwrap.dedent(FUNCTIONS.format(**device, activity=activity, options=options))) == []


def test_decorators_of_a_library_that_a_conftest_imports(pytester, run):
    """It comes before the session does."""
    pytester.makeconftest("import library")
    pytester.makepyfile(library="""
        import torch
        class Double(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx, x): return x * 2
    """, test_it="""
        import library, torch
        def test_it(device): library.Double.apply(torch.ones(3, device=device))
    """)  # fmt: skip
    lines = ['*1  library.py:4  custom_fwd(device_type="cuda")']
    run("--device=openreg", "--device-misuse=sync, cuda").stdout.fnmatch_lines(lines)
    run("--device=openreg", "--device-misuse=sync").stdout.fnmatch_lines(["none found in 1 test"])


SOURCE = '''
"""device.type == "cuda", x.is_cuda, ("cpu", "cuda")"""
from typing import Literal
import torch
# device.type == "cuda", x.is_cuda, ("cpu", "cuda")
ALL, SOME = ("cpu", "cuda", "openreg"), ["cpu", "cuda", "mps"]

def never_called(x, device, name, function: Literal["cpu", "cuda"]):
    text = 'device.type == "cuda", x.is_cuda'
    if device.type == "cuda": pass
    if torch.device("cuda") != device: pass
    if device not in ("cpu", "cuda"): raise ValueError
    if x.is_cuda and str(device).startswith("cuda"): pass
    if "cuda" in str(device): pass
    match device.type:
        case "cpu": pass
        case "cuda": pass
    torch.Generator(device="cuda")
    if torch.is_autocast_enabled(): x.to(torch.get_autocast_gpu_dtype())
    torch.set_autocast_enabled(True)
    torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype("cpu"), name.set_autocast_enabled(True)
    x.device.type != "cpu", name in ("adam", "cuda"), name.startswith("c"), torch.version.cuda, "cuda" in {}
    if device.type == "cuda": pass  # cuda only
    if device.type in {"cpu", "cuda", "openreg"}: pass
'''


def test_the_source_of_the_program(pytester, run):
    """Code that no watcher sees, whether it ran or not; comments, strings and types say nothing."""
    site = pytester.mkdir("site-packages")
    (site / "installed.py").write_text("def f(x): return x.is_cuda")
    pytester.makepyfile(
        library=SOURCE.lstrip(),
        never_imported="def f(x): return x.is_cuda",
        test_it="""
        import sys
        sys.path.append("site-packages")
        import installed, library, pytest
        @pytest.mark.parametrize("kind", ["cpu", "cuda"])
        def test_it(device, kind): assert device.type != "cuda"
        """,
    )
    result = run("--device=openreg", "--device-misuse=cuda", "--device-report=out.json")
    result.assert_outcomes(passed=2)
    rows = json.loads((pytester.path / "out.json").read_text())["findings"]
    assert all(row["count"] == 1 and row["tests"] == {} and row["remedy"] for row in rows)
    assert {(int(row["where"].partition(":")[2]), row["what"]) for row in rows if not row["in_tests"]} == {
        (5, 'allow-list ["cpu", "cuda", "mps"]'),
        (9, 'device.type == "cuda"'),
        (10, 'torch.device("cuda") != device'),
        (11, 'device not in ("cpu", "cuda")'),
        (12, "is_cuda"),
        (12, 'str(device).startswith("cuda")'),
        (13, '"cuda" in str(device)'),
        (16, 'case "cuda"'),
        (17, 'torch.Generator(device="cuda")'),
        (18, "torch.is_autocast_enabled()"),
        (18, "torch.get_autocast_gpu_dtype()"),
        (19, "torch.set_autocast_enabled(True)"),
    }
    (test,) = (row for row in rows if row["in_tests"])
    assert (test["what"], test["where"]) == ('device.type != "cuda"', "test_it.py:5")
    assert run("--device=cpu", "--device-forbid=cuda").ret == 1


def test_a_line_that_ran_is_reported_once(found):
    library = "def where(x): return x.is_cuda"
    assert found("cuda", "library.where(torch.ones(3, device=device))", library) == [("is_cuda", "library.py:2")]


def test_naming_cuda_changes_nothing_in_it(found):
    """Classes stay themselves, mocks work, and what a test patches is the real thing again behind it."""
    before = {name: torch.cuda.__dict__[name] for name in torch.cuda.__all__}
    body = """
        from unittest import mock
        class Stream(torch.cuda.Stream): pass
        assert issubclass(Stream, library.Stream) and torch.cuda.Stream is library.Stream
        assert not isinstance(None, torch.cuda.Event) and not hasattr(torch.cuda, "no_such_name")
        with mock.patch("torch.cuda.is_available", return_value=True), mock.patch.object(torch.cuda, "device_count"):
            assert torch.cuda.is_available()
        pytest.MonkeyPatch().setattr(torch.cuda, "empty_cache", torch.cuda.empty_cache)
        assert torch.compile(lambda x: x + torch.cuda.device_count(), backend="eager")(torch.ones(1)) == 1
    """
    whats = [what for what, _ in found("cuda", body, "from torch.cuda import Stream")]
    compiled = {ASKS.format("device_count")}  # seen where Dynamo leaves the function to Python
    assert {*whats} - compiled == {
        "torch.cuda.Event", "torch.cuda.Stream", "torch.cuda.empty_cache", ASKS.format("is_available")
    }  # fmt: skip
    assert type(torch.cuda) is type(torch.cuda.amp) is type(os)
    assert {name: torch.cuda.__dict__[name] for name in torch.cuda.__all__} == before


def test_tests_skipped_for_want_of_cuda(pytester, run):
    pytester.makepyfile("""
        import pytest
        @pytest.mark.skipif(True, reason="needs a GPU")
        def test_cuda(): pass
        @pytest.mark.skipif(True, reason="takes hours")
        def test_slow(): pass
    """)
    result = run("--device=openreg", "--device-misuse=cuda", "--device-report=found.json")
    result.stdout.fnmatch_lines(["*1  test_*.py:2  needs a GPU"])
    result.stdout.no_fnmatch_line("*hours*")
    (one,) = json.loads((pytester.path / "found.json").read_text())["findings"]
    assert one["in_tests"] and (one["kind"], one["what"], one["count"]) == ("cuda", "needs a GPU", 1)


@pytest.mark.processes
def test_the_checker_passes_under_the_watch(pytester, run):
    """Its fake tensors have unknown sizes, and torch.func copies numbers."""
    pytester.makepyfile("""
        import torch
        def test_it(openreg_check):
            x = torch.randn(3, 4, device="openreg")
            openreg_check("openreg::swiglu", [(x, x + 1)])
    """)
    run("--device=openreg", "--device-misuse=all", process=True).assert_outcomes(passed=1)


@pytest.mark.processes
def test_host_access(found):
    library = """
        import ctypes
        def first(x):
            host = x
            return ctypes.c_float.from_address(host.data_ptr()).value
    """
    body = "assert library.first(torch.ones(3, device=device)) == 1"
    assert found("host", body, library, passes=False, process=True) == [("read device memory", "library.py:6")]
    assert found("host", body, library.replace("host = x", "host = x.cpu()"), process=True) == []


@pytest.mark.processes
@pytest.mark.parametrize("isolation", ["auto", "strict"])
def test_host_access_in_any_isolation_of_the_run(pytester, run, monkeypatch, isolation):
    monkeypatch.setenv("OPENREG_ISOLATION", isolation)
    pytester.makepyfile("""
        import ctypes, torch
        def test_reads(device): ctypes.c_float.from_address(torch.ones(3, device=device).data_ptr()).value
        def test_after(device): pass
    """)
    result = run("--device=openreg", "--device-misuse=host", process=True)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["      1  test_host_*.py:2  read device memory"])


@pytest.mark.processes
def test_host_access_by_numpy(found):
    body = "library.first(torch.ones(3, device=device))"
    library = "def first(x): return x.numpy()[0]"
    where = ("numpy() of a tensor on openreg:0", "library.py:2")
    assert found("host", body, library, passes=False, process=True) == [where]
    assert found("host", body, library.replace("x.numpy", "x.cpu().numpy"), process=True) == []


@pytest.mark.processes
def test_the_run_goes_on_after_a_host_access(pytester, run):
    pytester.makepyfile("""
        import ctypes, pytest, torch
        def test_before(device, capsys): print("said"); assert capsys.readouterr().out == "said\\n"
        def test_reads(device): ctypes.c_float.from_address(torch.ones(3, device=device).data_ptr()).value
        def test_fails(device): print("kept"); assert 0
        def test_writes(device): ctypes.memset(torch.ones(3, device=device).data_ptr(), 0, 4)
        @pytest.mark.skip(reason="not today")
        def test_skipped(): pass
        @pytest.mark.xfail(reason="to be fixed")
        def test_known(device): ctypes.memset(torch.ones(3, device=device).data_ptr(), 0, 4)
        @pytest.mark.xfail(raises=ValueError)
        def test_of_another_kind(device): ctypes.memset(torch.ones(3, device=device).data_ptr(), 0, 4)
        def test_after(device): torch.ones(3, device=device)
    """)
    result = run("--device=openreg", "--device-misuse=host,leak", "-v", "-ra", process=True)
    result.assert_outcomes(passed=2, failed=4, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines([
        "openreg: the host read device memory: address *", "*test_the_run_*.py:3: in test_reads", "*Captured stdout call*",
        "kept", "openreg: the host wrote to device memory: address *", "host: the host reads or writes device memory",
        "      1  test_the_run_goes_on_after_a_host_access.py:3  read device memory",
        "leak: not known of the tests whose process *::test_reads* ended", "SKIPPED * not today",
        "XFAIL *::test_known* - to be fixed",
    ])  # fmt: skip


@pytest.mark.parametrize("option, isolated", [("--pdb", False), ("--trace", False), ("-s", True)])
def test_a_debugger_has_the_terminal(pytester, run, option, isolated):
    """Its tests run without isolation; isolated ones have no input."""
    pytester.makepyfile(f"""
        import os
        def test_it(device):
            assert (os.environ.get("OPENREG_ISOLATION") == "strict") == {isolated}
            if {isolated}: assert os.read(0, 9) == b""
    """)
    options = ("-p", "pytest_openreg_ops", "--device=openreg", "--device-misuse=host", option)
    result = pytester.run(sys.executable, "-m", "pytest", *options, stdin=b"continue\n")
    result.assert_outcomes(passed=1)


@pytest.mark.processes
def test_more_finished_tests_than_an_environment_variable_holds(pytester, run):
    pytester.makepyfile("""
        import ctypes, pytest, torch
        @pytest.mark.parametrize("i", range(20), ids=lambda i: f"{i}" * 8192)
        def test_many(i): pass
        def test_reads(device): ctypes.c_float.from_address(torch.ones(3, device=device).data_ptr()).value
        def test_after(device): pass
    """)
    run("--device=openreg", "--device-misuse=host", process=True).assert_outcomes(passed=21, failed=1)


@pytest.mark.processes
def test_a_property_that_is_no_json(pytester, run):
    pytester.makepyfile("""
        def test_it(device, record_property): record_property("device", device)
        def test_fails(device): assert 0
    """)
    result = run("--device=openreg", "--device-misuse=host", "--junitxml=out.xml", process=True)
    result.assert_outcomes(passed=1, failed=1)
    assert '<property name="device" value="openreg"' in (pytester.path / "out.xml").read_text()


@pytest.mark.parametrize(
    "body, status, sentence",
    [
        ("pytest.exit('enough', returncode=3)", 3, "*Exit: enough*"),
        ("pytest.exit('enough', returncode=0)", 0, "*Exit: enough*"),
        ("raise KeyboardInterrupt", 2, "*KeyboardInterrupt*"),
        ("request.session.shouldstop = 'enough'", 2, "*enough*"),
        ("request.session.shouldfail = 'enough'", 1, "*enough*"),
    ],
    ids=["exit", "exit-0", "interrupt", "shouldstop", "shouldfail"],
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
    "code, sentences",
    [
        (
            "HOST = ctypes.c_float.from_address(0).value if strict else 0",
            ["ERROR: *ended and ran none of the remaining ones:"],
        ),
        ("assert not strict", ["ERROR: *ended with status 2:", "E   assert not True"]),
        (
            "pytest.skip('isolated', allow_module_level=strict) if strict else 0",
            ["ERROR: *did not run 1 of 1 tests, as *"],
        ),
        (f"{OTHER_IDS}\ndef test_other(device, n): pass", ["ERROR: *did not run 1 of 2 tests, as *::test_other*"]),
        (f"{OTHER_IDS}\ndef test_other(device, n): os.abort()", ["ERROR: *ended and ran none of the remaining ones:"]),
    ],
    ids=["crash", "collection", "skip", "ids", "ids-crash"],
)
@pytest.mark.processes
def test_tests_that_an_isolated_process_cannot_run(pytester, run, code, sentences):
    pytester.makepyfile(
        f"import ctypes, os, pytest\nstrict = os.environ.get('OPENREG_ISOLATION') == 'strict'\n{code}\n"
        "def test_it(device): pass"
    )
    result = run("--device=openreg", "--device-misuse=host", process=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(sentences)
    assert result.parseoutcomes().get("failed", 0) == ("abort" in code)  # else it ended before the first


@pytest.mark.processes
def test_a_run_within_a_test(pytester, run):
    """It is a separate run, which reports only to its test."""
    pytester.makeconftest("pytest_plugins = ['pytester']")
    pytester.makepyfile("""
        import pytest
        @pytest.mark.parametrize("where", ["cpu", "openreg"])
        def test_outer(pytester, where, device):
            pytester.makepyfile("def test_inner(device): pass")
            result = pytester.runpytest_inprocess("-p", "pytest_openreg_ops", "--device=" + where)
            result.assert_outcomes(passed=1)
        def test_fails(device): assert 0
    """)
    result = run("--device=openreg", "--device-misuse=host", process=True)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.no_fnmatch_line("*test_inner*")


def test_pinned_memory(found):
    library = """
        def copy(device):
            x = torch.ones(1 << 18)
            return x.to(device, non_blocking=True)
    """
    what = "non_blocking copy of memory that is not pinned: the host copies it to a buffer first"
    assert found("pinned", "library.copy(device)", library) == [(what, "library.py:5")]
    assert found("pinned", "library.copy(device)", library.replace("18)", "18).pin_memory()")) == []
    library = """
        def copy(device):
            host = torch.empty(4)
            return host.copy_(torch.ones(4, device=device), non_blocking=True)
    """
    what = "non_blocking copy to memory that is not pinned: the host waits"
    assert found("pinned", "library.copy(device)", library) == [(what, "library.py:5")]
    pinned = library.replace("empty(4)", "empty(4, pin_memory=True)")
    assert found("pinned", "library.copy(device)", pinned) == []
    what = "non_blocking copy to memory of the host that is not pinned"
    assert found("sync", "library.copy(device)", library) == [(what, "library.py:5")]
    assert found("sync", "library.copy(device)", pinned) == []


def test_pinned_memory_written_while_it_is_copied(found):
    library = """
        def copy(device):
            x = torch.ones(1 << 18).pin_memory()
            y = x.to(device, non_blocking=True)
            # wait
            x.zero_()
            return y
    """
    what = "written while aten::_to_copy may read it"
    assert found("pinned", "library.copy(device)", library) == [(what, "library.py:7")]
    assert found("pinned", "library.copy(device)", library.replace("# wait", "torch.accelerator.synchronize()")) == []


def test_a_copy_in_a_backward_pass(found):
    """The line is that of backward(), where the node is PyTorch's, whatever thread it runs on."""
    library = """
        class Copies(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x.clone()
            @staticmethod
            def backward(ctx, grad): return grad * torch.ones(1).to(grad.device, non_blocking=True)
        def run(x):
            return Copies.apply(x.to("openreg", non_blocking=True)).sum()
        def step(loss):
            torch.autograd.backward(
                [loss]
            )
    """
    what = "non_blocking copy of memory that is not pinned: the host copies it to a buffer first"
    for mode in ("inline", "async"):
        body = f"""
            torch.openreg.set_launch_mode({mode!r})
            library.step(library.run(torch.ones(3, requires_grad=True).pin_memory()))
            torch.openreg.synchronize()
            torch.openreg.set_launch_mode("inline")
        """
        assert found("pinned", body, library) == [(what, "library.py:7")]
        assert ("copy between host and device", "library.py:11") in found("sync", body, library)


def test_read_too_early(found):
    library = """
        def total(x):
            host = x.to("cpu", non_blocking=True)
            # wait
            return host.sum()
    """
    body = "library.total(torch.ones(3, device=device))"
    assert found("race", body, library) == [("the host did not wait for aten::_to_copy", "library.py:6")]
    assert found("race", body, library.replace("# wait", "torch.openreg.current_stream().synchronize()")) == []


def test_streams_that_do_not_wait(found):
    library = """
        def double(x, side):
            # wait
            with side:
                return x * 2
    """
    body = "library.double(torch.ones(3, device=device), torch.openreg.Stream())"
    ((race, where),) = found("race", body, library)
    assert re.fullmatch(r"stream \d+ did not wait for aten::ones", race) and where == "library.py:6"
    wait = "side.wait_stream(torch.openreg.current_stream())"
    assert found("race", body, library.replace("# wait", wait)) == []


@pytest.mark.parametrize("kind", ["race", "mixed", "leak", "cuda", "pinned", "seed"])
def test_right_programs_of_rarer_layouts(found, kind):
    """Compressed sparse memory, masks, halves of an allocation and columns on two streams that wait for each other."""
    library = """
        def train(device, side):
            x = torch.eye(8, device=device)
            sparse, mask = x.to_sparse_csr(), x > 0
            current = torch.openreg.current_stream()
            side.wait_stream(current)
            with side:
                y = (sparse * 2).to_dense()
                x[:4].add_(y[:4])
            x[4:].mul_(2)
            current.wait_stream(side)
            x[mask] = 1
            x.masked_fill_(~mask, 0.5)
            side.wait_stream(current)
            with side:
                x[:, ::2].add_(1)
            x[:, 1::2].sub_(1)
            current.wait_stream(side)
            y.record_stream(side)
            host = torch.empty(8, 8, pin_memory=True)
            host.copy_(x, non_blocking=True)
            current.synchronize()
            return host.sum().item()
    """
    body = "assert library.train(device, torch.openreg.Stream()) == 36"
    assert found(kind, body, library) == []


def test_leaked_memory(found):
    library = """
        cache = {}
        def twice(x):
            y = x * 2
            cache["last"] = y
            return y
    """
    body = "library.twice(torch.ones(100, device=device))"
    assert found("leak", body, library) == [("400 bytes", "library.py:5")]
    assert found("leak", body, library.replace("= y\n", "= y.shape\n", 1).replace("y = x.shape", "y = x")) == []


def test_the_list_of_live_memory(monkeypatch):
    """It stays short however much memory is allocated and freed, and is not searched at every allocation."""
    searches, reported, prune = [], [], Leaks._prune
    watch = types.SimpleNamespace(found=lambda *found: reported.append(found))
    monkeypatch.setattr(Leaks, "alive", [])
    monkeypatch.setattr(Leaks, "most", 1000)
    monkeypatch.setattr(Leaks, "_prune", lambda: searches.append(len(Leaks.alive)) or prune())

    def allocate(where):
        x = torch.ones(1)
        Leaks.made(x.untyped_storage(), watch, where, True)
        return x

    def longest_of(count):
        """The longest list while as many tensors are allocated and freed."""
        return max(len(Leaks.alive) for _ in range(count) if allocate("freed") is not None)

    held = [allocate("held") for _ in range(1500)]
    assert longest_of(8000) <= 2 * (len(held) + 1) + 1 and len(searches) < 10
    held = held[:3]
    longest_of(4000)
    assert longest_of(4000) < 1100 and len(searches) < 20
    Leaks.tell()
    assert reported == [("leak", "4 bytes", "held", True)] * 3 and not Leaks.alive


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


def test_random_numbers_of_the_cpu(found):
    library = """
        def noisy(x): return x + torch.rand(x.shape).to(x.device)
    """
    body = "torch.manual_seed(0)\nlibrary.noisy(torch.rand(3).to(device))"
    assert found("seed", body, library) == [("rand on the CPU, in the library", "library.py:3")]
    assert found("seed", body, library.replace(".shape).to(x", ".shape, device=x")) == []
    generator = library.replace("x.shape", "x.shape, generator=torch.Generator().manual_seed(0)")
    assert found("seed", body, generator) == []
    where_x_is = library.replace("rand(x.shape)", "rand_like(x.cpu())")
    assert found("seed", body, where_x_is) == [("rand_like on the CPU, in the library", "library.py:3")]
    assert found("seed", body, where_x_is.replace(".to(x.device)", ".sum().item()")) == []  # not on the device
    assert found("seed", "library.noisy(torch.ones(3))", library) == []  # a test that leaves the device alone
    assert found("seed", body, "def noisy(x): return torch.nn.Linear(3, 3).to(x.device)(x)") == []  # made, then moved
    body = body.replace("torch.manual_seed(0)\n", "")
    what = "rand on the CPU, which this test has not seeded"
    assert found("seed", body, "def noisy(x): return x") == [(what, "test_it.py:4")]


DRAWS = """
    import torch.distributions as D
    import torch.nn.functional as F

    def bernoulli(x): return x * torch.empty(x.shape).bernoulli_(0.5).to(x.device)  # !
    def uniform(x): return x.copy_(torch.empty(3, pin_memory=True).uniform_(), non_blocking=True)  # !
    def multinomial(x): return x[torch.multinomial(torch.ones(3), 3)]  # !
    def dropout(x): return x * F.dropout(torch.ones(3)).to(x.device)  # !
    def trained(x): return x * F.dropout(torch.ones(3, requires_grad=True)).to(x.device)  # !
    def module(x): return x * torch.nn.RReLU()(-torch.ones(3)).to("openreg")  # !
    def normal(x): return x * D.Normal(0.0, 1.0).sample(x.shape).to(x.device)  # !
    def dirichlet(x): return x * (2 * D.Dirichlet(torch.ones(3)).sample()).clamp(0, 1).to(x.device)  # !
    def gamma(x): return x * D.Gamma(torch.ones(3), 1.0).rsample().to(x)  # !
    def number(x): return x * torch.bernoulli(torch.tensor(0.5))  # !
    def out(x):
        y, z = torch.empty(3), torch.zeros(4)
        torch.normal(0.0, 1.0, (3,), out=y)  # !
        z[1:] = y
        return x * z.to(x.device)[1:]
    def value(x): return x * torch.rand(1).item()  # !
    def values(x): return x + torch.tensor(torch.randn(3).tolist(), device=x.device)  # !

    def on_the_device(x): return F.dropout(x) + torch.empty_like(x).bernoulli_() + D.Normal(x, 1 + x.abs()).sample()
    def own(x): return x * torch.rand(3, generator=torch.Generator().manual_seed(0)).to(x.device)
    def on_the_host(x): return x * len(F.dropout(torch.ones(3)))
    def nothing_drawn(x): return x * F.dropout(torch.ones(3), training=False).to(x.device)
    def overwritten(x): return torch.empty(3).uniform_().copy_(x).sum()

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = torch.nn.Parameter(torch.empty(3)), torch.nn.Parameter(torch.randn(3))
            self.register_buffer("b", torch.empty(3).normal_())
            self.w.data.uniform_(-1, 1)
        def forward(self, x): return x * self.w + self.v + self.b
    def moved(x): return Module().to(x.device)(x)
    def loaded(x):
        module = Module().to(x.device)
        module.load_state_dict(Module().state_dict())
        return module(x)
    def shuffled(x):
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 3)), shuffle=True)
        return sum(x + each.to(x.device) for (each,) in data)
"""


@pytest.mark.parametrize("passes", [True, False])
def test_numbers_of_the_library_that_come_to_the_device(pytester, run, passes):
    """Whichever operator draws them, and whatever the test's outcome is."""
    library = f"import torch\n{textwrap.dedent(DRAWS)}"
    pytester.makepyfile(library=library, test_it=f"""
        import inspect, library, pytest, torch
        names = [name for name, value in vars(library).items() if inspect.isfunction(value)]
        @pytest.mark.parametrize("name", names)
        def test_it(device, name):
            torch.manual_seed(0)
            getattr(library, name)(torch.ones(3, device=device))
            assert {passes}
    """)  # fmt: skip
    result = run("--device=openreg", "--device-misuse=seed", "--device-report=out.json", "--tb=no")
    names = re.findall(r"^def (\w+)\(", library, re.M)
    result.assert_outcomes(**{"passed" if passes else "failed": len(names)})
    rows = json.loads((pytester.path / "out.json").read_text())["findings"]
    drawn = [i for i, line in enumerate(library.splitlines(), 1) if line.endswith("# !")]
    assert sorted(int(row["where"].partition(":")[2]) for row in rows) == drawn


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
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == [*findings.KINDS]
    options = re.findall(r'"(--(?:on-)?device[a-z-]*)"', Path(openreg_tools.pytest_plugin.__file__).read_text())
    assert options and all(option in text for option in options)


# ---- budgets ----

WAITING = "import torch\ndef step(x, times):\n    for _ in range(times): x.sum().item()\n"


def test_budgets(pytester, run):
    """The run's, and a test's own; waits in the tests' code are free."""
    pytester.makepyfile(
        library=WAITING,
        test_it="""
        import pytest, torch, library
        @pytest.fixture
        def x(device): return torch.ones(3, device=device)
        @pytest.mark.parametrize("times", [2, 3])
        def test_run(x, times): library.step(x, times); x.cpu(); x.cpu()
        @pytest.mark.device_syncs(max=3)
        def test_marked(x): library.step(x, 3)
        @pytest.mark.device_syncs(max=1)
        def test_marked_too_many(x): library.step(x, 2)
        """,
    )
    result = run("--device=openreg", "--device-sync-budget=2")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        ["the library waited for the device 3 times, and the budget is 2:", "      3  library.py:3  item"]
    )
    result = run("--device=openreg")  # the marker holds without the option
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["the library waited for the device 2 times, and the budget is 1:"])
    run("--device=cpu", "--device-sync-budget=0").assert_outcomes(passed=4)


def test_a_wait_of_a_node_that_a_mode_would_change(pytester, run):
    """PyTorch's derivatives of prod and cumprod wait, but not under a dispatch mode."""
    pytester.makepyfile(
        library="""
        import torch
        def prod(x): x.prod().backward()
        def cumprod(x): torch.autograd.grad(x.cumprod(0).sum(), [x])
        def double(x): (x * 2).sum().backward()
        """,
        test_it="""
        import library, pytest, torch
        @pytest.fixture
        def x(device): return torch.ones(3, device=device, requires_grad=True)
        def test_prod(x): library.prod(x)
        def test_cumprod(x): library.cumprod(x)
        def test_in_the_test(x): x.prod().backward()
        def test_double(x): library.double(x)
        def test_hook(x):
            x.register_hook(lambda grad: print(grad.sum().item()))
            library.double(x)
        def test_region(x, device_syncs):
            with device_syncs() as waits: library.prod(x)
            assert waits == ["library.py:2  nonzero: a size or value that depends on data"]
        def test_mode(x):
            torch.openreg.set_sync_debug_mode("error")
            try:
                with pytest.raises(RuntimeError, match="set_sync_debug_mode"): library.prod(x)
                assert torch.openreg.get_sync_debug_mode() == 2
            finally:
                torch.openreg.set_sync_debug_mode(0)
        """,
    )
    result = run("--device=openreg", "--device-sync-budget=0")
    result.assert_outcomes(passed=2, failed=5)
    result.stdout.fnmatch_lines(["*1  library.py:2  nonzero: a size or value that depends on data"])
    result.stdout.fnmatch_lines(["*1  library.py:3  item"])
    result.stdout.fnmatch_lines(["*1  test_it.py:6  nonzero: *"])
    for name in ("prod", "cumprod", "in_the_test", "region", "mode"):
        result.stdout.fnmatch_lines([f"FAILED test_it.py::test_{name}*"])


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


# ---- the report ----


def test_every_finding_has_a_remedy(pytester, run):
    """In the terminal once for the lines that share it, and in the file for each."""
    assert set(findings._REMEDIES) == set(findings.KINDS)
    found = findings.Findings()
    for i, what in enumerate(("item", "synchronize", "bool")):
        found.add(findings.Finding("sync", what, f"library.py:{i}", "test"))
    assert found.text()[1:] == [
        "      1  library.py:0  item",
        "      1  library.py:2  bool",
        "         Remedy: keep it in a tensor (torch.where for if), or read it later",
        "      1  library.py:1  synchronize",
        "         Remedy: let a stream wait with wait_stream(), or wait later",
    ]
    pytester.makepyfile("import torch\ndef test_it(device): torch.ones(3, device=device).is_cuda")
    result = run("--device=openreg", "--device-misuse=cuda", "--device-report=out.json")
    remedy = 'x.device.type != "cpu" is true on every accelerator'
    result.stdout.fnmatch_lines([f"         Remedy: {remedy}"])
    (row,) = json.loads((pytester.path / "out.json").read_text())["findings"]
    assert row["remedy"] == remedy


def test_forbidden_kinds_fail_the_run(pytester, run):
    pytester.makepyfile(library=WAITING, test_it="""
        import torch, library
        def test_it(device): library.step(torch.ones(3, device=device), 1)
    """)  # fmt: skip
    assert run("--device=openreg", "--device-misuse=sync", "--device-forbid=leak,cuda").ret == 0
    result = run("--device=openreg", "--device-forbid=sync")
    result.assert_outcomes(passed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["--device-forbid: found sync"])


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
