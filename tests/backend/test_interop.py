"""The device among PyTorch's other parts: DLPack, NumPy, pinned memory, DataLoader, packed sequences, modules."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.dlpack import to_dlpack

ONE = torch.device("openreg:1")

# ---- DLPack ----


@pytest.mark.parametrize(
    "export",
    [
        to_dlpack,
        torch.Tensor.__dlpack__,
        lambda x: x.__dlpack__(max_version=(1, 0)),
        lambda x: x.__dlpack__(copy=False),
    ],
    ids=["to_dlpack", "method", "versioned", "copy=False"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_dlpack_shares_memory(export, dtype):
    x = torch.arange(6, device=ONE).to(dtype).view(2, 3).t()
    y = torch.from_dlpack(export(x))
    assert y.device == ONE and y.dtype == dtype and y.stride() == x.stride() and y.data_ptr() == x.data_ptr()
    y.zero_()
    assert x.count_nonzero().item() == 0


def test_dlpack_keeps_the_memory_alive():
    before = torch.openreg.memory_allocated(1)
    x = torch.ones(1 << 16, device=ONE)
    y = torch.from_dlpack(x.__dlpack__())
    del x
    assert y.sum().item() == 1 << 16 and torch.openreg.memory_allocated(1) > before
    del y
    assert torch.openreg.memory_allocated(1) == before
    capsule = torch.ones(1 << 16, device=ONE).__dlpack__()
    del capsule  # unused
    assert torch.openreg.memory_allocated(1) == before


def test_what_dlpack_refuses():
    x = torch.ones(3, device="openreg")
    with pytest.raises(BufferError, match="require gradient"):
        x.clone().requires_grad_().__dlpack__()
    with pytest.raises(BufferError, match="conjugate"):
        x.to(torch.complex64).conj().__dlpack__()
    with pytest.raises((RuntimeError, BufferError), match="Unsupported device"):
        np.from_dlpack(x)


# ---- NumPy ----


@pytest.mark.parametrize(
    "convert", [torch.Tensor.numpy, np.asarray, lambda x: np.add(x, 1)], ids=["numpy", "asarray", "ufunc"]
)
def test_numpy_is_refused_with_the_remedy(convert):
    with pytest.raises(TypeError, match=r"can't convert openreg:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
        convert(torch.ones(3, device="openreg"))


# ---- pinned memory and DataLoader ----


def test_pinned_memory():
    x = torch.arange(6.0).pin_memory()
    assert x.is_pinned() and x[2:].is_pinned() and x.pin_memory() is x and x.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(3).is_pinned() and not torch.ones(3, device="openreg").is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(3, device="openreg").pin_memory()


# ---- packed sequences ----


@pytest.mark.parametrize("rnn", [torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU])
@pytest.mark.parametrize("sorted_by_length", [True, False])
def test_packed_sequences(rnn, sorted_by_length):
    lengths = [4, 3, 1] if sorted_by_length else [1, 4, 3]
    x = torch.randn(4, 3, 5)
    host = rnn(5, 6, bidirectional=True)
    device = rnn(5, 6, bidirectional=True).openreg()
    device.load_state_dict(host.state_dict())
    packed = pack_padded_sequence(x, lengths, enforce_sorted=sorted_by_length)
    for moved in (
        packed.to("openreg"),
        packed.openreg(),
        pack_padded_sequence(x.openreg(), lengths, enforce_sorted=sorted_by_length),
    ):
        assert moved.is_openreg and moved.data.is_openreg and moved.batch_sizes.device.type == "cpu"
        out, _ = device(moved)
        assert out.is_openreg
        padded, got_lengths = pad_packed_sequence(out)
        expected, _ = pad_packed_sequence(host(packed)[0])
        assert got_lengths.tolist() == lengths
        torch.testing.assert_close(padded.cpu(), expected)
        padded.sum().backward()
    assert not packed.openreg().cpu().is_openreg and device.weight_ih_l0.grad.is_openreg


# ---- modules and default devices ----


@pytest.fixture
def swap(request):
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("swap", [False, True], indirect=True)
def test_modules_move(swap):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before = list(model.parameters())
    expected = model.state_dict()
    expected = {name: value.clone() for name, value in expected.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    for target in ("openreg", ONE, "cpu", ONE):
        model.zero_grad()
        model.to(target)
        assert all(x.device.type == torch.device(target).type for x in (*model.parameters(), *model.buffers()))
    assert all(isinstance(p, torch.nn.Parameter) and p.device == ONE for p in model.parameters())
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
    assert model[0].weight.cpu().equal(expected["0.weight"]) and model[1].num_batches_tracked.device == ONE
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model.load_state_dict(expected)
    assert model[0].weight.device == ONE
    assert (
        model.half()[0].weight.dtype == torch.float16 and model.to(ONE, torch.float64)[0].weight.dtype == torch.float64
    )


def test_data_is_set_across_devices():
    host = torch.ones(2, 2)
    host.data = torch.eye(2, device=ONE)
    assert host.device == ONE and host.cpu().equal(torch.eye(2))
    for make in (
        torch.Tensor.to_sparse_coo,
        torch.Tensor.to_sparse_csr,
    ):  # as on every device: a dense one no sparse one
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            make(torch.ones(2, 2)).data = torch.ones(2, 2, device=ONE)


@pytest.mark.parametrize("there", ["openreg", ONE], ids=str)
def test_parameters_keep_their_identity(there):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.LSTM(3, 3))
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
        assert type(model[0].weight) is torch.nn.Parameter and model[0].weight.grad.cpu().equal(gradient)
    model[2](model(torch.ones(2, 3, device=there))[0])
    optimizer.step()
    assert model[0].weight.cpu().equal(values[0] - gradient)


def test_lazy_modules_move_before_their_first_call():
    module = torch.nn.LazyConv1d(4, 3).to(ONE)
    assert isinstance(module.weight, torch.nn.UninitializedParameter)
    assert module(torch.ones(2, 3, 8, device=ONE)).shape == (2, 4, 6)
    assert type(module) is torch.nn.Conv1d and type(module.weight) is torch.nn.Parameter and module.weight.device == ONE


def test_other_moves_are_torchs_own():
    layer = torch.nn.Linear(2, 2, device="openreg")
    weight, address = layer.weight, layer.weight.data_ptr()
    assert layer.double().weight is weight and weight.dtype == torch.float64 and weight.data_ptr() != address
    assert layer.to(ONE).weight is weight and weight.device == ONE
    assert (
        layer.to("meta").weight.is_meta
        and torch.nn.Linear(2, 2, device="meta").to_empty(device="openreg").weight.is_openreg
    )
    clone = copy.deepcopy(torch.nn.Linear(2, 2).to("openreg"))
    assert clone.weight.is_openreg and clone.weight.is_leaf and clone.weight.requires_grad


def test_the_default_device():
    torch.set_default_device("openreg:1")
    try:
        assert torch.get_default_device() == ONE
        made = [torch.ones(2), torch.tensor([1.0]), torch.arange(3), torch.randn(2), torch.nn.Linear(2, 2).weight]
        assert all(x.device == ONE for x in made)
        assert torch.ones(2, device="cpu").device.type == "cpu"
        sampler = torch.utils.data.RandomSampler(range(4), generator=torch.Generator(device=ONE))
        assert sorted(sampler) == [0, 1, 2, 3]
    finally:
        torch.set_default_device(None)
    with torch.device("openreg"):
        assert torch.zeros(2).device == torch.device("openreg:0")
    assert torch.zeros(2).device.type == "cpu"
