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
        "x = torch.ones(3, device='openreg', requires_grad=True); x.sum().backward()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    assert (x.detach() + 1).tolist() == [2, 2, 2]; os._exit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
