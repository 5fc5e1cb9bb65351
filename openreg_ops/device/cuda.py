"""What ``torch.cuda`` has besides the names of ``torch.openreg``, where OPENREG_DEVICE=cuda gives the device that name."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from openreg_ops import _C, environment
from openreg_ops.device import cuda_types, devices, graphs, memory, streams, sync_debug
from openreg_ops.device.device_index import maybe_exchange_device
from openreg_ops.device.refusals import refuse

__all__ = ["register"]

# The version of NCCL whose collectives the device has. Programs ask it what they may call.
_NCCL_VERSION = (2, 27, 0)

# Calls that need one of NVIDIA's libraries, and its name.
_REFUSED = {
    "torch.cuda.CUDAPluggableAllocator": "an allocator written for the CUDA runtime",
    "torch.cuda.change_current_allocator": "an allocator written for the CUDA runtime",
    "torch.cuda.memory.CUDAPluggableAllocator": "an allocator written for the CUDA runtime",
    "torch.cuda.memory.change_current_allocator": "an allocator written for the CUDA runtime",
    "torch.cuda.clock_rate": "NVML",
    "torch.cuda.power_draw": "NVML",
    "torch.cuda.temperature": "NVML",
    "torch.cuda.current_blas_handle": "cuBLAS",
    "torch.cuda.current_solver_handle": "cuSOLVER",
    "torch.cuda.GreenContext": "the CUDA driver",
    "torch.cuda.tunable.enable": "cuBLAS or rocBLAS",
    "torch.cuda.tunable.tuning_enable": "cuBLAS or rocBLAS",
    "torch.cuda.gds.GdsFile": "cuFile",
    "torch.cuda.gds.gds_register_buffer": "cuFile",
    "torch.cuda.gds.gds_deregister_buffer": "cuFile",
    **{
        f"torch.cuda.nccl.{name}": "NCCL"
        for name in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "unique_id")
    },
}


def _refusal(name: str, needs: str) -> Callable[..., NoReturn]:
    return lambda *_, **__: refuse(name, needs)


class _Runtime(types.SimpleNamespace):
    """The functions of ``torch.cuda.cudart()`` that have a meaning here. Each returns an error code, 0 for success."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("cuda"):
            return _refusal(f"cudart().{name}()", "the CUDA runtime")
        raise AttributeError(f"cudart() has no attribute {name!r}")


_runtime = _Runtime(
    cudaError=types.SimpleNamespace(success=0),
    cudaProfilerStart=lambda: 0,
    cudaProfilerStop=lambda: 0,
    cudaDeviceSynchronize=lambda: devices.synchronize() or 0,
    cudaMemGetInfo=memory.mem_get_info,
    cudaGetErrorString=lambda code: "no error" if not int(code) else "unknown error",
)


def _bindings() -> dict[str, Any]:
    """The functions of ``torch._C`` that PyTorch's Python code calls for CUDA outside ``torch.cuda``."""
    return {
        "_cuda_init": devices.init,
        "_cuda_isInBadFork": devices._is_in_bad_fork,
        "_cuda_getDeviceCount": devices.device_count,
        "_cuda_getDevice": devices.current_device,
        "_cuda_setDevice": devices.set_device,
        "_cuda_exchangeDevice": _C.exchange_device,
        "_cuda_maybeExchangeDevice": maybe_exchange_device,
        "_cuda_hasPrimaryContext": lambda device: 0 <= device < devices.device_count(),
        "_cuda_canDeviceAccessPeer": devices.can_device_access_peer,
        "_cuda_getArchFlags": lambda: " ".join(devices.get_arch_list()),
        "_cuda_getCurrentRawStream": lambda device: streams.current_stream(device).native_handle,
        "_cuda_setStream": lambda **of: streams.set_stream(torch.Stream(**of)),
        "_cuda_getCurrentStream": lambda device: _numbers(streams.current_stream(device)),
        "_cuda_getDefaultStream": lambda device: _numbers(streams.default_stream(device)),
        "_cuda_isCurrentStreamCapturing": graphs.is_current_stream_capturing,
        "_cuda_synchronize": devices.synchronize,
        "_cuda_sleep": streams._sleep,
        "_cuda_ipc_collect": devices.ipc_collect,
        "_cuda_emptyCache": memory.empty_cache,
        "_cuda_memoryStats": memory.memory_stats_as_nested_dict,
        "_cuda_hostMemoryStats": memory.host_memory_stats_as_nested_dict,
        "_cuda_resetAccumulatedMemoryStats": memory.reset_accumulated_memory_stats,
        "_cuda_resetAccumulatedHostMemoryStats": memory.reset_accumulated_host_memory_stats,
        "_cuda_resetPeakHostMemoryStats": memory.reset_peak_host_memory_stats,
        "_cuda_getMemoryFraction": memory.get_per_process_memory_fraction,
        "_cuda_setMemoryFraction": memory.set_per_process_memory_fraction,
        "_cuda_memorySnapshot": lambda *_: memory._snapshot(),
        "_cuda_cudaCachingAllocator_raw_alloc": lambda size, stream: memory.caching_allocator_alloc(
            size, stream=stream
        ),
        "_cuda_cudaCachingAllocator_raw_delete": memory.caching_allocator_delete,
        "_cuda_get_sync_debug_mode": sync_debug.get_sync_debug_mode,
        "_cuda_set_sync_debug_mode": sync_debug.set_sync_debug_mode,
        # A number that cuDNN would read.
        "_cuda_get_cudnn_benchmark_limit": lambda: _cudnn["benchmark_limit"],
        "_cuda_set_cudnn_benchmark_limit": lambda limit: _cudnn.update(benchmark_limit=limit),
        "_cuda_getAllocatorBackend": memory.get_allocator_backend,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_enable": lambda enabled: None,  # the device's allocator always keeps free memory
        "_cuda_jiterator_compile_and_launch_kernel": _refusal("a kernel of torch.cuda.jiterator", "NVRTC"),
        "_cuda_tunableop_is_enabled": lambda: False,
        "_cuda_tunableop_tuning_is_enabled": lambda: False,
        "_cuda_record_untuned_is_enabled": lambda: False,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_resetPeakMemoryStats": memory.reset_peak_memory_stats,
    }


_cudnn = {"benchmark_limit": 10}


def _numbers(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def register(cuda: types.ModuleType) -> None:
    """Complete ``torch.cuda``, which has the names of ``torch.openreg`` already."""
    for name, function in _bindings().items():
        setattr(torch._C, name, functools.partial(function))  # Dynamo has other rules for these than for our functions
    if environment.compute_capability():
        torch.backends.cuda.is_built = lambda: True
        torch._C._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})  # a type that Inductor names
        torch.version.cuda = "13.0"
    cuda._exchange_device, cuda._maybe_exchange_device = _C.exchange_device, maybe_exchange_device
    cuda._CudaDeviceProperties = devices.DeviceProperties
    cuda._cudart = _runtime
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = graphs.Graph
    cuda._sanitizer.enable_cuda_sanitizer = cuda._sanitizer.enable_openreg_sanitizer
    cuda._is_compiled = lambda: True
    cuda.is_initialized, cuda.has_magma = _C.initialized, True  # ATen's linear algebra takes the place of MAGMA
    cuda.nccl.version = lambda: _NCCL_VERSION
    cuda_types.register()
    for name, library in _REFUSED.items():
        *path, last = name.split(".")[2:]
        owner = getattr(cuda, path[0], None) if path else cuda
        if owner is not None and hasattr(owner, last):
            setattr(owner, last, _refusal(f"{name}()", library))
