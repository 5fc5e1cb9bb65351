"""Each mend of openreg_ops/adaptations.py: what works with it, and that PyTorch alone still needs it."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils.dlpack import DLDeviceType

from openreg_ops import adaptations

DEVICE, ONE = "openreg", torch.device("openreg:1")


def test_dlpack_device_of_torch_alone():
    with pytest.raises(ValueError, match="Unknown device type openreg"):
        adaptations._TENSOR_METHODS["__dlpack_device__"](torch.ones(1, device=DEVICE))


def test_from_dlpack():
    x = torch.arange(6.0, device=ONE).view(2, 3).t()
    assert x.__dlpack_device__() == (DLDeviceType.kDLExtDev, 1)
    y = torch.from_dlpack(x)
    assert y.device == ONE and y.data_ptr() == x.data_ptr() and y.stride() == x.stride()
    assert torch.from_dlpack(x, copy=True).data_ptr() != x.data_ptr()
    for to in ("cpu", "openreg:0"):
        moved = torch.from_dlpack(x, device=to)
        assert moved.device == torch.device(to) and moved.cpu().equal(x.cpu())
    assert torch.utils.dlpack.from_dlpack(nn.Parameter(x, requires_grad=False)).equal(x)


def test_other_devices_export_as_before():
    x = torch.arange(3.0)
    assert x.__dlpack_device__() == (DLDeviceType.kDLCPU, 0) and torch.from_dlpack(x).data_ptr() == x.data_ptr()
    with pytest.raises(ValueError, match="Unknown device type meta"):
        torch.ones(1, device="meta").__dlpack_device__()


def test_the_consumers_stream_waits():
    x = torch.zeros(1000, device=DEVICE)
    producer, consumer = torch.openreg.Stream(), torch.openreg.Stream()
    producer.wait_stream(torch.openreg.current_stream())
    with producer:
        torch.openreg._sleep(50_000_000)
        x.add_(1)
        for wanted, waits in ((-1, []), (consumer.native_handle, [consumer]), (None, [torch.openreg.default_stream()])):
            torch.openreg._sleep(50_000_000)
            y = torch.from_dlpack(x.__dlpack__(stream=wanted))
            waiting = [s for s in (consumer, torch.openreg.default_stream()) if not s.query()]
            assert waiting == waits
            torch.openreg.synchronize()
    assert y.unique().tolist() == [1]
    with pytest.raises(TypeError, match="stream must be"):
        x.__dlpack__(stream="default")
    with pytest.raises(ValueError, match="12345 is no stream of openreg:0"):
        x.__dlpack__(stream=12345)


def test_moved_parameters_of_torch_alone():
    layer = nn.Linear(2, 2)
    weight = layer.weight
    adaptations._module_apply(layer, lambda t: t.to(DEVICE))
    assert layer.weight is not weight and not weight.is_openreg


@pytest.mark.parametrize("there", [DEVICE, ONE], ids=str)
def test_parameters_keep_their_identity(there):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LSTM(3, 3))
    model[1].weight = model[0].weight
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = [p.detach().clone() for p in before]
    model[0](torch.ones(2, 3)).sum().backward()
    gradient = model[0].weight.grad.clone()
    for to in (there, "cpu", there):
        assert model.to(to) is model
        assert all(
            p is q and p.device.type == torch.device(to).type for p, q in zip(model.parameters(), before, strict=True)
        )
        assert model[1].weight is model[0].weight and model[2]._flat_weights[0] is model[2].weight_ih_l0
        assert all(p.cpu().equal(v) for p, v in zip(model.parameters(), values, strict=True))
        assert type(model[0].weight) is nn.Parameter and model[0].weight.grad.cpu().equal(gradient)
    model[2](model(torch.ones(2, 3, device=there))[0])
    optimizer.step()
    assert model[0].weight.cpu().equal(values[0] - gradient)


def test_an_optimizer_made_before_the_move_trains_the_module():
    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model.to(device)
        x, losses = torch.ones(2, 4, device=device), []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert train(DEVICE) == pytest.approx(train("cpu"))


def test_a_graph_from_before_the_move_says_so():
    layer = nn.Linear(2, 2)
    loss = layer(torch.ones(1, 2)).sum()
    layer.to(DEVICE)
    with pytest.raises(RuntimeError, match="should not change the device or dtype of the module"):
        loss.backward()
    layer(torch.ones(1, 2, device=DEVICE)).sum().backward()
    assert layer.weight.grad.tolist() == [[1, 1], [1, 1]]


def test_a_parameter_that_cannot_be_swapped_is_made_anew():
    layer = nn.Linear(2, 2)
    weight = layer.weight
    reference = weakref.ref(weight)
    layer.to(DEVICE)
    assert layer.weight.is_openreg and reference() is weight and not weight.is_openreg


def test_lazy_modules_move_before_their_first_call():
    module = nn.LazyConv1d(4, 3).to(ONE)
    assert isinstance(module.weight, nn.UninitializedParameter)
    assert module(torch.ones(2, 3, 8, device=ONE)).shape == (2, 4, 6)
    assert type(module) is nn.Conv1d and type(module.weight) is nn.Parameter and module.weight.device == ONE


def test_other_moves_are_torchs_own():
    layer = nn.Linear(2, 2, device=DEVICE)
    weight, address = layer.weight, layer.weight.data_ptr()
    assert layer.double().weight is weight and weight.dtype == torch.float64 and weight.data_ptr() != address
    assert layer.to(ONE).weight is weight and weight.device == ONE
    assert layer.to("meta").weight.is_meta and nn.Linear(2, 2, device="meta").to_empty(device=DEVICE).weight.is_openreg
    clone = copy.deepcopy(nn.Linear(2, 2).to(DEVICE))
    assert clone.weight.is_openreg and clone.weight.is_leaf and clone.weight.requires_grad
