"""Rung 1: the name, the device and its loading."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch
from conftest import python


def test_name():
    x = torch.empty(2, device="acme")
    assert x.device == torch.device("acme", 0) and x.is_acme and torch._C._get_privateuse1_backend_name() == "acme"
    assert torch.accelerator.current_accelerator() == torch.device("acme")


def test_current_device():
    assert torch.acme.device_count() == torch.accelerator.device_count() == 2
    with torch.acme.device(1):
        assert torch.empty(1, device="acme").device.index == torch.accelerator.current_device_index() == 1
    assert torch.acme.current_device() == 0
    with pytest.raises(RuntimeError, match="there is no device acme:7"):
        torch.empty(1, device="acme:7")


def test_autoload():
    if not [entry for entry in importlib.metadata.entry_points(group="torch.backends") if entry.name == "acme"]:
        pytest.skip("torch_acme is not installed")
    program = "import torch; print(torch.ones(1, device='acme').device)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "acme:0\n"


def test_the_host_cannot_touch_device_memory():
    program = """
    import ctypes, subprocess, sys
    address = torch.ones(1, device="acme").data_ptr()
    sys.exit(subprocess.call([sys.executable, "-c", f"import ctypes; ctypes.string_at({address})"]) == 0)
    """
    python(program)
