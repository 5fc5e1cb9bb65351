"""`torch.nn.DataParallel` and `torch.nn.parallel`, over both devices; results are the CPU's for the whole batch."""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm, gather, replicate, scatter
from torch.testing import assert_close

Pair = collections.namedtuple("Pair", ["first", "second"])

pytestmark = [
    pytest.mark.usefixtures("mode"),
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings(
        "ignore:Using -1 to represent CPU tensor is deprecated:FutureWarning"
    ),  # by PyTorch itself
]


def on(index, *shape, **options):
    return torch.randn(*shape, device=f"openreg:{index}", **options)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x, *, shift):
        return {"out": self.last(self.norm(self.first(x)).relu()) * self.scale, "pair": Pair(x + shift, [x.sum(1)])}


def flat(out):
    return [out["out"], out["pair"].first, out["pair"].second[0]]


# ---- DataParallel ----


@pytest.mark.parametrize("rows", [6, 5, 2, 1])
@pytest.mark.parametrize("device_ids", [[0, 1], [1, 0], [1], None], ids=str)
def test_data_parallel(device_ids, rows):
    """Forward and backward; a batch of one row uses one device."""
    torch.manual_seed(0)
    net = Net().eval()
    x = torch.randn(rows, 4)
    first = (device_ids or [0])[0]
    model = nn.DataParallel(copy.deepcopy(net).to(f"openreg:{first}"), device_ids)
    inputs, expected_inputs = x.to(f"openreg:{first}").requires_grad_(), x.clone().requires_grad_()
    shift = torch.randn(rows, 4)
    results, expected = flat(model(inputs, shift=shift)), flat(net(expected_inputs, shift=shift))
    for result, wanted in zip(results, expected, strict=True):
        assert result.device.index == first
        assert_close(result.cpu(), wanted)
    sum(each.square().sum() for each in results).backward()
    sum(each.square().sum() for each in expected).backward()
    assert_close(inputs.grad.cpu(), expected_inputs.grad)
    for result, wanted in zip(model.module.parameters(), net.parameters(), strict=True):
        assert result.grad.device.index == first
        assert_close(result.grad.cpu(), wanted.grad)


def test_buffers_of_the_first_device_are_the_modules():
    """Each replica normalizes its part of the batch; the statistics of the first one stay, as on CUDA."""
    model = nn.DataParallel(nn.BatchNorm1d(4).to("openreg"))
    x = on(0, 6, 4) + 3
    model(x)
    alone = nn.BatchNorm1d(4)
    alone(x[:3].cpu())
    assert_close(model.module.running_mean.cpu(), alone.running_mean)
    assert model.module.num_batches_tracked.item() == 1


def test_autocast_reaches_the_threads():
    model = nn.DataParallel(nn.Linear(4, 2).to("openreg"))
    with torch.autocast("openreg", dtype=torch.float16):
        assert model(on(0, 4, 4)).dtype == torch.float16


def test_errors_of_data_parallel():
    model = nn.DataParallel(nn.Linear(4, 2).to("openreg:1"), [0, 1])
    with pytest.raises(
        RuntimeError, match="parameters and buffers on device openreg:0.*found one of them on device: open"
    ):
        model(on(0, 4, 4))

    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("from the forward")

    with pytest.raises(ValueError, match="Caught ValueError in replica 0 on device 0"):
        nn.DataParallel(Fails())(on(0, 4, 4))


# ---- torch.nn.parallel ----


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("device", ["cpu", "openreg:0", "openreg:1"])
def test_scatter_and_gather(device, dim):
    x = torch.randn(5, 3, device=device, requires_grad=True)
    parts = scatter(x, [0, 1], dim)
    assert [part.device.index for part in parts] == [0, 1]
    for part, chunk in zip(parts, x.chunk(2, dim), strict=True):
        assert_close(part.cpu(), chunk.cpu())
    back = gather(parts, 1, dim)
    assert back.device.index == 1
    assert_close(back.cpu(), x.cpu())
    weights = torch.randn(5, 3)
    (back * weights.to(back.device)).sum().backward()
    assert x.grad.device == x.device
    assert_close(x.grad.cpu(), weights)


def test_scatter_and_gather_of_containers():
    x = on(0, 4, 2)
    given = {"pair": Pair(x, [x + 1, "text"]), "number": 3}
    parts = scatter(given, [0, 1])
    assert [part["number"] for part in parts] == [3, 3] and type(parts[1]["pair"]) is Pair
    assert parts[1]["pair"].second[1] == "text" and parts[1]["pair"].first.device.index == 1
    out = gather([{"pair": Pair(part["pair"].first, [part["pair"].second[0]])} for part in parts], "cpu")
    assert_close(out["pair"].first, x.cpu())
    assert_close(out["pair"].second[0], x.cpu() + 1)


@pytest.mark.parametrize("detach", [False, True])
def test_replicate(detach):
    net = Net().to("openreg").double()
    net.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64, device="openreg"))
    replicas = replicate(net, [0, 1], detach)
    for i, replica in enumerate(replicas):
        assert replica.first.weight.device.index == replica.scale.device.index == i
        assert_close(replica.first.weight.cpu(), net.first.weight.cpu())
        assert replica.complex.dtype == torch.complex64
    assert replicas[0].scale.data_ptr() == net.scale.data_ptr()
    assert replicas[1].first.weight.requires_grad is not detach
    if not detach:
        sum(replica.first.weight.sum().to("openreg:0") * (i + 1) for i, replica in enumerate(replicas)).backward()
        assert (net.first.weight.grad == 3).all()


# ---- comm ----


@pytest.mark.parametrize("source", ["cpu", "openreg:0", "openreg:1"])
def test_broadcast(source):
    x = torch.randn(3, 4, device=source).t()
    copies = comm.broadcast(x, devices=["openreg:0", "openreg:1"])
    assert [each.device.index for each in copies] == [0, 1]
    assert all(each.cpu().equal(x.cpu()) for each in copies)
    assert all((each is x) == (each.device == x.device) for each in copies)
    out = [torch.empty(4, 3, device=f"openreg:{i}") for i in range(2)]
    assert all(a is b and a.cpu().equal(x.cpu()) for a, b in zip(comm.broadcast(x, out=out), out, strict=True))


def test_broadcast_coalesced():
    """The first device has the tensors themselves; the other copies have a version of their own, and no gradient."""
    tensors = [on(0, 3, 2), on(0, 4, requires_grad=True), torch.arange(3, device="openreg"), on(0, 2, 2).to_sparse()]
    same, copies = comm.broadcast_coalesced(tensors, [0, 1], buffer_size=8)
    assert all(a is b for a, b in zip(same, tensors, strict=True))
    for copied, tensor in zip(copies, tensors, strict=True):
        assert copied.device.index == 1 and copied.layout == tensor.layout and not copied.requires_grad
        assert copied.to_dense().cpu().equal(tensor.detach().to_dense().cpu())
    version = copies[1]._version
    copies[0].add_(1)
    assert copies[1]._version == version
    twice = comm.broadcast_coalesced(tensors, [0, 0])[1]
    assert twice[0].data_ptr() != tensors[0].data_ptr() and twice[0].equal(tensors[0])


@pytest.mark.parametrize("destination", [0, 1])
def test_reduce_add(destination):
    tensors = [on(i, 3, 2) for i in (0, 1)]
    total = tensors[0].cpu() + tensors[1].cpu()
    result = comm.reduce_add(tensors, destination)
    assert result.device.index == destination
    assert_close(result.cpu(), total)
    more = [[tensor, tensor[0], tensor.to_sparse()] for tensor in tensors]
    results = comm.reduce_add_coalesced(more, destination, buffer_size=16)
    for result, wanted in zip(results, (total, total[0], total), strict=True):
        assert result.device.index == destination
        assert_close(result.to_dense().cpu(), wanted)


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_chunk_sizes_and_out(dim):
    x = on(0, 5, 5)
    expected = x.cpu().split([2, 3], dim)
    parts = comm.scatter(x, [1, 0], [2, 3], dim)
    assert [part.device.index for part in parts] == [1, 0]
    assert all(part.cpu().equal(wanted) for part, wanted in zip(parts, expected, strict=True))
    out = [torch.empty(wanted.shape, device=f"openreg:{i}") for i, wanted in enumerate(expected)]
    assert all(a is b for a, b in zip(comm.scatter(x, dim=dim, out=out), out, strict=True))
    assert all(part.cpu().equal(wanted) for part, wanted in zip(out, expected, strict=True))
    assert comm.gather(parts, dim, "cpu").equal(x.cpu())
    assert comm.gather(parts, dim).device.index == torch.openreg.current_device()
    for device in ("cpu", "openreg:1"):
        whole = torch.empty(5, 5, device=device)
        assert comm.gather(parts, dim, out=whole) is whole and whole.cpu().equal(x.cpu())


def test_streams():
    x = torch.randn(4, 2).pin_memory()
    streams = [torch.Stream("openreg:0"), None]
    parts = comm.scatter(x, [0, 1], streams=streams)
    with torch.openreg.device(0):
        torch.openreg.current_stream().wait_stream(streams[0])
    assert torch.cat([part.cpu() for part in parts]).equal(x)


def test_memory_formats_are_kept():
    x = on(0, 4, 3, 2, 2).to(memory_format=torch.channels_last)
    parts = comm.scatter(x, [0, 1])
    assert parts[1].is_contiguous(memory_format=torch.channels_last)
    assert comm.gather(parts).is_contiguous(memory_format=torch.channels_last)
    assert comm.gather([parts[0], parts[1].contiguous()]).is_contiguous()


ERRORS = [
    (lambda x: comm.broadcast(x), "Exactly one of 'devices' and 'out' must be specified"),
    (lambda x: comm.broadcast(x, out=[x, x.cpu()]), "tensor at index 1 has device cpu"),
    (lambda x: comm.broadcast(x, out=[x[0]]), r"Expected out tensor to have shape \[4, 3\], but got \[3\]"),
    (lambda x: comm.broadcast_coalesced([x], [1, 0]), r"All tensors must be on devices\[0\]: 1"),
    (lambda x: comm.broadcast_coalesced([x.cpu()], [0, 1]), r"All tensors must be on devices\[0\]: 0"),
    (lambda x: comm.scatter(x, []), "expects `chunks` to be greater than 0"),
    (lambda x: comm.scatter(x, [0, 1], [1, 1, 2]), r"len\(devices\) = 2 and len\(chunk_sizes\) = 3"),
    (lambda x: comm.scatter(x, [0, 1], [1, 1]), "split_with_sizes expects split_sizes to sum exactly to 4"),
    (lambda x: comm.scatter(x, [0], out=[x]), "'devices' must not be specified"),
    (lambda x: comm.scatter(x, out=[x.cpu()]), "tensor at index 0 has device cpu"),
    (lambda x: comm.scatter(x, out=[x[:, :1]]), r"Expected out tensor to have shape \[4, 3\], but got \[4, 1\]"),
    (lambda x: comm.scatter(x, out=[x[:2], x[:1]]), "split_with_sizes expects split_sizes to sum exactly to 4"),
    (lambda x: comm.gather([x, x.cpu()]), "tensor at index 1 has device cpu"),
    (lambda x: comm.gather([x, x[:, :1]]), "Sizes of tensors must match"),
    (lambda x: comm.gather([x, x], out=x), r"Expected out tensor to have shape \[8, 3\], but got \[4, 3\]"),
    (lambda x: comm.reduce_add([x, x], 1), "expects destination to be on the same GPU"),
]


@pytest.mark.parametrize("call,match", ERRORS, ids=[match for _, match in ERRORS])
def test_errors(call, match):
    """CUDA refuses the same calls."""
    with pytest.raises(RuntimeError, match=match):
        call(on(0, 4, 3))


def test_a_dimension_that_does_not_exist():
    for call in (comm.scatter, lambda x, devices, dim: comm.gather([x], dim)):
        with pytest.raises(IndexError, match="Dimension out of range"):
            call(on(0, 4, 3), [0, 1], dim=2)


def test_a_cuda_build_keeps_its_functions_for_cuda(monkeypatch):
    """Without a GPU, tensors on the CPU go to the device; tensors of the device always do."""
    from openreg_ops.torch_patches import data_parallel

    for name in ("_scatter", "_gather"):
        monkeypatch.setattr(torch._C, name, lambda *arguments: "CUDA's")
    monkeypatch.setattr(torch.cuda.nccl, "is_available", torch.cuda.nccl.is_available)
    for name in ("_broadcast", "_broadcast_coalesced", "_broadcast_out", "_gather_out", "_scatter_out"):
        monkeypatch.delattr(torch._C, name)
    data_parallel.register()
    x = torch.randn(4, 2)
    assert [part.device.type for part in scatter(x, [0, 1])] == ["openreg"] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert torch._C._scatter(x, [0, 1], None, 0, None) == torch._C._gather([x, x], 0, -1) == "CUDA's"
    assert [part.device.type for part in comm.scatter(x.to("openreg"), [0, 1])] == ["openreg"] * 2
    assert comm.gather([x.to("openreg"), x.to("openreg:1")], 0, 1).device.index == 1
