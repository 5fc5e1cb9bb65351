"""Rung 3: values arrive unchanged, between every pair of host, pinned host and devices."""

from __future__ import annotations

import torch

from openreg_tools.ladder.checks.memory import DTYPES
from openreg_tools.ladder.rung import Skip, check, equal

_SECTION = "PrivateUse1: Register kernels for the new backend"
_KEY = "PrivateUse1"


def _values(dtype: torch.dtype, *size: int) -> torch.Tensor:
    count = torch.Size(size).numel()
    return (torch.arange(count) % 100 - 20 * dtype.is_signed).to(dtype).view(size)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "sliced": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:1].expand(4, *x.shape[1:]),
    "a scalar": lambda x: x[1, 1, 1],
    "empty": lambda x: x[:0],
    "permuted": lambda x: x.permute(2, 0, 1),
}


@check("csrc/operators.cpp", _SECTION, "register aten::_copy_from: it copies any layout and converts dtypes", _KEY)
def round_trip(device: str) -> None:
    """Every dtype and layout survives the way to the device and back."""
    for dtype in DTYPES:
        for layout, change in LAYOUTS.items():
            x = change(_values(dtype, 3, 4, 5))
            equal(x.to(device), x, f"a {layout} tensor of {dtype} that went to the device and back")
            equal(change(_values(dtype, 3, 4, 5).to(device)), x, f"a device tensor of {dtype}, {layout},")
    x = torch.tensor([1 + 2j, 3 - 1j])
    equal(x.to(device).conj(), x.conj(), "a conjugate view")
    equal(x.to(device).conj().imag.neg(), x.conj().imag.neg(), "a negative view")


@check("csrc/operators.cpp", _SECTION, "let _copy_from write through the strides of its destination", _KEY)
def into(device: str) -> None:
    """copy_ writes through strides, and broadcasts."""
    for layout, change in LAYOUTS.items():
        if layout == "expanded":
            continue  # copy_ into memory that overlaps is an error
        for source in ("cpu", device):
            x, expected = torch.zeros(3, 4, 5, device=device), torch.zeros(3, 4, 5)
            value = change(_values(torch.float32, 3, 4, 5)) + 1
            change(x).copy_(value.to(source))
            change(expected).copy_(value)
            equal(x, expected, f"a tensor after copy_ from {source} into its {layout} view")
            back = torch.zeros(3, 4, 5)
            change(back).copy_(value.to(device))
            equal(back, expected, f"a host tensor after copy_ from the device into its {layout} view")
    equal(
        torch.zeros(3, 4, device=device).copy_(torch.arange(4.0)), torch.arange(4.0).expand(3, 4), "copy_, broadcast,"
    )
    equal(
        torch.zeros(3, 4).copy_(torch.arange(4.0, device=device)), torch.arange(4.0).expand(3, 4), "copy_ to the host"
    )


@check(
    "csrc/operators.cpp", _SECTION, "convert the dtype in _copy_from, for example on the host side of the copy", _KEY
)
def converts(device: str) -> None:
    """A copy converts dtypes like the CPU."""
    values = torch.tensor([0.0, 1.0, 1.75, 100.0])
    for source in DTYPES:
        for to in DTYPES:
            if source.is_complex and not to.is_complex:
                continue
            x = values.to(source)
            expected = x.to(to)
            equal(x.to(device).to(to), expected, f"{source} as {to} on the device")
            equal(
                torch.empty(4, dtype=to, device=device).copy_(x), expected, f"copy_ of {source} from the host to {to}"
            )
            equal(torch.empty(4, dtype=to).copy_(x.to(device)), expected, f"copy_ of {source} to the host as {to}")


@check(
    "csrc/operators.cpp",
    _SECTION,
    "copy between devices with the driver's peer copy, after the work of both streams",
    _KEY,
)
def peers(device: str) -> None:
    """Tensors move between devices."""
    kind, count = torch.device(device).type, torch.accelerator.device_count()
    if count < 2:
        raise Skip("there is only one device")
    x = _values(torch.float32, 3, 4, 5)
    for layout, change in LAYOUTS.items():
        first = change(x.to(f"{kind}:0"))
        second = first.to(f"{kind}:{count - 1}")
        assert second.device.index == count - 1
        equal(second, change(x), f"a {layout} tensor that moved between devices")
    y = torch.ones(1000, device=f"{kind}:0") * 3
    equal(y.to(f"{kind}:1") + 1, torch.full((1000,), 4.0), "a tensor that moved while its device computed")


@check("csrc/memory.cpp", _SECTION,
       "register at::HostAllocator for PrivateUse1, and isPinnedPtr and getPinnedMemoryAllocator of the hooks")  # fmt: skip
def pinned(device: str) -> None:
    """Host memory is pinned, and knows it."""
    x = torch.arange(1000.0).pin_memory()
    assert x.is_pinned(), "is_pinned() is false after pin_memory()"
    assert x[10:].is_pinned() and not torch.arange(3.0).is_pinned(), (
        "is_pinned() is wrong for a view or ordinary memory"
    )
    y = torch.empty(10, pin_memory=True)
    assert y.is_pinned() and y.device.type == "cpu"
    equal(x.to(device), torch.arange(1000.0), "a copy from pinned memory")


@check("csrc/operators.cpp", _SECTION, "keep non_blocking copies in the order of the current stream", _KEY)
def non_blocking(device: str) -> None:
    """non_blocking copies keep the order of the stream."""
    source = torch.arange(1 << 16, dtype=torch.float32).pin_memory()
    x = torch.zeros(1 << 16, device=device)
    x.copy_(source, non_blocking=True)
    x += 1
    back = torch.empty_like(source).pin_memory()
    back.copy_(x, non_blocking=True)
    torch.accelerator.synchronize()
    equal(back, source + 1, "a non_blocking copy to the device, an addition, and a non_blocking copy back")
    pageable = torch.arange(1 << 16, dtype=torch.float32)
    y = pageable.to(device, non_blocking=True)
    pageable.fill_(-1)  # the program may reuse pageable memory as soon as the call returns
    equal(
        y, torch.arange(1 << 16, dtype=torch.float32), "a non_blocking copy whose pageable source was written after it"
    )
