"""A process that used the device ends with its own exit status, whatever it was doing."""

import pytest
from processes import python

pytestmark = pytest.mark.processes

PROGRAMS = {
    "objects alive": (
        "keep = [torch.ones(3, device=f'{D}:{i}', requires_grad=True) for i in (0, 1)], torch.ones(10).pin_memory()\n"
        "class F(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: x * 1)\n"
        "    backward = staticmethod(lambda ctx, g: g)\n"
        "[F.apply(x.exp()).sum().backward() for x in keep[0]]"
    ),
    "threads": "import threading; [threading.Thread(target=lambda: torch.ones(9, device=D).sum()).start() for _ in range(8)]",
    "backward at exit": "import atexit; x = torch.ones(3, device=D, requires_grad=True); atexit.register(lambda: x.sum().backward())",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ends_cleanly(name):
    code = f"import torch, openreg_ops\nD = 'openreg'\n{PROGRAMS[name]}\nprint('end')"
    done = python("-c", code, destructors=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


DAEMONS = """
import threading, time, torch
torch.openreg.set_launch_mode({mode!r})
def work(call):
    x = torch.ones(1000, device="openreg", requires_grad=True)
    while True:
        call(x)
for call in (lambda x: x * 2, lambda x: x.sum().item(), lambda x: x.exp().sum().backward(),
             lambda x: torch.openreg.synchronize(), lambda x: torch.empty(9, device=x.device)):
    threading.Thread(target=work, args=(call,), daemon=True).start()
time.sleep(0.05)
print("end")
"""


@pytest.mark.parametrize("mode", ["inline", "async", "sync"])
def test_threads_that_launch_for_ever(mode):
    """Python cancels its daemon threads when the process ends, which PyTorch does not survive inside an operator."""
    done = python("-c", DAEMONS.format(mode=mode), timeout=60, destructors=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.slow
def test_threads_that_a_handler_waits_for():
    """An atexit handler that was registered before torch's runs after ours, and may wait for a thread."""
    code = (
        "import atexit, threading\n"
        "go, x = threading.Event(), []\n"
        "def work(): go.wait(); x.append(torch.ones(3, device='openreg').sum().item())\n"
        "thread = threading.Thread(target=work, daemon=True)\n"
        "atexit.register(lambda: (go.set(), thread.join(), print(x)))\n"
        "import torch, openreg_ops; torch.ones(3, device='openreg'); thread.start()\n"
    )
    done = python("-c", code, timeout=60, destructors=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[3.0]\n", "")


def test_an_error_keeps_its_exit_status():
    code = "import torch, openreg_ops\ntorch.ones(2, device='openreg', requires_grad=True).sum().backward()\nraise SystemExit(3)"
    assert python("-c", code, destructors=True).returncode == 3


def test_a_forked_child_ends_cleanly():
    code = (
        "import os, torch, openreg_ops, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)  # of fork() beside threads, since Python 3.12\n"
        "D = 'openreg'; x = torch.ones(3, device=D, requires_grad=True); x.sum().backward()\n"
        "stream, event = torch.openreg.current_stream(), torch.openreg.Event(); torch.openreg._sleep(300_000_000); event.record()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.environ['TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT'] = '0'  # else torch waits 10 s for the parent's threads\n"
        "    assert torch.openreg._is_in_bad_fork(); torch.manual_seed(3)  # what a DataLoader's worker does\n"
        "    for touch in (lambda: x.detach() + 1, lambda: torch.empty(3, device=D), lambda: torch.openreg.synchronize(),\n"
        "                  stream.query, event.query, event.synchronize, event.record, lambda: torch.openreg.Event().record(),\n"
        "                  lambda: stream.wait_event(event), torch.openreg.Stream, lambda: torch.openreg._sleep(1),\n"
        "                  torch.openreg.mem_get_info):\n"
        "        try: touch(); os._exit(1)\n"
        "        except RuntimeError as error: assert 'Cannot re-initialize openreg in forked subprocess' in str(error)\n"
        "    del x; raise SystemExit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = python("-c", code, destructors=True)
    assert (done.returncode, done.stderr) == (0, "")


# What makes a child unable to use the device, as with CUDA: whatever initializes it in the parent.
USES = {
    "init": "torch.openreg.init()",
    "set_device": "torch.openreg.set_device(1)",
    "torch.accelerator": "torch.accelerator.set_device_index(1)",
    "current_device": "torch.openreg.current_device()",
    "empty": "torch.empty(3, device='openreg')",
    "an operator": "torch.ones(3, device='openreg') + 1",
    "a stream": "torch.openreg.Stream()",
    "an event": "torch.openreg.Event().record()",
    "properties": "torch.openreg.get_device_properties(0)",
    "the name": "torch.openreg.get_device_name()",
    "pinned memory": "torch.ones(3).pin_memory()",
}
# What torch.cuda refuses in such a child (memory statistics it gives as 0), and torch.accelerator for CUDA.
REFUSED = (
    "init set_device(0) set_device('openreg:1') current_device synchronize get_device_name get_device_capability "
    "get_device_properties get_device_properties(1) can_device_access_peer(0,1) device(0).__enter__ current_stream "
    "default_stream Stream Stream(1) Event().record get_stream_from_external(0) "
    "get_rng_state get_rng_state_all initial_seed memory_allocated memory_allocated(0) max_memory_allocated "
    "memory_reserved max_memory_reserved memory_stats memory_summary mem_get_info reset_peak_memory_stats "
    "reset_accumulated_memory_stats get_per_process_memory_fraction set_per_process_memory_fraction(0.5) "
    "memory.memory_allocated random.get_rng_state"
)
REFUSED_ELSEWHERE = (
    "torch.ones(3).pin_memory()|torch.empty(3, pin_memory=True, device='cpu')|torch.empty(3, device='openreg')|"
    "torch.ones(3).to('openreg')|torch.ones(3).openreg()|torch.nn.Linear(2, 2).openreg()|torch.UntypedStorage(4, device='openreg')|"
    "torch.accelerator.current_device_index()|torch.accelerator.set_device_index(0)|torch.accelerator.synchronize()|"
    "torch.accelerator.current_stream()|torch.accelerator.memory_allocated()|torch.accelerator.get_memory_info()"
)
ALLOWED = (
    "device_count is_available is_initialized empty_cache manual_seed(1) manual_seed_all(1) seed seed_all Event "
    "set_rng_state(R) set_rng_state_all([R,R]) host_memory_stats is_bf16_supported get_launch_mode"
)


def test_what_a_forked_child_may_call():
    # Each parent is a fork of one process that has not used the device.
    code = f"""
import os, torch, openreg_ops
R = torch.Generator().get_state()

def call(text):
    return eval(text if text.endswith(")") else text + "()", {{"torch": torch, "R": R}})

def check():
    silent = []
    for text in [f"torch.openreg.{{name}}" for name in {REFUSED!r}.split()] + {REFUSED_ELSEWHERE!r}.split("|"):
        try: call(text); silent.append(text)
        except RuntimeError as error:
            assert "Cannot re-initialize openreg in forked subprocess" in str(error), (text, error)
    assert not silent, silent
    for name in {ALLOWED!r}.split():
        call("torch.openreg." + name)
    assert torch.openreg.device_count() == 2 and torch.openreg.is_available() and not torch.openreg.is_initialized()
    torch.manual_seed(3); torch.seed()
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
    assert torch.ones(2).sum() == 2 and torch.openreg._is_in_bad_fork()

def in_child(body):
    if (pid := os.fork()) == 0:
        try: body()
        except BaseException:
            import traceback
            traceback.print_exc(); os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

for use in {list(USES.values())!r}:
    in_child(lambda: (exec(use), in_child(check), torch.openreg.synchronize()))
in_child(lambda: (torch.openreg.init(), in_child(lambda: in_child(check))))  # a grandchild neither
"""
    done = python("-c", code, destructors=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_of_a_parent_that_used_no_device_may_use_one():
    code = (
        "import os, torch, openreg_ops\n"
        "torch.manual_seed(1); assert torch.openreg.device_count() == 2 and torch.openreg.is_available()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    torch.openreg.init(); assert torch.openreg.is_initialized()\n"
        "    assert torch.ones(2).pin_memory().is_pinned() and torch.openreg.memory_allocated() == 0\n"
        "    assert (torch.ones(3, device='openreg') + 1).tolist() == [2, 2, 2]; raise SystemExit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = python("-c", code, destructors=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_exit_with_work_in_flight():
    code = (
        "import torch, openreg_ops\n"
        "torch.openreg.set_launch_mode('async')\n"
        "torch.openreg._sleep(300_000_000)\n"
        "x = torch.ones(1 << 20).pin_memory().to('openreg', non_blocking=True); y = torch.ops.openreg.custom_abs(x)"
    )
    done = python("-c", code, destructors=True)
    assert (done.returncode, done.stderr) == (0, "")
