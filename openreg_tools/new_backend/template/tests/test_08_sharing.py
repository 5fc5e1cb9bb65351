"""Rung 8: saving, DLPack and sharing between processes."""

import copy
import io
import multiprocessing

import torch
from conftest import same


def test_save_and_load():
    x = torch.arange(6.0, device="acme:1").view(2, 3).t()
    file = io.BytesIO()
    torch.save({"x": x, "module": torch.nn.Linear(2, 2).to("acme").state_dict()}, file)
    for where, device in ((None, "acme:1"), ("cpu", "cpu"), ("acme:0", "acme:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert str(loaded["x"].device) == device and loaded["x"].stride() == x.stride()
        same(loaded["x"], x.cpu())
        assert loaded["module"]["weight"].device.type == device.partition(":")[0]
    same(copy.deepcopy(x), x.cpu())


def test_metadata():
    x = torch.ones(2, device="acme")
    torch._utils.set_tensor_metadata(x, {"blocked": True})
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch._utils.get_tensor_metadata(torch.load(file)) == {"blocked": True}


def test_dlpack():
    x = torch.arange(6, device="acme:1").view(2, 3).t()
    y = torch.from_dlpack(x)
    assert y.device == x.device and y.data_ptr() == x.data_ptr() and y.stride() == x.stride()
    same(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)), x.cpu())


def _double(tensors, answers):
    import torch_acme  # noqa: F401

    x = tensors.get()
    x.mul_(2)
    answers.put((str(x.device), x.sum().item()))
    tensors.get()


def test_processes_share_memory():
    processes = torch.multiprocessing.get_context("spawn")
    tensors, answers = processes.Queue(), processes.Queue()
    child = processes.Process(target=_double, args=(tensors, answers))
    child.start()
    x = torch.arange(4.0, device="acme")
    tensors.put(x)
    assert answers.get(timeout=120) == ("acme:0", 12.0)
    same(x, torch.tensor([0.0, 2.0, 4.0, 6.0]))
    tensors.put(None)
    child.join()
    assert child.exitcode == 0


def _in_fork(answers):
    try:
        torch.ones(1, device="acme")
    except RuntimeError as error:
        answers.put(str(error))


def test_fork_is_an_error():
    torch.ones(1, device="acme")
    processes = multiprocessing.get_context("fork")
    answers = processes.Queue()
    child = processes.Process(target=_in_fork, args=(answers,))
    child.start()
    assert "spawn" in answers.get(timeout=60)
    child.join()
