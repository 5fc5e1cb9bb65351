"""A library's tests: skipped without CUDA, parametrized over devices, run by pytest."""

import os
import subprocess
import sys
import tempfile

TESTS = """
import pytest
import torch

cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICES = ["cpu", pytest.param("cuda", marks=cuda_only), pytest.param("cuda:1", marks=two_gpus)]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def softmax(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_softmax(device, dtype):
    x = torch.randn(3, 5, dtype=dtype)
    torch.testing.assert_close(softmax(x.to(device)).cpu(), torch.softmax(x, -1))


def test_gradient(device):
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(softmax, x)


@cuda_only
def test_on_gpu():
    x = torch.randn(4).cuda()
    assert x.is_cuda and softmax(x).is_cuda


@two_gpus
def test_mixed():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


@cuda_only
@pytest.mark.xfail(strict=True, reason="a known bug")
def test_wrong():
    assert softmax(torch.ones(2).cuda()).sum().item() == 2
"""

with tempfile.TemporaryDirectory() as folder:
    with open(os.path.join(folder, "test_library.py"), "w") as file:
        file.write(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_library.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
assert result.returncode == 0, result.stdout + result.stderr
assert "14 passed, 1 xfailed" in result.stdout, result.stdout
