"""PyTorch's device-type tests run under the name cuda as on a machine with GPUs: which tests are made, run and skipped."""

from __future__ import annotations

import json

import pytest
from processes import python

pytestmark = pytest.mark.processes

PROGRAM = """
import json, unittest

import torch
from torch.testing._internal.common_cuda import (
    PLATFORM_SUPPORTS_FLASH_ATTENTION, PLATFORM_SUPPORTS_MEM_EFF_ATTENTION, SM53OrLater, SM80OrLater, TEST_CUDNN,
    TEST_MULTIGPU, tf32_on_and_off,
)
from torch.testing._internal.common_device_type import (
    OpDTypes, deviceCountAtLeast, dtypes, dtypesIfCUDA, expectedFailureCUDA, instantiate_device_type_tests,
    largeTensorTest, onlyAccelerator, onlyCPU, onlyCUDA, onlyNativeDeviceTypes, onlyOn, ops, skipCUDAIf,
    skipCUDAIfNoCudnn, skipCUDAIfNoMagma, skipCUDAIfRocm,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_optimizers import _get_optim_inputs_including_global_cliquey_kwargs, optim_db, optims
from torch.testing._internal.common_utils import CudaSyncGuard, TEST_CUDA, TEST_CUDA_GRAPH, TestCase, get_cycles_per_ms

SOFTMAX = [op for op in op_db if op.full_name == "softmax"]


class TestDecorators(TestCase):
    @onlyCUDA
    def test_only(self, device):
        self.assertEqual(device, "cuda:0")

    @onlyNativeDeviceTypes
    @onlyOn(["cuda"])
    @onlyAccelerator
    @skipCUDAIf(False, "never")
    @skipCUDAIfRocm
    def test_kept(self, device):
        self.assertTrue(torch.ones(1, device=device).is_cuda)

    @onlyCPU
    def test_only_cpu(self, device):
        self.fail("on the CPU only")

    @skipCUDAIf(True, "always")
    def test_skipped(self, device):
        self.fail("skipped on CUDA")

    @skipCUDAIfNoCudnn
    def test_cudnn(self, device):
        self.fail("there is no cuDNN")

    @skipCUDAIfNoMagma
    def test_linear_algebra(self, device):
        self.assertEqual(torch.linalg.inv(torch.eye(2, device=device)), torch.eye(2))

    @expectedFailureCUDA
    def test_expected_failure(self, device):
        self.fail("expected on CUDA")

    @dtypes(torch.int8)
    @dtypesIfCUDA(torch.float16, torch.bfloat16)
    def test_dtypes(self, device, dtype):
        self.assertIn(dtype, (torch.float16, torch.bfloat16))

    @ops(SOFTMAX, dtypes=OpDTypes.supported)  # float16 and others, which OpInfo lists for CUDA
    def test_ops(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            self.assertTrue(op(sample.input, *sample.args, **sample.kwargs).is_cuda)

    @optims([info for info in optim_db if info.name == "Adam"], dtypes=(torch.float32,))
    def test_optims(self, device, dtype, optim_info):  # whose arguments for CUDA are not made on other devices
        self.assertTrue(any(made.kwargs.get("capturable") for made in optim_info.optim_inputs_func(device=device)))
        made = _get_optim_inputs_including_global_cliquey_kwargs(device, dtype, optim_info)
        self.assertTrue(any(each.kwargs.get("fused") for each in made))

    @deviceCountAtLeast(2)
    def test_two_devices(self, devices):
        self.assertEqual(devices, ["cuda:0", "cuda:1"])

    @deviceCountAtLeast(65)
    def test_many_devices(self, devices):
        self.fail("there are fewer")

    @largeTensorTest("1GB")
    def test_large(self, device):
        self.assertGreater(torch.cuda.mem_get_info()[0], 1 << 30)

    @largeTensorTest("900000GB")
    def test_too_large(self, device):
        self.fail("there is less memory")

    @tf32_on_and_off(0.005)
    def test_tf32(self, device):
        self.assertEqual(torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device), torch.full((2, 2), 2.0))

    def test_synchronization(self, device):
        x = torch.ones(2, device=device)
        with CudaSyncGuard("error"), self.assertRaisesRegex(RuntimeError, "synchroniz"):
            x.sum().item()

    def test_cycles(self, device):
        self.assertGreater(get_cycles_per_ms(), 0)

    def test_runs_on_a_stream_of_its_own(self, device):
        self.assertNotEqual(torch.cuda.current_stream(), torch.cuda.default_stream())

    def test_leaks(self, device):
        with self.assertLeaksNoCudaTensors():
            torch.ones(1 << 25, device=device)
        with self.assertRaisesRegex(RuntimeError, "CUDA driver API confirmed a leak"), self.assertLeaksNoCudaTensors():
            self.kept = torch.ones(1 << 25, device=device)


@unittest.skipIf(not TEST_CUDA, "needs a GPU")
class TestConditions(TestCase):
    @unittest.skipIf(not TEST_MULTIGPU, "needs two GPUs")
    def test_two_gpus(self):
        self.assertEqual(torch.ones(1, device="cuda:1").cpu(), torch.ones(1))

    @unittest.skipIf(not SM53OrLater, "needs sm_53")
    def test_sm53(self):
        pass

    @unittest.skipIf(not SM80OrLater, "needs sm_80")
    def test_sm80(self):
        pass

    @unittest.skipIf(not PLATFORM_SUPPORTS_FLASH_ATTENTION, "needs sm_80")
    def test_flash_attention(self):
        x = torch.ones(1, 1, 8, 8, device="cuda", dtype=torch.float16)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            self.assertEqual(torch.nn.functional.scaled_dot_product_attention(x, x, x), x)

    @unittest.skipIf(not PLATFORM_SUPPORTS_MEM_EFF_ATTENTION, "needs CUDA")
    def test_efficient_attention(self):
        x = torch.ones(1, 1, 8, 8, device="cuda")
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
            self.assertEqual(torch.nn.functional.scaled_dot_product_attention(x, x, x), x)

    @unittest.skipIf(not TEST_CUDNN, "needs cuDNN")
    def test_cudnn(self):
        self.fail("there is no cuDNN")

    @unittest.skipIf(not TEST_CUDA_GRAPH, "needs a torch with CUDA")
    def test_graph(self):
        pass


instantiate_device_type_tests(TestDecorators, globals(), only_for="cuda")

if __name__ == "__main__":
    loader, result = unittest.defaultTestLoader, unittest.TestResult()
    names = [test._testMethodName for suite in loader.loadTestsFromModule(__import__("__main__")) for test in suite]
    loader.loadTestsFromModule(__import__("__main__")).run(result)
    failed = {test._testMethodName: text for test, text in result.failures + result.errors}
    skipped = {test._testMethodName: reason for test, reason in result.skipped}
    ran = sorted(set(names) - failed.keys() - skipped.keys())
    print(json.dumps({"ran": ran, "skipped": skipped, "failed": failed}))
"""

RAN = {
    "test_only_cuda", "test_kept_cuda", "test_linear_algebra_cuda", "test_expected_failure_cuda",
    "test_dtypes_cuda_float16", "test_dtypes_cuda_bfloat16",
    *(f"test_ops_softmax_cuda_{dtype}" for dtype in ("float16", "bfloat16", "float32", "float64")),
    "test_optims_Adam_cuda_float32", "test_two_devices_cuda", "test_large_cuda", "test_tf32_cuda",
    "test_synchronization_cuda", "test_cycles_cuda", "test_runs_on_a_stream_of_its_own_cuda", "test_leaks_cuda",
    "test_two_gpus", "test_efficient_attention",
}  # fmt: skip
SKIPPED = {"test_only_cpu_cuda", "test_skipped_cuda", "test_cudnn_cuda", "test_many_devices_cuda", "test_too_large_cuda",
           "test_cudnn"}  # fmt: skip
# What OPENREG_DEVICE=cuda:sm_90 adds.
OF_NEW_GPUS = {"test_sm53", "test_sm80", "test_flash_attention", "test_graph"}


@pytest.mark.parametrize("device", ["cuda", "cuda:sm_90"])
def test_which_tests_run(tmp_path, device):
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = python(tmp_path / "program.py", cwd=tmp_path, OPENREG_DEVICE=device)
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-10_000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    new = OF_NEW_GPUS if device == "cuda:sm_90" else set()
    assert not found["failed"], "\n".join(found["failed"].values())
    assert set(found["ran"]) == RAN | new
    assert set(found["skipped"]) == SKIPPED | (OF_NEW_GPUS - new)
