"""safetensors with the device's name, which `openreg_ops.integrations.safetensors` makes work."""

import subprocess
import sys

import pytest
import safetensors
import safetensors.torch
import torch
from processes import python
from safetensors import SafetensorError

pytestmark = pytest.mark.usefixtures("mode")

TENSORS = {
    "weight": torch.arange(6.0).view(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "empty": torch.ones(0, 2),
}


@pytest.fixture
def path(tmp_path):
    safetensors.torch.save_file({name: x.to("openreg") for name, x in TENSORS.items()}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


NAMES = {
    "openreg:0": 0, "openreg:1": 1, "openreg": 0, 0: 0, 1: 1,
    torch.device("openreg:1"): 1, torch.device("openreg"): 0,
}  # fmt: skip


def same(got, expected, index):
    assert got.device == torch.device("openreg", index) and got.dtype == expected.dtype
    assert got.cpu().equal(expected)


@pytest.mark.parametrize("device", NAMES, ids=repr)
def test_names(path, device):
    for name, got in safetensors.torch.load_file(path, device=device).items():
        same(got, TENSORS[name], NAMES[device])
    with safetensors.safe_open(path, "pt", device) as file:  # positional
        assert set(file.keys()) == set(TENSORS)
        same(file.get_tensor("weight"), TENSORS["weight"], NAMES[device])
        same(file.get_slice("weight")[:, 1:], TENSORS["weight"][:, 1:], NAMES[device])
    model = torch.nn.Module()
    model.register_buffer("weight", torch.zeros(2, 3, device="openreg:1"))
    assert safetensors.torch.load_model(model, path, strict=False, device=device)[0] == set()
    same(model.weight, TENSORS["weight"], 1)


def test_without_an_index_it_is_the_current_device(path):
    with torch.openreg.device(1):
        same(safetensors.torch.load_file(path, device="openreg")["half"], TENSORS["half"], 1)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_backends(path, backend):
    same(safetensors.torch.load_file(path, device="openreg:1", backend=backend)["weight"], TENSORS["weight"], 1)


def test_other_devices_are_as_before(path):
    from openreg_ops.integrations import safetensors as integration

    for device in ("cpu", None):
        with safetensors.safe_open(path, framework="pt", device=device) as file:
            assert file.get_tensor("weight").equal(TENSORS["weight"])
            assert isinstance(file, safetensors.safe_open) and type(file) is integration._original
    assert safetensors.safe_open(path, "np").get_tensor("flags").tolist() == [True, False]
    assert not isinstance(3, safetensors.safe_open)


@pytest.mark.parametrize(
    "device", ["openreg:x", "openreg:", "openreg:-1", "openregs", "meta", torch.device("cpu"), 1.5]
)
def test_bad_devices(path, device):
    with pytest.raises(SafetensorError, match="is invalid"):
        safetensors.torch.load_file(path, device=device)


def test_a_device_that_does_not_exist(path):
    with pytest.raises(RuntimeError, match="invalid device ordinal 7; there are 2 devices"):
        safetensors.torch.load_file(path, device="openreg:7")


def test_other_frameworks_are_refused(path):
    with pytest.raises(SafetensorError, match="is not support.* for framework"):
        safetensors.safe_open(path, "np", "openreg")


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["inline"], indirect=True)
@pytest.mark.parametrize(
    "program",
    [
        "import safetensors.torch, torch",
        "from safetensors import safe_open; import torch, safetensors.torch",
    ],
)
def test_in_any_order_of_imports(path, program, mode):
    check = """
import sys
assert safetensors.torch.load_file(sys.argv[1], device="openreg:1")["half"].device.index == 1
opens = globals().get("safe_open", safetensors.safe_open)
assert opens(sys.argv[1], "pt", "openreg").get_tensor("half").is_openreg
"""
    subprocess.run([sys.executable, "-c", program + check, path], check=True)


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["inline"], indirect=True)
def test_it_is_imported_with_safetensors_only():
    check = "import torch, sys; assert not {'safetensors', 'openreg_ops.integrations.safetensors'} & set(sys.modules)"
    done = python("-c", check)
    assert done.returncode == 0, done.stderr
