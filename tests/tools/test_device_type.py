"""PyTorch's generic device-type framework on the device: its @ops and @dtypes tests, blocks and tolerances."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal import common_device_type, common_utils
from torch.testing._internal.common_device_type import (
    OpDTypes,
    deviceCountAtLeast,
    dtypes,
    instantiate_device_type_tests,
    onlyCPU,
    onlyNativeDeviceTypes,
    onlyOn,
    ops,
    precisionOverride,
    tol,
    toleranceOverride,
)
from torch.testing._internal.common_methods_invocations import binary_ufuncs, reduction_ops, unary_ufuncs
from torch.testing._internal.common_utils import TestCase

import openreg_ops  # noqa: F401
from openreg_ops.testing import device_type, device_type_report
from openreg_tools.core.move import Move

pytestmark = pytest.mark.processes

FEW = [op for op in (*unary_ufuncs, *binary_ufuncs, *reduction_ops) if op.name in
       {"abs", "exp", "sigmoid", "add", "mul", "fmod", "maximum", "sum", "mean", "amax", "all"}]  # fmt: skip


class TestOpenregOps(TestCase):
    """Generic tests in PyTorch's own form, as test/test_ops.py writes them."""

    # From torch 2.15 on, --hw-classification ACCELERATOR selects it.
    hw_classification = getattr(getattr(common_utils, "HardwareClassification", None), "ACCELERATOR", None)

    @ops(FEW, dtypes=OpDTypes.supported, allowed_dtypes=(torch.float32, torch.float16, torch.complex64, torch.int64))
    def test_reference(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            actual = op(sample.input, *sample.args, **sample.kwargs)
            self.assertEqual(actual.device.type, "openreg")
            host = Move("cpu")
            expected = op(sample.input.cpu(), *_to_host(sample.args, host), **_to_host(sample.kwargs, host))
            self.assertEqual(actual.cpu(), expected)

    @ops(FEW, dtypes=OpDTypes.supported_backward, allowed_dtypes=(torch.float64,))
    def test_gradcheck(self, device, dtype, op):
        for sample in list(op.sample_inputs(device, dtype, requires_grad=True))[:2]:
            self.assertTrue(
                torch.autograd.gradcheck(
                    lambda x, s=sample: op(x, *s.args, **s.kwargs), (sample.input,), check_undefined_grad=False
                )
            )

    @ops([op for op in FEW if op.error_inputs_func], dtypes=OpDTypes.none)
    def test_errors(self, device, op):
        for wrong in op.error_inputs(device):
            sample = wrong.sample_input
            with self.assertRaisesRegex(wrong.error_type, wrong.error_regex):
                op(sample.input, *sample.args, **sample.kwargs)

    @dtypes(torch.float32, torch.float64, torch.bfloat16)
    def test_sum_precision(self, device, dtype):
        x = torch.full((1000,), 0.1, device=device, dtype=dtype)
        self.assertEqual(x.sum().cpu(), torch.full((1000,), 0.1, dtype=dtype).sum())

    @onlyOn(["openreg"])
    @onlyNativeDeviceTypes
    def test_only_on(self, device):
        self.assertEqual(torch.device(device).type, "openreg")

    @onlyCPU
    def test_only_on_the_cpu(self, device):
        self.fail("this runs on the CPU only")

    @precisionOverride({torch.float32: 0.5})
    @dtypes(torch.float32, torch.float64)
    def test_precision_override(self, device, dtype):
        self.compare(device, dtype, loose=torch.float32)

    @toleranceOverride({torch.float64: tol(atol=0.5, rtol=0)})
    @dtypes(torch.float32, torch.float64)
    def test_tolerance_override(self, device, dtype):
        self.compare(device, dtype, loose=torch.float64)

    def compare(self, device, dtype, loose):
        x, y = torch.tensor([1.0, 1.4], device=device, dtype=dtype)
        if dtype == loose:
            return self.assertEqual(x, y)
        with self.assertRaisesRegex(AssertionError, "not close"):
            self.assertEqual(x, y)

    @deviceCountAtLeast(2)
    def test_two_devices(self, devices):
        with self.assertRaisesRegex(RuntimeError, "same device"):
            torch.ones(2, device=devices[0]) + torch.ones(2, device=devices[1])


def _to_host(value, host):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, (list, tuple)):
        return type(value)(_to_host(each, host) for each in value)
    if isinstance(value, dict):
        return {key: _to_host(each, host) for key, each in value.items()}
    return value


device_type.install()
instantiate_device_type_tests(TestOpenregOps, globals(), only_for="openreg")


# ---- the lists of OpenregTestBase do what they say ----


class TestLists(TestCase):
    def test_blocked(self, device):
        self.fail("blocked tests do not run")

    @dtypes(torch.float32, torch.float64)
    def test_one_blocked(self, device, dtype):
        self.assertEqual(dtype, torch.float32)

    @dtypes(torch.int64, torch.complex128)
    def test_dtype(self, device, dtype):
        self.assertEqual(dtype, torch.int64)

    @dtypes(torch.bfloat16)
    def test_tolerance(self, device, dtype):
        self.assertEqual(torch.tensor(1.0, dtype=dtype, device=device), torch.tensor(1.4, dtype=dtype, device=device))


class Restricted(device_type.OpenregTestBase):
    blocked_tests = {"TestLists": {"test_blocked", "test_one_blocked_openreg_float64"}}
    unsupported_dtypes = {torch.complex128}
    tolerances = {torch.bfloat16: (0.5, 0.0)}


device_type.install(Restricted)
instantiate_device_type_tests(TestLists, globals(), only_for="openreg")
device_type.install()


FILE = """
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCPU
from torch.testing._internal.common_utils import TestCase, run_tests


class TestSome(TestCase):
    def test_passes(self, device):
        self.assertEqual(torch.ones(3, device=device).sum().item(), 3)

    def test_fails(self, device):
        self.fail("everywhere")

    def test_cpu_result(self, device):
        self.assertEqual(torch.ones(3, device=device).device.type, "cpu")

    @onlyCPU
    def test_of_the_cpu(self, device):
        pass


instantiate_device_type_tests(TestSome, globals())
if __name__ == "__main__":
    run_tests()
"""


def test_report(tmp_path, capsys):
    (tmp_path / "test_some.py").write_text(FILE)
    assert device_type_report.main([str(tmp_path / "test_some.py")]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["test_some.py", "cpu", "3", "passed", "1", "failed", "0", "skipped"]
    assert lines[1] == ["test_some.py", "openreg", "1", "passed", "2", "failed", "1", "skipped"]
    assert lines[3:] == [
        ["1", "fail", "on", "the", "device", "and", "not", "on", "the", "CPU"],
        ["test_some.py::TestSome.test_cpu_result_DEVICE"],
    ]


def test_blocked_tests_are_not_made():
    (made,) = [value for name, value in globals().items() if name.startswith("TestLists")]
    assert {name for name in vars(made) if name.startswith("test")} == {
        "test_one_blocked_openreg_float32", "test_dtype_openreg_int64", "test_tolerance_openreg_bfloat16",
    }  # fmt: skip


def test_every_capability_is_declared():
    """From torch 2.15 on, a test that requires one that is not declared fails."""
    declared = device_type.OpenregTestBase._capabilities()
    groups = vars(getattr(common_device_type, "Capability", type("None", (), {}))).values()
    names = {name for group in groups if isinstance(group, type) for key, name in vars(group).items() if key[0] != "_"}
    assert names <= set(declared), names - set(declared)
    assert all(supports() is True for supports in declared.values())
    x = torch.rand(2, 4, 8, 16, device="openreg").bfloat16()
    assert x.to(torch.float8_e4m3fn).float().isfinite().all()
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]):
        assert torch.nn.functional.scaled_dot_product_attention(x, x, x).shape == x.shape
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert torch.nn.functional.scaled_dot_product_attention(x, x, x).shape == x.shape
