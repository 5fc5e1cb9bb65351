"""Isolation: a host access to device memory is an error that names the memory; permitted accesses still work."""

import functools
import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import python

pytestmark = pytest.mark.processes

# Runs each program in its own fork, made before the device is used, so that torch is imported once.
DRIVER = """
import ctypes, json, os, sys, tempfile, traceback, torch, openreg_ops
def read(address, n=4): return ctypes.string_at(address, n)
def tensor(): return torch.arange(1000, dtype=torch.float32).to("openreg:1")
def run(name, code):
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        for number, file in enumerate(files): os.dup2(file.fileno(), number + 1)
        status = 0
        try: exec(code if name.startswith("before ") else "x = tensor()\\n" + code, globals())
        except BaseException: traceback.print_exc(); status = 1
        sys.stdout.flush(); sys.stderr.flush(); os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for file in files: file.seek(0)
    return status, *[file.read() for file in files]
print(json.dumps({name: run(name, code) for name, code in json.load(sys.stdin).items()}))
"""
HAS_KEYS = "ospke" in Path("/proc/cpuinfo").read_text().split()
NO_KEYS = pytest.mark.skipif(not HAS_KEYS, reason="the processor has no protection keys (no ospke in /proc/cpuinfo)")


PRINT = "print(hex(x.data_ptr() + 12), hex(x.data_ptr()), flush=True)\n"


@functools.cache
def outcomes(mode):
    """How all programs of this file ended, by name, with OPENREG_ISOLATION=mode."""
    programs = {**{name: PRINT + code for name, (_, code) in TOUCHES.items()}, **OTHERS, **USES}
    done = python("-c", DRIVER, input=json.dumps(programs), OPENREG_ISOLATION=mode)
    assert (done.returncode, done.stderr) == (0, "")
    return {
        name: SimpleNamespace(returncode=status, stdout=out, stderr=err)
        for name, (status, out, err) in json.loads(done.stdout).items()
    }


@pytest.fixture(params=["strict", pytest.param("auto", id="keys", marks=NO_KEYS)])
def ended(request):
    """How the program of a name ended."""
    return lambda name: outcomes(request.param)[name]


TOUCHES = {
    "read": ("read", "read(x.data_ptr() + 12)"),
    "write": ("wrote to", "ctypes.memset(x.data_ptr() + 12, 0, 4)"),
    "memcpy": ("read", "ctypes.memmove(ctypes.create_string_buffer(64), x.data_ptr() + 12, 64)"),
    "numpy view": (
        "read",
        "import numpy; print(numpy.ctypeslib.as_array((ctypes.c_float * 9).from_address(x.data_ptr() + 12)).sum())",
    ),
    "dlpack": (  # a consumer that takes the first field of the capsule, its data, for host memory
        "read",
        "from torch.utils.dlpack import to_dlpack\n"
        "pointer = ctypes.pythonapi.PyCapsule_GetPointer; pointer.restype = ctypes.c_void_p\n"
        "capsule = to_dlpack(x[3:])\n"
        "read(ctypes.c_void_p.from_address(pointer(ctypes.py_object(capsule), b'dltensor')).value)",
    ),
    "on a thread": (
        "read",
        "import threading; t = threading.Thread(target=read, args=(x.data_ptr() + 12,)); t.start(); t.join()",
    ),
    "after queued work": (
        "read",
        "torch.openreg.set_launch_mode('async'); y = torch.ops.openreg.custom_abs(x)\n"
        "torch.openreg.synchronize(1); read(x.data_ptr() + 12)",
    ),
    "after a launch that threw": (
        "read",
        "try: torch.mm(x.view(10, 100), x.view(10, 100))\nexcept RuntimeError: pass\nread(x.data_ptr() + 12)",
    ),
    "after a copy-on-write": ("read", "y = x._lazy_clone(); y += 1; assert y[3] == 4; read(x.data_ptr() + 12)"),
    "in a forked child": (
        "read",
        "if (pid := os.fork()) == 0: read(x.data_ptr() + 12); os._exit(0)\n"
        "os.kill(os.getpid(), os.WTERMSIG(os.waitpid(pid, 0)[1]))",
    ),
}

OTHERS = {
    "freed, small": "y = torch.ones(1000, device='openreg'); p = y.data_ptr(); del y; read(p + 8)",
    "freed, large": "y = torch.ones(100_000, device='openreg'); p = y.data_ptr(); del y; read(p + 8)",
    "freed, in use by a stream": """
y = torch.ones(100_000, device="openreg"); p = y.data_ptr(); s = torch.openreg.Stream()
with s: torch.openreg._sleep(10**9)
y.record_stream(s); del y; read(p + 65544)
""",
    "side stream": """
s = torch.openreg.Stream()
with s: y = torch.empty(5, device="openreg")
print(s.stream_id, flush=True); read(y.data_ptr())
""",
    "before the device: faulthandler": """
import faulthandler; faulthandler.enable(); x = tensor()
def culprit(): read(x.data_ptr())
culprit()
""",
    "before the device: a handler that ends the process": """
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: os._exit(7))
ctypes.CDLL(None).signal(11, handler); x = tensor(); read(x.data_ptr())
""",
    "before the device: a handler that returns": """
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: os.write(2, b"previous\\n") and None)
ctypes.CDLL(None).signal(11, handler); x = tensor(); read(x.data_ptr())
""",
    "null pointer": "read(8)",
    "kill": "os.kill(os.getpid(), 11)",
    "raise": "import signal; signal.raise_signal(11)",
    "before the device: null pointer under faulthandler": "import faulthandler; faulthandler.enable(); x = tensor(); read(8)",
}

USES = {
    "reading": """
assert torch.openreg.isolation_mode() in ("strict", "keys")
assert x[3].item() == 3 and x.tolist()[:2] == [0, 1] and x.cpu()[5] == 5 and bool((x == x).all())
assert "openreg:1" in repr(x) and str(x[:2]) == "tensor([0., 1.], device='openreg:1')"
assert x.untyped_storage()[4:8] is not None and x.untyped_storage().cpu()[6] == 128
try: x.numpy()
except TypeError: pass
else: assert False
""",
    "writing": """
x[0] = 7; x.fill_(2); x.copy_(torch.ones(1000)); x[torch.tensor([1, 2])] = 5; x.resize_(2000)
x.untyped_storage().resize_(16); x.resize_(4)
assert x.untyped_storage().nbytes() == 16 and x[:4].tolist() == [1, 5, 5, 1]
x.untyped_storage().fill_(0); assert x[:4].sum() == 0
y = torch.tensor([1.0, 2.0], device="openreg"); y.data = y.data.to("openreg:1"); assert y.sum() == 3
torch.manual_seed(0); assert torch.rand(3, device="openreg").isfinite().all()
""",
    "pickling": """
import copy, io, pickle
file = io.BytesIO(); torch.save(x, file); file.seek(0)
assert torch.equal(torch.load(file), x) and torch.equal(pickle.loads(pickle.dumps(x)), x) and torch.equal(copy.deepcopy(x), x)
file.seek(0); assert torch.equal(torch.load(file, map_location="cpu"), x.cpu())
assert torch.equal(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)), x)
""",
    "training": """
def train(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
                                torch.nn.Linear(4 * 36 * 36, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    a, b = torch.randn(32, 1, 38, 38).to(device), torch.randint(10, (32,)).to(device)
    for _ in range(3):
        optimizer.zero_grad(); loss = torch.nn.functional.cross_entropy(model(a), b); loss.backward(); optimizer.step()
    return loss.item()
assert abs(train("cpu") - train("openreg")) < 1e-4  # the CPU's first, so that its threads are older than a launch
torch.openreg.set_launch_mode("async")
assert abs(train("cpu") - train("openreg")) < 1e-4
""",
    "data loader": """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(64.0).view(16, 4))
for workers in (0, 2):
    batches = [b.to("openreg", non_blocking=True) for b, in DataLoader(data, batch_size=4, num_workers=workers, pin_memory=True)]
    assert torch.equal(torch.cat(batches).cpu(), data.tensors[0])
""",
    "fork": """
pid = os.fork()
if pid == 0:
    try: x + 1
    except RuntimeError as error: assert "Cannot re-initialize openreg in forked subprocess" in str(error)
    del x; os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3 and x.sum() == 499500
""",
    "threads": """
import threading
def work(n):
    for _ in range(50):
        y = torch.full((1000,), float(n), device="openreg", requires_grad=True); (y * y).sum().backward()
        assert y.grad[0].item() == 2 * n
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for t in threads: t.start()
for t in threads: t.join()
z = torch.randn(300, 300); z @ z; d = z.to("openreg"); torch.testing.assert_close((d @ d).cpu(), z @ z)
""",
    "pinned memory": "p = torch.arange(5.0).pin_memory(); p += 1; assert read(p.data_ptr()) == b'\\0\\0\\x80?' and p.to('openreg').sum() == 15",
    "poison": """
openreg_ops._C.set_poison(True)
y = torch.empty(7, device="openreg"); assert y.isnan().all()
with torch.openreg.Stream(): torch.openreg._sleep(10**7); assert torch.empty(7, device="openreg").isnan().all()
""",
    "copy-on-write": "y = x._lazy_clone(); y += 1; assert y[3] == 4 and x[3] == 3; z = torch.ones(3)._lazy_clone(); z += 1; assert z[0] == 2",
    "faults": """
with torch.openreg.faults.inject("copy", times=1): y = torch.ones(3).to("openreg")
assert y[0] != 1 and y[1] == 1
""",
    "quantized, nested and sparse": """
import warnings; warnings.simplefilter("ignore")
q = torch.quantize_per_channel(x.view(10, 100), torch.ones(10, device=x.device), torch.zeros(10, device=x.device, dtype=torch.long), 0, torch.quint8)
assert "openreg:1" in repr(q) and q.dequantize()[0, 5] == 5 and q.q_per_channel_scales().sum() == 10
n = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], device="openreg")
assert (n * 2).unbind()[1].sum() == 24 and n.size(0) == 2 and "openreg" in repr(n) and n.to_padded_tensor(0).sum() == 18
m = (n * 2).clone(); assert m._nested_tensor_size().tolist() == [[2, 3], [4, 3]] and m.is_contiguous()
s = torch.eye(3, device="openreg").to_sparse(); assert "openreg" in repr(s) and (s @ torch.ones(3, 1, device="openreg")).sum() == 3
c = s.to_sparse_csr(); assert "openreg" in repr(c) and c.to_dense().sum() == 3
""",
    "fallback": """
with openreg_ops.fallback.force("aten::add.Tensor", "aten::add_.Tensor"): y = x + x; y += 1; assert y[3] == 7
assert openreg_ops.fallback.report()
""",
    "exit with work in flight": "torch.openreg.set_launch_mode('async'); torch.openreg._sleep(10**8); y = torch.ops.openreg.custom_abs(x)",
}


@pytest.mark.parametrize("name", TOUCHES)
def test_a_touch_by_the_host_ends_with_a_message(name, ended):
    done = ended(name)
    assert done.returncode == -signal.SIGSEGV
    address, base = done.stdout.split()
    assert done.stderr.splitlines() == [
        f"openreg: the host {TOUCHES[name][0]} device memory: address {address} on openreg:1, byte 12 of an "
        f"allocation of 4000 bytes at {base}, made on stream 0.",
        'On a real accelerator the host cannot reach it. Copy the tensor with .cpu() or .to("cpu"), or do the work in '
        "a kernel, through openreg::launch(). (OPENREG_ISOLATION=off permits it.)",
    ]


@pytest.mark.parametrize(
    "name, what",
    [
        ("freed, small", "byte 8 of a freed allocation of 4000 bytes"),
        ("freed, large", "in memory that has been freed or was never allocated"),
        ("freed, in use by a stream", "byte 65544 of a freed allocation of 400000 bytes"),
    ],
)
def test_freed_memory(name, what, ended):
    done = ended(name)
    assert done.returncode == -signal.SIGSEGV and f" on openreg:0, {what}" in done.stderr


def test_the_stream_is_named(ended):
    done = ended("side stream")
    assert f"made on stream {int(done.stdout)}." in done.stderr and int(done.stdout) > 0


def test_faulthandler_has_its_turn(ended):
    done = ended("before the device: faulthandler")
    assert done.returncode == -signal.SIGSEGV and done.stderr.count("the host read") == 1
    assert re.search(r"(?s)^openreg: the host read .*Fatal Python error: Segmentation fault.* in culprit", done.stderr)


def test_a_previous_handler_has_its_turn(ended):
    done = ended("before the device: a handler that ends the process")
    assert done.returncode == 7 and done.stderr.startswith("openreg: the host read device memory")
    done = ended("before the device: a handler that returns")
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.count("the host read device memory") == done.stderr.count("previous\n") == 1


def test_other_faults_are_as_they_were(ended):
    for name in ("null pointer", "kill", "raise"):
        assert (ended(name).returncode, ended(name).stderr) == (-signal.SIGSEGV, "")
    done = ended("before the device: null pointer under faulthandler")
    assert done.returncode == -signal.SIGSEGV and done.stderr.startswith("Fatal Python error: Segmentation fault")


@pytest.mark.parametrize("name", USES)
def test_what_may_touch_it_works(name, ended):
    assert vars(ended(name)) == {"returncode": 0, "stdout": "", "stderr": ""}


@pytest.mark.parametrize(
    "given, mode",
    [
        ("off", "off"),
        ("auto", HAS_KEYS and "keys" or "off"),
        ("on", None),
        ("", "off"),
    ],
)
def test_modes(given, mode):
    code = (
        "import ctypes, torch, openreg_ops; print(torch.openreg.isolation_mode()); x = torch.ones(3, device='openreg')\n"
        "if torch.openreg.isolation_mode() == 'off': assert ctypes.string_at(x.data_ptr(), 4) == b'\\0\\0\\x80?'"
    )
    done = python("-c", code, OPENREG_ISOLATION=given)
    if mode is None:
        assert "OPENREG_ISOLATION: expected off or auto or strict, but got 'on'" in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{mode}\n", "")
