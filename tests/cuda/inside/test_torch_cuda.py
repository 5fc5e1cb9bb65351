"""torch.cuda under the name cuda: its names, its bindings, what it refuses, its tensor types and storages."""

import pytest
import torch

from openreg_ops.device import cuda, cuda_types
from openreg_ops.device.refusals import refusals


def test_the_device_has_the_name():
    assert torch.openreg is torch.cuda and torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.cuda.is_available() and torch.cuda.is_initialized()
    assert torch.version.cuda is None and not torch.backends.cuda.is_built()


@pytest.mark.parametrize("index", [0, 1])
def test_a_tensor_is_where_it_says(index):
    for x in (torch.ones(3).cuda(index), torch.ones(3).to(f"cuda:{index}"), torch.ones(3, device=torch.device(index))):
        assert (x.is_cuda, x.device.type, x.get_device(), x.device.index) == (True, "cuda", index, index)


def test_every_public_name_exists():
    assert [name for name in torch.cuda.__all__ if not hasattr(torch.cuda, name)] == []


# What each binding returns, by the function of torch.cuda that says the same.
SAME = {
    "_cuda_getDeviceCount": ((), torch.cuda.device_count),
    "_cuda_getDevice": ((), torch.cuda.current_device),
    "_cuda_getArchFlags": ((), lambda: " ".join(torch.cuda.get_arch_list())),
    "_cuda_getCurrentRawStream": ((1,), lambda: torch.cuda.current_stream(1).cuda_stream),
    "_cuda_isCurrentStreamCapturing": ((), torch.cuda.is_current_stream_capturing),
    "_cuda_canDeviceAccessPeer": ((0, 1), lambda: torch.cuda.can_device_access_peer(0, 1)),
    "_cuda_hasPrimaryContext": ((1,), lambda: True),
    "_cuda_isInBadFork": ((), lambda: False),
    "_cuda_memoryStats": ((0,), lambda: torch.cuda.memory_stats_as_nested_dict(0)),
    "_cuda_getAllocatorBackend": ((), torch.cuda.memory.get_allocator_backend),
    "_cuda_tunableop_is_enabled": ((), lambda: False),
}


@pytest.mark.parametrize("name", sorted(SAME))
def test_bindings_say_what_torch_cuda_says(name):
    arguments, expected = SAME[name]
    assert getattr(torch._C, name)(*arguments) == expected()


def test_bindings_change_the_current_device():
    assert torch._C._cuda_exchangeDevice(1) == 0 and torch.cuda.current_device() == 1
    assert torch._C._cuda_maybeExchangeDevice(-1) == 1 and torch.cuda.current_device() == 1
    assert torch._C._cuda_maybeExchangeDevice(0) == 1 and torch.cuda.current_device() == 0
    torch._C._cuda_setDevice(1)
    assert torch.cuda.current_device() == 1
    torch.cuda.set_device(0)


@pytest.mark.parametrize("name", sorted(cuda._REFUSED))
def test_what_needs_a_gpu_says_so(name):
    owner = torch.cuda
    *path, last = name.split(".")[2:]
    for part in path:
        owner = getattr(owner, part)
    known = len(refusals)
    with pytest.raises(NotImplementedError) as error:
        getattr(owner, last)()
    assert str(error.value) == (
        f"{name}() needs {cuda._REFUSED[name]}, which a simulated device does not have; run this on a GPU"
    )
    (refusal,) = [*refusals][known:]
    assert refusal[:2] == (f"{name}()", cuda._REFUSED[name]) and refusal.line.startswith(
        "tests/cuda/inside/test_torch_cuda.py:"
    )


def test_compilers_for_a_gpu_say_so():
    from torch.utils import cpp_extension

    for call in (
        lambda: cpp_extension.CUDAExtension("mine", ["mine.cu"]),
        lambda: cpp_extension.load_inline("mine", cpp_sources="", cuda_sources="__global__ void f() {}"),
    ):
        with pytest.raises(NotImplementedError, match="a CUDA extension needs nvcc"):
            call()


def test_operators_of_libraries_say_so():
    x = torch.ones(1, 1, 4, 4, device="cuda")
    with pytest.raises(
        NotImplementedError, match="aten::cudnn_convolution has no kernel for cuda. PyTorch calls cuDNN"
    ):
        torch.cudnn_convolution(x, x, (0, 0), (1, 1), (1, 1), 1, False, False, False)


@pytest.mark.parametrize("name", sorted(cuda_types._DTYPES))
def test_tensor_types(name):
    kind, dtype = getattr(torch.cuda, f"{name}Tensor"), cuda_types._DTYPES[name]
    for x, shape in ((kind(2, 3), (2, 3)), (kind([1, 0]), (2,)), (kind(torch.ones(4)), (4,)), (kind(), (0,))):
        assert (x.dtype, x.device.type, x.shape) == (dtype, "cuda", shape)
        assert isinstance(x, kind) and not isinstance(x.cpu(), kind)
    assert torch.ones(2).type(kind).dtype == torch.ones(2).type(f"torch.cuda.{name}Tensor").dtype == dtype
    others = [other for other in cuda_types._DTYPES if other != name]
    assert not any(isinstance(kind(1), getattr(torch.cuda, f"{other}Tensor")) for other in others)


@pytest.mark.parametrize("name", cuda_types._SPARSE)
def test_sparse_tensor_types(name):
    kind, dtype = getattr(torch.cuda.sparse, f"{name}Tensor"), cuda_types._DTYPES[name]
    x = kind(torch.tensor([[0, 2]]), torch.tensor([1, 1]), torch.Size([3]))
    assert (x.dtype, x.layout, x.device.type, x.to_dense().tolist()) == (dtype, torch.sparse_coo, "cuda", [1, 0, 1])
    assert isinstance(x, kind) and not isinstance(x.to_dense(), kind) and kind(2, 3).shape == (2, 3)


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:1"])
def test_storages(device):
    x = torch.arange(6.0, device=device)
    x.untyped_storage().resize_(48)
    assert x.untyped_storage().nbytes() == 48 and x.tolist() == [0.0, 1, 2, 3, 4, 5]
    for storage in (torch.UntypedStorage(8, device=device), torch.UntypedStorage([1, 2], device=device)):
        assert storage.device == torch.device(device)
    assert torch.UntypedStorage([1, 2], device=device).tolist() == [1, 2]
    assert torch.UntypedStorage(device=device).nbytes() == 0


def test_errors_have_cudas_sentences():
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. .* GPU 1 has a total capacity of"):
        torch.empty(2**60, device="cuda:1")
    with pytest.raises(
        RuntimeError, match="CUDA error: invalid device ordinal 7; there are 2 devices, cuda:0 to cuda:1"
    ):
        torch.ones(1, device="cuda:7")
    with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu!"):
        torch.ones(2, device="cuda") + torch.ones(2)
    with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cuda:1!"):
        torch.ones(2, device="cuda") + torch.ones(2, device="cuda:1")
    with pytest.raises(TypeError, match="can't convert cuda:1 device type tensor to numpy"):
        torch.ones(2, device="cuda:1").numpy()


@pytest.mark.parametrize("name", ["amp", "faults", "graphs", "memory", "nvtx", "random", "streams", "_sanitizer"])
def test_modules_have_both_names(name):
    import importlib

    ours, theirs = (importlib.import_module(f"torch.{parent}.{name}") for parent in ("openreg", "cuda"))
    assert ours is theirs is getattr(torch.cuda, name)


def test_graphs_of_the_accelerator():
    x, graph = torch.ones(3, device="cuda"), torch.accelerator.Graph()
    with torch.cuda.stream(torch.cuda.Stream()), graph:
        y = x + 1
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5.0, 5, 5]


def test_the_sanitizer_has_both_names():
    assert torch.cuda._sanitizer.enable_cuda_sanitizer is torch.cuda._sanitizer.enable_openreg_sanitizer
    x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    with torch.cuda._sanitizer.sanitize(), pytest.raises(Exception, match="stream 1 of cuda:0|stream [0-9]+ of cuda:0"):
        x.add_(1)
        with torch.cuda.stream(side):
            x.add_(1)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_move(kind):
    module = getattr(torch.nn, kind)(3, 4).cuda()
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(4, 3), torch.ones(2, 3)]).cuda()
    assert module(packed)[0].data.is_cuda


def test_streams_and_events_have_cudas_attributes():
    stream, event = torch.cuda.Stream(1), torch.cuda.Event()
    assert stream.cuda_stream == stream.native_handle != torch.cuda.default_stream(1).cuda_stream
    assert torch.cuda.ExternalStream(stream.cuda_stream, device=1) == stream
    assert event.cuda_event == 0
    event.record(stream)
    assert event.cuda_event != 0


def test_plans_are_numbers_to_set():
    cache = torch.backends.cuda.cufft_plan_cache
    cache[1].max_size = 10
    assert (cache[0].max_size, cache[1].max_size, cache[1].size) == (4096, 10, 0)
    cache[1].clear()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert torch.backends.cudnn.benchmark


def test_convolutions_name_the_type():
    module, x = torch.nn.Conv2d(1, 1, 2).cuda(), torch.ones(1, 1, 3, 3)
    message = r"Input type \({}\) and weight type \(torch.cuda.FloatTensor\) should be the same"
    with pytest.raises(RuntimeError, match=message.format("torch.FloatTensor")):
        module(x)
    module.bias = None
    with pytest.raises(RuntimeError, match=message.format("torch.cuda.HalfTensor")):
        module(x.cuda().half())


def test_sizes_may_be_numpys():
    import numpy

    assert torch.cuda.FloatTensor(numpy.int64(2), 3).shape == (2, 3)
    assert torch.UntypedStorage(numpy.int64(4), device="cuda").nbytes() == 4
    with pytest.raises(
        TypeError, match=r"torch.cuda.FloatTensor\(\) takes sizes, or one sequence or tensor, but got 2"
    ):
        torch.cuda.FloatTensor([1.0], 3)


def test_the_runtime_has_what_it_can_do():
    runtime = torch.cuda.cudart()
    assert runtime.cudaProfilerStart() == 0 and not hasattr(runtime, "x") and hasattr(runtime, "cudaHostRegister")
    with pytest.raises(NotImplementedError, match=r"cudart\(\).cudaHostRegister\(\) needs the CUDA runtime"):
        runtime.cudaHostRegister(0, 0, 0)


def test_the_default_device_of_a_program_stays():
    torch.set_default_device("cuda")
    try:
        torch.set_default_tensor_type(torch.FloatTensor)
        assert torch.ones(1).is_cuda
    finally:
        torch.set_default_device(None)
