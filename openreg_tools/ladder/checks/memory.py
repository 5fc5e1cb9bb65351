"""Rung 2: tensors are created, viewed, resized, read and freed."""

from __future__ import annotations

import gc

import torch

from openreg_tools.ladder.rung import Skip, check, equal, raises

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.complex64)  # fmt: skip
_MINIMAL = "Accelerator: Step 1"
_KEY = "PrivateUse1"


@check("csrc/operators.cpp", _MINIMAL, "register aten::empty.memory_format and aten::empty_strided", _KEY)
def empty(device: str) -> None:
    """Empty tensors have their sizes, strides, dtype and device."""
    for dtype in DTYPES:
        for size in ((), (0,), (3,), (2, 0, 4), (2, 3, 4)):
            x, expected = torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype)
            found = (x.dtype, x.device.type, x.size(), x.stride(), x.untyped_storage().nbytes())
            wanted = (dtype, torch.device(device).type, *(expected.size(), expected.stride()),
                      expected.untyped_storage().nbytes())  # fmt: skip
            assert found == wanted, f"torch.empty({size}, dtype={dtype}) gives {found}, expected {wanted}"
    x = torch.empty_strided((3, 2), (1, 5), device=device)
    assert x.stride() == (1, 5) and x.untyped_storage().nbytes() == 4 * 8
    x = torch.empty(2, 3, 4, 5, device=device, memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last), "empty ignores memory_format"


@check("csrc/memory.cpp", "PrivateUse1: Register kernels for the new backend",
       "give every block an address of its own, with the index of its device")  # fmt: skip
def blocks(device: str) -> None:
    """Live tensors do not share memory."""
    tensors = [torch.full((1000,), float(number), device=device) for number in range(20)]
    for number, tensor in enumerate(tensors):
        equal(tensor, torch.full((1000,), float(number)), f"tensor {number} of 20")
    del tensors[::2]
    more = [torch.full((1000,), -1.0, device=device) for _ in range(10)]
    for number, tensor in zip(range(1, 20, 2), tensors, strict=True):
        equal(tensor, torch.full((1000,), float(number)), f"tensor {number}, after others were freed and created,")
    del more


@check("csrc/operators.cpp", _MINIMAL, "register aten::fill_.Scalar, or leave it to the fallback", _KEY)
def filled(device: str) -> None:
    """zeros, ones, full and arange have their values."""
    for dtype in DTYPES:
        equal(torch.zeros(5, dtype=dtype, device=device), torch.zeros(5, dtype=dtype), f"torch.zeros of {dtype}")
        equal(torch.full((2, 3), 1, dtype=dtype, device=device), torch.full((2, 3), 1, dtype=dtype), f"full, {dtype}")
    equal(torch.arange(7, device=device), torch.arange(7), "torch.arange(7)")
    equal(torch.eye(3, device=device), torch.eye(3), "torch.eye(3)")


@check(
    "csrc/operators.cpp", _MINIMAL, "register aten::as_strided, aten::view, aten::_reshape_alias and aten::unfold", _KEY
)
def views(device: str) -> None:
    """Views share their storage."""
    base = torch.arange(24, device=device)
    expected = torch.arange(24)
    for name, view in {
        "view": lambda x: x.view(4, 6), "transpose": lambda x: x.view(4, 6).t(), "slice": lambda x: x[3:19:4],
        "as_strided": lambda x: x.as_strided((2, 3), (7, 2), 1), "expand": lambda x: x[:1].expand(5),
        "unfold": lambda x: x.unfold(0, 5, 4), "select": lambda x: x.view(2, 3, 4)[1, :, 2],
    }.items():  # fmt: skip
        found, on_cpu = view(base), view(expected)
        assert (found.size(), found.stride(), found.storage_offset()) == (
            on_cpu.size(), on_cpu.stride(), on_cpu.storage_offset()
        ), f"{name} gives other sizes or strides than the CPU"  # fmt: skip
        assert found.untyped_storage().data_ptr() == base.untyped_storage().data_ptr(), f"{name} copies"
        equal(found, on_cpu, name)
    base.view(4, 6).t()[1:3].fill_(-1)
    expected.view(4, 6).t()[1:3].fill_(-1)
    equal(base, expected, "a tensor that was written through a view")


@check("csrc/operators.cpp", _MINIMAL, "register aten::_local_scalar_dense", _KEY)
def items(device: str) -> None:
    """item() and printing read values."""
    for dtype in DTYPES:
        for value in (0, 1, 100):
            expected = torch.tensor(value, dtype=dtype)
            found = torch.tensor(value, dtype=dtype, device=device).item()
            assert found == expected.item(), f"item() of {value} as {dtype} gives {found}"
    assert torch.arange(5, device=device)[3].item() == 3, "item() ignores the storage offset"
    shown = repr(torch.tensor([1.5, -2.0], device=device))
    assert "1.5" in shown and "-2." in shown and torch.device(device).type in shown, f"printing gives {shown!r}"


@check(
    "csrc/operators.cpp",
    _MINIMAL,
    "register aten::resize_, aten::set_.source_Storage_storage_offset and aten::set_",
    _KEY,
)
def resized(device: str) -> None:
    """resize_ and set_ keep values."""
    x = torch.arange(6, device=device)
    x.resize_(4, 5)
    assert x.size() == (4, 5) and x.untyped_storage().nbytes() >= 8 * 20, "resize_ does not enlarge the storage"
    equal(x.flatten()[:6], torch.arange(6), "what a tensor held before resize_")
    x.resize_(2)
    equal(x, torch.arange(2), "a tensor that resize_ made shorter")
    y, source = torch.empty(0, dtype=torch.int64, device=device), torch.arange(10, device=device)
    y.set_(source.untyped_storage(), 2, (2, 3), (4, 1))
    equal(y, torch.arange(10).as_strided((2, 3), (4, 1), 2), "set_")
    y.add_(100)
    assert source.tolist() == [0, 1, 102, 103, 104, 5, 106, 107, 108, 9], "set_ copies instead of sharing"


@check("csrc/memory.cpp", "PrivateUse1: Register kernels for the new backend",
       "derive the allocator from c10::DeviceAllocator, and count in getDeviceStats")  # fmt: skip
def statistics(device: str) -> None:
    """torch.accelerator counts memory."""
    if not hasattr(torch.accelerator, "memory_allocated"):
        raise Skip("torch.accelerator has no memory statistics before torch 2.9")
    index = torch.empty(1, device=device).device.index or 0
    gc.collect()
    torch.accelerator.synchronize(index)
    before = torch.accelerator.memory_allocated(index)
    x = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    rise = torch.accelerator.memory_allocated(index) - before
    assert 1 << 20 <= rise < 1 << 22, f"memory_allocated rises by {rise} for 1 MiB"
    torch.accelerator.reset_peak_memory_stats(index)
    peak = torch.accelerator.max_memory_allocated(index)
    assert peak == torch.accelerator.memory_allocated(index), "reset_peak_memory_stats does not reset the peak"
    assert torch.accelerator.memory_reserved(index) >= torch.accelerator.memory_allocated(index)
    del x
    assert torch.accelerator.memory_allocated(index) == before, "memory_allocated does not fall when a tensor is freed"
    assert torch.accelerator.max_memory_allocated(index) == peak, "the peak falls with the memory"
    torch.accelerator.empty_cache()


@check("csrc/memory.cpp", "PrivateUse1: Register kernels for the new backend",
       "throw c10::OutOfMemoryError (TORCH_CHECK_WITH(OutOfMemoryError, …)) when the driver has no memory left")  # fmt: skip
def out_of_memory(device: str) -> None:
    """Too much memory is an error that can be caught."""
    said = raises(lambda: torch.empty(1 << 60, dtype=torch.uint8, device=device), "an allocation of 1 EiB")
    assert said, "the error for an allocation of 1 EiB has no message"
    equal(torch.ones(3, device=device), torch.ones(3), "a tensor that is made after memory ran out")
