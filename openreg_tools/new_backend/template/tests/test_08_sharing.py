"""Rung 8: saving, DLPack and sharing between processes."""

import io

import pytest
import torch
from conftest import same


@pytest.mark.parametrize("where, device", [(None, "acme:1"), ("cpu", "cpu"), ("acme:0", "acme:0")])
def test_save_and_load(where, device):
    x = torch.arange(6.0, device="acme:1").view(2, 3).t()
    torch._utils.set_tensor_metadata(x, {"blocked": True})
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, map_location=where)
    assert str(loaded.device) == device and loaded.stride() == x.stride()
    same(loaded, x.cpu())
    assert device == "cpu" or torch._utils.get_tensor_metadata(loaded) == {"blocked": True}


def test_dlpack():
    x = torch.arange(6, device="acme:1").view(2, 3).t()
    y = torch.from_dlpack(x)
    assert y.device == x.device and y.data_ptr() == x.data_ptr() and y.stride() == x.stride()


def _double(tensors, answers):
    import torch_acme  # noqa: F401

    x = tensors.get().mul_(2)
    answers.put((str(x.device), x.sum().item()))
    tensors.get()


def _use_device(tensors, answers):
    try:
        torch.ones(1, device="acme")
    except RuntimeError as error:
        answers.put(str(error))


@pytest.mark.parametrize("function, method", [(_double, "spawn"), (_use_device, "fork")])
def test_processes(function, method):
    x = torch.arange(4.0, device="acme")
    processes = torch.multiprocessing.get_context(method)
    tensors, answers = processes.Queue(), processes.Queue()
    child = processes.Process(target=function, args=(tensors, answers))
    child.start()
    if method == "fork":
        assert "start it with spawn" in answers.get(timeout=120)
    else:
        tensors.put(x)
        assert answers.get(timeout=120) == ("acme:0", 12.0)
        same(x, torch.tensor([0.0, 2.0, 4.0, 6.0]))
        tensors.put(None)
    child.join()
    assert child.exitcode == 0
