"""`torch.openreg` has the public names of `torch.cuda`, or a reason why not; tests of those without another test
file."""

import importlib
import inspect
import os
import types
import uuid

import pytest
import torch
from processes import python

RUNTIME = "the runtime of CUDA itself, which this device does not have"
TOOLS = "drives libraries or compilers of NVIDIA's"
ALLOCATOR = "replaces or switches off CUDA's caching allocator; the pool of this device cannot be replaced"

# Names of torch.cuda that torch.openreg does not have.
ABSENT = {
    **dict.fromkeys(["CudaError", "check_error", "cudaStatus", "cudart", "DeferredCudaCallError"], RUNTIME),
    **dict.fromkeys(["current_blas_handle", "current_solver_handle", "nccl", "jiterator", "tunable", "gds"], TOOLS),
    **dict.fromkeys(["GreenContext", "green_contexts"], TOOLS),
    **dict.fromkeys(["DEVICE_REQUIREMENT", "PYTORCH_RELEASES_CODE_CC", "get_gencode_flags"], TOOLS),
    **dict.fromkeys(["DEVICE_REQUIREMENT_POST_JETSON_SBSA_UNIFICATION"], TOOLS),
    **dict.fromkeys(["graph_annotations", "export_graph_data", "export_dot"], RUNTIME),  # the driver's graphs
    **dict.fromkeys(["CUDAPluggableAllocator", "change_current_allocator"], ALLOCATOR),
    **dict.fromkeys(["caching_allocator_disabled", "caching_allocator_enable"], ALLOCATOR),
    **dict.fromkeys(["clock_rate", "power_draw", "temperature"], "a simulated device has none"),
    "profiler": "starts and stops NVIDIA's profiler; torch.profiler profiles this device",
    "sparse": "has only tensor types",
    "CUDAGraph": "it is torch.openreg.Graph, as torch.accelerator's is Graph",
}


def is_public(name):
    """Returns true if `torch.cuda.NAME` is CUDA's, and not something that its source imports."""
    if name.endswith(("Tensor", "Storage")):  # types of the time before dtype= and device=
        return False
    value = getattr(torch.cuda, name)
    if isinstance(value, types.ModuleType):
        return value.__name__.startswith("torch.cuda.")
    if name in torch.cuda.__all__:
        return True
    return not name.startswith("_") and getattr(value, "__module__", "torch.cuda").startswith(
        ("torch.cuda", "torch._C")
    )


def test_every_name_of_cuda():
    names = {name for name in dir(torch.cuda) if not name.startswith("_") and is_public(name)}
    names -= {"Device", "TYPE_CHECKING", "lru_cache"}  # imported from elsewhere, and without a module of their own
    missing = {name for name in names if not hasattr(torch.openreg, name)}
    assert missing == {name for name in ABSENT if hasattr(torch.cuda, name)}
    assert not [name for name in ABSENT if hasattr(torch.openreg, name)]


@pytest.mark.parametrize("name", ["nvtx", "random"])
def test_every_name_of_a_module_of_cuda(name):
    theirs, ours = (importlib.import_module(f"torch.{device}.{name}") for device in ("cuda", "openreg"))
    assert theirs.__all__ and not [each for each in theirs.__all__ if not hasattr(ours, each)]


def test_every_parameter_of_cuda():
    """A call that works with torch.cuda works here."""
    checked = 0
    for name in torch.cuda.__all__:
        theirs, ours = getattr(torch.cuda, name), getattr(torch.openreg, name, None)
        if inspect.isfunction(theirs) and inspect.isfunction(ours):
            parameters = inspect.signature(ours).parameters
            for parameter in inspect.signature(theirs).parameters.values():
                assert parameter.name in parameters, (name, parameter)
                if parameter.default is not inspect.Parameter.empty:
                    assert parameters[parameter.name].default is not inspect.Parameter.empty, (name, parameter)
            checked += 1
    assert checked > 50


def test_every_parameter_of_the_classes_of_cuda():
    """Constructors and methods accept the parameters of those of torch.cuda."""

    def constructor(kind):
        return next(f for f in (kind.__new__, kind.__init__) if inspect.isfunction(f))

    missing, checked = {}, 0
    pairs = {name: name for name in ("Event", "ExternalStream", "MemPool", "Stream", "StreamContext", "graph")}
    for mine, theirs in (pairs | {"Graph": "CUDAGraph"}).items():
        ours, cuda = getattr(torch.openreg, mine), getattr(torch.cuda, theirs)
        functions = {mine: (constructor(ours), constructor(cuda))}
        for name in dir(cuda):
            both = getattr(ours, name, None), getattr(cuda, name)
            if not name.startswith("_") and all(map(inspect.isfunction, both)):
                functions[f"{mine}.{name}"] = both
        for name, (ours, cuda) in functions.items():
            checked += 1
            left = set(inspect.signature(cuda).parameters) - set(inspect.signature(ours).parameters)
            # torch 2.15: how annotations of CUDA's kernels are kept, and a flag of the CUDA runtime's own dump.
            if left := left - {"args", "kwargs", "obj", "cls"} - {"annotation_config", "verbose"}:
                missing[name] = left
    assert not missing and checked > 15


def test_properties():
    first, second = (torch.openreg.get_device_properties(i) for i in range(2))
    assert first.name == torch.openreg.get_device_name(0) and second.index == 1
    assert first.total_memory == torch.openreg.mem_get_info(0)[1] and first.multi_processor_count == os.cpu_count()
    assert isinstance(first.uuid, uuid.UUID) and first.uuid != second.uuid
    assert first.gcnArchName in torch.openreg.get_arch_list()
    assert not hasattr(first, "warp_size")
    with pytest.raises(AttributeError, match="clock_rate: openreg:1 is a simulated device, which has no clock"):
        second.clock_rate  # noqa: B018
    with pytest.raises(AttributeError, match="'DeviceProperties' object has no attribute 'colour'"):
        first.colour  # noqa: B018


def test_the_uuid_is_that_of_every_process():
    code = "import torch; print(torch.openreg.get_device_properties(1).uuid)"
    other = python("-c", code)
    assert other.stdout.strip() == str(torch.openreg.get_device_properties(1).uuid)


def test_utilization():
    torch.openreg.synchronize()
    stream = torch.openreg.Stream(device=1)
    with stream:
        torch.openreg._sleep(30_000_000_000)  # longer than the samples, of a sixth of a second, may take
        busy, memory = torch.openreg.utilization(1), torch.openreg.memory_usage("openreg:1")
    assert busy > 0 and memory == 0 and not stream.query()
    assert torch.openreg.utilization(0) == 0


def test_memory_of_processes():
    x = torch.ones(2**20, device="openreg:1")
    assert torch.openreg.device_memory_used(1) >= x.nbytes
    assert f"process {os.getpid():>10d} uses" in torch.openreg.list_gpu_processes(1)
    assert torch.openreg.get_allocator_backend() == "native"


def test_priority():
    least, greatest = torch.openreg.Stream.priority_range()
    assert least == 0 > greatest
    assert torch.openreg.Stream().priority == torch.openreg.default_stream(1).priority == least
    assert (
        torch.openreg.Stream(priority=-100).priority == greatest and torch.openreg.Stream(priority=5).priority == least
    )
    assert torch.Stream("openreg:1", priority=-1).priority == greatest
    with pytest.raises(AttributeError, match="no attribute 'priority'"):
        torch.Stream("cpu").priority  # noqa: B018
