"""Rung 1: PyTorch knows the device's name, counts and selects devices, and loads the package by itself."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import torch

from openreg_tools.ladder.rung import Skip, check, raises

_ENTRY = "torch.backends"


@check("torch_acme/__init__.py", "PrivateUse1: Rename privateuse1 to a custom name for the new backend",
       "call torch.utils.rename_privateuse1_backend(name) when the package is imported")  # fmt: skip
def name(device: str) -> None:
    """torch.device knows the name."""
    kind = torch.device(device).type
    private = torch._C._get_privateuse1_backend_name()
    assert kind == private, f"the device is {kind!r}, but PrivateUse1 is called {private!r}"
    assert torch.device(f"{kind}:1").index == 1


@check("torch_acme/device.py", "PrivateUse1: Rename privateuse1 to a custom name for the new backend",
       "call torch._register_device_module(name, module) with is_available, device_count, current_device, set_device, "
       "synchronize and the others of the example in this file")  # fmt: skip
def module(device: str) -> None:
    """torch has a module of the device's name."""
    kind = torch.device(device).type
    found = torch.get_device_module(kind)
    assert getattr(torch, kind, None) is found, f"torch.{kind} is not the registered module"
    names = ("is_available", "device_count", "current_device", "set_device", "synchronize", "is_initialized")
    lacking = [name for name in names if not hasattr(found, name)]
    assert not lacking, f"torch.{kind} lacks {', '.join(lacking)}"
    assert found.is_available() is True, f"torch.{kind}.is_available() is {found.is_available()}"
    current, count = found.current_device(), found.device_count()
    assert 0 <= current < count, f"torch.{kind}.current_device() is {current} of {count} devices"


@check("csrc/device.cpp", "PrivateUse1: Register device guard for the new backend",
       "register PrivateUse1HooksInterface with isAvailable, deviceCount, getCurrentDevice and setCurrentDevice")  # fmt: skip
def accelerator(device: str) -> None:
    """torch.accelerator finds the device."""
    kind = torch.device(device).type
    found = torch.accelerator.current_accelerator()
    assert found is not None and found.type == kind, f"torch.accelerator.current_accelerator() is {found}"
    assert torch.accelerator.is_available(), "torch.accelerator.is_available() is false"
    for name, module_name in (("device_count", "device_count"), ("current_device_index", "current_device")):
        here, there = getattr(torch.accelerator, name)(), getattr(torch.get_device_module(kind), module_name)()
        assert here == there, f"torch.accelerator.{name}() is {here}, but torch.{kind}.{module_name}() is {there}"


@check("csrc/device.cpp", "PrivateUse1: Register device guard for the new backend",
       "implement getDevice, setDevice and exchangeDevice of the guard; setDevice checks the index")  # fmt: skip
def selects(device: str) -> None:
    """A device is selected, and restored."""
    kind, count = torch.device(device).type, torch.accelerator.device_count()
    before = torch.accelerator.current_device_index()
    for index in range(count):
        torch.accelerator.set_device_index(index)
        assert torch.accelerator.current_device_index() == index, f"set_device_index({index}) selects another device"
        assert torch.empty(1, device=kind).device.index == index, f"a new tensor is not on the selected {kind}:{index}"
    torch.accelerator.set_device_index(before)
    if hasattr(torch.accelerator, "device_index"):
        with torch.accelerator.device_index(count - 1):
            assert torch.accelerator.current_device_index() == count - 1
        assert torch.accelerator.current_device_index() == before, "torch.accelerator.device_index does not restore"
    raises(lambda: torch.empty(1, device=f"{kind}:{count}"), f"a tensor on {kind}:{count} of {count} devices")
    raises(lambda: torch.accelerator.set_device_index(count), f"set_device_index({count}) of {count} devices")
    assert torch.accelerator.current_device_index() == before, "an error has changed the selected device"


@check("torch_acme/__init__.py", "PrivateUse1: Generate methods and properties related to the new backend",
       "call torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)")  # fmt: skip
def methods(device: str) -> None:
    """Tensors and modules have the methods with the device's name."""
    kind = torch.device(device).type
    lacking = [name for name in (kind, f"is_{kind}") if not hasattr(torch.Tensor, name)]
    assert not lacking, f"torch.Tensor lacks {', '.join(lacking)}"
    x = getattr(torch.ones(2), kind)()
    assert x.device.type == kind and getattr(x, f"is_{kind}") and not getattr(torch.ones(2), f"is_{kind}")
    moved = getattr(torch.nn.Linear(2, 2), kind)()
    assert {p.device.type for p in moved.parameters()} == {kind}


@check("pyproject.toml", "Extending dispatcher: Build an extension",
       'add the entry point [project.entry-points."torch.backends"], and install the package')  # fmt: skip
def autoload(device: str) -> None:
    """``import torch`` loads the package."""
    kind = torch.device(device).type
    entries = importlib.metadata.entry_points(group=_ENTRY)
    modules = [entry.module.partition(".")[0] for entry in entries]
    known = [name for name in modules if name in sys.modules]
    assert known, f"no installed package with an entry point in {_ENTRY!r} has registered {kind}"
    if len(modules) > 1:
        raise Skip(f"several backends are installed, and would be loaded together: {', '.join(modules)}")
    program = f"import torch; torch.empty(1, device={kind!r}); print(torch.accelerator.current_accelerator())"
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment)
    said = (done.stderr.strip().splitlines() or [""])[-1]
    assert done.returncode == 0, f"a program that only imports torch fails: {said}"
    assert kind in done.stdout, f"torch.accelerator.current_accelerator() is {done.stdout.strip()}"
