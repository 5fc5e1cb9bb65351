"""Shared by all tests: the device, uninitialized memory filled with NaN, and state restored afterwards."""

import collections
import gc
import os
import signal
import sys

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config

import openreg_ops
from openreg_ops import _C

# Environment variables that a test restores. Inductor sets some permanently.
OURS = ("OPENREG_", "PYTHON", "TORCH_")
# The files of most of the time, longest first.
LONGEST = """test_every_operator test_mistakes test_programs test_new_package test_ladder test_checker test_export
test_adapt test_docs test_reduce_overhead test_dtensor test_pytest_plugin test_stress test_flex_attention
test_compiled_opinfo test_generated test_distributed test_writing_an_operator""".split()


def pytest_sessionstart():
    """PyTorch's half a million objects stay, and compilers create as many: scanning them takes a tenth of the time."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a job in the background of a script ignores interrupts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(items):
    """Long files first, then by the markers of their tests, so that no worker process is left with one at the end."""
    seconds = {"slow": 3.0, "compiles": 2.0, "processes": 0.5, "conformance": 0.2}  # of a test that is marked so
    cost = collections.Counter()
    for item in items:
        cost[item.path] += max([0.05, *(seconds.get(mark.name, 0.0) for mark in item.iter_markers())])
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path.stem, len(LONGEST)), -cost[item.path]))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def without_waste():
    """PyTorch formats the stack when it seeds an absent accelerator, a tenth of the time of tests/aten/test_modules.py, and for
    each sample of an operator, which is most of the time of tests/aten/test_cuda_rules.py. It compiles six programs, in 8 s, to
    learn whether the compiler knows the processor's instructions. g++ optimizes the wrapper of an AOTInductor package, which
    runs once in a test, for a third of the package's 20 s."""
    with pytest.MonkeyPatch.context() as patch:
        for accelerator in (torch.cuda, torch.xpu, torch.mtia):
            if not accelerator.is_available():
                patch.setattr(accelerator, "manual_seed_all", lambda seed: None)
        for name in ("common_utils", "opinfo.core"):  # the second copies the function of the first
            if module := sys.modules.get(f"torch.testing._internal.{name}"):
                patch.setattr(module, "extract_test_fn", lambda: None)  # these tests are functions
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # for processes
        patch.setenv("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
        with config.patch({"cpp.vec_isa_ok": True, "aot_inductor.compile_wrapper_opt_level": "O0"}):
            yield


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """A test that collects garbage scans only what its own file has created."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def poisoned():
    """New device memory holds NaN (0xFF bytes), so that a result left unwritten fails its comparison."""
    _C.set_poison(True)
    yield
    _C.set_poison(False)


@pytest.fixture(params=["inline", "async"])
def mode(request):
    """Launch modes, of which a file or a folder may choose others."""
    with torch.openreg.launch_mode(request.param):
        yield request.param
        for index in range(torch.openreg.device_count()):
            torch.openreg.synchronize(index)


@pytest.fixture
def one_thread():
    """PyTorch computes on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def restored():
    """Every test starts on device 0, seeded, under the default policies. The pool gives 32 streams in turns, so a
    stream that captures for the tests before could be given to this one as a stream apart from the capture."""
    path, environment = sys.path[:], dict(os.environ)
    torch.openreg.set_device(0)
    torch.openreg.graph._streams.clear()
    torch.manual_seed(0)
    yield
    sys.path[:] = path  # commands add "", by which new processes would find the checkout
    openreg_ops.fallback.reset()
    configs = (config, dynamo_config, functorch_config)
    gone = [(name, option) for settings in configs for name, option in settings._config.items() if option.hide]
    for _, option in gone:
        option.hide = False
    assert openreg_ops.fallback.get_policy() == "allow", "a test left its fallback policy behind"
    left = {name for name, _ in set(os.environ.items()) ^ set(environment.items()) if name.startswith(OURS)}
    for name in left:  # so that one test fails for it
        os.environ.pop(name, None)
        os.environ.update({name: environment[name]} if name in environment else {})
    assert not left, f"a test left environment variables behind: {sorted(left)}"
    assert openreg_ops.autograd.get_fallback_mode() == "error", "a test left its autograd fallback mode behind"
    names = [name for name, _ in gone]
    assert not names, f"a test deleted {names} of PyTorch's configuration, as monkeypatch does: use config.patch"
