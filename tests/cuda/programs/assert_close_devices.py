"""torch.testing with tensors on several devices, and device-type tests of a library."""

import os
import subprocess
import sys
import tempfile

import torch
from torch.testing import assert_close, make_tensor

x = torch.randn(4, 5)
assert_close(x.cuda(), x.cuda(0))
assert_close(x.cuda(), x, check_device=False)
assert_close({"a": x.cuda(1), "b": [x.cuda()]}, {"a": x.cuda(1), "b": [x.cuda()]})
for wrong, text in (
    (lambda: assert_close(x.cuda(), x), "The values for attribute 'device' do not match: cuda:0 != cpu"),
    (lambda: assert_close(x.cuda(0), x.cuda(1)), "'device' do not match: cuda:0 != cuda:1"),
    (lambda: assert_close(x.cuda(), x.cuda() + 1), "Mismatched elements: 20 / 20 (100.0%)"),
    (lambda: assert_close(x.cuda().half(), x.cuda()), "'dtype' do not match"),
):
    try:
        wrong()
    except AssertionError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"expected: {text}")
made = make_tensor((3, 4), dtype=torch.float32, device="cuda:1", low=-1, high=1, requires_grad=True)
assert made.device.index == 1 and -1 <= made.min() and made.max() <= 1 and made.requires_grad
assert_close(torch.tensor([1.0, float("nan")], device="cuda"), torch.tensor([1.0, float("nan")]).cuda(), equal_nan=True)
assert torch.allclose(x.cuda(), (x + 1e-9).cuda()) and torch.isclose(x.cuda(), x.cuda()).all()

TESTS = """
import torch
from torch.testing._internal.common_cuda import TEST_CUDA, TEST_MULTIGPU
from torch.testing._internal.common_device_type import deviceCountAtLeast, dtypes, instantiate_device_type_tests, onlyCUDA
from torch.testing._internal.common_utils import TestCase, run_tests


class TestRelu(TestCase):
    @dtypes(torch.float32, torch.float64)
    def test_relu(self, device, dtype):
        x = torch.randn(5, device=device, dtype=dtype)
        self.assertEqual(torch.relu(x), x.clamp(min=0))
        self.assertEqual(torch.relu(x).cpu(), torch.relu(x.cpu()))

    @onlyCUDA
    def test_gpu(self, device):
        self.assertTrue(TEST_CUDA and TEST_MULTIGPU and torch.ones(1, device=device).is_cuda)

    @onlyCUDA
    @deviceCountAtLeast(2)
    def test_two(self, devices):
        self.assertEqual(torch.ones(2, device=devices[0]).to(devices[1]).cpu(), torch.ones(2))


instantiate_device_type_tests(TestRelu, globals(), only_for=("cpu", "cuda"))
if __name__ == "__main__":
    run_tests()
"""
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "test_relu.py")
    with open(path, "w") as file:
        file.write(TESTS)
    result = subprocess.run([sys.executable, path, "-v"], cwd=folder, capture_output=True, text=True)
assert result.returncode == 0, result.stderr
for name in (
    "test_relu_cuda_float32",
    "test_relu_cuda_float64",
    "test_gpu_cuda",
    "test_two_cuda",
    "test_relu_cpu_float32",
):
    assert f"{name} (" in result.stderr and "FAILED" not in result.stderr, result.stderr
