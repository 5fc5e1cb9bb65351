"""CUDA_VISIBLE_DEVICES, which a program sets before it imports torch, and the other variables of CUDA programs."""

import subprocess
import sys

PROGRAM = """
import os
os.environ.update({variables})
import torch
count = torch.cuda.device_count()
assert count == {count}, count
assert torch.cuda.is_available() == (count > 0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x = torch.arange(10.0)
result = (x.to(device) @ x.to(device)).cpu()
assert torch.equal(result, x @ x)
try:
    torch.ones(1, device="cuda:1")
except (RuntimeError, AssertionError):
    assert count < 2
else:
    assert count == 2
print(torch.cuda.get_device_properties(0).uuid if count else "none")
"""

OTHERS = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "TORCH_CUDNN_V8_API_ENABLED": "1",
    "NVIDIA_TF32_OVERRIDE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
uuids = {}
for variables, count in (
    ({}, 2),
    ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
    ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
    ({"CUDA_VISIBLE_DEVICES": "1,0"}, 2),
    ({"CUDA_VISIBLE_DEVICES": ""}, 0),
    ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    (OTHERS, 2),
):
    code = PROGRAM.format(variables=variables, count=count)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, f"{variables}: {result.stderr}"
    uuids[variables.get("CUDA_VISIBLE_DEVICES")] = result.stdout
assert uuids["0"] == uuids[None] != uuids["1"] == uuids["1,0"]
