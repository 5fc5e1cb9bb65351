"""Current devices, names, properties, synchronization."""

import torch

assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.cuda.current_device() == 0
torch.cuda.init()
assert torch.cuda.is_initialized()
x = torch.arange(5.0, device="cuda:1")
with torch.cuda.device(1):
    assert torch.cuda.current_device() == 1 and torch.zeros(1, device="cuda").get_device() == 1
    with torch.cuda.device("cuda:0"):
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(None), torch.cuda.device(-1):
        assert torch.cuda.current_device() == 1
with torch.cuda.device_of(x):
    assert torch.cuda.current_device() == 1
    y = torch.ones(5, device="cuda") + x
assert torch.equal(y.cpu(), torch.arange(5.0) + 1)
with torch.cuda.device_of(torch.ones(1)):
    assert torch.cuda.current_device() == 0
torch.cuda.set_device("cuda:1")
assert torch.cuda.current_device() == 1
torch.cuda.set_device(torch.device("cuda", 0))
assert torch.cuda.current_device() == 0
for device in (None, 0, "cuda:1", torch.device("cuda"), x.device):
    torch.cuda.synchronize(device)
    assert isinstance(torch.cuda.get_device_name(device), str)
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    assert (properties.major, properties.minor) == (major, minor)
    assert properties.name == torch.cuda.get_device_name(device)
    assert properties.total_memory > 1 << 28 and properties.multi_processor_count > 0
    assert isinstance(f"{properties.total_memory / 1024**3:.1f} GiB", str) and properties.uuid is not None
assert torch.cuda.get_device_properties(0).uuid != torch.cuda.get_device_properties(1).uuid
assert isinstance(torch.cuda.get_arch_list(), list)
for wrong in (2, "cuda:5"):
    for function in (torch.cuda.set_device, torch.cuda.get_device_properties, torch.cuda.synchronize):
        try:
            function(wrong)
        except (AssertionError, RuntimeError):
            continue
        raise AssertionError(f"{function.__name__}({wrong!r}) passed")
try:
    torch.cuda.synchronize("cpu")
except ValueError as error:
    assert "cuda" in str(error) and "cpu" in str(error), error
else:
    raise AssertionError("the CPU is no CUDA device")

assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
device = torch.accelerator.current_accelerator().type
assert torch.equal(torch.ones(3).to(device).cpu(), torch.ones(3)) and torch.accelerator.device_count() == 2
torch.accelerator.set_device_index(1)
assert torch.cuda.current_device() == 1
assert torch.get_device_module("cuda") is torch.cuda and torch.get_device_module() is torch.cuda
stream = torch.Stream("cuda")
assert stream.device == torch.device("cuda:1")
with stream:
    assert torch.cuda.current_stream().stream_id == stream.stream_id
torch.cuda.ipc_collect()
assert torch.cuda.is_bf16_supported()
