"""Rung 8: tensors are saved, loaded, exchanged with other libraries, and sent to other processes."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import tempfile
from pathlib import Path

import torch

from openreg_tools.core.child import Child
from openreg_tools.ladder.rung import check, equal, imports, raises

_SECTION = "PrivateUse1: Register serialization/deserialization functions for new backend metadata"


@check("torch_acme/__init__.py", _SECTION,
       "torch.save and torch.load need the device module and the storage's methods (generate_methods_for_privateuse1_backend)")  # fmt: skip
def saved(device: str) -> None:
    """torch.save and torch.load keep values, device, strides and shared storage."""
    kind = torch.device(device).type
    base = torch.arange(12.0, device=device).view(3, 4)
    values = {"base": base, "view": base.t()[1:], "half": base.half(), "weight": torch.nn.Parameter(base + 1)}
    file = io.BytesIO()
    torch.save(values, file)
    for weights_only in (True, False):
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        for name, tensor in loaded.items():
            assert tensor.device.type == kind, f"a loaded tensor is on {tensor.device}"
            assert tensor.stride() == values[name].stride() and tensor.dtype == values[name].dtype
            equal(tensor, values[name], f"the loaded {name}")
        loaded["base"].fill_(5)
        assert loaded["view"].cpu().eq(5).all(), "a loaded view does not share its base's storage"
    assert isinstance(loaded["weight"], torch.nn.Parameter)


@check("torch_acme/__init__.py", _SECTION, "map_location goes through torch.serialization's registry of device types")
def mapped(device: str) -> None:
    """map_location moves tensors to and from the device."""
    kind = torch.device(device).type
    x = torch.arange(5.0)
    for source, target in ((device, "cpu"), ("cpu", kind), (device, f"{kind}:0"), ("cpu", torch.device(kind, 0))):
        file = io.BytesIO()
        torch.save(x.to(source), file)
        file.seek(0)
        loaded = torch.load(file, map_location=target)
        assert loaded.device.type == torch.device(target).type, (
            f"map_location={target!r} gives a tensor on {loaded.device}"
        )
        equal(loaded, x, f"a tensor that was saved on {source} and loaded to {target}")


@check(
    "csrc/operators.cpp",
    _SECTION,
    "register aten::set_.source_Storage_storage_offset, which pickling uses",
    "PrivateUse1",
)
def copied(device: str) -> None:
    """Tensors and models are pickled and copied."""
    x = torch.arange(6.0, device=device).view(2, 3).t()
    for name, found in {"pickle": pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy(x)}.items():
        assert found.device == x.device and found.stride() == x.stride(), f"{name} changes the device or strides"
        equal(found, x, f"a tensor after {name}")
    model = torch.nn.Linear(2, 2).to(device)
    other = copy.deepcopy(model)
    other.weight.data.zero_()
    assert model.weight.cpu().abs().sum() > 0, "a deep copy of a model shares its weights"


@check(
    "torch_acme/sharing.py",
    "Extending dispatcher: Known issues & additional notes",
    "DLPack needs the device's stream and its type kDLExtDev",
)
def dlpack(device: str) -> None:
    """DLPack exchanges tensors without copies; NumPy is refused."""
    x = torch.arange(6.0, device=device).view(2, 3)
    kind, index = x.__dlpack_device__()
    assert int(kind) == 12 and index == (x.device.index or 0), f"__dlpack_device__() gives {(int(kind), index)}"
    y = torch.from_dlpack(x)
    assert y.device == x.device and y.data_ptr() == x.data_ptr(), "from_dlpack copies"
    y[1].fill_(7)
    equal(x, torch.tensor([[0.0, 1.0, 2.0], [7.0, 7.0, 7.0]]), "a tensor that was written through DLPack")
    raises(x.numpy, "numpy() of a device tensor", (TypeError, RuntimeError))


_RECEIVER = """
import sys, torch

def receive(queue, answers):
    for module in {modules!r}:
        __import__(module)
    try:
        x, view = queue.get()
        answers.put((str(x.device), x.tolist(), view.tolist()))
        x.add_(1)
        torch.accelerator.synchronize()
        answers.put("changed")
    except Exception as error:  # an answer, because the text of two processes on one stderr mixes
        answers.put(f"in the other process: {{error}}")
    queue.get()

if __name__ == "__main__":
    sys.path[:0] = {path!r}
    for module in {modules!r}:
        __import__(module)
    from openreg_tools.core.child import parent
    ladder = parent()
    context = torch.multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=receive, args=(queue, answers), daemon=True)
    process.start()
    x = torch.arange(4.0, device={device!r})
    queue.put((x, x[2:]))
    received = answers.get(timeout=100)
    assert not isinstance(received, str), received
    assert received == (str(x.device), [0, 1, 2, 3], [2, 3]), "another process receives other values"
    changed = answers.get(timeout=100)
    assert changed == "changed", changed
    assert x.tolist() == [1, 2, 3, 4], "the other process has a copy"
    queue.put(None)
    process.join()
    assert process.exitcode == 0, f"the other process ended with {{process.exitcode}}"
    ladder.answer("done")
"""


@check("torch_acme/sharing.py", "Extending dispatcher: Known issues & additional notes",
       "register a reduction of torch.multiprocessing that sends the driver's handle of the memory")  # fmt: skip
def processes(device: str) -> None:
    """torch.multiprocessing shares a tensor with another process."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "receiver.py")
        program.write_text(_RECEIVER.format(modules=imports(), path=sys.path, device=device))
        with Child.start([sys.executable, str(program)]) as child:
            child.read(120)
