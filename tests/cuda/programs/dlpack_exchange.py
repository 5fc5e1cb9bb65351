"""DLPack between libraries, and the CUDA array interface's fields."""

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

values = torch.arange(12.0).reshape(3, 4)
x = values.cuda()
assert x.__dlpack_device__() == (2, 0)  # kDLCUDA
assert values.cuda(1).__dlpack_device__() == (2, 1) and values.__dlpack_device__()[0] == 1
y = torch.from_dlpack(x)
assert y.is_cuda and y.data_ptr() == x.data_ptr()
y[0, 0] = 100
assert x[0, 0].item() == 100
z = from_dlpack(to_dlpack(x.t()))
assert z.shape == (4, 3) and z.stride() == x.t().stride() and z.device == x.device
x.add_(1)
expected = values.clone()
expected[0, 0] = 100
assert torch.equal(z.cpu(), (expected + 1).t())

stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    produced = x * 2
    torch.cuda._sleep(1_000_000)
    produced += 1
    capsule = produced.__dlpack__(stream=torch.cuda.default_stream().cuda_stream or 1)
consumed = from_dlpack(capsule)  # on the default stream, which __dlpack__ made wait
torch.testing.assert_close(consumed.cpu(), (expected + 1) * 2 + 1)


class OtherLibrary:
    """An array of another library."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, stream=None, **_):
        assert stream is not None  # a CUDA consumer names its stream
        return self.tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


foreign = torch.from_dlpack(OtherLibrary(x))
assert foreign.data_ptr() == x.data_ptr() and torch.equal(foreign.cpu(), expected + 1)
copied = torch.from_dlpack(x, copy=True)
assert copied.data_ptr() != x.data_ptr() and torch.equal(copied, x)
interface = x.__cuda_array_interface__
assert interface["shape"] == (3, 4) and interface["typestr"] == "<f4" and interface["data"] == (x.data_ptr(), False)
assert interface["strides"] is None and x.t().__cuda_array_interface__["strides"] == (4, 16)
assert not hasattr(values, "__cuda_array_interface__")
