"""How a process that used the device ends: with its own exit status, whatever was going on."""

import subprocess
import sys

import pytest

PROGRAMS = {
    "backward": "x = torch.ones(3, device=D, requires_grad=True); (x * 2).sum().backward()",
    "both devices": "[torch.ones(3, device=f'{D}:{i}', requires_grad=True).exp().sum().backward() for i in (0, 1)]",
    "globals alive": "import openreg_ops; keep = [torch.randn(1000, device=D) for _ in range(100)]",
    "pinned alive": "keep = torch.ones(10).pin_memory()",
    "threads": "import threading; [threading.Thread(target=lambda: torch.ones(9, device=D).sum()).start() for _ in range(8)]",
    "python function": (
        "class F(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: x * 1)\n"
        "    backward = staticmethod(lambda ctx, g: g)\n"
        "F.apply(torch.ones(3, device=D, requires_grad=True)).sum().backward()"
    ),
    "backward at exit": "import atexit; x = torch.ones(3, device=D, requires_grad=True); atexit.register(lambda: x.sum().backward())",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ends_cleanly(name):
    code = f"import torch, openreg_ops\nD = 'openreg'\n{PROGRAMS[name]}\nprint('end')"
    for _ in range(3):  # it was a race: half of all processes that had run a backward aborted
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_an_error_keeps_its_exit_status():
    code = "import torch, openreg_ops\ntorch.ones(2, device='openreg', requires_grad=True).sum().backward()\nraise SystemExit(3)"
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, timeout=120).returncode == 3


def test_a_forked_child_ends_cleanly():
    code = (
        "import os, torch, openreg_ops\n"
        "D = 'openreg'; x = torch.ones(3, device=D, requires_grad=True); x.sum().backward()\n"
        "stream, event = torch.openreg.current_stream(), torch.openreg.Event(); torch.openreg._sleep(300_000_000); event.record()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
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
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_of_a_parent_that_used_no_device_may_use_one():
    code = (
        "import os, torch, openreg_ops\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    assert (torch.ones(3, device='openreg') + 1).tolist() == [2, 2, 2]; raise SystemExit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_exit_with_work_in_flight():
    code = (
        "import torch, openreg_ops\n"
        "torch.openreg.set_launch_mode('async')\n"
        "torch.openreg._sleep(300_000_000)\n"
        "x = torch.ones(1 << 20).pin_memory().to('openreg', non_blocking=True); y = torch.ops.openreg.custom_abs(x)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
