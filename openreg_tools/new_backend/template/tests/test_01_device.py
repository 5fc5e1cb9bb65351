"""Rung 1: the name, the device and its loading."""

import importlib.metadata
import os
import signal

import pytest
import torch
from conftest import python


def test_name():
    x = torch.empty(2, device="acme")
    assert x.device == torch.device("acme", 0) and x.is_acme and torch._C._get_privateuse1_backend_name() == "acme"
    assert torch.accelerator.current_accelerator() == torch.device("acme")


def test_current_device():
    with torch.acme.device(1):
        assert torch.empty(1, device="acme").device.index == torch.accelerator.current_device_index() == 1
    assert torch.acme.current_device() == 0 and torch.accelerator.device_count() == 2
    with pytest.raises(RuntimeError, match="there is no device acme:7"):
        torch.empty(1, device="acme:7")


@pytest.mark.skipif("acme" not in importlib.metadata.entry_points(group="torch.backends").names, reason="not installed")
@pytest.mark.skipif(os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0", reason="the environment turns it off")
def test_autoload():
    program = "import torch; print(torch.ones(1, device='acme').device)"
    assert python("-c", program).stdout == "acme:0\n"


def test_the_host_cannot_touch_device_memory():
    program = "import ctypes, torch, torch_acme; ctypes.string_at(torch.ones(1, device='acme').data_ptr())"
    assert python("-c", program).returncode == -signal.SIGSEGV
