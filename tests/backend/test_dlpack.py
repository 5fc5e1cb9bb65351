"""DLPack of device tensors, and that PyTorch without our patches still rejects it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.dlpack import DLDeviceType

from openreg_ops.torch_patches import dlpack

DEVICE, ONE = "openreg", torch.device("openreg:1")


def test_dlpack_device_of_torch_alone():
    with pytest.raises(ValueError, match="Unknown device type openreg"):
        dlpack._TENSOR_METHODS["__dlpack_device__"](torch.ones(1, device=DEVICE))


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
    assert torch.from_dlpack(x.__dlpack__(dl_device=(DLDeviceType.kDLCPU, 0))).equal(x.cpu())
    for source in (torch.arange(3.0), np.arange(3.0)):
        y = torch.from_dlpack(source, device=ONE)
        assert y.device == ONE and y.tolist() == [0, 1, 2]


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
    there = torch.ones(4, device="openreg:1")  # whose streams these are, whichever device is current
    stream = torch.openreg.Stream(device=1)
    assert torch.from_dlpack(there.__dlpack__(stream=stream.native_handle)).tolist() == [1] * 4
    with pytest.raises(TypeError, match="stream must be"):
        x.__dlpack__(stream="default")
    with pytest.raises(ValueError, match="12345 is not a stream of openreg:0"):
        x.__dlpack__(stream=12345)
